"""What is done to each row of a matrix between matmuls, in one pass over it instead of torch's five."""

from __future__ import annotations

import numpy as np
from numba import njit

from h2o_flexgen.compiled.floats import element, exp, float_of

#: sums in another order, but NaN stays NaN
_SUMS = {"reassoc", "contract", "nsz"}


@njit(nogil=True, cache=True, fastmath=_SUMS)
def rms_norm(begin, end, x, weight, eps, out):
    """RMSNorm of rows (N, E) floats into `out`, rounded before the weight (E,) as transformers does."""
    for r in range(begin, end):
        row = x[r]
        target = out[r]
        total = np.float32(0)
        for i in range(len(row)):
            total += float_of(row[i]) * float_of(row[i])
        scale = np.float32(1) / np.sqrt(total / np.float32(len(row)) + eps)
        for i in range(len(row)):
            target[i] = element(float_of(element(float_of(row[i]) * scale, out)) * float_of(weight[i]), out)


@njit(nogil=True, cache=True, fastmath=_SUMS)
def maxima(begin, end, logits, tokens, sums):
    """Of rows (N, V) the place of the largest, of equal ones the first, and the logarithm of the sum of their
    exponentials, NaN if one is; into int64 and float32 (N,)."""
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
