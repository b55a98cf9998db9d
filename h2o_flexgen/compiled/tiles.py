"""Int8 matmuls compiled by numba: tiles of a few rows and outputs, by the instruction for codes that this CPU has.

    int16  vpmaddwd   16 products of 16 bits (AVX2): without VNNI several times as fast as torch's operators
    uint8  vpdpbusd   64 or 32 products of 8 bits (VNNI); its codes of x are unsigned, with 128 added

Every weight is read as it is stored, once: a block of it stays in a core's cache while all rows of x pass over it, and
the sums of a tile become floats at once. oneDNN, behind torch's operators, rearranges a weight in each call.

What is in registers for a tile of 4 rows and 4 outputs:

                  weight o      o + 1      o + 2      o + 3      a vector of `inputs` codes each
        x row r      total      total      total      total      `lanes` sums of 32 bits each: a lane adds up the
              r + 1  total      total      total      total      products of its neighbouring inputs, and at the end
              r + 2  total      total      total      total      `store_sums` adds up the lanes
              r + 3  total      total      total      total
"""

from __future__ import annotations

from functools import reduce
from itertools import product
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from h2o_flexgen.compiled import simd
from h2o_flexgen.compiled.floats import U, element
from h2o_flexgen.compiled.simd import HAS_VNNI, IS_AVX512, TILE_OUT

#: bytes of the weight that all rows of x pass over before the next ones
BLOCK_BYTES = 128 << 10
#: added to codes of 8 bits, it makes them unsigned
OFFSET = 128


class Tile(NamedTuple):
    """The rows of x and the inputs that are in registers at once, and the lanes of a register of sums."""

    rows: int
    inputs: int
    lanes: int


#: by the type of the codes of x
TILES = {"int16": Tile(2, 16, 8), "uint8": Tile(2, 32, 8) if HAS_VNNI and not IS_AVX512 else Tile(4, 64, 16)}
_ROWS_OF_8 = TILES["uint8"].rows
_ROWS_OF_16 = TILES["int16"].rows
#: the type that is fastest on this CPU
CODES = np.dtype("uint8" if HAS_VNNI else "int16")


class RowFloats(NamedTuple):
    """What rows of activations have beside their codes (`kernels.int8`)."""

    scale: np.ndarray  # (R,) float32
    kept: np.ndarray  # (R, U) float32, the outliers, 0 for other elements
    places: np.ndarray  # (U,) int64, the columns of outliers


class Outputs(NamedTuple):
    """Where results go, and what makes them: total * scale + bias."""

    scale: np.ndarray  # (O,) float32
    bias: np.ndarray  # (O,) float32
    out: np.ndarray  # (R, O) floats


def _add_products(builder, total, x, weight):
    """Add the products of x (inputs) int16 or uint8 and a weight (inputs) int8 to sums (lanes) int32."""
    if HAS_VNNI and x.type.element.width == 8:
        return simd.add_codes(builder, total, x, weight)
    if simd.FEATURES.get("avx2") and x.type.element.width == 16:
        return builder.add(total, simd.multiply_pairs(builder, x, builder.sext(weight, x.type)))
    wide = ir.VectorType(simd.I32, x.type.count)
    near = x.type.count // total.type.count
    widen = builder.sext if x.type.element.width == 16 else builder.zext
    products = builder.mul(widen(x, wide), builder.sext(weight, wide))
    parts = [simd.lanes(builder, products, products, range(n, x.type.count, near)) for n in range(near)]
    return builder.add(total, reduce(builder.add, parts))


