"""Blocks of codes to floats and to codes of 8 bits, by a table that says where the bits are (`formats.layout`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from h2o_flexgen.compiled import simd
from h2o_flexgen.compiled.floats import U, bits_of, element, float_of, from_bits
from h2o_flexgen.compiled.simd import I8, I16, I32, I64

#: whether this CPU looks codes up in a table of 16 in one instruction
_HAS_LOOKUP = bool(simd.FEATURES.get("ssse3"))


#: as in `formats.layout`
HALF = 0
SINGLE = 1


class Arrays(NamedTuple):
    """A `formats.layout.Layout`; from Python a plain tuple."""

    size: int  # elements of a block
    nbytes: int
    run: int  # elements
    group: int  # elements
    offset: int  # of codes
    scale_at: int
    scale_kind: int  # `layout.HALF` or its neighbours
    minimum_at: int  # -1: there is none
    scale_offset: int
    is_signed: int  # scales of groups
    table: np.ndarray  # (16,) int8, or empty
    floats: np.ndarray  # (16 or 256,) float32, or empty
    codes: np.ndarray  # (runs, 8) int64, from `Numbers.array`
    scales: np.ndarray  # likewise, or empty
    minima: np.ndarray  # likewise, or empty


# codes


def _build(count, kind):
    """The LLVM IR that decodes `count` codes of a run. Codes of the kinds "low" and "table" have one part, those of the
    kinds "bytes" and "bits" also an upper one: some bits of a byte, or a bit of its own."""

    def build(context, builder, signature, args):
        low_at, high_at, numbers, target, table = args
        shift, mask, high_shift, high_mask, left, offset = (builder.extract_value(numbers, n) for n in range(6))
        words = ir.VectorType(I16, count // 2)
        codes = ir.VectorType(I8, count)

        def every(number):
            return simd.every(builder, number, I16, count // 2)

        def every_byte(number):
            return simd.every(builder, number, I8, count)

        def part(address, shift, mask):
            shifted = builder.lshr(simd.load(builder, address, I16, count // 2), every(shift))
            return builder.and_(builder.bitcast(shifted, codes), every_byte(mask))

        code = part(low_at, shift, mask)
        high = None
        if kind == "bits":
            few = simd.load(builder, high_at, I8, count // 8)
            spread = ir.Constant(ir.VectorType(I32, count), [n // 8 for n in range(count)])
            bits = ir.Constant(codes, [1 << n % 8 for n in range(count)])
            taken = builder.and_(builder.shuffle_vector(few, few, spread), bits)
            is_set = builder.icmp_unsigned("!=", taken, codes(None))
            high = builder.select(is_set, every_byte(builder.shl(I64(1), left)), codes(None))
        elif kind == "bytes":
            shifted = builder.shl(builder.bitcast(part(high_at, high_shift, high_mask), words), every(left))
            high = builder.bitcast(shifted, codes)
        if high is not None:
            code = builder.or_(code, high)
        if kind == "table":
            data = context.make_array(signature.args[4])(context, builder, table).data
            entries = simd.load(builder, builder.ptrtoint(data, I64), I8, 16)
            code = simd.call(builder, "llvm.x86.ssse3.pshuf.b.128", codes, entries, code)
        simd.store(builder, builder.sub(code, every_byte(offset)), target)

    return build


def _decoder(count, kind):
    @intrinsic
    def decoder(_, low_at, high_at, numbers, target, table):
        """Write `count` codes of a run in int8 to address `target`; their bytes are at two addresses. `numbers`: shift
        and mask of the lower part, shift, mask and left shift of the upper one, and the offset; `table`: (16,) int8, or
        empty."""
        return types.void(types.int64, types.int64, numbers, types.int64, table), _build(count, kind)

    return decoder


_decode_low16, _decode_low32 = (_decoder(count, "low") for count in (16, 32))
_decode_bytes16, _decode_bytes32 = (_decoder(count, "bytes") for count in (16, 32))
_decode_bits16 = _decoder(16, "bits")
_look_up16 = _decoder(16, "table")


@njit(nogil=True)
def _decode_one_by_one(row, first, count, layout, n, codes):
    """Write the codes of run `n` of each block."""
    parts = layout.codes[n]
    for b in range(count):
        at = (first + b) * layout.nbytes
        target = b * layout.size + n * layout.run
        for i in range(layout.run):
            code = row[at + parts[0] + i] >> parts[1] & parts[2]
            if parts[7] == 8:
                code |= (row[at + parts[3] + i // 8] >> (i % 8) & 1) << parts[6]
            elif parts[5]:
                code |= (row[at + parts[3] + i] >> parts[4] & parts[5]) << parts[6]
            codes[target + i] = np.int8(layout.table[code] if len(layout.table) else code - layout.offset)


@njit(nogil=True, inline="always")
def decode(row, first, count, layout, codes):
    """Write the codes of `count` blocks of a row (bytes,) uint8, from block `first` on, to codes (elements,) int8."""
    has_table = len(layout.table) > 0
    step = 32 if layout.run % 32 == 0 else 16
    table = layout.table
    parts = layout.codes
    offset = layout.offset
    begin = row.ctypes.data + first * layout.nbytes
    for n in range(U(len(parts))):
        if layout.run % 16 or (has_table and not _HAS_LOOKUP):
            _decode_one_by_one(row, first, count, layout, n, codes)
            continue
        rest = (parts[n, 1], parts[n, 2], parts[n, 4], parts[n, 5], parts[n, 6], offset)
        is_bits = parts[n, 7] == 8
        for i in range(0, layout.run, 16 if has_table or is_bits else step):
            low = begin + parts[n, 0] + i
            high = begin + parts[n, 3] + (i // 8 if is_bits else i)
            target = codes.ctypes.data + np.int64(n) * layout.run + i
            if has_table:
                for b in range(count):
                    at = b * layout.nbytes
                    _look_up16(low + at, high + at, rest, target + b * layout.size, table)
            elif is_bits:
                for b in range(count):
                    at = b * layout.nbytes
                    _decode_bits16(low + at, high + at, rest, target + b * layout.size, table)
            elif step == 32 and parts[n, 5] == 0:
                for b in range(count):
                    at = b * layout.nbytes
                    _decode_low32(low + at, high + at, rest, target + b * layout.size, table)
            elif parts[n, 5] == 0:
                for b in range(count):
                    at = b * layout.nbytes
                    _decode_low16(low + at, high + at, rest, target + b * layout.size, table)
            elif step == 32:
                for b in range(count):
                    at = b * layout.nbytes
                    _decode_bytes32(low + at, high + at, rest, target + b * layout.size, table)
            else:
                for b in range(count):
                    at = b * layout.nbytes
                    _decode_bytes16(low + at, high + at, rest, target + b * layout.size, table)


# scales


def _load(kind):
    def build(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], kind.as_pointer()), align=1)

    return build


@intrinsic
def _byte(_, address):
    """The byte at an address."""
    return types.uint8(types.int64), _load(I8)


@intrinsic
def _word16(_, address):
    """The 16 bits at an address of any alignment."""
    return types.int16(types.int64), _load(I16)


@intrinsic
def _word32(_, address):
    """The 32 bits at an address of any alignment."""
    return types.uint32(types.int64), _load(I32)


@njit(nogil=True, inline="always")
def _numbers(begin, nbytes, parts, groups, count, out):
    """Write the whole numbers of `count` blocks from an address on to out (groups,) uint8; parts: of their runs."""
    run = groups // len(parts)
    words = out.view(np.uint32)
    for n in range(len(parts)):
        low = begin + parts[n, 0]
        shift = parts[n, 1]
        mask = parts[n, 2]
        high = begin + parts[n, 3]
        high_shift = parts[n, 4]
        high_mask = parts[n, 5]
        left = parts[n, 6]
        if run % 4 == 0:  # four at a time
            mask *= 0x01010101
            high_mask *= 0x01010101
            for i in range(0, run, 4):
                for b in range(count):
                    at = b * nbytes + i
                    word = np.int64(_word32(low + at)) >> shift & mask
                    word |= (np.int64(_word32(high + at)) >> high_shift & high_mask) << left
                    words[U((b * groups + n * run + i) // 4)] = np.uint32(word)
            continue
        for i in range(run):
            for b in range(count):
                at = b * nbytes + i
                number = np.int64(_byte(low + at)) >> shift & mask
                number |= (np.int64(_byte(high + at)) >> high_shift & high_mask) << left
                out[U(b * groups + n * run + i)] = np.uint8(number)


@njit(nogil=True, inline="always")
def _repeat(values, count, times):
    """Put each of the first `count` values `times` times in its place."""
    for n in range(count - 1, -1, -1):  # from the last, since they lie in the way
        value = values[U(n)]
        for i in range(U(times)):
            values[U(n * times) + i] = value


@njit(nogil=True, inline="always")
def _of_blocks(begin, count, layout, kind, halves, groups, out):
    """Write a float of each of `count` blocks, which is at `begin` of the first, to all of its groups in out."""
    nbytes = layout.nbytes
    if kind == HALF:
        for b in range(count):
            halves[U(b)] = _word16(begin + b * nbytes)
        for b in range(U(count)):  # in a loop of its own, which is vectorised
            out[b] = float_of(halves[b])
    elif kind == SINGLE:
        for b in range(count):
            out[U(b)] = from_bits(_word32(begin + b * nbytes))
    else:
        for b in range(count):
            e = np.uint32(_byte(begin + b * nbytes))
            bits = np.uint32(0x00200000) << e if e < 2 else (e - np.uint32(1)) << np.uint32(23)
            out[U(b)] = from_bits(np.uint32(bits))
    if groups > 1:
        _repeat(out, count, groups)


@njit(nogil=True, inline="always")
def decode_scales(row, first, count, groups, layout, buffers, scale, minimum):
    """Write the scale and the minimum of each group of `count` blocks of a row, from block `first` on; both (groups,)
    float32. `groups`: of a block; there may be more than have scales of their own. Buffers: (blocks,) int16, and
    (groups,) uint8, a multiple of 4."""
    halves, numbers = buffers
    begin = row.ctypes.data + first * layout.nbytes
    wanted = groups
    if len(layout.scales) + len(layout.minima):
        groups = layout.size // layout.group
    _of_blocks(begin + layout.scale_at, count, layout, layout.scale_kind, halves, groups, scale)
    if layout.minimum_at >= 0:
        _of_blocks(begin + layout.minimum_at, count, layout, HALF, halves, groups, minimum)
    else:
        minimum[: count * groups] = 0
    if len(layout.scales):
        _numbers(begin, layout.nbytes, layout.scales, groups, count, numbers)
        offset = np.float32(layout.scale_offset)
        if layout.is_signed:
            signed = numbers.view(np.int8)
            for g in range(U(count * groups)):
                scale[g] *= np.float32(signed[g])
        else:
            for g in range(U(count * groups)):
                scale[g] *= np.float32(numbers[g]) - offset
    if len(layout.minima):
        _numbers(begin, layout.nbytes, layout.minima, groups, count, numbers)
        for g in range(U(count * groups)):
            minimum[g] = -(minimum[g] * np.float32(numbers[g]))
    if wanted > groups:
        _repeat(scale, count * groups, wanted // groups)
        _repeat(minimum, count * groups, wanted // groups)


@njit(nogil=True, cache=True)
def scales(rows, scale, minimum, begin, end, layout):
    """Write the scales and minima, both (R, G) float32, of rows `begin` to `end` of blocks, rows (R, bytes) uint8."""
    layout = Arrays(*layout)
    blocks = rows.shape[1] // layout.nbytes
    halves = np.empty(blocks, np.int16)
    numbers = np.empty((scale.shape[1] + 3) // 4 * 4, np.uint8)
    groups = layout.size // layout.group
    for r in range(begin, end):
        decode_scales(rows[r], 0, blocks, groups, layout, (halves, numbers), scale[r], minimum[r])


# to floats and to 8 bits


@njit(nogil=True)
def _write_row(row, scale, minimum, factor, layout, codes, out):
    """(code * scale + minimum) * factor of each element of a row; codes (elements,) int8 is a buffer."""
    if layout.size == 1:  # plain codes of 8 bits
        codes = row.view(np.int8)
    else:
        decode(row, 0, len(row) // layout.nbytes, layout, codes)
    size = U(len(codes) // len(scale))
    for g in range(U(len(scale))):
        s = scale[g]
        m = minimum[g]
        begin = g * size
        if len(layout.floats):
            last = np.uint8(len(layout.floats) - 1)
            for i in range(size):
                value = layout.floats[U(np.uint8(codes[begin + i]) & last)]
                out[begin + i] = element((value * s + m) * factor, out)
        else:
            for i in range(size):
                out[begin + i] = element((np.float32(codes[begin + i]) * s + m) * factor, out)


@njit(nogil=True)
def _largest(row, scale, minimum, layout, codes):
    """The bits of the largest absolute value in a row of codes that stand for floats; codes as in `_write_row`."""
    decode(row, 0, len(row) // layout.nbytes, layout, codes)
    size = U(len(codes) // len(scale))
    last = np.uint8(len(layout.floats) - 1)
    most = np.uint32(0)
    for g in range(U(len(scale))):
        for i in range(size):
            value = layout.floats[U(np.uint8(codes[g * size + i]) & last)]
            most = max(most, bits_of(abs(value * scale[g] + minimum[g])))
    return most


@njit(nogil=True, cache=True)
def to_floats(rows, scale, minimum, order, layout, out):
    """Write code * scale + minimum for R rows of G groups.

    Args:
        rows: (R, bytes of a row) uint8.
        scale, minimum: (R, G) float32.
        order: (R,), the row of `out` that each becomes.
        layout: `Arrays` in a plain tuple.
        out: (rows, width), floats.
    """
    layout = Arrays(*layout)
    codes = np.empty(out.shape[1], np.int8)
    for r in range(len(rows)):
        _write_row(rows[r], scale[r], minimum[r], np.float32(1), layout, codes, out[order[r]])


@njit(nogil=True, cache=True)
def to_int8(rows, scale, minimum, order, layout, out, out_scale, bounds):
    """As `to_floats`, but to symmetric codes of 8 bits, `out` (rows, width) int8, with one scale a row, `out_scale`
    (rows,) float32: 127 stands for the largest number that the codes of any of its groups, within `bounds`, can
    stand for, or if these stand for floats, for the largest number of the row (`formats.codes.Codes.to_int8`)."""
    layout = Arrays(*layout)
    codes = np.empty(out.shape[1], np.int8)
    for r in range(len(rows)):
        most = np.uint32(0)
        if len(layout.floats):
            most = _largest(rows[r], scale[r], minimum[r], layout, codes)
        else:
            for g in range(scale.shape[1]):
                for end in bounds:
                    most = max(most, bits_of(abs(end * scale[r, g] + minimum[r, g])))
        largest = from_bits(most)
        out_scale[order[r]] = largest / np.float32(127)
        factor = np.float32(127) / max(largest, np.float32(1e-30))
        _write_row(rows[r], scale[r], minimum[r], factor, layout, codes, out[order[r]])
