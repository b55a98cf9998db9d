"""Operations on each row of a matrix between matmuls, in one pass over it where torch needs five."""

from __future__ import annotations

import numpy as np
from numba import njit

from h2o_flexgen.compiled.floats import SUMS, element, exp, float_of


@njit(nogil=True, cache=True, fastmath=SUMS)
def rms_norm(begin, end, x, weight, eps, out):
    """Write RMSNorm of rows `begin` to `end` of x (N, E), floats, to `out`, rounded to the type of the weight (E,)
    before it is multiplied by that, as transformers does."""
    for r in range(begin, end):
        row = x[r]
        target = out[r]
        total = np.float32(0)
        for i in range(len(row)):
            total += float_of(row[i]) * float_of(row[i])
        scale = np.float32(1) / np.sqrt(total / np.float32(len(row)) + eps)
        for i in range(len(row)):
            target[i] = element(float_of(element(float_of(row[i]) * scale, weight)) * float_of(weight[i]), out)


@njit(nogil=True, cache=True)
def rotate(begin, end, x, cos, sin, out):
    """Write heads `begin` to `end` of x (N, H, D), floats, to `out`, with the first elements of each head rotated in
    pairs, half of them apart, by cos and sin (N, 1, pairs). The first product is rounded before the second is added."""
    (heads, dim) = x.shape[1:]
    half = cos.shape[2]
    for n in range(begin, end):
        row = x[n // heads, n % heads]
        target = out[n // heads, n % heads]
        c = cos[n // heads, 0]
        s = sin[n // heads, 0]
        for i in range(half):
            a = float_of(row[i])
            b = float_of(row[half + i])
            first = float_of(element(a * float_of(c[i]), out))
            second = float_of(element(b * float_of(c[i]), out))
            target[i] = element(first - b * float_of(s[i]), out)
            target[half + i] = element(second + a * float_of(s[i]), out)
        for i in range(2 * half, dim):
            target[i] = row[i]


@njit(nogil=True, cache=True, fastmath=SUMS)
def maxima(begin, end, logits, tokens, sums):
    """Write argmax (of equal logits the first) and logsumexp of rows `begin` to `end` of logits (N, V), floats, to
    tokens (N,) int64 and sums (N,) float32; the sum is NaN if a logit is."""
    for r in range(begin, end):
        row = logits[r]
        most = np.float32(-np.inf)
        total = np.float32(0)
        n = 0
        for i in range(len(row)):
            most = max(most, float_of(row[i]))
        for i in range(len(row)):
            total += exp(float_of(row[i]) - most)
        while n < len(row) - 1 and float_of(row[n]) != most:
            n += 1
        tokens[r] = n
        sums[r] = most + np.log(total)


@njit(nogil=True, cache=True)
def allowed_maxima(begin, end, logits, allowed, tokens):
    """Write the index of the largest logit whose bit is set, of equal ones the first, of rows `begin` to `end` of
    logits (N, V), floats, to tokens (N,) int64. allowed: (N, words) uint32, a bit for each logit, the lowest first."""
    for r in range(begin, end):
        row = logits[r]
        most = np.float32(-np.inf)
        found = 0
        for w in range(allowed.shape[1]):
            word = allowed[r, w]
            if word == 0:
                continue
            for n in range(w * 32, min(w * 32 + 32, len(row))):
                if word >> np.uint32(n % 32) & np.uint32(1) and float_of(row[n]) > most:
                    most = float_of(row[n])
                    found = n
        tokens[r] = found
