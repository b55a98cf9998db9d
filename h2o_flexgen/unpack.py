"""From codes of 8 and 4 bits to floats, compiled for this CPU: several times as fast as a few torch operators
(docs/formats.md). The functions release the GIL, so that threads can share the rows of a matrix.

Loops run over slices whose length is not known when they are compiled: others are not vectorised.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True, inline="always")
def _unpack_row(codes, scale, minimum, first, step, half, row):
    size = row.shape[0] // scale.shape[0]
    for g in range(scale.shape[0]):
        s, m, at = scale[g], minimum[g], first + g * step
        if half:
            c, to = codes[at : at + half], size * g
            low, high = row[to : to + half], row[to + half : to + size]
            for i in range(half):
                q = c[i]
                low[i] = np.float32(q & 15) * s + m
                high[i] = np.float32(q >> 4) * s + m
        else:
            c, whole = codes[at : at + size], row[size * g : size * g + size]
            for i in range(size):
                whole[i] = np.float32(c[i]) * s + m


@njit(nogil=True, cache=True)
def to_float32(codes, scale, minimum, order, first, step, half, out):
    """code * scale + minimum, for R rows of G groups.

    Args:
        codes: (R, bytes of a row); int8, or uint8 with two codes each.
        scale, minimum: (R, G), float32.
        order: (R,), the row of `out` that each becomes.
        first, step: where in a row the codes of the first group begin, and how far apart those of two groups are.
        half: 0 for codes of 8 bits; of 4 bits the codes in half a group, which are the lower ones of as many bytes,
            while the upper ones are the other half.
        out: (rows, width), float32.
    """
    for r in range(codes.shape[0]):
        _unpack_row(codes[r], scale[r], minimum[r], first, step, half, out[order[r]])


@njit(nogil=True, cache=True)
def to_bfloat16(codes, scale, minimum, order, first, step, half, out):
    """As `to_float32`, rounded to the nearest, ties to even; `out`: the bits, uint16."""
    row = np.empty(out.shape[1], np.float32)
    bits = row.view(np.uint32)
    for r in range(codes.shape[0]):
        _unpack_row(codes[r], scale[r], minimum[r], first, step, half, row)
        target = out[order[r]]
        for i in range(len(bits)):
            x = bits[i]
            target[i] = np.uint16((x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


# attention over a cache: sums in another order, but NaN stays NaN
_SUMS = {"reassoc", "contract", "nsz"}


@njit(nogil=True, cache=True, fastmath=_SUMS)
def dots(halves, codes, table, q, out):
    """Queries times keys in 8 bits, for n heads with S slots, G queries of each.

    Args:
        halves: (n, S, W / 2) uint16: each vector, whose scale in fp16 comes first; codes: (n, S, W) int8, the same.
        table: (65536,) float32, what each fp16 is.
        q: (n, G, D) float32; out: (n, G, S) float32.
    """
    for h in range(q.shape[0]):
        for s in range(codes.shape[1]):
            c, scale = codes[h, s, 2:], table[halves[h, s, 0]]
            for g in range(q.shape[1]):
                query, total = q[h, g], np.float32(0)
                for i in range(query.shape[0]):
                    total += np.float32(c[i]) * query[i]
                out[h, g, s] = total * scale


@njit(nogil=True, cache=True, fastmath=_SUMS)
def mix8(halves, codes, table, p, out):
    """Values in 8 bits, as `dots` has keys, summed with the weights p (n, G, S) float32 into out (n, G, D)."""
    out[:] = 0
    for h in range(p.shape[0]):
        for s in range(codes.shape[1]):
            c, scale = codes[h, s, 2:], table[halves[h, s, 0]]
            for g in range(p.shape[1]):
                weight, total = p[h, g, s] * scale, out[h, g]
                for i in range(total.shape[0]):
                    total[i] += np.float32(c[i]) * weight


@njit(nogil=True, cache=True, fastmath=_SUMS)
def mix4(halves, codes, table, p, out):
    """The same of values in 4 bits, `codes` uint8: scale and minimum in fp16, then the codes, of which the first half
    are the lower ones."""
    out[:] = 0
    half = out.shape[2] // 2
    for h in range(p.shape[0]):
        for s in range(codes.shape[1]):
            c, scale, least = codes[h, s, 4:], table[halves[h, s, 0]], table[halves[h, s, 1]]
            for g in range(p.shape[1]):
                weight, start = p[h, g, s] * scale, p[h, g, s] * least
                low, high = out[h, g, :half], out[h, g, half:]
                for i in range(low.shape[0]):
                    low[i] += np.float32(c[i] & np.uint8(15)) * weight + start
                for i in range(high.shape[0]):
                    high[i] += np.float32(c[i] >> np.uint8(4)) * weight + start
