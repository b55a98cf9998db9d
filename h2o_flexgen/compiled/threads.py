"""Runs compiled loops on all cores, or says that there are none."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from platform import machine

import numpy as np
import torch
from torch import Tensor

#: elements that are not worth a second thread, and parts for each thread at most
SMALL = 1 << 18
PARTS = 4


def in_threads(work: Callable[[int, int], None], count: int, size: int) -> None:
    """work(begin, end) for parts of range(count), by all threads if their `size` is worth it. There are more parts than
    threads, each of which takes the next one when it is done: cores are not all as fast, or as free."""
    threads = torch.get_num_threads() if size > SMALL else 1
    parts = max(threads, min(PARTS * threads, size // SMALL)) if threads > 1 else 1
    cuts = [count * n // parts for n in range(parts + 1)]
    left = iter(list(zip(cuts, cuts[1:])))  # which gives each part to one thread, as long as there is a GIL

    def take() -> None:
        for ends in left:
            work(*ends)

    jobs = [_pool(threads - 1).submit(take) for _ in range(threads - 1)]
    try:
        take()
    finally:
        for _ in left:  # after an error nobody begins another part
            pass
        # a thread that sleeps wakes up too late for little work
        begun = [job for job in jobs if not job.cancel()]
        wait(begun)
    for job in begun:
        job.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads that decode beside the one that asks. They sleep when they wait, unlike those of OpenMP."""
    return ThreadPoolExecutor(threads, "decode")


@cache
def compiled():
    """The package `loops` with all its modules; None without numba, which follows new versions of Python months later,
    where it finds no folder to keep what it compiles, and on CPUs that do not convert fp16 (those of PCs before
    2012)."""
    try:
        from llvmlite.binding import get_host_cpu_features

        if machine() == "x86_64" and not get_host_cpu_features().get("f16c"):
            return None
        from h2o_flexgen import compiled
        from h2o_flexgen.compiled import attention, codes, rowwise, tiles, tiles4  # noqa: F401, `compiled` has them from now on
    except (ImportError, RuntimeError):
        return None
    return compiled


def float_array(x: Tensor) -> np.ndarray:
    """Floats on the CPU as compiled loops take them, in the same memory: fp16 as their bits in int16, bf16 as theirs in
    uint16, fp32 and fp64 as they are."""
    bits = {torch.float16: torch.int16, torch.bfloat16: torch.uint16}
    return x.view(bits.get(x.dtype, x.dtype)).numpy()
