"""Codes of 8 and 4 bits to floats and back."""

from __future__ import annotations

import numpy as np
from numba import njit

from h2o_flexgen.compiled.floats import bits_of, element, float_of, from_bits

U = np.uint64


# codes to floats, and to other codes


@njit(nogil=True, inline="always")
def _decode_row(codes, scale, minimum, factor, first, step, half, out):
    """(code * scale + minimum) * factor of each element."""
    size = U(len(out)) // U(len(scale))
    for g in range(U(len(scale))):
        s = scale[g]
        m = minimum[g]
        at = U(first) + g * U(step)
        low = g * size
        if half:
            high = low + U(half)
            for i in range(U(half)):
                out[low + i] = element((np.float32(codes[at + i] & np.uint8(15)) * s + m) * factor, out)
            for i in range(U(half)):
                out[high + i] = element((np.float32(codes[at + i] >> np.uint8(4)) * s + m) * factor, out)
        else:
            for i in range(size):
                out[low + i] = element((np.float32(codes[at + i]) * s + m) * factor, out)


@njit(nogil=True, cache=True)
def to_floats(codes, scale, minimum, order, first, step, half, out):
    """code * scale + minimum, for R rows of G groups.

    Args:
        codes: (R, bytes of a row); int8, or uint8 with two codes each.
        scale, minimum: (R, G), float32.
        order: (R,), the row of `out` that each becomes.
        first, step: where in a row the codes of the first group begin, and how far apart those of two groups are.
        half: 0 for codes of 8 bits; of 4 bits the codes in half a group, which are the lower ones of as many bytes,
            while the upper ones are the other half.
        out: (rows, width), floats.
    """
    for r in range(len(codes)):
        _decode_row(codes[r], scale[r], minimum[r], np.float32(1), first, step, half, out[order[r]])


@njit(nogil=True, cache=True)
def to_int8(codes, scale, minimum, order, first, step, half, out, out_scale):
    """As `to_floats`, but into symmetric codes of 8 bits, `out` (rows, width) int8, with one scale for a row,
    `out_scale` (rows,) float32: 127 is the largest that the codes of any of its groups can stand for
    (`codes.Codes.largest`)."""
    for r in range(len(codes)):
        most = np.uint32(0)
        for g in range(scale.shape[1]):
            s = scale[r, g]
            m = minimum[r, g]
            one, other = (m, np.float32(15) * s + m) if half else (m, np.float32(127) * s)
            most = max(most, max(bits_of(abs(one)), bits_of(abs(other))))
        largest = from_bits(most)
        out_scale[order[r]] = largest / np.float32(127)
        factor = np.float32(127) / max(largest, np.float32(1e-30))
        _decode_row(codes[r], scale[r], minimum[r], factor, first, step, half, out[order[r]])


@njit(nogil=True, cache=True)
def scales(halves, begin, end, has_minimum, centre, scale, minimum):
    """Of rows of blocks (`formats.Blocks`), `begin` to `end` of R, the scales and minima, both (R, G) float32.

    Args:
        halves: (R, G, bytes / 2) fp16, the blocks.
        centre: without a minimum in the block the minimum is the scale times this.
    """
    for r in range(begin, end):
        for g in range(scale.shape[1]):
            scale[r, g] = float_of(halves[r, g, 0])
            minimum[r, g] = float_of(halves[r, g, 1]) if has_minimum else scale[r, g] * centre


# floats to codes


@njit(nogil=True, inline="always")
def _size(bits):
    """The bits of the absolute value, of those of a float. They compare as floats do, and NaN is the largest of all."""
    return bits & np.uint32(0x7FFFFFFF)


@njit(nogil=True, inline="always")
def _largest(row):
    """The bits of the largest absolute value."""
    largest = np.uint32(0)
    for i in range(len(row)):
        largest = max(largest, _size(bits_of(float_of(row[i]))))
    return largest


@njit(nogil=True, cache=True)
def encode8(x, begin, end, halves, codes):
    """Each row of x (R, I), floats, as a block of 8 bits without a minimum (`formats.Blocks`): rows `begin` to `end`.

    Args:
        halves: (R, W / 2) fp16, codes: (R, W) int8: the same bytes, the blocks.
    """
    for r in range(begin, end):
        row = x[r]
        target = codes[r, 2:]
        halves[r, 0] = element(from_bits(_largest(row)) / np.float32(127), halves)
        scale = float_of(halves[r, 0])
        if 0 < scale < np.inf:
            for i in range(len(row)):
                code = min(max(float_of(row[i]) / scale, np.float32(-127)), np.float32(127))
                target[i] = element(code, target)
        else:  # all stand for 0, or for NaN
            target[:] = 0


