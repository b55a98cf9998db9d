"""Attention over a KV cache as it is stored: in floats, or in codes of 8 and 4 bits."""

from __future__ import annotations

import numpy as np
from numba import njit

from h2o_flexgen.loops.floats import float_of

#: sums in another order, but NaN stays NaN
_SUMS = {"reassoc", "contract", "nsz"}


@njit(nogil=True, cache=True, fastmath=_SUMS)
def dots(keys, q, out):
    """Queries times keys, for n heads with S slots, G queries of each.

    Args:
        keys: (n, S, D) floats; q: (n, G, D) float32; out: (n, G, S) float32.
    """
    for h in range(q.shape[0]):
        for s in range(keys.shape[1]):
            key = keys[h, s]
            for g in range(q.shape[1]):
                query, total = q[h, g], np.float32(0)
                for i in range(len(query)):
                    total += float_of(key[i]) * query[i]
                out[h, g, s] = total


@njit(nogil=True, cache=True, fastmath=_SUMS)
def mix(values, p, out):
    """Values (n, S, D) floats, summed with the weights p (n, G, S) float32 into out (n, G, D) float32."""
    out[:] = 0
    for h in range(p.shape[0]):
        for s in range(values.shape[1]):
            value = values[h, s]
            for g in range(p.shape[1]):
                weight, total = p[h, g, s], out[h, g]
                for i in range(len(total)):
                    total[i] += float_of(value[i]) * weight


@njit(nogil=True, cache=True, fastmath=_SUMS)
def dots8(halves, codes, q, out):
    """As `dots`, of keys in 8 bits.

    Args:
        halves: (n, S, W / 2) fp16: each vector, whose scale in fp16 comes first; codes: (n, S, W) int8, the same.
    """
    for h in range(q.shape[0]):
        for s in range(codes.shape[1]):
            c, scale = codes[h, s, 2:], float_of(halves[h, s, 0])
            for g in range(q.shape[1]):
                query, total = q[h, g], np.float32(0)
                for i in range(query.shape[0]):
                    total += np.float32(c[i]) * query[i]
                out[h, g, s] = total * scale


@njit(nogil=True, cache=True, fastmath=_SUMS)
def mix8(halves, codes, p, out):
    """As `mix`, of values in 8 bits, as `dots8` has keys."""
    out[:] = 0
    for h in range(p.shape[0]):
        for s in range(codes.shape[1]):
            c, scale = codes[h, s, 2:], float_of(halves[h, s, 0])
            for g in range(p.shape[1]):
                weight, total = p[h, g, s] * scale, out[h, g]
                for i in range(total.shape[0]):
                    total[i] += np.float32(c[i]) * weight


@njit(nogil=True, cache=True, fastmath=_SUMS)
def mix4(halves, codes, p, out):
    """The same of values in 4 bits, `codes` uint8: scale and minimum in fp16, then the codes, of which the first half
    are the lower ones."""
    out[:] = 0
    half = out.shape[2] // 2
    for h in range(p.shape[0]):
        for s in range(codes.shape[1]):
            c, scale, least = codes[h, s, 4:], float_of(halves[h, s, 0]), float_of(halves[h, s, 1])
            for g in range(p.shape[1]):
                weight, start = p[h, g, s] * scale, p[h, g, s] * least
                low, high = out[h, g, :half], out[h, g, half:]
                for i in range(low.shape[0]):
                    low[i] += np.float32(c[i] & np.uint8(15)) * weight + start
                for i in range(high.shape[0]):
                    high[i] += np.float32(c[i] >> np.uint8(4)) * weight + start
