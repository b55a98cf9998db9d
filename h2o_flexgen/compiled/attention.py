"""Attention over a KV cache in the form it is stored in, floats or codes of 8 or 4 bits, and writes of new tokens.

Numba vectorises little of this by itself (vectors are short, and arrays might overlap), so the innermost loops are
written in LLVM IR. Stored vectors are widened to float32 in a buffer, a few at a time, for all queries of a group.

Shapes: B sequences, H KV heads, n = B * H, G query heads per KV head, S slots, D elements of a head. The heads of a
cache that have as many slots form one of its P parts, and each part is cut along its slots into N segments, each (B,
heads of the part, slots, bytes of a vector).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from h2o_flexgen.compiled import BF16, FP16, FP32, INT4, INT8
from h2o_flexgen.compiled.floats import SUMS, element, exp, float_of
from h2o_flexgen.compiled.simd import FLOAT, I8, I32, I64, add_up, load, loop, store

#: floats in a vector register
LANES = 16
#: stored vectors that are widened and used at once
VECTORS = 4


class Vectors(NamedTuple):
    """The keys of a cache, or its values, as stored."""

    kind: int  # FP32 to INT4
    width: int  # elements of a vector, D
    nbytes: int  # of a vector
    segments: np.ndarray  # (P, N) int64, addresses


class Slots(NamedTuple):
    """The slots of a cache, and which of them hold tokens."""

    sizes: np.ndarray  # (P, N) int64, of each segment
    heads: np.ndarray  # (H, 3) int64: the part of each head, its place among the heads of the part, and their number
    cached_len: np.ndarray  # (B,) int64, slots in use, the first ones; without elements if all are
    empty: np.ndarray  # (P,) int64, addresses of (B, heads of the part, S) bool, those without a token; 0: none


class Softmax(NamedTuple):
    """How products of queries and keys become probabilities."""

    scale: float  # of the products
    cap: float  # a product x becomes cap * tanh(x / cap); 0: no cap
    sinks: np.ndarray  # (n, G) float32, one more logit of each query head; without elements if there are none


# innermost loops, on addresses


def _at(builder, address, index):
    """The address of float `index` of those at an address."""
    return builder.add(address, builder.mul(index, I64(4)))


def _multiply_add(builder, a, b, total):
    return builder.fadd(builder.fmul(a, b, ("contract",)), total, ("contract",))


@intrinsic
def _address(_, integer):
    return types.voidptr(types.int64), lambda _, builder, __, args: builder.inttoptr(args[0], I8.as_pointer())


@intrinsic
def _dots(_, rows, x, out, width):
    """Write the dot products of VECTORS rows of float32 with x to `out`. All but `width`, a multiple of LANES, are
    addresses."""

    def build(_, builder, __, args):
        rows, x, out, width = args

        def body(n, totals):
            vector = load(builder, _at(builder, x, n), FLOAT, LANES)
            starts = [builder.add(n, builder.mul(width, I64(j))) for j in range(VECTORS)]
            loaded = [load(builder, _at(builder, rows, start), FLOAT, LANES) for start in starts]
            return [_multiply_add(builder, row, vector, total) for row, total in zip(loaded, totals)]

        totals = loop(builder, LANES, width, [_splat(FLOAT, 0.0, LANES)] * VECTORS, body)
        store(builder, add_up(builder, totals), out)

    return types.void(*[types.int64] * 4), build


@intrinsic
def _mix(_, rows, weights, total, width):
    """Add VECTORS rows, each times its weight, to `total`; arguments as in `_dots`."""

    def build(_, builder, __, args):
        rows, weights, total, width = args
        loaded = load(builder, weights, FLOAT, VECTORS)
        spread = [builder.shuffle_vector(loaded, loaded, _splat(I32, j, LANES)) for j in range(VECTORS)]

        def body(n, _):
            target = _at(builder, total, n)
            found = load(builder, target, FLOAT, LANES)
            for j, weight in enumerate(spread):
                start = builder.add(n, builder.mul(width, I64(j)))
                row = load(builder, _at(builder, rows, start), FLOAT, LANES)
                found = _multiply_add(builder, row, weight, found)
            store(builder, found, target)
            return []

        loop(builder, LANES, width, [], body)

    return types.void(*[types.int64] * 4), build


def _widening(nbytes, convert):
    """An intrinsic (source, target, count) that widens `count` elements of `nbytes` each to float32, from one address
    to another. convert(builder, bits, vector type of the floats) -> floats."""

    def build(_, builder, __, args):
        source, target, count = args

        def widen(lanes, begin, size):
            def body(n, _):
                n = builder.add(n, begin)
                start = builder.add(source, builder.mul(n, I64(nbytes)))
                bits = load(builder, start, ir.IntType(8 * nbytes), lanes)
                store(builder, convert(builder, bits, ir.VectorType(FLOAT, lanes)), _at(builder, target, n))
                return []

            with builder.if_then(builder.icmp_unsigned("!=", size, I64(0))):
                loop(builder, lanes, size, [], body)

        whole = builder.and_(count, I64(-LANES))
        widen(LANES, I64(0), whole)
        widen(1, whole, builder.sub(count, whole))

    @intrinsic
    def widen(_, source, target, count):
        return types.void(types.int64, types.int64, types.int64), build

    return widen


def _splat(kind, value, lanes):
    return ir.VectorType(kind, lanes)([value] * lanes)


def _bf16(builder, bits, floats):
    wide = builder.zext(bits, ir.VectorType(I32, floats.count))
    return builder.bitcast(builder.shl(wide, _splat(I32, 16, floats.count)), floats)


def _fp16(builder, bits, floats):
    return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), floats.count)), floats)


_from_fp32 = _widening(4, lambda builder, bits, floats: builder.bitcast(bits, floats))
_from_fp16 = _widening(2, _fp16)
_from_bf16 = _widening(2, _bf16)
_from_int8 = _widening(1, lambda builder, bits, floats: builder.sitofp(bits, floats))
_from_low = _widening(1, lambda builder, bits, to: builder.uitofp(builder.and_(bits, _splat(I8, 15, to.count)), to))
_from_high = _widening(1, lambda builder, bits, to: builder.uitofp(builder.lshr(bits, _splat(I8, 4, to.count)), to))


# vectors


@njit(nogil=True, inline="always")
def _half(address):
    return float_of(carray(_address(address), (1,), np.int16)[0])


@njit(nogil=True)
def _widen(kind, address, nbytes, count, D, rows, width, scales):
    """Widen `count` stored vectors of `nbytes` each to float32, codes without scale and minimum, into rows of `width`
    floats at an address; scales and minima go to `scales` (2, VECTORS)."""
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


@njit(nogil=True, fastmath=SUMS)
def _cap(x, cap):
    for s in range(len(x)):
        e = exp(np.float32(-2) * abs(x[s]) / cap)
        x[s] = np.copysign(cap * (np.float32(1) - e) / (np.float32(1) + e), x[s])


@njit(nogil=True, fastmath=SUMS)
def _softmax(x, sink):
    """Logits become probabilities, as if `sink` were one more of them."""
    most = sink
    for s in range(len(x)):
        most = max(most, x[s])
    total = exp(sink - most)
    for s in range(len(x)):
        x[s] = exp(x[s] - most)
        total += x[s]
    for s in range(len(x)):
        x[s] /= total


@njit(nogil=True)
def _place(heads, h):
    """Where head h of n is: its part, and its place there among all sequences' heads."""
    b = h // len(heads)
    part, place, count = heads[h % len(heads)]
    return part, b * count + place


