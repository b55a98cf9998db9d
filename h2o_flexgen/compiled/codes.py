"""Floats to codes of 8 and 4 bits; `blocks.py` is the way back."""

from __future__ import annotations

import numpy as np
from numba import njit

from h2o_flexgen.compiled.floats import U, bits_of, element, float_of, from_bits

# floats to codes


@njit(nogil=True, inline="always")
def _size(bits):
    """The bits of a float's absolute value. They compare as floats do, and NaN is above all others."""
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
    """Write rows `begin` to `end` of x (R, I), floats, each as a block of 8 bits without a minimum (`formats.Blocks`).
    `halves`, (R, W / 2) fp16, and `codes`, (R, W) int8, are views of the same blocks."""
    for r in range(begin, end):
        row = x[r]
        target = codes[r, 2:]
        halves[r, 0] = element(from_bits(_largest(row)) / np.float32(127), halves)
        scale = float_of(halves[r, 0])
        if 0 < scale < np.inf:
            for i in range(len(row)):
                code = min(max(float_of(row[i]) / scale, np.float32(-127)), np.float32(127))
                target[i] = element(code, target)
        else:  # all elements are 0, or NaN
            target[:] = 0


@njit(nogil=True, inline="always")
def _ordered(bits):
    """The bits of a float as an int32 that compares with others as their floats do; its own inverse."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(nogil=True, inline="always")
def _code4(x, start, scale):
    return np.uint8(np.rint(min(max((float_of(x) - start) / scale, np.float32(0)), np.float32(15))))


@njit(nogil=True, cache=True)
def encode4(x, begin, end, halves, codes):
    """As `encode8`, to blocks of 4 bits with a minimum; `codes` is uint8."""
    half = U(x.shape[1] // 2)
    for r in range(begin, end):
        row = x[r]
        target = codes[r, 4:]
        # NaN is below or above all others, by its sign
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
        else:  # all elements are the minimum, or NaN
            target[:] = 0


@njit(nogil=True, cache=True, fastmath={"reassoc"})  # inlined by numba it would lose the flag
def _sum_abs(row):
    total = np.float32(0)
    for i in range(len(row)):
        total += abs(float_of(row[i]))
    return total


@njit(nogil=True, inline="always")
def _above(row, limit):
    """The number of absolute values above a limit, given as its bits."""
    count = np.uint32(0)
    for i in range(len(row)):
        count += np.uint32(_size(bits_of(float_of(row[i]))) > limit)
    return count


@njit(nogil=True, cache=True)
def quantise(x, times, few, begin, end, codes, limit, scale):
    """Write rows `begin` to `end` of x (R, I), floats, in int8, with 0 for outliers. Returns (I,) uint8, 1 where any of
    these rows has an outlier, a new array, since threads that share one would overwrite each other's.

    Args:
        times: an outlier is above this many times the mean absolute value of its row, doubled until at most `few` are.
        codes: (R, I) int8.
        limit: (R,) float32, the absolute value above which elements are outliers.
        scale: (R,) float32; 127 stands for the largest of the others.
    """
    is_outlier = np.zeros(x.shape[1], np.uint8)
    for r in range(begin, end):
        row = x[r]
        target = codes[r]
        # as bits: the largest element, the largest that is no outlier, and the limit
        highest = _largest(row)
        most = highest
        top = highest
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
        scale[r] = from_bits(most) / np.float32(127)
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
    """Write the outliers of each row of x (R, I), floats, at `columns` (U,) to kept (R, U) float32, and 0 for all other
    elements there."""
    for r in range(len(x)):
        for u in range(len(columns)):
            value = float_of(x[r, columns[u]])
            kept[r, u] = value if abs(value) > limit[r] else np.float32(0)
