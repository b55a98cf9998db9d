"""Floats of 16, 32 and 64 bits in compiled loops, as `threads.float_array` views them: numba has no types of 16 bits.

Numba's cache goes by the date of a loop's own file: after a change here, touch the files that use it.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

U = np.uint64
#: fastmath flags: sums may be reordered, but NaN stays NaN
SUMS = {"reassoc", "contract", "nsz"}


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
    """An element of a float array as float32."""

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
    """A float32 rounded to an element of `array`, floats or codes of 8 bits: to the nearest, ties to even."""
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


@njit(nogil=True, fastmath={"contract"})
def exp(x):
    """e^x of a float32 <= 0, to within two units in the last place; NaN stays. Cephes' expf without branches, and with
    its own fastmath flags: if sums could be reordered, the constant that rounds `shifted` would cancel out."""
    shifted = x * np.float32(1.4426950408889634) + np.float32(12582912)  # its low bits are the power of two
    n = shifted - np.float32(12582912)
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    power = from_bits((bits_of(shifted) + np.uint32(127)) << np.uint32(23))
    return np.float32(0) if x < np.float32(-87) else p * power
