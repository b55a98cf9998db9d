"""Matmuls of activations in 8 bits and weights in 4 bits as stored, compiled by numba. Nothing is decoded
beforehand, and only the few rows of the weight that are being multiplied take more than 4 bits an element.

    chunk    16 bytes of a row of the weight: 32 codes, which share scale and minimum
    strip    LANES chunks
    segment  SEGMENT inputs. Its scales and minima become whole numbers of 16 bits, so that all sums in it are exact

A strip is spread out to 8 registers, which have a lane of 32 bits for each chunk:

                 lane 0        lane 1        ...
    register 0   codes 0-3     codes 0-3           codes 0-15 are the lower 4 bits of a chunk's 16 bytes, codes 16-31
    register 1   codes 4-7     codes 4-7           the upper ones; `arrange` puts x into the same order
    ...
    register 7   codes 28-31   codes 28-31
                 of chunk 0    of chunk 1    ...

A tile multiplies 4 rows of x (2 without AVX-512) and 4 outputs. It has a register of totals for each of their pairs,
and adds to them, strip by strip, the products of 8 registers (a lane sums up one chunk) times a register of scales.
To the same totals it adds sums of x's codes, one a chunk, times minima.

No sum overflows: 8 pairs of products in 16 bits without VNNI (8 * 2 * 15 * 127), all of a segment in 32.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from h2o_flexgen.compiled import simd
from h2o_flexgen.compiled.floats import U, bits_of, float_of, from_bits
from h2o_flexgen.compiled.simd import HAS_VNNI, I8, I16, I32, I64, IS_AVX512, TILE_OUT
from h2o_flexgen.compiled.tiles import Outputs, RowFloats, finish_row

#: whether this CPU has the instructions
IS_POSSIBLE = bool(simd.FEATURES.get("avx2"))
LANES = 16 if IS_AVX512 else 8
#: codes of a chunk
CHUNK = 32
#: bytes of a chunk in the weight
CHUNK_BYTES = 16
#: registers of a strip
_REGISTERS = 8
#: codes of a strip, and its bytes when it is spread out
STRIP = CHUNK * LANES
#: inputs whose scales become whole numbers together
SEGMENT = 2048
#: the whole number for the largest element that they can have
LARGEST = 8000
_SEGMENT_CHUNKS = SEGMENT // CHUNK
#: rows of x in a tile
_ROWS = 4 if IS_AVX512 else 2
#: rows of the weight that are spread out at once: a segment of them, 128 KiB, stays in a core's cache
_HEIGHT = 64
#: rows from the one being spread out to the one prefetched: parts of rows are too short for the CPU's own prefetching
_AHEAD = 4
#: whether products are summed in 16 bits, two sums a lane
_IS_PAIR = not HAS_VNNI
#: numbers of 16 bits in a register: the chunks whose minima are multiplied at once
_PAIRS = 2 * LANES


class Blocks(NamedTuple):
    """A weight (O, I) whose rows are blocks of 4 bits, as stored: a scale in fp16, maybe a minimum in fp16, codes."""

    rows: np.ndarray  # (O, bytes) uint8
    halves: np.ndarray  # (O, bytes / 2) int16, the same memory
    stored: np.ndarray  # (O,) int64, the row in which each output is stored
    head: int  # bytes of a block before its codes: 2, or 4 with a minimum; else it is the scale times -8
    half: int  # bytes of a block's codes, 1 or 2 chunks; the first half of the codes are the lower 4 bits


class Segment(NamedTuple):
    """Buffers for a segment of _HEIGHT rows of a weight, of up to C chunks each."""

    codes: np.ndarray  # (_HEIGHT, SEGMENT) uint8, spread out
    scale: np.ndarray  # (_HEIGHT, C) int32, whole numbers; in both halves of 32 bits where sums are pairs
    minimum: np.ndarray  # (_HEIGHT, C) int16, whole numbers
    unit: np.ndarray  # (_HEIGHT,) float32, the value of 1 in these
    sums: np.ndarray  # (rows of a tile, _HEIGHT) int32


def padded(chunks: int) -> int:
    """Chunks of a row of x with the zeros behind them."""
    return -(-chunks // _PAIRS) * _PAIRS


def _add_products(builder, total, weight, x):
    """Add the products of codes (4 * LANES), uint8 and int8, to sums of chunks; `total` is None before the first."""
    if HAS_VNNI:
        return simd.add_codes(builder, total or ir.VectorType(I32, LANES)(None), weight, x)
    products = simd.call(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, _PAIRS), weight, x)
    return builder.add(total, products) if total else products


def _build(rows):
    """The LLVM IR of a tile of this many rows (`_tile`)."""

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
            sums = [None] * len(totals)
            for register in range(_REGISTERS):
                place = builder.add(builder.mul(strip, I64(STRIP)), I64(register * 4 * LANES))
                pairs = product(load(x_rows, place, I8, 4 * LANES), load(weight_rows, place, I8, 4 * LANES))
                sums = [_add_products(builder, each, weight, x) for each, (x, weight) in zip(sums, pairs)]
            place = builder.mul(strip, I64(4 * LANES))
            scales = load(scale_rows, place, *((I16, _PAIRS) if _IS_PAIR else (I32, LANES))) * rows
            multiply = simd.multiply_pairs if _IS_PAIR else ir.IRBuilder.mul
            return [builder.add(total, multiply(builder, *pair)) for total, *pair in zip(totals, sums, scales)]

        zeros = [ir.VectorType(I32, LANES)(None)] * (rows * TILE_OUT)
        totals = simd.loop(builder, 2, strips, zeros, add_minima)
        totals = simd.loop(builder, 1, strips, totals, add_codes)
        simd.store_sums(builder, totals, buffer("sums"), n, rows)

    return build


@intrinsic
def _tile(_, codes, code_sums, segment, r, n, strips):
    """Write the products of _ROWS rows of x, from `r` on, and TILE_OUT rows of the segment, from `n` on, to the first
    rows of its sums, from column `n` on. Codes and their sums begin at the segment, which has `strips` strips."""
    return types.void(codes, code_sums, segment, *[types.int64] * 3), _build(_ROWS)


@intrinsic
def _tile_of_one(_, codes, code_sums, segment, r, n, strips):
    """As `_tile`, for one row of x."""
    return types.void(codes, code_sums, segment, *[types.int64] * 3), _build(1)


def _transposed(builder, chunks):
    """8 vectors of 4 words as 4 vectors of 8 words."""
    wide = [simd.lanes(builder, chunks[n], chunks[n + 4], range(8)) for n in range(4)]
    low = [simd.lanes(builder, wide[n], wide[n + 1], [0, 8, 1, 9, 4, 12, 5, 13]) for n in (0, 2)]
    high = [simd.lanes(builder, wide[n], wide[n + 1], [2, 10, 3, 11, 6, 14, 7, 15]) for n in (0, 2)]
    order = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    return [simd.lanes(builder, *pair, which) for pair in (low, high) for which in order]


@intrinsic
def _spread(_, source, target, first, chunks, shift, step, ahead):
    """Spread out 8 chunks of a segment, from chunk `first` on, to part of a strip.

    Args:
        source: address of the segment's first chunk in a row of the weight; target: address in `Segment.codes`.
        chunks: of the segment; beyond these its first one is read instead.
        shift: 1 if a block has two chunks, else 0; step: bytes from block to block.
        ahead: bytes to the row to prefetch.
    """

    def build(context, builder, signature, args):
        source, target, first, chunks, shift, step, ahead = args
        found = []
        for n in range(8):
            chunk = builder.add(first, I64(n))
            chunk = builder.select(builder.icmp_unsigned("<", chunk, chunks), chunk, I64(0))
            place = builder.mul(builder.lshr(chunk, shift), step)
            place = builder.add(place, builder.mul(builder.and_(chunk, shift), I64(CHUNK_BYTES)))
            address = builder.add(source, place)
            found.append(simd.load(builder, address, I32, 4))
            if n in (0, 3, 7):  # every cache line of 64 bytes
                far = builder.inttoptr(builder.add(address, ahead), I8.as_pointer())
                simd.call(builder, "llvm.prefetch.p0i8", ir.VoidType(), far, *map(I32, (0, 3, 1)))
        words = _transposed(builder, found)
        mask = ir.Constant(words[0].type, [0x0F0F0F0F] * 8)
        four = ir.Constant(words[0].type, [4] * 8)
        lower = [builder.and_(word, mask) for word in words]
        upper = [builder.and_(builder.lshr(word, four), mask) for word in words]
        for n, word in enumerate(lower + upper):
            simd.store(builder, word, builder.add(target, I64(n * 4 * LANES)))

    return types.void(*[types.int64] * 7), build


@njit(nogil=True)
def _rounded(floats, count, scale, minimum):
    """Write `count` scales and minima of a row, floats (2, C), as whole numbers to scale (C,) and minimum (C,). Returns
    the value of 1."""
    most = np.uint32(0)
    for c in range(U(count)):
        lowest = floats[1, c]
        highest = floats[1, c] + np.float32(15) * floats[0, c]
        most = max(most, max(bits_of(abs(lowest)), bits_of(abs(highest))))
    factor = np.float32(LARGEST) / max(from_bits(most), np.float32(1e-30))
    for c in range(U(count)):
        exact = floats[0, c] * factor
        nearest = np.rint(exact)
        # the minimum makes up for the rounding of the scale at the middle code, 7.5
        minimum[c] = np.int32(np.rint(floats[1, c] * factor + np.float32(7.5) * (exact - nearest)))
        whole = np.int32(nearest)
        scale[c] = (whole & np.int32(0xFFFF)) * np.int32(0x10001) if _IS_PAIR else whole
    return from_bits(most) / np.float32(LARGEST)


# a function of one row would cost more: numba counts references to every array of a NamedTuple that it gets
@njit(nogil=True)
def _read(weight, stored, chunk, count, segment):
    """Read `count` chunks, from `chunk` on, of rows `stored` of the weight into the segment."""
    shift = weight.half // CHUNK_BYTES - 1
    step = weight.head + weight.half
    begin = (chunk >> shift) * step
    width = weight.rows.shape[1]
    rows_at = weight.rows.ctypes.data + begin + weight.head
    codes_at = segment.codes.ctypes.data
    halves = np.empty((2, _SEGMENT_CHUNKS), np.int16)
    floats = np.empty((2, _SEGMENT_CHUNKS), np.float32)
    for n in range(len(stored)):
        r = stored[n]
        row = weight.halves[r]
        for c in range(U(count)):
            at = U(begin // 2) + (c >> U(shift)) * U(step // 2)
            halves[0, c] = row[at]
            halves[1, c] = row[at + U(1)]
        for c in range(U(count)):  # in loops of their own, which are vectorised
            floats[0, c] = float_of(halves[0, c])
        for c in range(U(count)):
            floats[1, c] = float_of(halves[1, c]) if weight.head == 4 else np.float32(-8) * floats[0, c]
        segment.unit[n] = _rounded(floats, count, segment.scale[n], segment.minimum[n])
        for first in range(0, -(-count // LANES) * LANES, 8):
            target = codes_at + n * SEGMENT + first // LANES * STRIP + first % LANES * 4
            _spread(rows_at + r * width, target, first, count, shift, step, _AHEAD * width)


@njit(nogil=True)
def _spread_places(places, half):
    """Where columns (U,) of x are in a row that is spread out."""
    found = np.empty_like(places)
    for u in range(len(places)):
        block = places[u] // (2 * half)
        inside = places[u] % (2 * half)
        byte = block * half + inside % half
        chunk = byte // CHUNK_BYTES
        code = byte % CHUNK_BYTES + inside // half * CHUNK_BYTES
        found[u] = chunk // LANES * STRIP + code // 4 * 4 * LANES + chunk % LANES * 4 + code % 4
    return found


@njit(nogil=True)
def _add_tiles(codes, code_sums, segment, height, strips, totals):
    """Add the products of all rows of x and a segment of `height` rows of the weight to totals (R, _HEIGHT)."""
    rows = len(codes)
    sums = segment.sums
    unit = segment.unit
    tall = len(sums)
    for r in range(0, rows, tall):
        top = min(r, rows - tall)
        for n in range(0, height, TILE_OUT):
            if tall == 1:
                _tile_of_one(codes, code_sums, segment, top, n, strips)
            else:
                _tile(codes, code_sums, segment, top, n, strips)
        for k in range(U(r - top), U(tall)):
            for n in range(U(height)):
                totals[U(top) + k, n] += np.float32(sums[k, n]) * unit[n]


@njit(nogil=True, cache=True)
def _sums(codes, code_sums, weight, stored, outliers, segment, totals, columns):
    """Write codes @ weight.T for rows `stored` of the weight, _HEIGHT at most, to the first columns of totals
    (R, _HEIGHT) float32, and their elements at `outliers`, from `_spread_places`, to the first ones of columns
    (U, _HEIGHT) float32."""
    chunks = weight.rows.shape[1] // (weight.head + weight.half) * (weight.half // CHUNK_BYTES)
    totals[:] = 0
    u = 0
    for chunk in range(0, chunks, _SEGMENT_CHUNKS):
        begin = chunk * CHUNK
        count = min(_SEGMENT_CHUNKS, chunks - chunk)
        if count < _SEGMENT_CHUNKS:
            segment.scale[:] = 0
            segment.minimum[:] = 0
        _read(weight, stored, chunk, count, segment)
        while u < len(outliers) and outliers[u] < begin + SEGMENT:
            at = U(outliers[u] - begin)
            c = at // U(STRIP) * U(LANES) + at % U(4 * LANES) // U(4)
            for n in range(U(len(stored))):
                scaled = np.int32(np.int16(segment.scale[n, c])) * np.int32(segment.codes[n, at])
                columns[u, n] = np.float32(scaled + np.int32(segment.minimum[n, c])) * segment.unit[n]
            u += 1
        _add_tiles(codes[:, begin:], code_sums[:, chunk:], segment, len(stored), -(-count // LANES), totals)


@njit(nogil=True, cache=True)
def multiply(codes, code_sums, x, weight, bias, begin, end, out):
    """out = scale * (codes @ weight.T) + kept @ weight.T[places] + bias, for the outputs `begin` to `end`, as
    `tiles.multiply`.

    Args:
        codes, code_sums: from `arrange`; x: `RowFloats` as a plain tuple.
        weight: `Blocks` as a plain tuple.
        bias: (O,) float32; out: (R, O) floats.
    """
    x = RowFloats(*x)
    weight = Blocks(*weight)
    rows = len(codes)
    segment = Segment(
        np.empty((_HEIGHT, SEGMENT), np.uint8),
        np.empty((_HEIGHT, _SEGMENT_CHUNKS), np.int32),
        np.empty((_HEIGHT, _SEGMENT_CHUNKS), np.int16),
        np.empty(_HEIGHT, np.float32),
        np.empty((_ROWS if rows >= _ROWS else 1, _HEIGHT), np.int32),
    )
    totals = np.empty((rows, _HEIGHT), np.float32)
    columns = np.empty((len(x.places), _HEIGHT), np.float32)
    total = np.empty(_HEIGHT, np.float32)
    outputs = Outputs(np.ones(len(bias), np.float32), bias, out)  # totals are scaled already
    outliers = _spread_places(x.places, weight.half)
    for o in range(begin, end, _HEIGHT):
        stored = weight.stored[o : min(o + _HEIGHT, end)]
        _sums(codes, code_sums, weight, stored, outliers, segment, totals, columns)
        for r in range(rows):
            for n in range(U(len(stored))):
                total[n] = totals[U(r), n] * x.scale[r]
            finish_row(total, len(stored), columns, 0, x.kept, r, outputs, o)


@njit(nogil=True, cache=True)
def arrange(words, half, begin, end, out, sums):
    """Write the codes of rows `begin` to `end` of x, in words (R, I / 4) int32 of 4 codes each, to out
    (R, 8 * padded(I / CHUNK)) int32, in the order of a weight that is spread out, and the sum of each chunk's codes to
    sums (R, padded(I / CHUNK)) int16. `half`: as in `Blocks`."""
    per_block = U(half // CHUNK_BYTES)
    size = U(half // 4)
    for r in range(begin, end):
        for chunk in range(U(words.shape[1] // 8)):
            at = chunk // per_block * U(2) * size + chunk % per_block * U(4)
            target = chunk // U(LANES) * U(_REGISTERS * LANES) + chunk % U(LANES)
            total = np.int32(0)
            for n in range(U(8)):
                word = words[r, at + n if n < U(4) else at + size + n - U(4)]
                out[r, target + n * U(LANES)] = word
                for shift in (24, 16, 8, 0):
                    total += np.int32(word << np.int32(shift)) >> np.int32(24)
            sums[r, chunk] = total