def _build(x_kind, rows):
    """The LLVM IR of a tile of this many rows (`_tile`)."""
    tile = TILES[x_kind.dtype.name]
    x_code = ir.IntType(x_kind.dtype.bitwidth)

    def build(context, builder, signature, args):
        kinds = signature.args[:3]
        r, o, at = args[3:]
        x, weight, sums = (context.make_array(kind)(context, builder, each) for kind, each in zip(kinds, args))
        x_rows = simd.addresses(builder, x, r, rows)
        weight_rows = simd.addresses(builder, weight, o, TILE_OUT)

        def load(rows, code, i):
            at = builder.mul(i, simd.I64(code.width // 8))
            return [simd.load(builder, builder.add(row, at), code, tile.inputs) for row in rows]

        def products(i, totals):
            pairs = product(load(x_rows, x_code, i), load(weight_rows, simd.I8, i))
            return [_add_products(builder, total, *pair) for total, pair in zip(totals, pairs)]

        zeros = [ir.VectorType(simd.I32, tile.lanes)(None)] * (rows * TILE_OUT)
        totals = simd.loop(builder, tile.inputs, builder.extract_value(x.shape, 1), zeros, products)
        simd.store_sums(builder, totals, sums, at, rows)

    return build


@intrinsic
def _tile(_, x, weight, sums, r, o, at):
    """Write the products of a tile's rows of x (R, I), from `r` on, and TILE_OUT rows of weight (O, I) int8, from `o`
    on, to the first rows of sums (rows, n) int32, from column `at` on. I is a multiple of the tile's inputs.

    In LLVM IR, since numba's own loops do not use these instructions.
    """
    return types.void(x, weight, sums, *[types.int64] * 3), _build(x, TILES[x.dtype.name].rows)


@intrinsic
def _tile_of_one(_, x, weight, sums, r, o, at):
    """As `_tile`, for one row of x."""
    return types.void(x, weight, sums, *[types.int64] * 3), _build(x, 1)


# inlined in `block_tiles.multiply`, too: after a change here, touch that file, by whose date numba's cache goes
@njit(nogil=True, inline="always")
def finish_row(total, n, columns, at, kept, r, outputs, first):
    """Compute n outputs of row r, from `first` on. `total` (n or more,) holds scale * (codes @ weight.T), and `columns`
    (U, .), from column `at` on, the weight at `places`; `total` is overwritten."""
    scale, bias, out = outputs
    n = U(n)
    at = U(at)
    r = U(r)
    first = U(first)
    for u in range(U(kept.shape[1])):
        factor = kept[r, u]
        if factor != 0:
            for o in range(n):
                total[o] += np.float32(columns[u, at + o]) * factor
    for o in range(n):
        out[r, first + o] = element(total[o] * scale[first + o] + bias[first + o], out)


@njit(nogil=True, cache=True)
def multiply(codes, x, weight, weight_scale, bias, begin, end, out):
    """out = weight_scale * (scale * (codes @ weight.T) + kept @ weight.T[places]) + bias, for the outputs `begin` to
    `end`. Outliers are added one after the other, so a row's result does not depend on the outliers of other rows.

    Args:
        codes: (R, I), in int16, or in uint8 with OFFSET added.
        x: `RowFloats` as a plain tuple.
        weight: (O, I) int8; O is at least TILE_OUT.
        weight_scale, bias: (O,) float32.
        out: (R, O) floats.
    """
    x = RowFloats(*x)
    outputs = Outputs(weight_scale, bias, out)
    rows, width = codes.shape
    most = _ROWS_OF_8 if codes.itemsize == 1 else _ROWS_OF_16
    step = most if rows >= most else 1
    block = max(BLOCK_BYTES // (width * TILE_OUT), 1) * TILE_OUT
    sums = np.empty((step, block), np.int32)
    total = np.empty(block, np.float32)
    columns = np.empty((len(x.places), block), np.int8)
    # for unsigned codes: (codes + OFFSET) @ weight.T - OFFSET @ weight.T = codes @ weight.T
    offsets = np.full((1, width), OFFSET, codes.dtype)
    offset_sums = np.zeros((1, block), np.int32)
    for first in range(begin, end, block):
        last = min(first + block, end)
        first = min(first, last - TILE_OUT)  # outputs that are computed twice come out the same
        n = last - first
        for u in range(len(x.places)):
            for o in range(n):
                columns[u, o] = weight[first + o, x.places[u]]
        if codes.itemsize == 1:
            for o in range(first, last, TILE_OUT):
                o = min(o, last - TILE_OUT)
                _tile_of_one(offsets, weight, offset_sums, 0, o, o - first)
        for r in range(0, rows, step):
            r = min(r, rows - step)
            for o in range(first, last, TILE_OUT):
                o = min(o, last - TILE_OUT)
                if step == 1:
                    _tile_of_one(codes, weight, sums, r, o, o - first)
                else:
                    _tile(codes, weight, sums, r, o, o - first)
            for k in range(step):
                scale = x.scale[r + k]
                for o in range(U(n)):
                    total[o] = np.float32(np.int32(sums[k, o] - offset_sums[0, o])) * scale
                finish_row(total, n, columns, 0, x.kept, r + k, outputs, first)


@njit(nogil=True, cache=True)
def scale_back(sums, columns, x, weight_scale, bias, begin, end, out):
    """As `multiply`, for rows `begin` to `end` of known sums (R, O) and of columns (U, O), the weight at `places`, both
    whole numbers of any type."""
    x = RowFloats(*x)
    outputs = Outputs(weight_scale, bias, out)
    part = 1024
    total = np.empty(part, np.float32)
    for r in range(begin, end):
        scale = x.scale[r]
        for first in range(0, out.shape[1], part):
            n = min(part, out.shape[1] - first)
            for o in range(U(n)):
                total[o] = np.float32(sums[U(r), U(first) + o]) * scale
            finish_row(total, n, columns, first, x.kept, r, outputs, first)
