"""Matmuls of activations in 8 bits and weights in blocks of up to 6 bits as stored, compiled by numba. Nothing is
decoded beforehand, and only the few rows of the weight that are being multiplied take more than they do in the file.

    chunk    neighbouring codes of a row that share scale and minimum: 32, or 16 where groups are as small
    strip    LANES chunks
    segment  SEGMENT inputs. Its scales and minima become whole numbers of 16 bits, so that all sums in it are exact

A strip is spread out to 8 registers, or 4, which have a lane of 32 bits for each chunk:

                 lane 0        lane 1        ...
    register 0   codes 0-3     codes 0-3
    register 1   codes 4-7     codes 4-7           `arrange` puts x into the same order
    ...
    register 7   codes 28-31   codes 28-31
                 of chunk 0    of chunk 1    ...

A tile multiplies 4 rows of x (2 without AVX-512) and 4 outputs. It has a register of totals for each of their pairs,
and adds to them, strip by strip, the products of the registers (a lane sums up one chunk) times a register of scales.
To the same totals it adds sums of x's codes, one a chunk, times minima. Codes are multiplied as 0 and more: what they
are above the lowest one, which the minimum stands for.

No sum overflows: of pairs of products in 16 bits without VNNI (2 * 127 * the largest code, times the registers that are
summed up before the scale: `Kind`), all of a segment in 32.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from h2o_flexgen.compiled import simd
from h2o_flexgen.compiled.blocks import Arrays, decode, decode_scales
from h2o_flexgen.compiled.floats import U, bits_of, from_bits
from h2o_flexgen.compiled.simd import HAS_VNNI, I8, I16, I32, I64, IS_AVX512, TILE_OUT
from h2o_flexgen.compiled.tiles import Outputs, RowFloats, finish_row

#: whether this CPU has the instructions
IS_POSSIBLE = bool(simd.FEATURES.get("avx2"))
LANES = 16 if IS_AVX512 else 8
#: inputs whose scales become whole numbers together
SEGMENT = 2048
#: the whole number for the largest element that they can have
LARGEST = 8000
#: rows of x in a tile
_ROWS = 4 if IS_AVX512 else 2
#: rows of the weight that are spread out at once: a segment of them, 128 KiB, stays in a core's cache
_HEIGHT = 64
#: rows from the one being spread out to the one prefetched: parts of rows are too short for the CPU's own prefetching
_AHEAD = 4
#: bytes of a cache line
_LINE = 64
#: whether products are summed in 16 bits, two sums a lane
_IS_PAIR = not HAS_VNNI
#: numbers of 16 bits in a register: the chunks whose minima are multiplied at once
_PAIRS = 2 * LANES
#: the largest sum of a lane in 16 bits
_MOST_SUM = 32767


class Kind(NamedTuple):
    """How a tile multiplies a strip: its registers, and how many of them are summed up before they are scaled."""

    registers: int
    together: int


#: of codes up to 15 and up to 31 in chunks of 32, and up to 63 in chunks of 16
KINDS = (Kind(8, 8), Kind(8, 4), Kind(4, 2)) if _IS_PAIR else (Kind(8, 8), Kind(8, 8), Kind(4, 4))
#: codes of a chunk, by the index of the kind
CHUNKS = tuple(4 * kind.registers for kind in KINDS)
_LEAST_CHUNK = min(CHUNKS)


class Blocks(NamedTuple):
    """A weight (O, I) whose rows are blocks, as stored."""

    rows: np.ndarray  # (O, bytes) uint8
    stored: np.ndarray  # (O,) int64, the row in which each output is stored
    kind: int  # index into KINDS
    lowest: int  # code; the others are multiplied as what they are above it
    most: int  # what the highest code is above it


class Segment(NamedTuple):
    """Buffers for a segment of _HEIGHT rows of a weight, of up to C chunks each."""

    codes: np.ndarray  # (_HEIGHT, SEGMENT) uint8, spread out
    scale: np.ndarray  # (_HEIGHT, C) int32, whole numbers; in both halves of 32 bits where sums are pairs
    minimum: np.ndarray  # (_HEIGHT, C) int16, whole numbers
    unit: np.ndarray  # (_HEIGHT,) float32, the value of 1 in these
    sums: np.ndarray  # (rows of a tile, _HEIGHT) int32
    row: np.ndarray  # (SEGMENT,) int8, the codes of one row
    floats: np.ndarray  # (2, C) float32, its scales and minima


def kind_of(group: int, most: int) -> int | None:
    """Which of KINDS multiplies codes up to `most` with a scale for `group` of them; None: none of them does."""
    is_small = group < 4 * KINDS[0].registers
    for n, kind in enumerate(KINDS):
        fits = 2 * most * 127 * kind.together <= _MOST_SUM or not _IS_PAIR
        if fits and group % (4 * kind.registers) == 0 and most <= 63 and is_small == (n == len(KINDS) - 1):
            return n
    return None


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
            scales = load(scale_rows, place, *((I16, _PAIRS) if _IS_PAIR else (I32, LANES))) * rows
            multiply = simd.multiply_pairs if _IS_PAIR else ir.IRBuilder.mul
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


def _transposed(builder, chunks):
    """8 vectors of 4 words as 4 vectors of 8 words."""
    wide = [simd.lanes(builder, chunks[n], chunks[n + 4], range(8)) for n in range(4)]
    low = [simd.lanes(builder, wide[n], wide[n + 1], [0, 8, 1, 9, 4, 12, 5, 13]) for n in (0, 2)]
    high = [simd.lanes(builder, wide[n], wide[n + 1], [2, 10, 3, 11, 6, 14, 7, 15]) for n in (0, 2)]
    order = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    return [simd.lanes(builder, *pair, which) for pair in (low, high) for which in order]


@intrinsic
def _spread(_, source, target, step, lowest):
    """Spread out 16 codes of each of 8 chunks to part of a strip: 4 registers. `source`: address of the first one's
    codes in int8; `step`: bytes from chunk to chunk; `target`: address in `Segment.codes`; `lowest`: the lowest code.
    """

    def build(context, builder, signature, args):
        source, target, step, lowest = args
        chunks = [simd.load(builder, builder.add(source, builder.mul(step, I64(n))), I32, 4) for n in range(8)]
        every = simd.every(builder, lowest, I8, 32)
        for n, words in enumerate(_transposed(builder, chunks)):
            codes = builder.sub(builder.bitcast(words, every.type), every)
            simd.store(builder, codes, builder.add(target, I64(n * 4 * LANES)))

    return types.void(*[types.int64] * 4), build


@intrinsic
def _prefetch(_, address):
    """Begin to read the cache line at an address, which may be any."""

    def build(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], I8.as_pointer())
        simd.call(builder, "llvm.prefetch.p0i8", ir.VoidType(), pointer, *map(I32, (0, 3, 1)))

    return types.void(types.int64), build


@njit(nogil=True)
def _rounded(floats, count, lowest, most, scale, minimum):
    """Write `count` scales and minima of a row, floats (2, C), as whole numbers to scale (C,) and minimum (C,); the
    latter are what the lowest code stands for. Returns the value of 1."""
    largest = np.uint32(0)
    for c in range(U(count)):
        floats[1, c] += lowest * floats[0, c]
        highest = floats[1, c] + most * floats[0, c]
        largest = max(largest, max(bits_of(abs(floats[1, c])), bits_of(abs(highest))))
    factor = np.float32(LARGEST) / max(from_bits(largest), np.float32(1e-30))
    for c in range(U(count)):
        exact = floats[0, c] * factor
        nearest = np.rint(exact)
        # the minimum makes up for the rounding of the scale at the middle code
        minimum[c] = np.int32(np.rint(floats[1, c] * factor + most / np.float32(2) * (exact - nearest)))
        whole = np.int32(nearest)
        scale[c] = (whole & np.int32(0xFFFF)) * np.int32(0x10001) if _IS_PAIR else whole
    return from_bits(largest) / np.float32(LARGEST)


# a function of one row would cost more: numba counts references to every array of a NamedTuple that it gets
@njit(nogil=True)
def _read(weight, layout, stored, begin, chunks, size, segment):
    """Read `chunks` chunks of `size` codes, from code `begin` on, of rows `stored` of the weight into the segment."""
    first = begin // layout.size
    blocks = (chunks * size + layout.size - 1) // layout.size
    each = layout.size // size
    row_at = segment.row.ctypes.data
    codes_at = segment.codes.ctypes.data
    buffers = (np.empty(SEGMENT // _LEAST_CHUNK, np.int16), np.empty(SEGMENT // _LEAST_CHUNK, np.uint8))
    lowest = np.float32(weight.lowest)
    most = np.float32(weight.most)
    for n in range(len(stored)):
        row = weight.rows[stored[n]]
        ahead = row.ctypes.data + first * layout.nbytes + _AHEAD * len(row)
        for line in range(0, blocks * layout.nbytes, _LINE):
            _prefetch(ahead + line)
        decode(row, first, blocks, layout, segment.row)
        decode_scales(row, first, blocks, each, layout, buffers, segment.floats[0], segment.floats[1])
        segment.unit[n] = _rounded(segment.floats, chunks, lowest, most, segment.scale[n], segment.minimum[n])
        for c in range(0, -(-chunks // LANES) * LANES, 8):
            target = codes_at + n * SEGMENT + c // LANES * (size * LANES) + c % LANES * 4
            for half in range(0, size, 16):
                _spread(row_at + c * size + half, target + half * LANES, size, weight.lowest)


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
    """Add the products of all rows of x and a segment of `height` rows of the weight to totals (R, _HEIGHT)."""
    rows = len(codes)
    sums = segment.sums
    unit = segment.unit
    tall = len(sums)
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
def _sums(x_codes, weight, layout, stored, outliers, segment, totals, columns):
    """Write codes @ weight.T for rows `stored` of the weight, _HEIGHT at most, to the first columns of totals
    (R, _HEIGHT) float32, and their elements at `outliers`, from `_spread_places`, to the first ones of columns
    (U, _HEIGHT) float32."""
    codes, code_sums = x_codes
    size = CHUNKS[weight.kind]
    width = weight.rows.shape[1] // layout.nbytes * layout.size
    totals[:] = 0
    u = 0
    for begin in range(0, width, SEGMENT):
        chunks = min(SEGMENT, width - begin) // size
        if chunks < SEGMENT // size:
            segment.scale[:] = 0
            segment.minimum[:] = 0
        _read(weight, layout, stored, begin, chunks, size, segment)
        while u < len(outliers) and outliers[u] < begin + SEGMENT:
            at = U(outliers[u] - begin)
            c = at // U(size * LANES) * U(LANES) + at % U(4 * LANES) // U(4)
            for n in range(U(len(stored))):
                scaled = np.int32(np.int16(segment.scale[n, c])) * np.int32(segment.codes[n, at])
                columns[u, n] = np.float32(scaled + np.int32(segment.minimum[n, c])) * segment.unit[n]
            u += 1
        strips = -(-chunks // LANES)
        part = code_sums[:, begin // size :]
        _add_tiles(weight.kind, codes[:, begin:], part, segment, len(stored), strips, totals)


@njit(nogil=True, cache=True)
def multiply(x_codes, x, weight, layout, bias, begin, end, out):
    """out = scale * (codes @ weight.T) + kept @ weight.T[places] + bias, for the outputs `begin` to `end`, as
    `tiles.multiply`.

    Args:
        x_codes: codes and sums, from `arrange`; x: `RowFloats` as a plain tuple.
        weight, layout: `Blocks` and `blocks.Arrays` as plain tuples.
        bias: (O,) float32; out: (R, O) floats.
    """
    x = RowFloats(*x)
    weight = Blocks(*weight)
    layout = Arrays(*layout)
    size = CHUNKS[weight.kind]
    rows = len(x_codes[0])
    segment = Segment(
        np.empty((_HEIGHT, SEGMENT), np.uint8),
        np.empty((_HEIGHT, SEGMENT // size), np.int32),
        np.empty((_HEIGHT, SEGMENT // size), np.int16),
        np.empty(_HEIGHT, np.float32),
        np.empty((_ROWS if rows >= _ROWS else 1, _HEIGHT), np.int32),
        np.zeros(SEGMENT, np.int8),
        np.empty((2, SEGMENT // size), np.float32),
    )
    totals = np.empty((rows, _HEIGHT), np.float32)
    columns = np.empty((len(x.places), _HEIGHT), np.float32)
    total = np.empty(_HEIGHT, np.float32)
    outputs = Outputs(np.ones(len(bias), np.float32), bias, out)  # totals are scaled already
    outliers = _spread_places(x.places, size)
    for o in range(begin, end, _HEIGHT):
        stored = weight.stored[o : min(o + _HEIGHT, end)]
        _sums(x_codes, weight, layout, stored, outliers, segment, totals, columns)
        for r in range(rows):
            for n in range(U(len(stored))):
                total[n] = totals[U(r), n] * x.scale[r]
            finish_row(total, len(stored), columns, 0, x.kept, r, outputs, o)


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
