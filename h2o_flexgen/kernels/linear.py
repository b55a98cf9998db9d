"""Products of 16-bit numbers on processors.

Those with bf16 instructions get matrices that stay in RAM as oneDNN's products want them, which saves it laying them
out for every product: a third of the time with few rows. Those without are slow in torch: their products run in
float32, a part of the numbers at a time, whose copies stay in the processor's cache."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.sizes import WIDEN_BYTES, WIDEN_ROWS

#: up to so many rows torch's own products in 16 bits are faster; up to so many it pays to multiply from the left
FEWEST, FEW = 7, 256


@cache
def has_bf16() -> bool:
    """Whether this processor multiplies bf16."""
    try:
        with open("/proc/cpuinfo") as f:
            flags = next((line for line in f if line.startswith(("flags", "Features"))), "").split()
    except OSError:
        return False
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))


def is_slow(x: Tensor) -> bool:
    """Whether products of such numbers are slow where they are."""
    return x.device.type == "cpu" and (x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and not has_bf16()))


@cache
def can_pack() -> bool:
    """Whether `pack` works here: the operators are those that torch's own compiler uses, not public ones."""
    if not has_bf16():
        return False
    try:
        for rows, out, into in ((1, 64, 64), (33, 70, 48), (3, 5, 7)):
            # numbers small enough that bf16 products of them are exact, in an order that shows
            x, weight = (torch.arange(n * into).remainder(7).bfloat16().view(n, into) for n in (rows, out))
            bias = torch.arange(out).bfloat16()
            if not torch.equal(linear(x, pack(weight), bias), F.linear(x, weight, bias)):
                return False
        return True
    except (AttributeError, RuntimeError):
        return False


def pack(weight: Tensor) -> Tensor:
    """A bf16 matrix (O, I) as `linear` multiplies with it fastest; good for nothing else."""
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: x (..., I), weight (O, I), as it is or packed, bias (O,) -> (..., O)."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    rows = x.numel() // x.shape[-1]
    if rows <= FEWEST or not is_slow(x):
        return F.linear(x, weight, bias)
    out = x.new_empty(rows, len(weight))
    for some, into in zip(x.reshape(rows, -1).split(WIDEN_ROWS), out.split(WIDEN_ROWS)):
        _widened(into, some, weight, bias)
    return out.view(*x.shape[:-1], -1)


def _widened(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    few = len(x) <= FEW
    wide = {"dtype": torch.float32, "device": x.device}
    x = torch.empty(x.shape[1], len(x), **wide).copy_(x.t()) if few else x.float()
    part = max(1, WIDEN_BYTES // (4 * weight.shape[1]))
    buffer = torch.empty(min(part, len(weight)), weight.shape[1], **wide)
    for begin in range(0, len(weight), part):
        end = min(begin + part, len(weight))
        w = buffer[: end - begin].copy_(weight[begin:end])
        product = torch.mm(w, x).t() if few else torch.mm(x, w.t())
        out[:, begin:end] = product if bias is None else product.add_(bias[begin:end])
