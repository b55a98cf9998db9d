"""Loops over codes of 8 and 4 bits, compiled for this CPU by numba: several times as fast as a few torch operators
(docs/formats.md). They release the GIL, so that threads can share the rows of a matrix (`threads.py`).

So that loops are vectorised, their lengths are not known when they are compiled, and what is added up to an index is
unsigned (`U`). Floats that numba has no type for are passed as their bits.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from h2o_flexgen.tiles import TILE_IN, TILE_OUT, TILE_ROWS, tiles  # noqa: F401, one module has all loops

U = np.uint64


@intrinsic
def _bits(_, x):
    """The bits of a float32, as uint32."""
    return types.uint32(types.float32), lambda _, builder, __, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def _float(_, bits):
    """The float32 of these bits."""
    return types.float32(types.uint32), lambda _, builder, __, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def _from_float16(_, bits):
    """The float32 of the bits of an fp16."""

    def convert(_, builder, __, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), convert


@intrinsic
def _as_float16(_, x):
    """The bits of the fp16 that is nearest to a float32, ties to even."""

    def convert(_, builder, __, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), convert


@njit(nogil=True, inline="always")
def _from_bfloat16(bits):
    """The float32 of the bits of a bf16."""
    return _float(np.uint32(bits) << np.uint32(16))


# codes to floats, and to other codes


@njit(nogil=True, inline="always")
def _as_float32(x):
    return x


@njit(nogil=True, inline="always")
def _as_bfloat16(x):
    """Rounded to the nearest, ties to even; its bits."""
    bits = _bits(x)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit(nogil=True, inline="always")
def _as_int8(x):
    return np.int8(np.rint(x))


@njit(nogil=True, inline="always")
def _decode_row(convert, codes, scale, minimum, factor, first, step, half, out):
    """convert((code * scale + minimum) * factor) of each element."""
    size = U(len(out)) // U(len(scale))
    for g in range(U(len(scale))):
        s, m, at, low = scale[g], minimum[g], U(first) + g * U(step), g * size
        if half:
            high = low + U(half)
            for i in range(U(half)):
                out[low + i] = convert((np.float32(codes[at + i] & np.uint8(15)) * s + m) * factor)
            for i in range(U(half)):
                out[high + i] = convert((np.float32(codes[at + i] >> np.uint8(4)) * s + m) * factor)
        else:
            for i in range(size):
                out[low + i] = convert((np.float32(codes[at + i]) * s + m) * factor)


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
    for r in range(len(codes)):
        _decode_row(_as_float32, codes[r], scale[r], minimum[r], np.float32(1), first, step, half, out[order[r]])


@njit(nogil=True, cache=True)
def to_bfloat16(codes, scale, minimum, order, first, step, half, out):
    """As `to_float32`; `out`: the bits, uint16."""
    for r in range(len(codes)):
        _decode_row(_as_bfloat16, codes[r], scale[r], minimum[r], np.float32(1), first, step, half, out[order[r]])


@njit(nogil=True, cache=True)
def to_int8(codes, scale, minimum, order, first, step, half, out, out_scale):
    """As `to_float32`, but into symmetric codes of 8 bits, `out` (rows, width) int8, with one scale for a row,
    `out_scale` (rows,) float32: 127 is the largest that the codes of any of its groups can stand for
    (`codes.Codes.largest`)."""
    for r in range(len(codes)):
        most = np.uint32(0)
        for g in range(scale.shape[1]):
            s, m = scale[r, g], minimum[r, g]
            one, other = (m, np.float32(15) * s + m) if half else (m, np.float32(127) * s)
            most = max(most, max(_bits(abs(one)), _bits(abs(other))))
        largest = _float(most)
        out_scale[order[r]] = largest / np.float32(127)
        factor = np.float32(127) / max(largest, np.float32(1e-30))
        _decode_row(_as_int8, codes[r], scale[r], minimum[r], factor, first, step, half, out[order[r]])


@njit(nogil=True, cache=True)
def scales(halves, begin, end, has_minimum, centre, scale, minimum):
    """Of rows of blocks (`formats.Blocks`), `begin` to `end` of R, the scales and minima, both (R, G) float32.

    Args:
        halves: (R, G, bytes / 2) uint16, the blocks.
        centre: without a minimum in the block the minimum is the scale times this.
    """
    for r in range(begin, end):
        for g in range(scale.shape[1]):
            scale[r, g] = _from_float16(halves[r, g, 0])
            minimum[r, g] = _from_float16(halves[r, g, 1]) if has_minimum else scale[r, g] * centre


# attention over a cache: sums in another order, but NaN stays NaN
_SUMS = {"reassoc", "contract", "nsz"}


@njit(nogil=True, inline="always")
def _dots(convert, keys, q, out):
    for h in range(q.shape[0]):
        for s in range(keys.shape[1]):
            key = keys[h, s]
            for g in range(q.shape[1]):
                query, total = q[h, g], np.float32(0)
                for i in range(len(query)):
                    total += convert(key[i]) * query[i]
                out[h, g, s] = total


@njit(nogil=True, inline="always")
def _mix(convert, values, p, out):
    out[:] = 0
    for h in range(p.shape[0]):
        for s in range(values.shape[1]):
            value = values[h, s]
            for g in range(p.shape[1]):
                weight, total = p[h, g, s], out[h, g]
                for i in range(len(total)):
                    total[i] += convert(value[i]) * weight


@njit(nogil=True, cache=True, fastmath=_SUMS)
def dots_bfloat16(keys, q, out):
    """Queries times keys, for n heads with S slots, G queries of each.

    Args:
        keys: (n, S, D) uint16, the bits; q: (n, G, D) float32; out: (n, G, S) float32.
    """
    _dots(_from_bfloat16, keys, q, out)


@njit(nogil=True, cache=True, fastmath=_SUMS)
def dots_float16(keys, q, out):
    """The same of keys in fp16."""
    _dots(_from_float16, keys, q, out)


@njit(nogil=True, cache=True, fastmath=_SUMS)
def mix_bfloat16(values, p, out):
    """Values (n, S, D) uint16, the bits, summed with the weights p (n, G, S) float32 into out (n, G, D) float32."""
    _mix(_from_bfloat16, values, p, out)


@njit(nogil=True, cache=True, fastmath=_SUMS)
def mix_float16(values, p, out):
    """The same of values in fp16."""
    _mix(_from_float16, values, p, out)


@njit(nogil=True, cache=True, fastmath=_SUMS)
def dots8(halves, codes, q, out):
    """As `dots_bfloat16`, of keys in 8 bits.

    Args:
        halves: (n, S, W / 2) uint16: each vector, whose scale in fp16 comes first; codes: (n, S, W) int8, the same.
    """
    for h in range(q.shape[0]):
        for s in range(codes.shape[1]):
            c, scale = codes[h, s, 2:], _from_float16(halves[h, s, 0])
            for g in range(q.shape[1]):
                query, total = q[h, g], np.float32(0)
                for i in range(query.shape[0]):
                    total += np.float32(c[i]) * query[i]
                out[h, g, s] = total * scale


@njit(nogil=True, cache=True, fastmath=_SUMS)
def mix8(halves, codes, p, out):
    """As `mix_bfloat16`, of values in 8 bits, as `dots8` has keys."""
    out[:] = 0
    for h in range(p.shape[0]):
        for s in range(codes.shape[1]):
            c, scale = codes[h, s, 2:], _from_float16(halves[h, s, 0])
            for g in range(p.shape[1]):
                weight, total = p[h, g, s] * scale, out[h, g]
                for i in range(total.shape[0]):
                    total[i] += np.float32(c[i]) * weight


@njit(nogil=True, cache=True, fastmath=_SUMS)
def mix4(halves, codes, p, out):
    """The same of values in 4 bits, `codes` uint8: scale and minimum in fp16, then the codes, of which the first half
    are the lower ones."""
    out[:] = 0
    half = out.shape[2] // 2
    for h in range(p.shape[0]):
        for s in range(codes.shape[1]):
            c, scale, least = codes[h, s, 4:], _from_float16(halves[h, s, 0]), _from_float16(halves[h, s, 1])
            for g in range(p.shape[1]):
                weight, start = p[h, g, s] * scale, p[h, g, s] * least
                low, high = out[h, g, :half], out[h, g, half:]
                for i in range(low.shape[0]):
                    low[i] += np.float32(c[i] & np.uint8(15)) * weight + start
                for i in range(high.shape[0]):
                    high[i] += np.float32(c[i] >> np.uint8(4)) * weight + start


# floats to codes, and sums in int32 back to floats; x and out: the bits of floats, the upper ones where `shift` is 16
# (bf16), all where it is 0 (fp32)


@njit(nogil=True, inline="always")
def _element(x, shift):
    """The bits of a float32, of an element of x."""
    return np.uint32(x) << shift


@njit(nogil=True, inline="always")
def _size(bits):
    """Those of the absolute value, which compare as their floats do; NaN is the largest of all."""
    return bits & np.uint32(0x7FFFFFFF)


@njit(nogil=True, inline="always")
def _largest(row, shift):
    """The bits of the largest absolute value."""
    largest = np.uint32(0)
    for i in range(len(row)):
        largest = max(largest, _size(_element(row[i], shift)))
    return largest


@njit(nogil=True, cache=True)
def encode8(x, shift, begin, end, halves, codes):
    """Each row of x (R, I) as a block of 8 bits without a minimum (`formats.Blocks`): rows `begin` to `end`.

    Args:
        halves: (R, W / 2) uint16, codes: (R, W) int8: the same bytes, the blocks.
    """
    for r in range(begin, end):
        row, target = x[r], codes[r, 2:]
        halves[r, 0] = _as_float16(_float(_largest(row, shift)) / np.float32(127))
        scale = _from_float16(halves[r, 0])
        if 0 < scale < np.inf:
            for i in range(len(row)):
                code = _float(_element(row[i], shift)) / scale
                target[i] = np.int8(np.rint(min(max(code, np.float32(-127)), np.float32(127))))
        else:  # all stand for 0, or for NaN
            target[:] = 0


@njit(nogil=True, inline="always")
def _ordered(bits):
    """The bits of a float as an int32 that compares with others as their floats do. It is its own inverse."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(nogil=True, inline="always")
