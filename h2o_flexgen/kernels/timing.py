"""Time every kernel on this CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, product

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.formats import Int4, dtype_name
from h2o_flexgen.kernels import exact, int8
from h2o_flexgen.kernels.int8 import Int8Weight
from h2o_flexgen.kernels.rates import HALF_TYPES, INT4, INT8, ROWS, KernelRates

#: (out, in) of the matrices that are timed: with few rows so large that they come from RAM, as those of a model do
FEW_ROWS_SHAPE = (4096, 1024)
MANY_ROWS_SHAPE = (1024, 1024)
#: likewise of int8, and how many of them take turns: one alone would stay in the CPU's cache
INT8_SHAPE = (4096, 4096)
INT8_MATRICES = 3
#: rows from which on the smaller matrix is timed: the CPU, not RAM, decides there
MANY_ROWS = 128
#: (heads, queries, head size) of the attention that is timed
ATTENTION_SHAPE = (8, 256, 64)
#: times that each kernel runs, of which the fastest counts; one that has taken so long does not run again
ROUNDS = 8
SECONDS_EACH = 0.03
#: one that takes longer than this is not timed with more rows, and keeps its rate
SECONDS_MOST = 0.2


@torch.no_grad()
def measure() -> KernelRates:
    """Time every kernel on this CPU, in one or two seconds and 0.2 GB of RAM."""
    calls = _calls()
    found = {}
    slow = {}
    for rows in sorted({rows for _, _, rows in calls}):
        keys = [key for key in calls if key[2] == rows]
        taken: dict[tuple, list[float]] = {key: [] for key in keys if key[:2] not in slow}
        for _, (key, times) in product(range(ROUNDS), taken.items()):  # in turns, since other programs come and go
            if sum(times) < SECONDS_EACH:
                start = time.perf_counter()
                calls[key][0]()
                times.append(time.perf_counter() - start)
        for key in keys:
            found[key] = calls[key][1] / min(taken[key]) if key in taken else slow[key[:2]]
            if key in taken and min(taken[key]) > SECONDS_MOST:
                slow[key[:2]] = found[key]
    linear = {}
    attention = {}
    for (dtype, kernel, rows), rate in found.items():
        if kernel == "attention":
            attention[dtype] = rate
        else:
            linear.setdefault(dtype, {}).setdefault(kernel, {})[rows] = rate
    return KernelRates(linear, attention)


def _multiply_next(x: Tensor, weights: Iterator[int8.Weight], kernel: str, out: Tensor) -> None:
    int8.multiply(int8.Rows.of(x), [(next(weights), None, out)], kernel)


def _calls() -> dict[tuple, tuple[Callable, int]]:
    """By (dtype, kernel, rows): calls and their flops."""
    calls = {}
    halves = [getattr(torch, name) for name in HALF_TYPES]
    for dtype, few in product((*halves, torch.float32), (True, False)):
        weight = torch.full(FEW_ROWS_SHAPE if few else MANY_ROWS_SHAPE, 0.01, dtype=dtype)
        kernels = {"native": partial(F.linear, weight=weight)}
        if dtype in halves:
            kernels["widened"] = partial(exact.widened, weight=weight)
            if exact.can_pack(dtype):
                kernels["packed"] = partial(exact.packed, weight=exact.pack(weight))
        for rows, (name, kernel) in product(ROWS, kernels.items()):
            if few == (rows < MANY_ROWS):
                x = torch.full((rows, weight.shape[1]), 0.5, dtype=dtype)
                calls[dtype_name(dtype), name, rows] = partial(kernel, x), 2 * rows * weight.numel()
    matrices = [torch.ones(INT8_SHAPE, dtype=torch.int8) for _ in range(INT8_MATRICES)]
    # native is what others must beat; floats are for where tiles are not
    kernels = [name for name in int8.KERNELS if int8.is_exact(name) or name == "native"]
    scale = torch.ones(INT8_SHAPE[0])
    eights = [Int8Weight(codes, scale) for codes in matrices]
    weights = {(INT8, name): eights for name in kernels if name != "floats" or "tiled" not in kernels}
    if int8.can_pack():
        weights[INT8, "packed"] = [Int8Weight(int8.pack(codes), scale) for codes in matrices]
    if int8.takes_blocks():  # half as large
        form, count = Int4(64), 2 * INT8_MATRICES
        raws = [torch.ones(form.nbytes(INT8_SHAPE), dtype=torch.uint8) for _ in range(count)]
        weights[INT4, "tiled"] = [form.view(raw, INT8_SHAPE) for raw in raws]
    for rows, ((kind, name), turn) in product(ROWS, weights.items()):
        x = torch.ones(rows, INT8_SHAPE[1], dtype=torch.int8)
        out = torch.empty(rows, INT8_SHAPE[0])
        calls[kind, name, rows] = partial(_multiply_next, x, cycle(turn), name, out), 2 * rows * matrices[0].numel()
    for dtype in (*halves, torch.float32):
        q = torch.full(ATTENTION_SHAPE, 0.1, dtype=dtype)
        call = partial(torch.bmm, q, q.transpose(1, 2))
        calls[dtype_name(dtype), "attention", 0] = call, 2 * q.numel() * q.shape[1]
    return calls
