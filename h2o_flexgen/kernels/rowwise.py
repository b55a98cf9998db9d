"""Operations on single rows between matmuls: by torch, or on CPUs in one pass by compiled loops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.compiled import threads
from h2o_flexgen.compiled.threads import float_array, in_threads
from h2o_flexgen.kernels.attention import WIDENED_ELEMENTS
from h2o_flexgen.kernels.cache_loops import by_loops


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x (..., E) (arXiv 1910.07467), with its mean square in fp32. It is rounded to the type of the weight
    before it is multiplied by that: with one in fp32 only the product is rounded."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows)
    if _by_loops(rows, weight):
        arrays = (float_array(rows), float_array(weight), np.float32(eps), float_array(out))
        _each_row(threads.compiled().rowwise.rms_norm, rows, *arrays)
        return out.view(x.shape)
    few = max(1, WIDENED_ELEMENTS[x.device.type] // x.shape[-1])  # rows that are in fp32 at once
    for part, target in zip(rows.split(few), out.split(few)):
        wide = part.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        torch.mul(weight, (wide * scale).to(weight.dtype), out=target)
    return out.view(x.shape)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (N, H, D) with the first elements of each head rotated in pairs, half of them apart, by cos and sin
    (N, 1, pairs) of the same type."""
    out = torch.empty_like(x)
    if x.element_size() < 4 and _by_loops(x, cos, sin):  # in fp32 torch may fuse product and sum, and rounds once
        arrays = map(float_array, (x, cos, sin, out))
        _each_row(threads.compiled().rowwise.rotate, x.flatten(0, 1), *arrays)
        return out
    half = cos.shape[-1]
    dim = 2 * half
    first = x[..., :half]
    second = x[..., half:dim]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:dim]).addcmul_(first, sin)
    out[..., dim:] = x[..., dim:]
    return out


def maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of logits (N, V) the index of the largest, the first among equals, and the log of the sum of
    exponentials, NaN if a logit is: (N,) int64 and (N,) fp32."""
    if not _by_loops(logits):
        wide = logits.float()
        return wide.argmax(-1), wide.logsumexp(-1)
    places = torch.empty(len(logits), dtype=torch.int64)
    sums = torch.empty(len(logits), dtype=torch.float32)
    _each_row(threads.compiled().rowwise.maxima, logits, float_array(logits), places.numpy(), sums.numpy())
    return places, sums


def allowed_maxima(logits: Tensor, allowed: np.ndarray) -> Tensor:
    """For each row of logits (N, V) the index of the largest that is allowed, the first among equals: (N,) int64.
    allowed: (N, words) uint32, a bit for each logit, the lowest one first."""
    if not _by_loops(logits):
        return forbid(logits.float(), allowed).argmax(-1)
    places = torch.empty(len(logits), dtype=torch.int64)
    _each_row(threads.compiled().rowwise.allowed_maxima, logits, float_array(logits), allowed, places.numpy())
    return places


def forbid(logits: Tensor, allowed: np.ndarray) -> Tensor:
    """Logits (N, V) with minus infinity in place of those that are not allowed, as for `allowed_maxima`."""
    bits = np.unpackbits(allowed.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    return logits.masked_fill(torch.from_numpy(bits == 0).to(logits.device), -torch.inf)


def prepare(dtype: torch.dtype) -> None:
    """Compile the loops for a job that computes in `dtype`, or read them from numba's cache."""
    row = torch.ones(1, 1, dtype=dtype)
    rms_norm(row, row[0], 1.0)
    rms_norm(row, row[0].float(), 1.0)
    rotated(row[None], row[None, :, :0], row[None, :, :0])
    maxima(row)
    allowed_maxima(row, np.ones((1, 1), np.uint32))


def _by_loops(*tensors: Tensor) -> bool:
    return all(by_loops(x.device) and x.is_contiguous() for x in tensors)


def _each_row(loop: Callable[..., None], like: Tensor, *arrays) -> None:
    """Run a loop over the rows of a matrix, in all threads."""
    in_threads(lambda begin, end: loop(begin, end, *arrays), len(like), like.numel())
