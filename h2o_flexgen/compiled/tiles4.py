"""Matmuls of activations in 8 bits with weights in 4 bits as they are stored, compiled by numba: nothing is decoded
beforehand, and the weight is never larger than its 4 bits but for the few rows that are multiplied.

    chunk    16 bytes of a row of the weight: 32 codes, which share scale and minimum
    strip    as many chunks as a register has lanes of 32 bits. Spread out, each of its 8 registers has 4 codes of every
             chunk, so that a lane adds up the products of one chunk
    segment  SEGMENT inputs. Its scales and minima become whole numbers of 16 bits, so that all sums in it are exact

The largest sums fit: 8 pairs of products into 16 bits without VNNI (8 * 2 * 15 * 127), those of a segment into 32.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from h2o_flexgen.compiled.floats import bits_of, float_of, from_bits
from h2o_flexgen.compiled.simd import (
    FEATURES,
    HAS_VNNI,
    IS_AVX512,
    TILE_OUT,
    add_codes,
    addresses,
    call,
    lanes,
    loop,
    multiply_pairs,
    pointer,
    store_sums,
)
from h2o_flexgen.compiled.tiles import scale_row

U = np.uint64
#: whether this CPU has the instructions
IS_POSSIBLE = bool(FEATURES.get("avx2"))
LANES = 16 if IS_AVX512 else 8
#: codes of a chunk, and its bytes
CHUNK = 32
CHUNK_BYTES = 16
#: registers of a strip, and its codes
_REGISTERS = 8
STRIP = CHUNK * LANES
#: inputs whose scales become whole numbers together, and what stands for the largest element that these can have
SEGMENT = 2048
LARGEST = 8000
_SEGMENT_CHUNKS = SEGMENT // CHUNK
#: rows of x in a tile
_ROWS = 4 if IS_AVX512 else 2
#: rows of the weight that are spread out at once: a segment of them, 128 KiB, stays in a core's cache
_HEIGHT = 64
#: rows between the one that is spread out and that which is fetched from RAM: parts of rows are too short for CPUs to
#: foresee them
_AHEAD = 4
#: a scale as a tile takes it: of each pair of sums in 16 bits, or of one in 32
_IS_PAIR = not HAS_VNNI
#: numbers of 16 bits in a register, and so chunks whose minima are multiplied at once
_PAIRS = 2 * LANES


def padded(chunks: int) -> int:
    """Chunks of a row of x, with those that are 0."""
    return -(-chunks // _PAIRS) * _PAIRS


def _add_products(builder, total, weight, x):
    """Codes (4 * LANES) uint8 times int8, added to sums of chunks, which are None before the first."""
    if HAS_VNNI:
        return add_codes(builder, total or ir.VectorType(ir.IntType(32), LANES)(None), weight, x)
    products = call(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(ir.IntType(16), _PAIRS), weight, x)
    return builder.add(total, products) if total else products


def _build(rows):
    """The code of a tile with this number of rows (`_tile`)."""
    i8, i16, i32, i64 = map(ir.IntType, (8, 16, 32, 64))

    def build(context, builder, signature, args):
        kinds = signature.args[:6]
        (r, o, at, strip, strips) = args[6:]
        arrays = [context.make_array(kind)(context, builder, each) for kind, each in zip(kinds, args)]
        x, x_sums, weight, scale, minimum = (
            addresses(builder, array, first, count)
            for array, first, count in zip(arrays, (r, r, o, o, o), (rows, rows, *[TILE_OUT] * 3))
        )
        x, x_sums = (
            [builder.add(row, builder.mul(strip, i64(size))) for row in found]
            for found, size in ((x, STRIP), (x_sums, _PAIRS))
        )

        def load(row, place, element, count):
            return builder.load(pointer(builder, builder.add(row, place), element, count), align=1)

        def minima(n, totals):
            place = builder.mul(n, i64(_PAIRS))
            pairs = product(*([load(row, place, i16, _PAIRS) for row in each] for each in (x_sums, minimum)))
            return [builder.add(total, multiply_pairs(builder, *pair)) for total, pair in zip(totals, pairs)]

        def codes(n, totals):
            sums = [None] * len(totals)
            start = builder.mul(n, i64(STRIP))
            for register in range(_REGISTERS):
                place = builder.add(start, i64(register * 4 * LANES))
                pairs = product(*([load(row, place, i8, 4 * LANES) for row in each] for each in (x, weight)))
                sums = [_add_products(builder, total, w, each) for total, (each, w) in zip(sums, pairs)]
            place = builder.mul(n, i64(4 * LANES))
            kind = (i16, _PAIRS) if _IS_PAIR else (i32, LANES)
            scales = [load(row, place, *kind) for row in scale] * rows
            times = multiply_pairs if _IS_PAIR else ir.IRBuilder.mul
            return [builder.add(total, times(builder, *pair)) for total, *pair in zip(totals, sums, scales)]

        nothing = [ir.VectorType(i32, LANES)(None)] * (rows * TILE_OUT)
        totals = loop(builder, 1, strips, loop(builder, 2, strips, nothing, minima), codes)
        store_sums(builder, totals, arrays[5], at, rows)

    return build


@intrinsic
def _tile(_, x, x_sums, weight, scale, minimum, sums, r, o, at, strip, strips):
    """Rows of x from `r` on, and of it `strips` strips from `strip` on, times TILE_OUT rows of the weight from `o` on,
    spread out, into the first rows of sums (_ROWS, n) int32 from column `at` on."""
    return types.void(x, x_sums, weight, scale, minimum, sums, *[types.int64] * 5), _build(_ROWS)


@intrinsic
def _tile_of_one(_, x, x_sums, weight, scale, minimum, sums, r, o, at, strip, strips):
    """The same of one row of x."""
    return types.void(x, x_sums, weight, scale, minimum, sums, *[types.int64] * 5), _build(1)


@intrinsic
def _spread(_, weight, row, begin, step, is_half, codes, o, strip, part, chunks):
    """8 chunks of a row of the weight, those of a part of a strip, into row `o` of codes (_HEIGHT, SEGMENT) uint8.

    Args:
        begin: where in the row the first chunk of the segment is; `step`: from block to block.
        is_half: 1 if a block has two chunks, else 0.
        chunks: of the segment; for those that are missing its first one is taken.
    """
    i32 = ir.IntType(32)
    i64 = ir.IntType(64)
    eight = ir.VectorType(i32, 8)

    def build(context, builder, signature, args):
        begin, step, is_half, strip, part, chunks = (args[n] for n in (2, 3, 4, 7, 8, 9))
        rows, spread = (context.make_array(signature.args[n])(context, builder, args[n]) for n in (0, 5))
        (source,) = addresses(builder, rows, args[1], 1)
        (target,) = addresses(builder, spread, args[6], 1)
        first = builder.add(builder.mul(strip, i64(LANES)), builder.mul(part, i64(8)))
        found = []
        ahead = builder.mul(builder.extract_value(rows.strides, 0), i64(_AHEAD))
        for n in range(8):
            chunk = builder.add(first, i64(n))
            chunk = builder.select(builder.icmp_unsigned("<", chunk, chunks), chunk, i64(0))
            place = builder.mul(builder.lshr(chunk, is_half), step)
            place = builder.add(place, builder.mul(builder.and_(chunk, is_half), i64(CHUNK_BYTES)))
            address = builder.add(source, builder.add(begin, place))
            found.append(builder.load(pointer(builder, address, i32, 4), align=1))
            if n in (0, 3, 7):  # each line of a CPU's cache, of 64 bytes
                far = builder.inttoptr(builder.add(address, ahead), ir.IntType(8).as_pointer())
                call(builder, "llvm.prefetch.p0i8", ir.VoidType(), far, *map(i32, (0, 3, 1)))
        # a transposition of 8 chunks of 4 words
        wide = [lanes(builder, found[n], found[n + 4], range(8)) for n in range(4)]
        (a, b), (c, d) = (
            [lanes(builder, *pair, which) for which in ([0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15])]
            for pair in (wide[:2], wide[2:])
        )
        words = [
            lanes(builder, *pair, which)
            for pair in ((a, c), (b, d))
            for which in ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
        ]
        mask = eight([0x0F0F0F0F] * 8)
        four = eight([4] * 8)
        both = [builder.and_(word, mask) for word in words]
        both += [builder.and_(builder.lshr(word, four), mask) for word in words]
        start = builder.add(builder.mul(strip, i64(STRIP)), builder.mul(part, i64(32)))
        for n, word in enumerate(both):
            place = builder.add(target, builder.add(start, i64(n * 4 * LANES)))
            builder.store(word, pointer(builder, place, i32, 8), align=1)

    return types.void(weight, *[types.int64] * 4, codes, *[types.int64] * 4), build


@njit(nogil=True)
def _whole(halves, begin, step, is_half, chunks, has_minimum, found, floats, scale, minimum):
    """Scales and minima of some chunks of a row as whole numbers. Returns what 1 stands for.

    Args:
        halves: (W / 2,) fp16, the blocks of the row; begin, step: where the first one is, and how far it is to the
            next; is_half: as for `_spread`.
        found: (2, chunks) fp16, floats: (2, chunks) float32, for what is read.
        scale: (chunks,) int32; minimum: (chunks,) int16.
    """
    for c in range(U(chunks)):
        at = U(begin) + (c >> U(is_half)) * U(step)
        found[0, c] = halves[at]
        found[1, c] = halves[at + U(1)]
    for c in range(U(chunks)):
        floats[0, c] = float_of(found[0, c])
    for c in range(U(chunks)):
        floats[1, c] = float_of(found[1, c]) if has_minimum else np.float32(-8) * floats[0, c]
    most = np.uint32(0)
    for c in range(U(chunks)):
        one = floats[1, c]
        other = floats[1, c] + np.float32(15) * floats[0, c]
        most = max(most, max(bits_of(abs(one)), bits_of(abs(other))))
    factor = np.float32(LARGEST) / max(from_bits(most), np.float32(1e-30))
    for c in range(U(chunks)):
        s = floats[0, c] * factor
        whole = np.rint(s)
        # what the scale loses by rounding, the minimum makes good in the middle of the codes
        minimum[c] = np.int32(np.rint(floats[1, c] * factor + np.float32(7.5) * (s - whole)))
        s = np.int32(whole)
        scale[c] = (s & np.int32(0xFFFF)) * np.int32(0x10001) if _IS_PAIR else s
    return from_bits(most) / np.float32(LARGEST)


@njit(nogil=True, cache=True)
def _outliers(places, first, step, half):
    """Where columns of x meet a row of the weight: in which chunk, at which byte, and how far the code is shifted."""
    chunk = np.empty_like(places)
    byte = np.empty_like(places)
    shift = np.empty(len(places), np.uint8)
    for u in range(len(places)):
        group = places[u] // (2 * half)
        inside = places[u] % (2 * half)
        chunk[u] = (group * half + inside % half) // CHUNK_BYTES
        byte[u] = first + group * step + inside % half
        shift[u] = 4 * (inside // half)
    return chunk, byte, shift


@njit(nogil=True, cache=True)
def _sums(
    x, x_sums, outliers, weight, halves, stored, first, step, half, has_minimum, o, height, codes, totals, columns
):
    """codes @ weight.T of `height` outputs from `o` on, _HEIGHT at most, into the first columns of totals (R, _HEIGHT)
    float32, and what `outliers`, from `_outliers`, meet into those of columns (U, _HEIGHT) float32. `codes` (_HEIGHT,
    SEGMENT) is for those of the weight; the others are those of `multiply`."""
    rows = len(x)
    each = half // CHUNK_BYTES
    chunks = weight.shape[1] // step * each
    tall = _ROWS if rows >= _ROWS else 1
    scales = np.empty((_HEIGHT, _SEGMENT_CHUNKS), np.int32)
    minima = np.empty((_HEIGHT, _SEGMENT_CHUNKS), np.int16)
    found = np.empty((2, _SEGMENT_CHUNKS), np.int16)
    floats = np.empty((2, _SEGMENT_CHUNKS), np.float32)
    ones = np.empty(_HEIGHT, np.float32)
    sums = np.zeros((tall, _HEIGHT), np.int32)
    outlier_chunk, byte, shift = outliers
    totals[:] = 0
    u_begin = 0
    u_end = 0
    for chunk in range(0, chunks, _SEGMENT_CHUNKS):
        few = min(_SEGMENT_CHUNKS, chunks - chunk)
        strips = (few + LANES - 1) // LANES
        block = chunk // each * step
        if few < _SEGMENT_CHUNKS:
            scales[:] = 0
            minima[:] = 0
        while u_end < len(byte) and outlier_chunk[u_end] < chunk + few:
            u_end += 1
        for n in range(height):
            r = stored[o + n]
            ones[n] = _whole(
                halves[r], block // 2, step // 2, each - 1, few, has_minimum, found, floats, scales[n], minima[n]
            )
            for strip in range(strips):
                for part in range(LANES // 8):
                    _spread(weight, r, first + block, step, each - 1, codes, n, strip, part, few)
            for u in range(u_begin, u_end):
                code = weight[r, byte[u]] >> shift[u] & np.uint8(15)
                at = outlier_chunk[u] - chunk
                whole = np.int32(np.int16(scales[n, at])) * np.int32(code) + np.int32(minima[n, at])
                columns[u, n] = np.float32(whole) * ones[n]
        for r in range(0, rows, tall):
            top = min(r, rows - tall)
            for n in range(0, height, TILE_OUT):
                if tall == 1:
                    _tile_of_one(x, x_sums, codes, scales, minima, sums, top, n, n, chunk // LANES, strips)
                else:
                    _tile(x, x_sums, codes, scales, minima, sums, top, n, n, chunk // LANES, strips)
            for k in range(U(r - top), U(tall)):
                for n in range(U(height)):
                    totals[U(top) + k, n] += np.float32(sums[k, n]) * ones[n]
        u_begin = u_end


@njit(nogil=True, cache=True)
def multiply(
    x,
    x_sums,
    scale,
    kept,
    places,
    weight,
    halves,
    stored,
    first,
    step,
    half,
    has_minimum,
    bias,
    begin,
    end,
    out,
):
    """out = scale * (codes @ weight.T) + kept @ weight.T[places] + bias, of the outputs `begin` to `end`, as
    `tiles.multiply`.

    Args:
        x, x_sums: from `arrange`; scale: (R,); kept: (R, U), float32; places: (U,).
        weight: (O, W) uint8, rows of blocks; halves: (O, W / 2) fp16, the same.
        stored: (O,), which of these rows has each output.
        first, step: where in a row the codes of the first block begin, and how far it is to those of the next.
        half: bytes of the codes of a block, CHUNK_BYTES or twice as many; lower codes are its first half.
        has_minimum: in fp16 behind the scale; else it is the scale times -8.
        bias: (O,) float32; out: (R, O) floats.
    """
    row, no_scale = np.empty(_HEIGHT, np.float32), np.ones(len(bias), np.float32)  # the weight's are in the totals
    totals = np.empty((len(x), _HEIGHT), np.float32)
    columns = np.empty((len(places), _HEIGHT), np.float32)
    codes = np.empty((_HEIGHT, SEGMENT), np.uint8)
    outliers = _outliers(places, first, step, half)
    for o in range(begin, end, _HEIGHT):
        height = min(_HEIGHT, end - o)
        _sums(
            x,
            x_sums,
            outliers,
            weight,
            halves,
            stored,
            first,
            step,
            half,
            has_minimum,
            o,
            height,
            codes,
            totals,
            columns,
        )
        for r in range(len(x)):
            scale_row(totals, r, columns, 0, scale, kept, r, no_scale, bias, o, height, row, out)


@njit(nogil=True, cache=True)
def arrange(words, half, begin, end, out, sums):
    """Codes of rows `begin` to `end` of x in the order of a weight's, spread out.

    Args:
        words: (R, I / 4) int32, 4 codes each; half: as for `multiply`.
        out: (R, 8 * padded(I / CHUNK)) int32; sums: (R, padded(I / CHUNK)) int16, of the codes of a chunk.
    """
    each = U(half // CHUNK_BYTES)
    size = U(half // 4)
    for r in range(begin, end):
        for chunk in range(U(words.shape[1] // 8)):
            at = chunk // each * U(2) * size + chunk % each * U(4)
            to = chunk // U(LANES) * U(_REGISTERS * LANES) + chunk % U(LANES)
            total = np.int32(0)
            for n in range(U(8)):
                word = words[r, at + n if n < U(4) else at + size + n - U(4)]
                out[r, to + n * U(LANES)] = word
                for shift in (24, 16, 8, 0):
                    total += np.int32(word << np.int32(shift)) >> np.int32(24)
            sums[r, chunk] = total
