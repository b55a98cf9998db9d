"""Matmuls of activations in 8 bits and weights in blocks of up to 6 bits as stored, compiled by numba. Nothing is
decoded beforehand: `block_rows` spreads out the few rows of a weight that are being multiplied, and has the words.

A tile multiplies 4 rows of x (2 without AVX-512) and 4 outputs. It has a register of totals for each of their pairs,
and adds to them, strip by strip, the products of the registers (a lane sums up one chunk) times a register of scales.
To the same totals it adds sums of x's codes, one a chunk, times minima. Codes are multiplied as 0 and more: what they
are above the lowest one, which the minimum stands for.

No sum overflows: of pairs of products in 16 bits without VNNI (2 * 127 * the largest code, times the registers that are
summed up before the scale: `Kind`), all of a segment in 32.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from h2o_flexgen.compiled import simd
from h2o_flexgen.compiled.block_rows import (
    CHUNKS,
    HEIGHT,
    IS_PAIR,
    KINDS,
    LANES,
    SEGMENT,
    Blocks,
    new_segment,
    plan_of,
    read,
)
from h2o_flexgen.compiled.blocks import Arrays
from h2o_flexgen.compiled.floats import U
from h2o_flexgen.compiled.simd import HAS_VNNI, I8, I16, I32, I64, IS_AVX512, TILE_OUT
from h2o_flexgen.compiled.tiles import Outputs, RowFloats, finish_row

#: outputs that a thread computes at least
PART = 16
#: rows of x in a tile
_ROWS = 4 if IS_AVX512 else 2
#: numbers of 16 bits in a register: the chunks whose minima are multiplied at once
_PAIRS = 2 * LANES


def padded(chunks: int) -> int:
    """Chunks of a row of x with the zeros behind them."""
    return -(-chunks // _PAIRS) * _PAIRS


def _add_products(builder, total, weight, x):
    """Add the products of codes (4 * LANES), uint8 and int8, to sums of chunks; `total` is None before the first."""
    if HAS_VNNI:
        return simd.add_codes(builder, total or ir.VectorType(I32, LANES)(None), weight, x)
    products = simd.call(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, _PAIRS), weight, x)
    return builder.add(total, products) if total else products


def _build(rows, kind):
    """The LLVM IR of a tile of this many rows (`_tile`)."""
    registers, together = KINDS[kind]

    def build(context, builder, signature, args):
        codes_kind, sums_kind, segment_kind = signature.args[:3]
        codes, code_sums, segment, r, n, strips = args

        def array(kind, value):
            return context.make_array(kind)(context, builder, value)

        def buffer(name):
            index = segment_kind.fields.index(name)
            return array(segment_kind.types[index], builder.extract_value(segment, index))

        x_rows = simd.addresses(builder, array(codes_kind, codes), r, rows)
        x_sum_rows = simd.addresses(builder, array(sums_kind, code_sums), r, rows)
        weight_rows = simd.addresses(builder, buffer("codes"), n, TILE_OUT)
        scale_rows = simd.addresses(builder, buffer("scale"), n, TILE_OUT)
        minimum_rows = simd.addresses(builder, buffer("minimum"), n, TILE_OUT)

        def load(rows, place, element, count):
            return [simd.load(builder, builder.add(row, place), element, count) for row in rows]

        def add_minima(strip, totals):
            place = builder.mul(strip, I64(_PAIRS))
            pairs = product(load(x_sum_rows, place, I16, _PAIRS), load(minimum_rows, place, I16, _PAIRS))
            return [builder.add(total, simd.multiply_pairs(builder, *pair)) for total, pair in zip(totals, pairs)]

        def add_codes(strip, totals):
            place = builder.mul(strip, I64(4 * LANES))
            scales = load(scale_rows, place, *((I16, _PAIRS) if IS_PAIR else (I32, LANES))) * rows
            multiply = simd.multiply_pairs if IS_PAIR else ir.IRBuilder.mul
            sums = [None] * len(totals)
            for register in range(registers):
                place = builder.add(builder.mul(strip, I64(registers * 4 * LANES)), I64(register * 4 * LANES))
                pairs = product(load(x_rows, place, I8, 4 * LANES), load(weight_rows, place, I8, 4 * LANES))
                sums = [_add_products(builder, each, weight, x) for each, (x, weight) in zip(sums, pairs)]
                if (register + 1) % together == 0:
                    scaled = [multiply(builder, *pair) for pair in zip(sums, scales)]
                    totals = [builder.add(*pair) for pair in zip(totals, scaled)]
                    sums = [None] * len(totals)
            return totals

        zeros = [ir.VectorType(I32, LANES)(None)] * (rows * TILE_OUT)
        totals = simd.loop(builder, 2, strips, zeros, add_minima)
        totals = simd.loop(builder, 1, strips, totals, add_codes)
        simd.store_sums(builder, totals, buffer("sums"), n, rows)

    return build


def _tile(rows, kind):
    @intrinsic
    def tile(_, codes, code_sums, segment, r, n, strips):
        """Write the products of `rows` rows of x, from `r` on, and TILE_OUT rows of the segment, from `n` on, to the
        first rows of its sums, from column `n` on. Codes and their sums begin at the segment, which has `strips`
        strips."""
        return types.void(codes, code_sums, segment, *[types.int64] * 3), _build(rows, kind)

    return tile


_tile_0, _tile_1, _tile_2 = (_tile(_ROWS, kind) for kind in range(3))
_row_0, _row_1, _row_2 = (_tile(1, kind) for kind in range(3))


@njit(nogil=True)
def _spread_places(places, size):
    """Where columns (U,) of x are in a row that is spread out, in chunks of `size`."""
    found = np.empty_like(places)
    for u in range(len(places)):
        chunk = places[u] // size
        code = places[u] % size
        found[u] = chunk // LANES * size * LANES + code // 4 * 4 * LANES + chunk % LANES * 4 + code % 4
    return found


@njit(nogil=True)
def _add_tiles(kind, codes, code_sums, segment, height, strips, totals):
    """Add the products of all rows of x and a segment of `height` rows of the weight to totals (R, HEIGHT)."""
    rows = len(codes)
    sums = segment.sums
    unit = segment.unit
    tall = _ROWS if rows >= _ROWS else 1
    for r in range(0, rows, tall):
        top = min(r, rows - tall)
        for n in range(0, height, TILE_OUT):
            if tall == 1:
                if kind == 0:
                    _row_0(codes, code_sums, segment, top, n, strips)
                elif kind == 1:
                    _row_1(codes, code_sums, segment, top, n, strips)
                else:
                    _row_2(codes, code_sums, segment, top, n, strips)
            elif kind == 0:
                _tile_0(codes, code_sums, segment, top, n, strips)
            elif kind == 1:
                _tile_1(codes, code_sums, segment, top, n, strips)
            else:
                _tile_2(codes, code_sums, segment, top, n, strips)
        for k in range(U(r - top), U(tall)):
            for n in range(U(height)):
                totals[U(top) + k, n] += np.float32(sums[k, n]) * unit[n]


@njit(nogil=True, cache=True)
def _sums(x_codes, weight, plan, rows, outliers, segment, totals, columns):
    """Write codes @ weight.T for `rows` of a weight, HEIGHT at most, given by their addresses, to the first columns of
    totals (R, HEIGHT) float32, and their elements at `outliers`, from `_spread_places`, to the first ones of columns
    (U, HEIGHT) float32."""
    codes, code_sums = x_codes
    size = CHUNKS[weight.kind]
    width = weight.row_bytes // plan.scales.nbytes * plan.block
    totals[:] = 0
    u = 0
    for begin in range(0, width, SEGMENT):
        chunks = min(SEGMENT, width - begin) // size
        if chunks < SEGMENT // size:
            segment.minimum[:] = 0
        read(weight, plan, rows, begin, chunks, segment)
        while u < len(outliers) and outliers[u] < begin + SEGMENT:
            at = U(outliers[u] - begin)
            c = at // U(size * LANES) * U(LANES) + at % U(4 * LANES) // U(4)
            for n in range(U(len(rows))):
                scaled = np.int32(np.int16(segment.scale[n, c])) * np.int32(segment.codes[n, at])
                columns[u, n] = np.float32(scaled + np.int32(segment.minimum[n, c])) * segment.unit[n]
            u += 1
        strips = -(-chunks // LANES)
        part = code_sums[:, begin // size :]
        _add_tiles(weight.kind, codes[:, begin:], part, segment, len(rows), strips, totals)


@njit(nogil=True, cache=True)
def multiply(x_codes, x, weight, layout, bias, begin, end, out):
    """out = scale * (codes @ weight.T) + kept @ weight.T[places] + bias, as `tiles.multiply`, of each weight and
    its rows of x.

    The outputs of a weight are cut into parts of PART, and the parts `begin` to `end` of all weights are computed.

    Args:
        x_codes: codes and sums, from `arrange`; x: `RowFloats` as a plain tuple.
        weight, layout: `Blocks` and `blocks.Arrays` as plain tuples.
        bias: (M, O) float32; out: (R, O) floats.
    """
    codes, code_sums = x_codes
    x = RowFloats(*x)
    weight = Blocks(*weight)
    layout = Arrays(*layout)
    outputs = len(weight.stored)
    parts = -(-outputs // PART)  # of a weight
    size = CHUNKS[weight.kind]
    segment = new_segment(size, _ROWS, layout.table, weight.lowest)
    all_totals = np.empty((_most_rows(weight.ends), HEIGHT), np.float32)
    columns = np.empty((len(x.places), HEIGHT), np.float32)
    total = np.empty(HEIGHT, np.float32)
    ones = np.ones(outputs, np.float32)  # totals are scaled already
    outliers = _spread_places(x.places, size)
    plan = plan_of(layout, size, weight.row_bytes, segment.numbers)
    while begin < end:
        m = begin // parts
        o = begin % parts * PART
        begin = min(begin + HEIGHT // PART, end, (m + 1) * parts)
        first = weight.ends[m - 1] if m else 0
        last = weight.ends[m]
        if first == last:
            continue
        stored = weight.stored[o : min((begin - m * parts) * PART, outputs)]
        rows = weight.addresses[m] + stored * weight.row_bytes
        totals = all_totals[: last - first]
        part_codes = codes[first:last], code_sums[first:last]
        _sums(part_codes, weight, plan, rows, outliers, segment, totals, columns)
        for r in range(first, last):
            for n in range(U(len(rows))):
                total[n] = totals[U(r - first), n] * x.scale[r]
            finish_row(total, len(rows), columns, 0, x.kept, r, Outputs(ones, bias[m], out), o)


@njit(nogil=True)
def _most_rows(ends):
    """The most rows of x that are those of one weight."""
    most = ends[0]
    for m in range(1, len(ends)):
        most = max(most, ends[m] - ends[m - 1])
    return most


@njit(nogil=True, cache=True)
def arrange(words, size, begin, end, out, sums):
    """Write the codes of rows `begin` to `end` of x, in words (R, I / 4) int32 of 4 codes each, to out, int32, in the
    order of a weight that is spread out in chunks of `size` codes, and the sum of each chunk's codes to sums, int16;
    both have `padded` chunks of zeros at the end."""
    registers = U(size // 4)
    for r in range(begin, end):
        for chunk in range(U(words.shape[1]) // registers):
            target = chunk // U(LANES) * registers * U(LANES) + chunk % U(LANES)
            total = np.int32(0)
            for n in range(registers):
                word = words[r, chunk * registers + n]
                out[r, target + n * U(LANES)] = word
                for shift in (24, 16, 8, 0):
                    total += np.int32(word << np.int32(shift)) >> np.int32(24)
            sums[r, chunk] = total
