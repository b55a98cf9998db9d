"""A KV cache as it is stored, in floats or in codes of 8 and 4 bits: one new token in, and attention over it.

Numba vectorises none of this well (widths are small, and arrays might overlap), hence the innermost loops in LLVM's
language. Vectors become float32 in a buffer, a few at a time, which the queries of a group then share.

Shapes: B sequences, H KV heads, n = B * H, G query heads to each, S slots, D elements of a head. A cache has segments
of slots, each (B, H, S, bytes of a vector); they come as arrays of addresses and of sizes.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from h2o_flexgen.compiled import BF16, FP16, FP32, INT4, INT8
from h2o_flexgen.compiled.floats import element, exp, float_of
from h2o_flexgen.compiled.simd import add_up, loop, pointer

#: floats of a vector register, and stored vectors that are used at once
LANES = 16
VECTORS = 4
#: sums in another order, but NaN stays NaN
_SUMS = {"reassoc", "contract", "nsz"}
_I8 = ir.IntType(8)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_FLOAT = ir.FloatType()


# innermost loops, on addresses


def _each(builder, count, body, lanes=LANES):
    """body(offset) for each `lanes` of `count` elements, a multiple of them; none of 0."""
    with builder.if_then(builder.icmp_unsigned("!=", count, _I64(0))):
        loop(builder, lanes, count, [], lambda n, _: body(n) or [])


def _floats(builder, address, index, lanes=LANES):
    """A pointer to floats from element `index` on."""
    return pointer(builder, builder.add(address, builder.mul(index, _I64(4))), _FLOAT, lanes)


def _multiply_add(builder, a, b, total):
    return builder.fadd(builder.fmul(a, b, ("contract",)), total, ("contract",))


def _nothing():
    return ir.Constant(_I8.as_pointer(), None)


@intrinsic
def _address(_, integer):
    return types.voidptr(types.int64), lambda _, builder, __, args: builder.inttoptr(args[0], _I8.as_pointer())


@intrinsic
def _dots(_, rows, x, out, width):
    """Dot products of VECTORS rows of float32 with `x`, all at addresses and of `width`, a multiple of LANES."""

    def build(_, builder, __, args):
        rows, x, out, width = args

        def body(n, totals):
            vector = builder.load(_floats(builder, x, n), align=4)
            places = [builder.add(n, builder.mul(width, _I64(j))) for j in range(VECTORS)]
            loaded = [builder.load(_floats(builder, rows, place), align=4) for place in places]
            return [_multiply_add(builder, row, vector, total) for row, total in zip(loaded, totals)]

        zeros = ir.Constant(ir.VectorType(_FLOAT, LANES), [0.0] * LANES)
        totals = loop(builder, LANES, width, [zeros] * VECTORS, body)
        builder.store(add_up(builder, totals), _floats(builder, out, _I64(0), VECTORS), align=4)
        return _nothing()

    return types.none(*[types.int64] * 4), build


@intrinsic
def _mix(_, rows, weights, total, width):
    """Add VECTORS rows times their weights to `total`; all as in `_dots`."""

    def build(_, builder, __, args):
        rows, weights, total, width = args
        four = builder.load(_floats(builder, weights, _I64(0), VECTORS), align=4)
        each = [builder.shuffle_vector(four, four, ir.VectorType(_I32, LANES)([j] * LANES)) for j in range(VECTORS)]

        def body(n):
            target = _floats(builder, total, n)
            found = builder.load(target, align=4)
            for j, weight in enumerate(each):
                place = builder.add(n, builder.mul(width, _I64(j)))
                found = _multiply_add(builder, builder.load(_floats(builder, rows, place), align=4), weight, found)
            builder.store(found, target, align=4)

        _each(builder, width, body)
        return _nothing()

    return types.none(*[types.int64] * 4), build


def _widening(nbytes, convert):
    """An intrinsic function (source, target, count): elements of so many bytes at an address become float32 at another.
    convert(builder, bits, type of the floats) -> floats."""

    def build(_, builder, __, args):
        source, target, count = args
        whole = builder.and_(count, _I64(-LANES))
        for lanes, begin, size in ((LANES, _I64(0), whole), (1, whole, builder.sub(count, whole))):

            def body(n, lanes=lanes, begin=begin):
                n = builder.add(n, begin)
                place = builder.add(source, builder.mul(n, _I64(nbytes)))
                bits = builder.load(pointer(builder, place, ir.IntType(8 * nbytes), lanes), align=1)
                floats = convert(builder, bits, ir.VectorType(_FLOAT, lanes))
                builder.store(floats, _floats(builder, target, n, lanes), align=4)

            _each(builder, size, body, lanes)
        return _nothing()

    @intrinsic
    def widen(_, source, target, count):
        return types.none(types.int64, types.int64, types.int64), build

    return widen


def _lanes(like, kind, value=None):
    """A vector type with as many lanes as another; of a value the constant."""
    found = ir.VectorType(kind, like.count)
    return found if value is None else found([value] * like.count)


def _bf16(builder, bits, floats):
    return builder.bitcast(builder.shl(builder.zext(bits, _lanes(floats, _I32)), _lanes(floats, _I32, 16)), floats)


def _fp16(builder, bits, floats):
    return builder.fpext(builder.bitcast(bits, _lanes(floats, ir.HalfType())), floats)


def _low(builder, bits, floats):
    return builder.uitofp(builder.and_(bits, _lanes(floats, _I8, 15)), floats)


def _high(builder, bits, floats):
    return builder.uitofp(builder.lshr(bits, _lanes(floats, _I8, 4)), floats)


_from_fp32 = _widening(4, lambda builder, bits, floats: builder.bitcast(bits, floats))
_from_fp16 = _widening(2, _fp16)
_from_bf16 = _widening(2, _bf16)
_from_int8 = _widening(1, lambda builder, bits, floats: builder.sitofp(bits, floats))
_from_low = _widening(1, _low)
_from_high = _widening(1, _high)


# vectors


@njit(nogil=True, inline="always")
def _half(address):
    return float_of(carray(_address(address), (1,), np.int16)[0])


@njit(nogil=True)
def _widen(kind, address, nbytes, count, D, rows, width, scales):
    """Stored vectors, one each `nbytes`, as they are without scale and minimum: to float32 rows of `width` at an
    address, and those (2, VECTORS)."""
    for j in range(count):
        source = address + j * nbytes
        target = rows + 4 * j * width
        if kind == FP32:
            _from_fp32(source, target, D)
        elif kind == FP16:
            _from_fp16(source, target, D)
        elif kind == BF16:
            _from_bf16(source, target, D)
        elif kind == INT8:
            _from_int8(source + 2, target, D)
            scales[0, j] = _half(source)
        else:
            _from_low(source + 4, target, D // 2)
            _from_high(source + 4, target + 2 * D, D // 2)
            scales[0, j] = _half(source)
            scales[1, j] = _half(source + 2)


@njit(nogil=True, fastmath=_SUMS)
def _softmax(x):
    most = np.float32(-np.inf)
    for s in range(len(x)):
        most = max(most, x[s])
    total = np.float32(0)
    for s in range(len(x)):
        x[s] = exp(x[s] - most)
        total += x[s]
    for s in range(len(x)):
        x[s] /= total


@njit(nogil=True)
def _logits(kind, nbytes, segments, sizes, cached_len, h, D, query, rows, scales, p):
    """Queries (G, width) times the first `cached_len` keys of head h, which are never in 4 bits: into p
    (G, cached_len + VECTORS)."""
    first = 0
    width = rows.shape[1]
    rows_at = rows.ctypes.data
    query_at = query.ctypes.data
    p_at = p.ctypes.data
    for n in range(len(sizes)):
        few = min(sizes[n], cached_len - first)
        begin = segments[n] + h * sizes[n] * nbytes
        for s in range(0, few, VECTORS):
            count = min(VECTORS, few - s)
            _widen(kind, begin + s * nbytes, nbytes, count, D, rows_at, width, scales)
            for g in range(len(query)):
                _dots(rows_at, query_at + 4 * g * width, p_at + g * p.strides[0] + 4 * (first + s), width)
                if kind == INT8:
                    for j in range(count):
                        p[g, first + s + j] *= scales[0, j]
        first += few


@njit(nogil=True)
def _sums(kind, nbytes, segments, sizes, cached_len, h, D, total, rows, scales, p):
    """The first `cached_len` values of head h, times their weights p as in `_logits`: added up in total (G, width)."""
    first = 0
    width = rows.shape[1]
    weights = np.zeros(VECTORS, np.float32)
    rows_at = rows.ctypes.data
    total_at = total.ctypes.data
    weights_at = weights.ctypes.data
    for n in range(len(sizes)):
        few = min(sizes[n], cached_len - first)
        begin = segments[n] + h * sizes[n] * nbytes
        for s in range(0, few, VECTORS):
            count = min(VECTORS, few - s)
            if count < VECTORS:
                rows[:] = 0
                weights[:] = 0
            _widen(kind, begin + s * nbytes, nbytes, count, D, rows_at, width, scales)
            for g in range(len(total)):
                least = np.float32(0)
                for j in range(count):
                    weights[j] = p[g, first + s + j] * scales[0, j]
                    least += p[g, first + s + j] * scales[1, j]
                _mix(rows_at, weights_at, total_at + 4 * g * width, width)
                if kind == INT4:
                    for i in range(D):
                        total[g, i] += least
        first += few


@njit(nogil=True, cache=True)
def attend(begin, end, kinds, nbytes, k, v, sizes, cached_len, empty, q, context, received):
    """Attention of one query to each query head, for the KV heads `begin` to `end` of n.

    Args:
        kinds, nbytes: of the vectors of K and of V, (2,) int64.
        k, v: addresses of the segments; sizes: their slots. int64 all.
        cached_len: (B,) int64, slots that are in use, the first ones.
        empty: (B, H or 1, S) bool, which of them hold no token; without elements if all do.
        q: (n, G, D) floats, as `threads.float_array` has them; context: the same, written.
        received: (n, S) float32, to which what each slot receives from its G queries is added; without elements where
            that is not wanted.
    """
    G, D = q.shape[1:]
    heads = len(q) // len(cached_len)
    width = -(-D // LANES) * LANES
    scale = np.float32(1 / np.sqrt(D))
    rows = np.zeros((VECTORS, width), np.float32)
    query = np.zeros((G, width), np.float32)
    total = np.empty((G, width), np.float32)
    every = np.empty((G, np.max(cached_len) + VECTORS), np.float32)
    scales = np.empty((2, VECTORS), np.float32)
    for h in range(begin, end):
        b = h // heads
        count = cached_len[b]
        p = every[:, : count + VECTORS]
        for g in range(G):
            for i in range(D):
                query[g, i] = float_of(q[h, g, i]) * scale
        total[:] = 0
        scales[0] = 1
        scales[1] = 0
        _logits(kinds[0], nbytes[0], k, sizes, count, h, D, query, rows, scales, p)
        for g in range(G):
            if empty.size:
                for s in range(count):
                    if empty[b, h % empty.shape[1], s]:
                        p[g, s] = -np.inf
            _softmax(p[g, :count])
            if received.size:
                for s in range(count):
                    received[h, s] += p[g, s]
        scales[0] = 1
        scales[1] = 0
        _sums(kinds[1], nbytes[1], v, sizes, count, h, D, total, rows, scales, p)
        for g in range(G):
            for i in range(D):
                context[h, g, i] = element(total[g, i], context)


@njit(nogil=True, cache=True)
def put(segments, sizes, slots, new):
    """Write new vectors (n, bytes) uint8 into slots (n,) of n heads; segments and their sizes as in `attend`."""
    for h in range(len(slots)):
        slot = slots[h]
        n = 0
        if slot < 0:
            raise IndexError("a slot before the first one")
        while n < len(sizes) and slot >= sizes[n]:
            slot -= sizes[n]
            n += 1
        if n == len(sizes):
            raise IndexError("a slot behind the last one")
        target = carray(_address(segments[n] + (h * sizes[n] + slot) * new.shape[1]), (new.shape[1],), np.uint8)
        for i in range(len(target)):
            target[i] = new[h, i]
