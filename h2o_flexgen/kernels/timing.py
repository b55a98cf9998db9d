"""Time every kernel on this CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.formats import Int4, dtype_name
from h2o_flexgen.kernels import exact, int8
from h2o_flexgen.kernels.operands import Int8Activations, Int8Weight
from h2o_flexgen.kernels.rates import HALF_TYPES, INT4, INT8, ROWS, KernelRates

#: (out, in) of the matrices that are timed: for few rows so large that they come from RAM, as in a model
FEW_ROWS_SHAPE = (4096, 1024)
MANY_ROWS_SHAPE = (1024, 1024)
#: likewise of int8, and how many of them take turns: a single one would stay in the CPU's cache
INT8_SHAPE = (4096, 4096)
INT8_MATRICES = 3
#: from this many rows on the smaller matrix is timed: the CPU, not RAM, is the bottleneck there
MANY_ROWS = 128
#: (heads, queries, head size) of the attention that is timed
ATTENTION_SHAPE = (8, 256, 64)
#: each kernel runs this often, and the fastest run counts; it stops early after this many seconds
ROUNDS = 8
SECONDS_EACH = 0.03
#: a kernel that takes longer than this is not timed with more rows, and keeps its rate
SECONDS_MOST = 0.2

_HALVES = tuple(getattr(torch, name) for name in HALF_TYPES)


@dataclass(frozen=True, eq=False)
class Trial:
    """A kernel that is timed with a number of rows; "attention" with 0."""

    dtype: str
    kernel: str
    rows: int
    call: Callable[[], object]
    flops: int


@torch.no_grad()
def measure() -> KernelRates:
    """Time every kernel on this CPU, in one or two seconds and 0.2 GB of RAM."""
    trials = [*_float_trials(), *_int8_trials(), *_attention_trials()]
    rates = {}
    slow = {}
    for rows in sorted({trial.rows for trial in trials}):
        timed = [trial for trial in trials if trial.rows == rows and (trial.dtype, trial.kernel) not in slow]
        for trial, seconds in _fastest_seconds(timed).items():
            rates[trial] = trial.flops / seconds
            if seconds > SECONDS_MOST:
                slow[trial.dtype, trial.kernel] = rates[trial]
    linear = {}
    attention = {}
    for trial in trials:
        rate = rates[trial] if trial in rates else slow[trial.dtype, trial.kernel]
        if trial.kernel == "attention":
            attention[trial.dtype] = rate
        else:
            linear.setdefault(trial.dtype, {}).setdefault(trial.kernel, {})[trial.rows] = rate
    return KernelRates(linear, attention)


def _fastest_seconds(trials: list[Trial]) -> dict[Trial, float]:
    """Trials take turns, since other programs come and go."""
    taken = {trial: [] for trial in trials}
    for _, (trial, times) in product(range(ROUNDS), taken.items()):
        if sum(times) < SECONDS_EACH:
            start = time.perf_counter()
            trial.call()
            times.append(time.perf_counter() - start)
    return {trial: min(times) for trial, times in taken.items()}


def _float_trials() -> Iterator[Trial]:
    for dtype, few_rows in product((*_HALVES, torch.float32), (True, False)):
        weight = torch.full(FEW_ROWS_SHAPE if few_rows else MANY_ROWS_SHAPE, 0.01, dtype=dtype)
        kernels = {"native": partial(F.linear, weight=weight)}
        if dtype in _HALVES:
            kernels["widened"] = partial(exact.widened, weight=weight)
            if exact.can_pack(dtype):
                kernels["packed"] = partial(exact.packed, weight=exact.pack(weight))
        for rows, (name, kernel) in product(ROWS, kernels.items()):
            if few_rows == (rows < MANY_ROWS):
                x = torch.full((rows, weight.shape[1]), 0.5, dtype=dtype)
                yield Trial(dtype_name(dtype), name, rows, partial(kernel, x), 2 * rows * weight.numel())


def _int8_trials() -> Iterator[Trial]:
    scale = torch.ones(INT8_SHAPE[0])
    matrices = [torch.ones(INT8_SHAPE, dtype=torch.int8) for _ in range(INT8_MATRICES)]
    plain = [Int8Weight(codes, scale) for codes in matrices]
    # native is what others must beat; floats are for where tiles are not
    kernels = [name for name in int8.UNPACKED if int8.KERNELS[name].works or name == "native"]
    weights = {(INT8, name): plain for name in kernels if name != "floats" or "tiled" not in kernels}
    if int8.can_pack():
        weights[INT8, "packed"] = [Int8Weight(int8.pack(codes), scale) for codes in matrices]
    if int8.takes_blocks():
        form = Int4(64)  # takes half the bytes
        raws = [torch.ones(form.nbytes(INT8_SHAPE), dtype=torch.uint8) for _ in range(2 * INT8_MATRICES)]
        weights[INT4, "tiled"] = [form.view(raw, INT8_SHAPE) for raw in raws]
    for rows, ((kind, name), turn) in product(ROWS, weights.items()):
        x = torch.ones(rows, INT8_SHAPE[1], dtype=torch.int8)
        call = partial(_multiply_next, x, cycle(turn), name, torch.empty(rows, INT8_SHAPE[0]))
        yield Trial(kind, name, rows, call, 2 * rows * scale.numel() * x.shape[1])


def _multiply_next(x: Tensor, weights: Iterator[int8.Weight], kernel: str, out: Tensor) -> None:
    int8.multiply(Int8Activations.of(x), [int8.Product(next(weights), None, out)], kernel)


def _attention_trials() -> Iterator[Trial]:
    for dtype in (*_HALVES, torch.float32):
        q = torch.full(ATTENTION_SHAPE, 0.1, dtype=dtype)
        call = partial(torch.bmm, q, q.transpose(1, 2))
        yield Trial(dtype_name(dtype), "attention", 0, call, 2 * q.numel() * q.shape[1])
