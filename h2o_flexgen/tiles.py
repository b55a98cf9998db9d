"""A matmul in int8 for CPUs without instructions for it, compiled by numba: several times as fast there as torch's.

A file of its own, which shares no code with `loops.py`: what numba keeps of a loop is dated by the file of that loop
alone.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

U = np.uint64
#: rows, outputs and inputs that are in the CPU's registers at once
TILE_ROWS, TILE_OUT, TILE_IN = 2, 4, 16
#: of the weight that all rows of x meet before the next: they stay in a core's cache meanwhile
BLOCK_BYTES = 128 << 10


@intrinsic
def _tile(_, x, weight, width, sums, step):
    """TILE_ROWS rows of x times TILE_OUT rows of a weight, all `width` wide, into sums, whose rows are `step` apart.

    Written in LLVM's language, since numba's own loops do not get at the one instruction that multiplies 16 pairs of
    int16 and adds up each two neighbours.

    Args:
        x, weight, sums: addresses of int16, int8 and int32.
        width: a multiple of TILE_IN.
    """

    def build(_, builder, __, args):
        x, weight, width, sums, step = args
        i8, i16, i32, i64 = map(ir.IntType, (8, 16, 32, 64))
        wide, half = ir.VectorType(i32, TILE_IN), ir.VectorType(i32, TILE_IN // 2)
        even, odd = (half(list(range(first, TILE_IN, 2))) for first in (0, 1))
        rows, outs, undefined = range(TILE_ROWS), range(TILE_OUT), wide(ir.Undefined)

        def address(base, row, width, column, size):
            return builder.add(base, builder.mul(builder.add(builder.mul(width, i64(row)), column), i64(size)))

        def load(base, row, kind):
            size, vector = kind.width // 8, ir.VectorType(kind, TILE_IN)
            pointer = builder.inttoptr(address(base, row, width, i, size), vector.as_pointer())
            return builder.sext(builder.load(pointer, align=size), wide)

        before, loop, after = builder.block, *(builder.append_basic_block() for _ in range(2))
        builder.branch(loop)
        builder.position_at_end(loop)
        i, totals = builder.phi(i64), {each: builder.phi(half) for each in product(rows, outs)}
        xs, weights = [load(x, r, i16) for r in rows], [load(weight, o, i8) for o in outs]
        following, added = builder.add(i, i64(TILE_IN)), {}
        for r, o in totals:
            products = builder.mul(xs[r], weights[o])
            pair = (builder.shuffle_vector(products, undefined, each) for each in (even, odd))
            added[r, o] = builder.add(totals[r, o], builder.add(*pair))
        steps = {i: (i64(0), following)} | {totals[each]: (half([0] * half.count), added[each]) for each in added}
        for variable, (first, then) in steps.items():
            variable.add_incoming(first, before)
            variable.add_incoming(then, loop)
        builder.cbranch(builder.icmp_unsigned("<", following, width), loop, after)
        builder.position_at_end(after)
        add_up = builder.module.declare_intrinsic(
            f"llvm.vector.reduce.add.v{half.count}i32", (), ir.FunctionType(i32, [half])
        )
        for r, o in added:
            target = builder.inttoptr(address(sums, r, step, i64(o), 4), i32.as_pointer())
            builder.store(builder.call(add_up, [added[r, o]]), target)

    return types.void(*[types.uint64] * 5), build


@njit(nogil=True, cache=True)
def tiles(x, weight, begin, end, sums):
    """x (R, I) int16 @ weight.T (O, I) int8 into sums (R, O) int32, of the outputs `begin` to `end`. R, I, begin and
    end are multiples of the sizes of a tile.

    x holds codes of 8 bits: two products of such codes add up to 17 bits, and what multiplies 8 bits stops at 16.
    """
    width, out = U(x.shape[1]), U(len(weight))
    x_at, weight_at, sums_at = U(x.ctypes.data), U(weight.ctypes.data), U(sums.ctypes.data)
    block = max(U(BLOCK_BYTES) // (width * U(TILE_OUT)), U(1)) * U(TILE_OUT)
    for first in range(U(begin), U(end), block):
        for r in range(U(0), U(len(x)), U(TILE_ROWS)):
            for o in range(first, min(first + block, U(end)), U(TILE_OUT)):
                _tile(x_at + r * width * U(2), weight_at + o * width, width, sums_at + (r * out + o) * U(4), out)
