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
