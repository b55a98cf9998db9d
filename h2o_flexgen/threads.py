"""Runs compiled loops (`loops.py`) on all cores, or says that there are none."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from platform import machine

import torch
from numpy import uint32
from torch import Tensor

#: elements that are not worth a second thread
SMALL = 1 << 18


def in_threads(work: Callable[[int, int], None], count: int, size: int) -> None:
    """work(begin, end) for parts of range(count), one a thread, if their `size` is worth it."""
    threads = torch.get_num_threads() if size > SMALL else 1
    cuts = [count * n // threads for n in range(threads + 1)]
    jobs = [_pool(threads - 1).submit(work, *ends) for ends in zip(cuts[1:], cuts[2:])]
    work(0, cuts[1])
    for job in jobs:
        job.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads that decode beside the one that asks. They sleep when they wait, unlike those of OpenMP."""
    return ThreadPoolExecutor(threads, "decode")


@cache
def compiled():
    """The compiled loops; None without numba, which follows new versions of Python months later, where it finds no
    folder to keep what it compiles, and on CPUs that do not convert fp16 (those of PCs before 2012)."""
    try:
        from llvmlite.binding import get_host_cpu_features

        if machine() == "x86_64" and not get_host_cpu_features().get("f16c"):
            return None
        from h2o_flexgen import loops
    except (ImportError, RuntimeError):
        return None
    return loops


def float_bits(x: Tensor) -> tuple:
    """Floats on the CPU as compiled loops take them: the bits of fp32 or bf16, and by how many they lack of fp32's."""
    if x.dtype == torch.bfloat16:
        return x.view(torch.uint16).numpy(), uint32(16)
    return x.float().numpy().view(uint32), uint32(0)