@njit(nogil=True, inline="always")
def _ordered(bits):
    """The bits of a float as an int32 that compares with others as their floats do. It is its own inverse."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(nogil=True, inline="always")
def _code4(x, start, scale):
    return np.uint8(np.rint(min(max((float_of(x) - start) / scale, np.float32(0)), np.float32(15))))


@njit(nogil=True, cache=True)
def encode4(x, begin, end, halves, codes):
    """The same as a block of 4 bits with a minimum; `codes` uint8."""
    half = U(x.shape[1] // 2)
    for r in range(begin, end):
        row = x[r]
        target = codes[r, 4:]
        # NaN comes before all others, or after them
        first = np.int32(2**31 - 1)
        last = np.int32(-(2**31))
        for i in range(len(row)):
            each = _ordered(np.int32(bits_of(float_of(row[i]))))
            first = min(first, each)
            last = max(last, each)
        least = from_bits(np.uint32(_ordered(first)))
        most = from_bits(np.uint32(_ordered(last)))
        halves[r, 0] = element((most - least) / np.float32(15), halves)
        halves[r, 1] = element(least, halves)
        scale = float_of(halves[r, 0])
        start = float_of(halves[r, 1])
        if 0 < scale < np.inf:
            for i in range(half):
                low = _code4(row[i], start, scale)
                high = _code4(row[half + i], start, scale)
                target[i] = low | (high << np.uint8(4))
        else:  # all stand for the minimum, or for NaN
            target[:] = 0


@njit(nogil=True, cache=True, fastmath={"reassoc"})  # inlined by numba it would lose that, and its vectors
def _sum_abs(row):
    total = np.float32(0)
    for i in range(len(row)):
        total += abs(float_of(row[i]))
    return total


@njit(nogil=True, inline="always")
def _above(row, limit):
    """How many absolute values are above the limit, which is given as its bits."""
    count = np.uint32(0)
    for i in range(len(row)):
        count += np.uint32(_size(bits_of(float_of(row[i]))) > limit)
    return count


@njit(nogil=True, cache=True)
def quantise(x, times, few, begin, end, codes, limit, largest):
    """The rows of x (R, I), floats, in int8; outliers become 0. Returns (I,) uint8, 1 where any of its rows has an
    outlier: were it shared, threads would overwrite each other's.

    Args:
        times: an outlier is above this many times the mean absolute value, doubled until a row has at most `few`.
        codes: (R, I) int8; limit, largest: (R,) float32, above which elements are outliers, and of the others the
            largest; of all three rows `begin` to `end` are written.
    """
    is_outlier = np.zeros(x.shape[1], np.uint8)
    for r in range(begin, end):
        row = x[r]
        target = codes[r]
        highest = most = top = _largest(row)  # of all, of what stays, and the limit, as bits
        mean = np.float32(times * _sum_abs(row) / np.float32(len(row))) if few else np.float32(np.inf)
        if mean < from_bits(highest) < np.inf:
            while _above(row, bits_of(mean)) > few:
                mean *= np.float32(2)
            top = bits_of(mean)
            most = np.uint32(0)
            for i in range(len(row)):
                size = _size(bits_of(float_of(row[i])))
                most = max(most, np.uint32(0) if size > top else size)
                is_outlier[i] |= np.uint8(size > top)
        limit[r] = from_bits(top)
        largest[r] = from_bits(most)
        factor = np.float32(127) / max(from_bits(most), np.float32(1e-30))
        if highest <= top:  # no outliers
            for i in range(len(row)):
                target[i] = element(float_of(row[i]) * factor, target)
        else:
            for i in range(len(row)):
                bits = bits_of(float_of(row[i]))
                target[i] = element(from_bits(np.uint32(0) if _size(bits) > top else bits) * factor, target)
    return is_outlier


@njit(nogil=True, cache=True)
def outliers(x, limit, columns, kept):
    """Those of each row of x (R, I), floats, at some columns (U,) into kept (R, U) float32, 0 where an element is
    none."""
    for r in range(len(x)):
        for u in range(len(columns)):
            value = float_of(x[r, columns[u]])
            kept[r, u] = value if abs(value) > limit[r] else np.float32(0)
