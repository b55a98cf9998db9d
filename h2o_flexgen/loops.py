"""Loops over codes of 8 and 4 bits, compiled for this CPU by numba: several times as fast as a few torch operators
(docs/formats.md). They release the GIL, so that threads can share the rows of a matrix (`threads.py`).

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
def scales(halves, table, begin, end, has_minimum, centre, scale, minimum):
    """Of rows of blocks (`formats.Blocks`), `begin` to `end` of R, the scales and minima, both (R, G) float32.

    Args:
        halves: (R, G, bytes / 2) uint16, the blocks; table: (65536,) float32, what each fp16 is.
        centre: without a minimum in the block the minimum is so many scales.
    """
    for r in range(begin, end):
        for g in range(scale.shape[1]):
            scale[r, g] = table[halves[r, g, 0]]
            minimum[r, g] = table[halves[r, g, 1]] if has_minimum else scale[r, g] * centre


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


# floats to codes, and sums in int32 back to floats; x and out: the bits of floats, the upper ones where `shift` is 16
# (bf16), all where it is 0 (fp32)


@njit(nogil=True, cache=True, inline="always")
def _largest(bits):
    """Of the bits of floats, those of the largest absolute value: in this order NaN is the largest of all."""
    largest = np.uint32(0)
    for i in range(len(bits)):
        largest = max(largest, bits[i] & np.uint32(0x7FFFFFFF))
    return largest


@njit(nogil=True, cache=True, inline="always")
def _half(x):
    """The bits of a float32 as those of the nearest fp16, ties to even."""
    sign, size = (x >> np.uint32(16)) & np.uint32(0x8000), x & np.uint32(0x7FFFFFFF)
    if size > np.uint32(0x7F800000):  # NaN
        size = np.uint32(0x7E00)
    elif size >= np.uint32(0x47800000):  # 2^16: infinite
        size = np.uint32(0x7C00)
    elif size >= np.uint32(0x38800000):  # 2^-14
        size = (size - np.uint32(0x38000000) + np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1))) >> 13
    else:  # multiples of 2^-24
        one = np.empty(1, np.uint32)
        one[0] = size
        size = np.uint32(np.rint(one.view(np.float32)[0] * np.float32(1 << 24)))
    return np.uint16(sign | size)


@njit(nogil=True, cache=True)
def encode8(x, shift, table, begin, end, halves, codes):
    """Each row of x (R, I) as a block of 8 bits without a minimum (`formats.Blocks`): rows `begin` to `end`.

    Args:
        table: as for `dots`.
        halves: (R, W / 2) uint16, codes: (R, W) int8: the same bytes, the blocks.
    """
    row, one = np.empty(x.shape[1], np.float32), np.empty(1, np.float32)
    bits, one_bits = row.view(np.uint32), one.view(np.uint32)
    for r in range(begin, end):
        source, target = x[r], codes[r, 2:]
        for i in range(len(bits)):
            bits[i] = np.uint32(source[i]) << shift
        one_bits[0] = _largest(bits)
        one[0] /= np.float32(127)
        halves[r, 0] = _half(one_bits[0])
        scale = table[halves[r, 0]]
        if 0 < scale < np.inf:
            for i in range(len(row)):
                target[i] = np.int8(np.rint(min(max(row[i] / scale, np.float32(-127)), np.float32(127))))
        else:  # all stand for 0, or for NaN
            target[:] = 0


@njit(nogil=True, cache=True, inline="always")
def _ordered(bits):
    """The bits of a float as an int32 that compares with others as their floats do. It is its own inverse."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(nogil=True, cache=True)
def encode4(x, shift, table, begin, end, halves, codes):
    """The same as a block of 4 bits with a minimum; `codes` uint8."""
    row, ends = np.empty(x.shape[1], np.float32), np.empty(3, np.float32)
    bits, end_bits = row.view(np.uint32), ends.view(np.uint32)
    signed, signed_ends, half = row.view(np.int32), ends.view(np.int32), len(row) // 2
    for r in range(begin, end):
        source, target = x[r], codes[r, 4:]
        for i in range(len(bits)):
            bits[i] = np.uint32(source[i]) << shift
        # NaN comes before all others, or after them
        least, most = np.int32(2**31 - 1), np.int32(-(2**31))
        for i in range(len(signed)):
            ordered = _ordered(signed[i])
            least, most = min(least, ordered), max(most, ordered)
        signed_ends[0], signed_ends[1] = _ordered(least), _ordered(most)
        ends[2] = (ends[1] - ends[0]) / np.float32(15)
        halves[r, 0], halves[r, 1] = _half(end_bits[2]), _half(end_bits[0])
        scale, start = table[halves[r, 0]], table[halves[r, 1]]
        if 0 < scale < np.inf:
            for i in range(len(row)):
                row[i] = np.rint(min(max((row[i] - start) / scale, np.float32(0)), np.float32(15)))
        else:  # all stand for the minimum, or for NaN
            row[:] = 0
        low, high = row[:half], row[half:]
        for i in range(half):
            target[i] = np.uint8(low[i]) | (np.uint8(high[i]) << np.uint8(4))


