"""Floats of 16, 32 and 64 bits in compiled loops, whose arrays `threads.float_array` makes: numba has
no type for those of 16 bits.

What numba keeps of a loop is dated by the file of that loop alone: after a change here, touch those that use it.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def bits_of(_, x):
    """The bits of a float32, as uint32."""
    return types.uint32(types.float32), lambda _, builder, __, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def from_bits(_, bits):
    """The float32 of these bits."""
    return types.float32(types.uint32), lambda _, builder, __, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def float_of(_, x):
    """An element of an array of floats as float32."""

    def convert(_, builder, __, args):
        if x == types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        if x == types.uint16:
            bits = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.IntType(32)(16))
            return builder.bitcast(bits, ir.FloatType())
        return args[0] if x == types.float32 else builder.fptrunc(args[0], ir.FloatType())

    return types.float32(x), convert


@intrinsic
def element(_, x, array):
    """A float32 as an element of an array, of floats or of codes of 8 bits: the nearest one, of two the even one."""
    kind = array.dtype

    def convert(_, builder, __, args):
        i8, i16, i32 = map(ir.IntType, (8, 16, 32))
        if kind == types.int16:
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), i16)
        if kind == types.uint16:
            bits = builder.bitcast(args[0], i32)
            odd = builder.and_(builder.lshr(bits, i32(16)), i32(1))
            rounded = builder.add(bits, builder.add(odd, i32(0x7FFF)))
            return builder.trunc(builder.lshr(rounded, i32(16)), i16)
        if kind == types.int8:
            nearest = builder.module.declare_intrinsic("llvm.rint", (ir.FloatType(),))
            return builder.fptosi(builder.call(nearest, args[:1]), i8)
        return args[0] if kind == types.float32 else builder.fpext(args[0], ir.DoubleType())

    return kind(types.float32, array), convert
