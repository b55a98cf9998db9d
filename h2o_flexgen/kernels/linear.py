"""x @ W.T + b in 16 bits on a CPU: the same matmul by several kernels, the fastest of which is chosen by measuring.

native   torch's own `F.linear` in the 16-bit type
widened  through fp32, a slice of W at a time, which stays in the CPU's cache
packed   oneDNN's, on a W that was laid out for it beforehand; such a W has no other kernel

All are exact: products of 16-bit elements are added up in fp32 and rounded once. bf16 through fp16 is not among them:
its range is too small for bf16, so a value may overflow. fp32, and everything on CUDA, is always `F.linear`.

What processors say about themselves does not tell which kernel is fastest: some have bf16 instructions with which
`F.linear` is slower than in fp32. So each kernel is timed, once in a process or, kept with the profile, on a machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.kernels.rates import HALF_TYPES, ROWS, KernelRates
from h2o_flexgen.sizes import WIDEN_BYTES, WIDEN_ROWS

#: `widened` has W, not x, as the left operand of its matmul up to so many rows
LEFT_ROWS = 256
#: (out, in) of the matrices that are timed: with few rows so large that they come from RAM, as those of a model do
FEW_ROWS_SHAPE, MANY_ROWS_SHAPE = (4096, 1024), (1024, 1024)
#: rows from which on the smaller matrix is timed: the CPU, not RAM, decides there
MANY_ROWS = 128
#: (heads, queries, head size) of the attention that is timed
ATTENTION_SHAPE = (8, 256, 64)
#: times that each kernel runs
ROUNDS = 5
#: they run again while one turns out so many times faster than before, which means that other programs are in the way
IMPROVED = 1.25
#: but not for longer than this, once each has run twice
MOST_SECONDS = 1.0
#: a kernel so many times slower than another, which takes so long, is not timed again
HOPELESS = 3
LONG_SECONDS = 0.02

_HALVES = tuple(getattr(torch, name) for name in HALF_TYPES)
_rates: KernelRates | None = None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` by the fastest kernel.

    Args:
        x: (..., I); weight: (O, I), as it is or from `pack`; bias: (O,). All of one dtype.

    Returns:
        (..., O), contiguous.
    """
    if weight.is_mkldnn:
        return packed(x, weight, bias)
    if x.dtype not in _HALVES or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    return KERNELS[_chosen(x.dtype, x.numel() // x.shape[-1])](x, weight, bias)


def is_slow(x: Tensor) -> bool:
    """Whether attention over tensors like x is better computed in fp32."""
    return x.device.type == "cpu" and x.dtype in _HALVES and rates().is_slow(dtype_name(x.dtype))


def packs(dtype: torch.dtype) -> bool:
    """Whether matrices of this type that stay in RAM should go through `pack`."""
    return dtype in _HALVES and rates().packs(dtype_name(dtype)) and can_pack(dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


# the kernels


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
    """As `linear`, of a weight from `pack`."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def pack(weight: Tensor) -> Tensor:
    """A 16-bit matrix (O, I) in RAM as oneDNN wants it; good for `linear` only. Holds as many bytes."""
    return torch.ops.mkldnn._reorder_linear_weight(weight)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether `pack` works here in this type: its operators are those of torch's compiler, not public ones, and oneDNN
    has fp16 on few CPUs."""
    try:
        for rows, out, width in ((1, 64, 64), (33, 70, 48), (3, 5, 7)):
            # small integers, so that every order of adding up is exact; in an order that shows
            x, weight = (torch.arange(n * width).remainder(7).to(dtype).view(n, width) for n in (rows, out))
            bias = torch.arange(out).to(dtype)
            if not torch.equal(packed(x, pack(weight), bias), F.linear(x, weight, bias)):
                return False
        return True
    except (AttributeError, RuntimeError):
        return False


#: of matrices that are not packed
KERNELS: dict[str, Callable] = {"native": F.linear, "widened": widened}


# the choice


def use(rates: KernelRates | None) -> None:
    """Choose kernels by these rates from now on; None: measure at the next use."""
    global _rates
    _rates = rates
    _chosen.cache_clear()


def are_known() -> bool:
    """Whether rates were given or measured."""
    return _rates is not None


def rates() -> KernelRates:
    """The rates that kernels are chosen by, measured now if there are none yet."""
    if _rates is None:
        use(measure())
    return _rates


@lru_cache(maxsize=4096)
def _chosen(dtype: torch.dtype, rows: int) -> str:
    return rates().kernel(dtype_name(dtype), rows)


@torch.no_grad()
def measure() -> KernelRates:
    """Time every kernel on this CPU, in a fraction of a second and 0.1 GB of RAM."""
    cases = _cases()
    linear, attention = {}, {}
    for key, seconds in _least_seconds({key: call for key, (call, _) in cases.items()}).items():
        (dtype, kernel, rows), rate = key, cases[key][1] / seconds
        if kernel == "attention":
            attention[dtype] = rate
        else:
            linear.setdefault(dtype, {}).setdefault(kernel, {})[rows] = rate
    return KernelRates(linear, attention)


def _least_seconds(calls: dict[tuple, Callable]) -> dict[tuple, float]:
    """Of each call, which all take turns: other programs can only make one longer. Those whose keys end alike are
    compared with each other, and a hopeless one runs once."""
    least: dict[tuple, float] = {}
    turn, improved, end = 0, True, time.perf_counter() + MOST_SECONDS
    while turn < 2 or (time.perf_counter() < end and (turn < ROUNDS or improved)):
        before = dict(least)
        for key, call in calls.items():
            best = min((seconds for other, seconds in least.items() if other[-1] == key[-1]), default=0.0)
            if turn and least[key] > max(LONG_SECONDS, HOPELESS * best):
                continue
            start = time.perf_counter()
            call()
            least[key] = min(time.perf_counter() - start, least.get(key, float("inf")))
        improved = turn == 0 or any(before[key] > IMPROVED * least[key] for key in calls)
        turn += 1
    return least


def _cases() -> dict[tuple[str, str, int], tuple[Callable, int]]:
    """{(dtype, kernel, rows): (call, flops)}; cases that differ in dtype and kernel only do the same work."""
    cases = {}
    for shape, rows_of_shape in (
        (FEW_ROWS_SHAPE, [n for n in ROWS if n < MANY_ROWS]),
        (MANY_ROWS_SHAPE, [n for n in ROWS if n >= MANY_ROWS]),
    ):
        for dtype in (*_HALVES, torch.float32):
            weight = torch.empty(shape, dtype=dtype).fill_(0.01)
            kernels = dict(KERNELS) if dtype in _HALVES else {"native": F.linear}
            operands = dict.fromkeys(kernels, weight)
            if dtype in _HALVES and can_pack(dtype):
                kernels["packed"], operands["packed"] = packed, pack(weight)
            for rows in rows_of_shape:
                x = torch.empty(rows, shape[1], dtype=dtype).fill_(0.5)
                for name, kernel in kernels.items():
                    flops = 2 * rows * weight.numel()
                    cases[dtype_name(dtype), name, rows] = (_call(kernel, x, operands[name]), flops)
    heads, queries, width = ATTENTION_SHAPE
    for dtype in (*_HALVES, torch.float32):
        q = torch.empty(ATTENTION_SHAPE, dtype=dtype).fill_(0.1)
        flops = 2 * heads * queries * queries * width
        cases[dtype_name(dtype), "attention", 0] = (_call(torch.bmm, q, q.transpose(1, 2)), flops)
    return cases


def _call(function: Callable, *operands: Tensor) -> Callable[[], Tensor]:
    return lambda: function(*operands)