@njit(nogil=True, cache=True, inline="always")
def _round_row(row, largest, out):
    """As `formats.quantise_rows`."""
    factor = np.float32(127) / max(largest, np.float32(1e-30))
    for i in range(len(out)):
        out[i] = np.int8(np.rint(row[i] * factor))


@njit(nogil=True, cache=True, fastmath={"reassoc"})  # inlined by numba it would lose that, and its vectors
def _sum_abs(row):
    total = np.float32(0)
    for i in range(len(row)):
        total += abs(row[i])
    return total


@njit(nogil=True, cache=True, inline="always")
def _above(bits, limit):
    """How many absolute values are above the limit, all as bits of floats."""
    count = np.uint32(0)
    for i in range(len(bits)):
        count += np.uint32((bits[i] & np.uint32(0x7FFFFFFF)) > limit)
    return count


@njit(nogil=True, cache=True, inline="always")
def _cut(bits, limit, is_outlier):
    """Let those above the limit be 0, and tell where they were."""
    for i in range(len(bits)):
        above = (bits[i] & np.uint32(0x7FFFFFFF)) > limit
        bits[i] = np.uint32(0) if above else bits[i]
        is_outlier[i] |= np.uint8(above)


@njit(nogil=True, cache=True)
def quantise(x, shift, times, few, begin, end, codes, limit, largest):
    """The rows of x (R, I) in int8; outliers become 0. Returns (I,) uint8, 1 where any of its rows has an outlier: were
    it shared, threads would overwrite each other's.

    Args:
        times: an outlier is above this many times the mean absolute value, doubled until a row has at most `few`.
        codes: (R, I) int8; limit, largest: (R,) float32, above which elements are outliers, and of the others the
            largest; of all three rows `begin` to `end` are written.
    """
    row, found = np.empty(x.shape[1], np.float32), np.empty(2, np.float32)  # [largest, bound of outliers]
    is_outlier = np.zeros(x.shape[1], np.uint8)
    bits, found_bits = row.view(np.uint32), found.view(np.uint32)
    for r in range(begin, end):
        source = x[r]
        for i in range(len(bits)):
            bits[i] = np.uint32(source[i]) << shift
        found_bits[0] = _largest(bits)
        limit[r] = found[0]
        found[1] = times * _sum_abs(row) / np.float32(len(row))
        if few and found[1] < found[0] < np.inf:
            while _above(bits, found_bits[1]) > few:
                found[1] *= np.float32(2)
            limit[r] = found[1]
            _cut(bits, found_bits[1], is_outlier)
            found_bits[0] = _largest(bits)
        largest[r] = found[0]
        _round_row(row, found[0], codes[r])
    return is_outlier


@njit(nogil=True, cache=True)
def outliers(x, shift, limit, columns, kept):
    """Those of each row of x (R, I) at some columns (U,) into kept (R, U) float32, 0 where an element is none."""
    one = np.empty(1, np.float32)
    bits = one.view(np.uint32)
    for r in range(x.shape[0]):
        for u in range(len(columns)):
            bits[0] = np.uint32(x[r, columns[u]]) << shift
            kept[r, u] = one[0] if abs(one[0]) > limit[r] else np.float32(0)


@njit(nogil=True, cache=True, inline="always")
def _add_scaled(total, row, factor):
    for o in range(len(total)):
        total[o] += np.float32(row[o]) * factor


@njit(nogil=True, cache=True)
def scale_back(sums, scale, kept, columns, weight_scale, bias, shift, begin, end, out):
    """out[r] = weight_scale * (scale[r] * sums[r] + kept[r] @ columns) + bias, for rows `begin` to `end` of R; a row
    adds its outliers up one after the other, so that it does not depend on the columns in which others have some.

    Args:
        sums: (R, O), columns: (U, O); whole numbers of any type.
        scale: (R,); kept: (R, U); weight_scale, bias: (O,), all float32; out: (R, O).
    """
    part = 1024
    buffer = np.empty(part, np.float32)
    half, odd = np.uint32((1 << shift >> 1) - (shift > 0)), np.uint32(shift > 0)
    for r in range(begin, end):
        for at in range(0, out.shape[1], part):
            stop = min(at + part, out.shape[1])
            total, row, factor = buffer[: stop - at], sums[r, at:stop], scale[r]
            for o in range(len(total)):
                total[o] = np.float32(row[o]) * factor
            for u in range(kept.shape[1]):
                if kept[r, u] != 0:
                    _add_scaled(total, columns[u, at:stop], kept[r, u])
            s, b, target, bits = weight_scale[at:stop], bias[at:stop], out[r, at:stop], total.view(np.uint32)
            for o in range(len(total)):
                total[o] = total[o] * s[o] + b[o]
            for o in range(len(target)):
                target[o] = (bits[o] + half + ((bits[o] >> shift) & odd)) >> shift
