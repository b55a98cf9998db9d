"""Matmuls in int8, compiled by numba: tiles of a few rows and outputs, in the instruction that this CPU has for codes.

    int16  vpmaddwd   16 pairs of 16 bits (AVX2): several times as fast as torch's operators on CPUs with nothing better
    uint8  vpdpbusd   64 or 32 pairs of 8 bits (VNNI). The codes of x are unsigned there, 128 more than they are

Every weight is read as it is stored, once; a block of it stays in a core's cache while all rows of x pass over it, and
the sums of a tile become floats at once. oneDNN, whose operators torch has, lays a weight out anew in each call.
"""

from __future__ import annotations

from functools import reduce
from itertools import product
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from h2o_flexgen.compiled.floats import element
from h2o_flexgen.compiled.simd import (
    FEATURES,
    HAS_VNNI,
    IS_AVX512,
    TILE_OUT,
    add_codes,
    addresses,
    lanes,
    loop,
    multiply_pairs,
    pointer,
    store_sums,
)

U = np.uint64
#: bytes of the weight that all rows of x meet before the next
BLOCK_BYTES = 128 << 10
#: what makes codes of 8 bits unsigned
OFFSET = 128


class Tile(NamedTuple):
    """Rows of x, and inputs, that are in the CPU's registers at once; sums in one register."""

    rows: int
    inputs: int
    lanes: int


#: by what codes of x are in
TILES = {"int16": Tile(2, 16, 8), "uint8": Tile(2, 32, 8) if HAS_VNNI and not IS_AVX512 else Tile(4, 64, 16)}
_ROWS_OF_8 = TILES["uint8"].rows
_ROWS_OF_16 = TILES["int16"].rows
#: what they are best in here
CODES = np.dtype("uint8" if HAS_VNNI else "int16")


def _add_products(builder, total, x, weight):
    """Sums (lanes) int32, and the products of x (inputs) int16 or uint8 with a weight (inputs) int8 among them."""
    if HAS_VNNI and x.type.element.width == 8:
        return add_codes(builder, total, x, weight)
    if FEATURES.get("avx2") and x.type.element.width == 16:
        return builder.add(total, multiply_pairs(builder, x, builder.sext(weight, x.type)))
    wide = ir.VectorType(ir.IntType(32), x.type.count)
    near = x.type.count // total.type.count
    widen = builder.sext if x.type.element.width == 16 else builder.zext
    products = builder.mul(widen(x, wide), builder.sext(weight, wide))
    parts = [lanes(builder, products, products, range(n, x.type.count, near)) for n in range(near)]
    return builder.add(total, reduce(builder.add, parts))


