"""Blocks of codes to floats and to codes of 8 bits, by a table that says where the bits are (`formats.layout`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from h2o_flexgen.compiled import simd
from h2o_flexgen.compiled.floats import U, bits_of, element, from_bits
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


#: scales of a block at most
NUMBERS = 16


class Scales(NamedTuple):
    """How the scales and minima of `each` equal parts of a block are read: a float of the block times numbers, each
    (byte >> shift & mask | (upper byte >> shift & mask) << left) ^ flipped - offset. No arrays, to which numba would
    count references."""

    nbytes: int
    each: int
    scale_at: int
    scale_kind: int
    minimum_at: int
    has_numbers: bool  # or `each` is 1
    scale_from: int  # the first byte of numbers
    minimum_from: int
    table: int  # address of (2, 8, NUMBERS) int32: which bytes, shift and mask of both, left, flipped, offset


@njit(nogil=True)
def _fill_table(parts, layout, each, table):
    """Fill in all but the last two rows. Returns from which byte the places of bytes are counted."""
    table[:] = 0
    if len(parts) == 0:
        return 0
    groups = layout.size // layout.group
    run = groups // len(parts)
    begin = max(min(parts[:, 0].min(), parts[:, 3].min(), layout.nbytes - NUMBERS), 0)
    places = table[0].view(np.uint8)
    for n in range(each):
        group = n * groups // each
        bits = parts[group // run]
        places[n] = bits[0] + group % run - begin
        places[NUMBERS + n] = bits[3] + group % run - begin
        table[1, n] = bits[1]
        table[2, n] = bits[2]
        table[3:6, n] = bits[4:7]
    return begin


@njit(nogil=True)
def scales_of(layout, each, table):
    """`Scales` of `each` equal parts of a block, NUMBERS at most; table (2, 8, NUMBERS) int32 is filled in for it."""
    scale_from = _fill_table(layout.scales, layout, each, table[0])
    minimum_from = _fill_table(layout.minima, layout, each, table[1])
    table[0, 6] = 128 if layout.is_signed else 0
    table[0, 7] = 128 if layout.is_signed else layout.scale_offset
    if len(layout.scales) == 0:
        table[0, 7] = -1  # the number 1
    table[1, 6] = -1 if len(layout.minima) else 0  # they are subtracted
    table[1, 7] = -1
    has_numbers = each > 1 or len(layout.scales) + len(layout.minima) > 0
    of_block = layout.scale_at, layout.scale_kind, layout.minimum_at
    return Scales(layout.nbytes, each, *of_block, has_numbers, scale_from, minimum_from, table.ctypes.data)


def _floats(kind):
    """A loop that reads floats of blocks, NUMBERS at a time."""

    def convert(builder, read):
        floats = ir.VectorType(simd.FLOAT, NUMBERS)
        bits = ir.VectorType(I32, NUMBERS)
        if kind == HALF:
            return builder.fpext(builder.bitcast(read, ir.VectorType(ir.HalfType(), NUMBERS)), floats)
        if kind == SINGLE:
            return builder.bitcast(read, floats)
        e = builder.zext(read, bits)
        one, denormal, fraction = (simd.every(builder, I32(n), I32, NUMBERS) for n in (1, 0x00200000, 23))
        usual = builder.shl(builder.sub(e, one), fraction)
        found = builder.select(builder.icmp_unsigned(">", e, one), usual, builder.shl(denormal, e))
        return builder.bitcast(found, floats)

    def build(context, builder, signature, args):
        begin, step, count, target = args
        stored = {HALF: I16, SINGLE: I32}.get(kind, I8)
        last = builder.add(begin, builder.mul(builder.sub(count, I64(1)), step))

        def put(n, _):
            read = ir.VectorType(stored, NUMBERS)(ir.Undefined)
            for lane in range(NUMBERS):
                at = builder.add(begin, builder.mul(builder.add(n, I64(lane)), step))
                at = builder.select(builder.icmp_unsigned("<", at, last), at, last)
                each = builder.load(builder.inttoptr(at, stored.as_pointer()), align=1)
                read = builder.insert_element(read, each, I32(lane))
            simd.store(builder, convert(builder, read), builder.add(target, builder.mul(n, I64(4))))
            return []

        simd.loop(builder, NUMBERS, count, [], put)

    @intrinsic
    def floats(_, begin, step, count, target):
        """Write a float of each of `count` blocks of `step` bytes, which is at address `begin` of the first, to address
        `target`, and garbage up to a multiple of NUMBERS."""
        return types.void(*[types.int64] * 4), build

    return floats


_halves, _singles, _exponents = map(_floats, (HALF, SINGLE, SINGLE + 1))


@njit(nogil=True, inline="always")
def _put_floats(begin, step, count, kind, target):
    """The loop of this kind."""
    if kind == HALF:
        _halves(begin, step, count, target)
    elif kind == SINGLE:
        _singles(begin, step, count, target)
    else:
        _exponents(begin, step, count, target)


@intrinsic
def _put_scaled(_, begin, step, count, each, table, factors, target):
    """Write `each` floats of `count` blocks, and garbage up to NUMBERS of the last one: numbers times a factor of the
    block. `step`: bytes of a block; the others but for the counts are addresses, `table` that of (8, NUMBERS)."""

    def build(context, builder, signature, args):
        begin, step, count, each, table, factors, target = args

        def row(n, element=I32):
            return simd.load(builder, builder.add(table, I64(NUMBERS * n)), element, NUMBERS)

        low = row(0, I8)
        high = row(1, I8)
        shift, mask, high_shift, high_mask, left, flipped, offset = (row(4 * n) for n in range(1, 8))

        def put(n, _):
            read = simd.load(builder, builder.add(begin, builder.mul(n, step)), I8, NUMBERS)
            few, more = (builder.zext(simd.looked_up(builder, read, which), shift.type) for which in (low, high))
            few = builder.and_(builder.lshr(few, shift), mask)
            more = builder.shl(builder.and_(builder.lshr(more, high_shift), high_mask), left)
            found = builder.sub(builder.xor(builder.or_(few, more), flipped), offset)
            at = builder.inttoptr(builder.add(factors, builder.mul(n, I64(4))), simd.FLOAT.as_pointer())
            factor = simd.every(builder, builder.load(at), simd.FLOAT, NUMBERS)
            scaled = builder.fmul(builder.sitofp(found, factor.type), factor)
            simd.store(builder, scaled, builder.add(target, builder.mul(builder.mul(n, each), I64(4))))
            return []

        simd.loop(builder, 1, count, [], put)

    return types.void(*[types.int64] * 7), build


@njit(nogil=True, inline="always")
def decode_scales(begin, count, of, factors, scale, minimum):
    """Write the scales and minima of `count` blocks as float32, NUMBERS more than there are; no minima, if the layout
    has none. All are addresses, but for of: `Scales`; `factors`: of a buffer for a float of each block."""
    target = factors if of.has_numbers else scale
    _put_floats(begin + of.scale_at, of.nbytes, count, of.scale_kind, target)
    if of.has_numbers:
        _put_scaled(begin + of.scale_from, of.nbytes, count, of.each, of.table, target, scale)
    if of.minimum_at >= 0:
        target = factors if of.has_numbers else minimum
        _put_floats(begin + of.minimum_at, of.nbytes, count, HALF, target)
        if of.has_numbers:
            table = of.table + 8 * NUMBERS * 4
            _put_scaled(begin + of.minimum_from, of.nbytes, count, of.each, table, target, minimum)


@njit(nogil=True, cache=True)
def scales(rows, scale, minimum, begin, end, layout):
    """Write the scales and minima, both (R, G) float32, of rows `begin` to `end` of blocks, rows (R, bytes) uint8."""
    layout = Arrays(*layout)
    width = rows.shape[1]
    groups = scale.shape[1]
    blocks = width // layout.nbytes
    table = np.empty((2, 8, NUMBERS), np.int32)
    of = scales_of(layout, layout.size // layout.group, table)
    # with what is read and written behind them
    row = np.empty(width + NUMBERS, np.uint8)
    found = np.zeros((3, groups + NUMBERS), np.float32)
    for r in range(begin, end):
        row[:width] = rows[r]
        decode_scales(row.ctypes.data, blocks, of, found[2].ctypes.data, found[0].ctypes.data, found[1].ctypes.data)
        scale[r] = found[0, :groups]
        minimum[r] = found[1, :groups]
    table[:] = 0  # it must not be freed before


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
