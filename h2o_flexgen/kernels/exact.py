"""x @ W.T + b in 16 bits on a CPU: the same matmul by several kernels.

native   torch's own `F.linear` in the 16-bit type
widened  through fp32, a slice of W at a time, which stays in the CPU's cache
packed   oneDNN's, on a W that was laid out for it beforehand; such a W has no other kernel

All are exact: 16-bit elements are multiplied and added up in fp32, and rounded once. bf16 through fp16 is no option,
since values may overflow the range of fp16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

#: bytes of weights and rows of tokens in fp32 at once, where matmuls in 16 bits go through fp32
WIDEN_BYTES = 4 << 20
WIDEN_ROWS = 512
#: up to this many rows of x, W is the left operand of the matmul in `widened`
LEFT_ROWS = 256


def widened(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `linear`, through fp32: WIDEN_ROWS rows of x and WIDEN_BYTES of the weight at a time."""
    rows = x.numel() // x.shape[-1]
    out = x.new_empty(rows, len(weight))
    for x_part, out_part in zip(x.reshape(rows, -1).split(WIDEN_ROWS), out.split(WIDEN_ROWS)):
        _widen(out_part, x_part, weight, bias)
    return out.view(*x.shape[:-1], -1)


def _widen(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    weight_left = len(x) <= LEFT_ROWS
    fp32 = {"dtype": torch.float32, "device": x.device}
    x = torch.empty(x.shape[1], len(x), **fp32).copy_(x.t()) if weight_left else x.float()
    step = max(1, WIDEN_BYTES // (4 * weight.shape[1]))
    buffer = torch.empty(min(step, len(weight)), weight.shape[1], **fp32)
    for begin in range(0, len(weight), step):
        end = min(begin + step, len(weight))
        w = buffer[: end - begin].copy_(weight[begin:end])
        y = torch.mm(w, x).t() if weight_left else torch.mm(x, w.t())
        out[:, begin:end] = y if bias is None else y.add_(bias[begin:end])


def packed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `linear`, for a weight from `pack`."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def pack(weight: Tensor) -> Tensor:
    """A 16-bit matrix (O, I) in RAM in oneDNN's layout, for `linear` only; as many bytes."""
    return torch.ops.mkldnn._reorder_linear_weight(weight)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether `pack` works here in this type: its operators belong to torch's compiler and are not public, and oneDNN
    has fp16 on few CPUs."""
    width = 48
    # small integers, so that every order of adding up is exact
    x, weight = (torch.arange(n * width).remainder(7).to(dtype).view(n, width) for n in (33, 70))
    bias = torch.arange(len(weight)).to(dtype)
    try:
        return torch.equal(packed(x, pack(weight), bias), F.linear(x, weight, bias))
    except (AttributeError, RuntimeError):
        return False


#: for matrices that are not packed
KERNELS: dict[str, Callable] = {"native": F.linear, "widened": widened}