def _code4(bits, start, scale):
    return np.uint8(np.rint(min(max((_float(bits) - start) / scale, np.float32(0)), np.float32(15))))


@njit(nogil=True, cache=True)
def encode4(x, shift, begin, end, halves, codes):
    """The same as a block of 4 bits with a minimum; `codes` uint8."""
    half = U(x.shape[1] // 2)
    for r in range(begin, end):
        row, target = x[r], codes[r, 4:]
        # NaN comes before all others, or after them
        first, last = np.int32(2**31 - 1), np.int32(-(2**31))
        for i in range(len(row)):
            each = _ordered(np.int32(_element(row[i], shift)))
            first, last = min(first, each), max(last, each)
        least, most = _float(np.uint32(_ordered(first))), _float(np.uint32(_ordered(last)))
        halves[r, 0], halves[r, 1] = _as_float16((most - least) / np.float32(15)), _as_float16(least)
        scale, start = _from_float16(halves[r, 0]), _from_float16(halves[r, 1])
        if 0 < scale < np.inf:
            for i in range(half):
                low = _code4(_element(row[i], shift), start, scale)
                high = _code4(_element(row[half + i], shift), start, scale)
                target[i] = low | (high << np.uint8(4))
        else:  # all stand for the minimum, or for NaN
            target[:] = 0


@njit(nogil=True, cache=True, fastmath={"reassoc"})  # inlined by numba it would lose that, and its vectors
def _sum_abs(row, shift):
    total = np.float32(0)
    for i in range(len(row)):
        total += abs(_float(_element(row[i], shift)))
    return total


@njit(nogil=True, inline="always")
def _above(row, shift, limit):
    """How many absolute values are above the limit, which is given as its bits."""
    count = np.uint32(0)
    for i in range(len(row)):
        count += np.uint32(_size(_element(row[i], shift)) > limit)
    return count


@njit(nogil=True, cache=True)
def quantise(x, shift, times, few, begin, end, codes, limit, largest):
    """The rows of x (R, I) in int8; outliers become 0. Returns (I,) uint8, 1 where any of its rows has an outlier: were
    it shared, threads would overwrite each other's.

    Args:
        times: an outlier is above this many times the mean absolute value, doubled until a row has at most `few`.
        codes: (R, I) int8; limit, largest: (R,) float32, above which elements are outliers, and of the others the
            largest; of all three rows `begin` to `end` are written.
    """
    is_outlier = np.zeros(x.shape[1], np.uint8)
    for r in range(begin, end):
        row, target = x[r], codes[r]
        most = top = _largest(row, shift)  # of what stays, and the limit, as bits
        mean = np.float32(times * _sum_abs(row, shift) / np.float32(len(row))) if few else np.float32(np.inf)
        if mean < _float(most) < np.inf:
            while _above(row, shift, _bits(mean)) > few:
                mean *= np.float32(2)
            top, most = _bits(mean), np.uint32(0)
            for i in range(len(row)):
                size = _size(_element(row[i], shift))
                most = max(most, np.uint32(0) if size > top else size)
                is_outlier[i] |= np.uint8(size > top)
        limit[r], largest[r] = _float(top), _float(most)
        factor = np.float32(127) / max(_float(most), np.float32(1e-30))
        if most == top:
            for i in range(len(row)):
                target[i] = np.int8(np.rint(_float(_element(row[i], shift)) * factor))
        else:
            for i in range(len(row)):
                bits = _element(row[i], shift)
                target[i] = np.int8(np.rint(_float(np.uint32(0) if _size(bits) > top else bits) * factor))
    return is_outlier


@njit(nogil=True, cache=True)
def outliers(x, shift, limit, columns, kept):
    """Those of each row of x (R, I) at some columns (U,) into kept (R, U) float32, 0 where an element is none."""
    for r in range(len(x)):
        for u in range(len(columns)):
            value = _float(_element(x[r, columns[u]], shift))
            kept[r, u] = value if abs(value) > limit[r] else np.float32(0)


@njit(nogil=True, inline="always")
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