def _build(x_kind, rows):
    """The code of a tile with this number of rows (`_tile`)."""
    tile, i8, i32, i64 = TILES[x_kind.dtype.name], *map(ir.IntType, (8, 32, 64))
    code = ir.IntType(x_kind.dtype.bitwidth)

    def build(context, builder, signature, args):
        kinds = signature.args[:3]
        (r, o, at) = args[3:]
        x, weight, sums = (context.make_array(kind)(context, builder, each) for kind, each in zip(kinds, args))

        x_rows = addresses(builder, x, r, rows)
        weight_rows = addresses(builder, weight, o, TILE_OUT)

        def products(i, totals):
            def load(address, element):
                place = builder.add(address, builder.mul(i, i64(element.width // 8)))
                return builder.load(pointer(builder, place, element, tile.inputs), align=element.width // 8)

            pairs = product([load(row, code) for row in x_rows], [load(row, i8) for row in weight_rows])
            return [_add_products(builder, total, *pair) for total, pair in zip(totals, pairs)]

        nothing = [ir.VectorType(i32, tile.lanes)(None)] * (rows * TILE_OUT)
        added = loop(builder, tile.inputs, builder.extract_value(x.shape, 1), nothing, products)
        store_sums(builder, added, sums, at, rows)

    return build


@intrinsic
def _tile(_, x, weight, sums, r, o, at):
    """A tile's rows of x (R, I) from `r` on times TILE_OUT rows of weight (O, I) int8 from `o` on, into the first rows
    of sums (rows, n) int32 from column `at` on. I is a multiple of the tile's inputs.

    Written in LLVM's language, since numba's own loops do not get at the instructions.
    """
    return types.void(x, weight, sums, *[types.int64] * 3), _build(x, TILES[x.dtype.name].rows)


@intrinsic
def _tile_of_one(_, x, weight, sums, r, o, at):
    """The same of one row of x."""
    return types.void(x, weight, sums, *[types.int64] * 3), _build(x, 1)


# `tiles4.multiply` has it too: after a change here, touch that file, for what numba keeps of it is dated by it alone
@njit(nogil=True, inline="always")
def scale_row(sums, k, columns, at, scale, kept, r, weight_scale, bias, first, n, total, out):
    """n elements of row r of the result, from `first` on: of row k of the sums and of the columns, both from `at` on.
    `total` is for what is added up."""
    k, at, r, first, factor = U(k), U(at), U(r), U(first), scale[r]
    for o in range(U(n)):
        total[o] = np.float32(sums[k, at + o]) * factor
    for u in range(U(kept.shape[1])):
        factor = kept[r, u]
        if factor != 0:
            for o in range(U(n)):
                total[o] += np.float32(columns[u, at + o]) * factor
    for o in range(U(n)):
        out[r, first + o] = element(total[o] * weight_scale[first + o] + bias[first + o], out)


@njit(nogil=True, cache=True)
def multiply(x, scale, kept, places, weight, weight_scale, bias, begin, end, out):
    """out = weight_scale * (scale * (codes @ weight.T) + kept @ weight.T[places]) + bias, of the outputs `begin` to
    `end`; a row adds its outliers up one after the other, so that it does not depend on those of others.

    Args:
        x: (R, I), the codes in int16, or 128 more than they are in uint8.
        scale: (R,); kept: (R, U), float32; places: (U,), the columns of what is kept.
        weight: (O, I) int8; weight_scale, bias: (O,) float32. O is at least TILE_OUT.
        out: (R, O) floats.
    """
    rows, width = x.shape
    most = _ROWS_OF_8 if x.itemsize == 1 else _ROWS_OF_16
    step = most if rows >= most else 1
    block = max(BLOCK_BYTES // (width * TILE_OUT), 1) * TILE_OUT
    sums = np.empty((step, block), np.int32)
    total = np.empty(block, np.float32)
    columns = np.empty((len(places), block), np.int8)
    # of unsigned codes: (codes + OFFSET) @ weight.T - OFFSET @ weight.T = codes @ weight.T
    offsets = np.full((1, width), OFFSET, x.dtype)
    offset_sums = np.empty((1, block), np.int32)
    for first in range(begin, end, block):
        last = min(first + block, end)
        first = min(first, last - TILE_OUT)  # what is computed twice is the same twice
        n = last - first
        for u in range(len(places)):
            for o in range(n):
                columns[u, o] = weight[first + o, places[u]]
        if x.itemsize == 1:
            for o in range(first, last, TILE_OUT):
                o = min(o, last - TILE_OUT)
                _tile_of_one(offsets, weight, offset_sums, 0, o, o - first)
        for r in range(0, rows, step):
            r = min(r, rows - step)
            for o in range(first, last, TILE_OUT):
                o = min(o, last - TILE_OUT)
                if step == 1:
                    _tile_of_one(x, weight, sums, r, o, o - first)
                else:
                    _tile(x, weight, sums, r, o, o - first)
            for k in range(step):
                if x.itemsize == 1:
                    for o in range(U(n)):
                        sums[k, o] = np.int32(sums[k, o] - offset_sums[0, o])
                scale_row(sums, k, columns, 0, scale, kept, r + k, weight_scale, bias, first, n, total, out)


@njit(nogil=True, cache=True)
def scale_back(sums, scale, kept, columns, weight_scale, bias, begin, end, out):
    """The same of sums that are known, for rows `begin` to `end`.

    Args:
        sums: (R, O), columns: (U, O); whole numbers of any type.
    """
    part = 1024
    total = np.empty(part, np.float32)
    for r in range(begin, end):
        for at in range(0, out.shape[1], part):
            n = min(part, out.shape[1] - at)
            scale_row(sums, r, columns, at, scale, kept, r, weight_scale, bias, at, n, total, out)
