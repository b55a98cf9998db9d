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


@njit(nogil=True, cache=True)
def to_int8(codes, scale, minimum, order, first, step, half, out, out_scale):
    """As `to_float32`, but into symmetric codes of 8 bits: `out` (rows, width) int8, `out_scale` (rows,) float32."""
    row, top = np.empty(out.shape[1], np.float32), np.empty(1, np.float32)
    bits, largest = row.view(np.uint32), top.view(np.uint32)
    for r in range(codes.shape[0]):
        _unpack_row(codes[r], scale[r], minimum[r], first, step, half, row)
        largest[0] = _largest(bits)
        out_scale[order[r]] = top[0] / np.float32(127)
        _round_row(row, top[0], out[order[r]])


# activations to int8, and sums in int32 back to floats


@njit(nogil=True, cache=True, inline="always")
def _largest(bits):
    """Of the bits of floats, those of the largest absolute value: in this order NaN is the largest of all."""
    largest = np.uint32(0)
    for i in range(len(bits)):
        largest = max(largest, bits[i] & np.uint32(0x7FFFFFFF))
    return largest


@njit(nogil=True, cache=True, inline="always")
def _round_row(row, largest, out):
    """As `formats.quantise_rows`."""
    factor = np.float32(127) / max(largest, np.float32(1e-30))
    for i in range(len(out)):
        out[i] = np.int8(np.rint(row[i] * factor))


@njit(nogil=True, cache=True, inline="always", fastmath={"reassoc"})
def _sum_abs(row):
    total = np.float32(0)
    for i in range(len(row)):
        total += abs(row[i])
    return total


@njit(nogil=True, cache=True)
def row_limits(x, times, few, begin, end, limit, largest, is_outlier):
    """For each row of x (R, I) the limit above which its elements are outliers, and the largest of the others.

    Args:
        times: the limit is this many times the mean absolute value, doubled until at most `few` elements are above it.
        limit, largest: (R,), float32, of which `begin` to `end` are written; the largest of the others.
        is_outlier: (I,), uint8, set to 1 where any row has an outlier.
    """
    part = 64
    tops = np.empty((x.shape[1] + part - 1) // part, np.float32)
    top_bits, top_of_all = tops.view(np.uint32), np.empty(1, np.float32)
    for r in range(begin, end):
        row = x[r]
        bits = row.view(np.uint32)
        for n in range(len(tops)):
            top_bits[n] = _largest(bits[n * part : n * part + part])
        top_of_all.view(np.uint32)[0] = _largest(top_bits)
        limit[r] = top = top_of_all[0]
        bound = times * _sum_abs(row) / np.float32(len(row))
        if few and bound < top < np.inf:
            count = few + 1
            while count > few:
                count, top, limit[r] = 0, np.float32(0), bound
                for n in range(len(tops)):
                    if tops[n] <= bound:
                        top = max(top, tops[n])
                        continue
                    for i in range(n * part, min(n * part + part, len(row))):
                        if abs(row[i]) > bound:
                            count += 1
                        else:
                            top = max(top, abs(row[i]))
                bound *= np.float32(2)
            for n in range(len(tops)):
                if tops[n] > limit[r]:
                    for i in range(n * part, min(n * part + part, len(row))):
                        if abs(row[i]) > limit[r]:
                            is_outlier[i] = 1
        largest[r] = top


@njit(nogil=True, cache=True)
def row_codes(x, limit, largest, columns, begin, end, codes, kept):
    """The rows of x (R, I) in int8, and their outliers, whose codes are 0.

    Args:
        limit, largest: from `row_limits`.
        columns: (U,), those that have outliers.
        codes: (R, I), int8; kept: (R, U), float32, of both `begin` to `end` are written.
    """
    for r in range(begin, end):
        _round_row(x[r], largest[r], codes[r])
        for u in range(len(columns)):
            value = x[r, columns[u]]
            is_outlier = abs(value) > limit[r]
            kept[r, u] = value if is_outlier else np.float32(0)
            if is_outlier:
                codes[r, columns[u]] = 0


@njit(nogil=True, cache=True, inline="always")
def _add_scaled(total, row, factor):
    for o in range(len(total)):
        total[o] += np.float32(row[o]) * factor


@njit(nogil=True, cache=True)
def scale_back(sums, scale, kept, columns, weight_scale, bias, begin, end, out):
    """out[r] = weight_scale * (scale[r] * sums[r] + kept[r] @ columns) + bias, for rows `begin` to `end` of R; a row
    adds its outliers up one after the other, so that it does not depend on the columns in which others have some.

    Args:
        sums: (R, O), columns: (U, O); whole numbers of any type.
        scale: (R,); kept: (R, U); weight_scale, bias: (O,); out: (R, O); all float32.
    """
    part = 1024
    for r in range(begin, end):
        for at in range(0, out.shape[1], part):
            stop = min(at + part, out.shape[1])
            total = out[r, at:stop]
            total[:] = 0
            _add_scaled(total, sums[r, at:stop], scale[r])
            for u in range(kept.shape[1]):
                if kept[r, u] != 0:
                    _add_scaled(total, columns[u, at:stop], kept[r, u])
            s, b = weight_scale[at:stop], bias[at:stop]
            for o in range(len(total)):
                total[o] = total[o] * s[o] + b[o]