@njit(nogil=True)
def _logits(keys, sizes, cached_len, at, query, rows, scales, p):
    """Write the dot products of the queries (G, width) with the first `cached_len` keys `at` (part, place), which are
    never in 4 bits, to p (G, cached_len + VECTORS). Buffers: rows (VECTORS, width), scales (2, VECTORS)."""
    part, place = at
    first = 0
    width = rows.shape[1]
    rows_at = rows.ctypes.data
    query_at = query.ctypes.data
    p_at = p.ctypes.data
    for n in range(sizes.shape[1]):
        used = min(sizes[part, n], cached_len - first)
        begin = keys.segments[part, n] + place * sizes[part, n] * keys.nbytes
        for s in range(0, used, VECTORS):
            count = min(VECTORS, used - s)
            _widen(keys.kind, begin + s * keys.nbytes, keys.nbytes, count, keys.width, rows_at, width, scales)
            for g in range(len(query)):
                _dots(rows_at, query_at + 4 * g * width, p_at + g * p.strides[0] + 4 * (first + s), width)
                if keys.kind == INT8:
                    for j in range(count):
                        p[g, first + s + j] *= scales[0, j]
        first += used


@njit(nogil=True)
def _sums(values, sizes, cached_len, at, total, rows, scales, p):
    """Write the sum of the first `cached_len` values `at` (part, place), each times its weight in p, to total (G,
    width). Shapes and buffers as in `_logits`."""
    part, place = at
    first = 0
    width = rows.shape[1]
    weights = np.zeros(VECTORS, np.float32)
    rows_at = rows.ctypes.data
    total_at = total.ctypes.data
    weights_at = weights.ctypes.data
    total[:] = 0
    scales[0] = 1
    scales[1] = 0
    for n in range(sizes.shape[1]):
        used = min(sizes[part, n], cached_len - first)
        begin = values.segments[part, n] + place * sizes[part, n] * values.nbytes
        for s in range(0, used, VECTORS):
            count = min(VECTORS, used - s)
            if count < VECTORS:
                rows[:] = 0
                weights[:] = 0
            _widen(values.kind, begin + s * values.nbytes, values.nbytes, count, values.width, rows_at, width, scales)
            for g in range(len(total)):
                minimum = np.float32(0)
                for j in range(count):
                    weights[j] = p[g, first + s + j] * scales[0, j]
                    minimum += p[g, first + s + j] * scales[1, j]
                _mix(rows_at, weights_at, total_at + 4 * g * width, width)
                if values.kind == INT4:
                    for i in range(values.width):
                        total[g, i] += minimum
        first += used


