"""Blocks of codes to floats and to codes of 8 bits, by a table that says where the bits are (`formats.layout`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from h2o_flexgen.compiled import simd
from h2o_flexgen.compiled.floats import U, bits_of, element, float_of, from_bits
from h2o_flexgen.compiled.simd import I8, I16, I64

#: whether this CPU looks codes up in a table of 16 in one instruction
_HAS_LOOKUP = bool(simd.FEATURES.get("ssse3"))


#: `formats.layout.SINGLE` and EXPONENT
SINGLE, EXPONENT = 1, 2


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
    scales: np.ndarray  # (groups, 8), or empty
    minima: np.ndarray  # (groups, 8), or empty


# codes


def _build(count, has_table):
    def build(context, builder, signature, args):
        low_at, shift, mask, high_at, high_shift, high_mask, left, offset, target = args[:9]
        words = ir.VectorType(I16, count // 2)

        def every(number):
            first = builder.insert_element(words(ir.Undefined), builder.trunc(number, I16), ir.IntType(32)(0))
            zeros = ir.Constant(ir.VectorType(ir.IntType(32), count // 2), [0] * (count // 2))
            return builder.shuffle_vector(first, first, zeros)

        def part(address, shift, mask):
            shifted = builder.lshr(simd.load(builder, address, I16, count // 2), every(shift))
            return builder.and_(shifted, every(builder.mul(mask, I64(0x0101))))

        high = builder.shl(part(high_at, high_shift, high_mask), every(left))
        code = builder.bitcast(builder.or_(part(low_at, shift, mask), high), ir.VectorType(I8, count))
        if has_table:
            table = context.make_array(signature.args[9])(context, builder, args[9])
            entries = simd.load(builder, builder.ptrtoint(table.data, I64), I8, 16)
            code = simd.call(builder, "llvm.x86.ssse3.pshuf.b.128", code.type, entries, code)
        code = builder.sub(code, builder.bitcast(every(builder.mul(offset, I64(0x0101))), code.type))
        simd.store(builder, code, target)

    return build


@intrinsic
def _decode32(_, low_at, shift, mask, high_at, high_shift, high_mask, left, offset, target):
    """Write 32 codes of a run, less the offset, in int8 to address `target`; their bytes are at two addresses."""
    return types.void(*[types.int64] * 9), _build(32, False)


@intrinsic
def _decode16(_, low_at, shift, mask, high_at, high_shift, high_mask, left, offset, target):
    """The same of 16 codes."""
    return types.void(*[types.int64] * 9), _build(16, False)


@intrinsic
def _look_up16(_, low_at, shift, mask, high_at, high_shift, high_mask, left, offset, target, table):
    """The same of 16 codes that stand for the numbers of a table (16,) int8."""
    return types.void(*[types.int64] * 9, table), _build(16, True)


@njit(nogil=True)
def _decode_rest(row, at, run, parts, begin, layout, codes, target):
    """`_decode16` one code at a time, from code `begin` of the run in a row (bytes,) on."""
    for i in range(begin, run):
        code = row[at + parts[0] + i] >> parts[1] & parts[2]
        if parts[7] == 8:
            code |= (row[at + parts[3] + i // 8] >> (i % 8) & 1) << parts[6]
        elif parts[5]:
            code |= (row[at + parts[3] + i] >> parts[4] & parts[5]) << parts[6]
        codes[target + i] = np.int8(layout.table[code] if len(layout.table) else code - layout.offset)


@njit(nogil=True)
def decode(row, first, count, layout, codes):
    """Write the codes of `count` blocks of a row (bytes,) uint8, from block `first` on, to codes (elements,) int8."""
    run = layout.run
    address = row.ctypes.data
    out = codes.ctypes.data
    offset = layout.offset
    has_table = len(layout.table) > 0
    is_wide = run % 16 == 0 and (_HAS_LOOKUP or not has_table)
    for b in range(count):
        at = (first + b) * layout.nbytes
        for n in range(len(layout.codes)):
            parts = layout.codes[n]
            target = b * layout.size + n * run
            if not is_wide or parts[7] == 8:
                _decode_rest(row, at, run, parts, 0, layout, codes, target)
                continue
            low = address + at + parts[0]
            high = address + at + parts[3]
            i = 0
            while i < run:
                rest = (high + i, parts[4], parts[5], parts[6], offset, out + target + i)
                if has_table:
                    _look_up16(low + i, parts[1], parts[2], *rest, layout.table)
                    i += 16
                elif i + 32 <= run:
                    _decode32(low + i, parts[1], parts[2], *rest)
                    i += 32
                else:
                    _decode16(low + i, parts[1], parts[2], *rest)
                    i += 16


# scales


@njit(nogil=True, inline="always")
def _half(row, at):
    return float_of(np.int16(np.uint16(row[at]) | np.uint16(row[at + 1]) << np.uint16(8)))


@njit(nogil=True, inline="always")
def _single(row, at):
    bits = np.uint32(0)
    for n in range(4):
        bits |= np.uint32(row[at + n]) << np.uint32(8 * n)
    return from_bits(bits)


@njit(nogil=True, inline="always")
def _number(row, at, parts):
    low = np.int64(row[U(at + parts[0])]) >> parts[1] & parts[2]
    return low | (np.int64(row[U(at + parts[3])]) >> parts[4] & parts[5]) << parts[6]


@njit(nogil=True)
def decode_scales(row, first, count, layout, scale, minimum):
    """Write the scale and the minimum of each group of `count` blocks of a row, from block `first` on; both (groups,)
    float32."""
    groups = layout.size // layout.group
    for b in range(count):
        at = (first + b) * layout.nbytes
        if layout.scale_kind == SINGLE:
            block_scale = _single(row, at + layout.scale_at)
        elif layout.scale_kind == EXPONENT:
            e = np.uint32(row[at + layout.scale_at])
            half = np.uint32(0x00200000) << e if e < 2 else (e - np.uint32(1)) << np.uint32(23)
            block_scale = from_bits(np.uint32(half))
        else:
            block_scale = _half(row, at + layout.scale_at)
        block_minimum = _half(row, at + layout.minimum_at) if layout.minimum_at >= 0 else np.float32(0)
        for g in range(groups):
            scale[b * groups + g] = block_scale
            minimum[b * groups + g] = block_minimum
        for g in range(len(layout.scales)):
            number = _number(row, at, layout.scales[g])
            number = np.int64(np.int8(number)) if layout.is_signed else number - layout.scale_offset
            scale[b * groups + g] *= np.float32(number)
        for g in range(len(layout.minima)):
            minimum[b * groups + g] *= np.float32(-_number(row, at, layout.minima[g]))


@njit(nogil=True, cache=True)
def scales(rows, scale, minimum, begin, end, layout):
    """Write the scales and minima, both (R, G) float32, of rows `begin` to `end` of blocks, rows (R, bytes) uint8."""
    layout = Arrays(*layout)
    blocks = rows.shape[1] // layout.nbytes
    for r in range(begin, end):
        decode_scales(rows[r], 0, blocks, layout, scale[r], minimum[r])


# to floats and to 8 bits


@njit(nogil=True)
def _write_row(row, scale, minimum, factor, layout, codes, out):
    """(code * scale + minimum) * factor of each element of a row; codes (elements,) int8 is a buffer."""
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
def to_int8(rows, scale, minimum, order, layout, out, out_scale, lowest, highest):
    """As `to_floats`, but to symmetric codes of 8 bits, `out` (rows, width) int8, with one scale a row, `out_scale`
    (rows,) float32: 127 stands for the largest number that the codes of any of its groups, `lowest` to `highest`, can
    stand for (`formats.codes.Codes.largest`)."""
    layout = Arrays(*layout)
    codes = np.empty(out.shape[1], np.int8)
    for r in range(len(rows)):
        most = np.uint32(0)
        for g in range(scale.shape[1]):
            for end in (lowest, highest):
                most = max(most, bits_of(abs(end * scale[r, g] + minimum[r, g])))
        largest = from_bits(most)
        out_scale[order[r]] = largest / np.float32(127)
        factor = np.float32(127) / max(largest, np.float32(1e-30))
        _write_row(rows[r], scale[r], minimum[r], factor, layout, codes, out[order[r]])
