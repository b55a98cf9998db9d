"""The two rates that bound a decode step: disk reads and matmuls."""

from __future__ import annotations

import time
from functools import partial
from math import prod
from pathlib import Path
from statistics import median

import torch

from h2o_flexgen.formats import Format
from h2o_flexgen.kernels.int8 import Product, multiply
from h2o_flexgen.kernels.linear import linear, rates
from h2o_flexgen.kernels.operands import Grouped, Int8Activations, Int8Weight
from h2o_flexgen.kernels.rates import INT8
from h2o_flexgen.machine.device import as_numpy, open_device
from h2o_flexgen.storage.disk import DiskIO, File, wait

REQUEST = 64 << 20
MAX_BYTES = 2 << 30
SECONDS = 3.0


def disk_rate(path: Path) -> float:
    """Bytes per second at which the engine's reader reads a file, past the page cache and from the start again if it is
    short. Two requests are in flight, so that the disk never idles."""
    io = DiskIO()
    file = File(path)
    request = min(REQUEST, file.size >> 12 << 12)
    buffers = [as_numpy(open_device("cpu").buffer(request)) for _ in range(2)]
    count = 0
    pending = []
    begin = time.perf_counter()
    while count * request < MAX_BYTES and time.perf_counter() - begin < SECONDS:
        if len(pending) == 2:
            wait(pending.pop(0))
        pending.append(io.read(file, buffers[count % 2], count % (file.size // request) * request, True))
        count += 1
    for reads in pending:
        wait(reads)
    seconds = time.perf_counter() - begin
    io.close()
    file.close()
    return count * request / seconds


def matmul_rate(shapes: list[tuple[int, int]], dtype: torch.dtype | Format, rows: int, groups: int = 1) -> float:
    """Operations per second on the CPU of back-to-back matmuls of `rows` rows with matrices of these (out, in) shapes.
    With torch.int8 the fastest kernel multiplies codes, with a format of blocks the loops that read them as stored, in
    `groups` with rows of their own; quantising the activations is not timed."""
    if dtype == torch.int8 or isinstance(dtype, Format):
        kernel = rates().kernel(INT8, rows)
        weights = [_int8_weight(shape, dtype, rows, groups) for shape in shapes]
        rows *= groups
        inputs = [Int8Activations.of(torch.ones(rows, width, dtype=torch.int8)) for _, width in shapes]
        outs = [torch.empty(rows, out) for out, _ in shapes]
        calls = [partial(multiply, x, [Product(w, None, out)], kernel) for x, w, out in zip(inputs, weights, outs)]
    else:
        calls = [partial(linear, torch.randn(rows, w[1], dtype=dtype), torch.randn(w, dtype=dtype)) for w in shapes]
    times: list[float] = []
    with torch.inference_mode():
        while len(times) < 16 or sum(times) < SECONDS:
            begin = time.perf_counter()
            for call in calls:
                call()
            times.append(time.perf_counter() - begin)
    return 2 * rows * sum(map(prod, shapes)) / median(times)


def _int8_weight(shape: tuple[int, int], dtype: torch.dtype | Format, rows: int, groups: int) -> Int8Weight | Grouped:
    if dtype == torch.int8:
        return Int8Weight(torch.ones(shape, dtype=dtype), torch.ones(shape[0]))
    raws = [torch.ones(dtype.nbytes(shape), dtype=torch.uint8) for _ in range(groups)]
    return Grouped([dtype.view(raw, shape) for raw in raws], [rows] * groups)