@njit(nogil=True, cache=True)
def attend(begin, end, cache, softmax, q, context, received):
    """Attention of one query per query head, for the KV heads `begin` to `end` of n.

    Args:
        cache: keys (`Vectors`), values (`Vectors`) and `Slots`; these and `softmax` (`Softmax`) as plain tuples.
        q: (n, G, D) floats, as from `threads.float_array`; context: the same, written.
        received: (P,) int64, addresses of (B, heads of the part, S) float32, to which the attention that each slot
            receives from its G queries is added; 0: not wanted.
    """
    keys = Vectors(*cache[0])
    values = Vectors(*cache[1])
    sizes, heads, cached_len, empty = cache[2]
    softmax = Softmax(*softmax)
    scale = np.float32(softmax.scale)
    cap = np.float32(softmax.cap)
    G, D = q.shape[1:]
    slots = sizes.sum(1)
    most = np.max(cached_len if cached_len.size else slots)
    width = -(-D // LANES) * LANES
    rows = np.zeros((VECTORS, width), np.float32)
    scales = np.empty((2, VECTORS), np.float32)
    query = np.zeros((G, width), np.float32)
    total = np.empty((G, width), np.float32)
    longest = np.empty((G, most + VECTORS), np.float32)
    for h in range(begin, end):
        part, place = _place(heads, h)
        count = cached_len[h // len(heads)] if cached_len.size else slots[part]
        is_empty = carray(_address(empty[part] + place * slots[part]), (count if empty[part] else 0,), np.bool_)
        sums = carray(_address(received[part] + 4 * place * slots[part]), (count if received[part] else 0,), np.float32)
        p = longest[:, : count + VECTORS]
        for g in range(G):
            for i in range(D):
                query[g, i] = float_of(q[h, g, i]) * scale
        _logits(keys, sizes, count, (part, place), query, rows, scales, p)
        for g in range(G):
            if cap:
                _cap(p[g, :count], cap)
            for s in range(len(is_empty)):
                if is_empty[s]:
                    p[g, s] = -np.inf
            _softmax(p[g, :count], softmax.sinks[h, g] if softmax.sinks.size else np.float32(-np.inf))
            for s in range(len(sums)):
                sums[s] += p[g, s]
        _sums(values, sizes, count, (part, place), total, rows, scales, p)
        for g in range(G):
            for i in range(D):
                context[h, g, i] = element(total[g, i], context)


@njit(nogil=True, cache=True)
def free_slots(tokens, sizes, heads, newest, window, slots):
    """Write the slot of each of n heads that the next token takes to slots (n,): an empty one; or that of a token which
    the next query does not see; or the unprotected one of the lowest rank. Of equal ones it is the one with the lowest
    position.

    Args:
        tokens: (3, P) int64, addresses of (B, heads of the part, S): ranks in float32, protected tokens in bool, and
            positions in int32, below 0 for empty slots.
        sizes, heads: as in `Slots`; each part has one segment.
        newest: (B,) int32, position of the newest token.
        window: tokens that the next query sees, itself included; 0: all.
    """
    for h in range(len(slots)):
        part, place = _place(heads, h)
        S = sizes[part, 0]
        first = place * S
        rank = carray(_address(tokens[0, part] + 4 * first), (S,), np.float32)
        stays = carray(_address(tokens[1, part] + first), (S,), np.bool_)
        position = carray(_address(tokens[2, part] + 4 * first), (S,), np.int32)
        begin = max(0, newest[h // len(heads)] + 2 - window) if window else 0
        found = 0
        lowest = np.float32(np.inf)
        for s in range(S):
            each = -np.float32(np.inf) if position[s] < begin else np.float32(np.inf) if stays[s] else rank[s]
            if each < lowest or (each == lowest and position[s] < position[found]):
                lowest = each
                found = s
        slots[h] = found


@njit(nogil=True, cache=True)
def put(fields, nbytes, sizes, heads, slots, new):
    """Write vectors to slots (n,) of n heads.

    Args:
        fields: (F, P, N) int64, where the segments of F fields are, as in `Vectors`: keys, values and the like.
        nbytes: (F,) int64, of a vector of each.
        sizes, heads: as in `Slots`.
        new: (F,) int64, addresses of n vectors of each.

    Raises:
        IndexError: a slot that the cache lacks, when vectors of earlier heads are written already.
    """
    for h in range(len(slots)):
        part, place = _place(heads, h)
        slot = slots[h]
        n = 0
        if slot < 0:
            raise IndexError("slot is negative")
        while n < sizes.shape[1] and slot >= sizes[part, n]:
            slot -= sizes[part, n]
            n += 1
        if n == sizes.shape[1]:
            raise IndexError("slot is beyond the last one")
        for f in range(len(fields)):
            size = nbytes[f]
            target = carray(_address(fields[f, part, n] + (place * sizes[part, n] + slot) * size), (size,), np.uint8)
            source = carray(_address(new[f] + h * size), (size,), np.uint8)
            for i in range(size):
                target[i] = source[i]
