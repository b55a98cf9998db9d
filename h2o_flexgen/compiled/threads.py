"""Compiled loops on all cores, where numba is available."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from platform import machine
from threading import Barrier

import numpy as np
import torch
from torch import Tensor

#: work on fewer elements is not worth a second thread
SMALL = 1 << 18
#: parts per thread at most
PARTS = 4


def in_threads(work: Callable[[int, int], None], count: int, size: int) -> None:
    """Call work(begin, end) for parts of range(count), on all threads if `size`, its elements, is worth it. There are
    more parts than threads, and a thread takes the next one when it is done: cores differ in speed and load."""
    threads = torch.get_num_threads() if size > SMALL else 1
    if threads == 1:
        work(0, count)
        return
    parts = max(threads, min(PARTS * threads, size // SMALL))
    cuts = [count * n // parts for n in range(parts + 1)]
    left = iter(list(zip(cuts, cuts[1:])))  # under the GIL no two threads get the same part

    def take() -> None:
        for ends in left:
            work(*ends)

    jobs = [_pool(threads - 1).submit(take) for _ in range(threads - 1)]
    try:
        take()
    finally:
        for _ in left:  # after an error no thread begins another part
            pass
        # with little work, all of it is done before a thread wakes up
        started = [job for job in jobs if not job.cancel()]
        wait(started)
    for job in started:
        job.result()


def in_order(works: Iterable[Callable[[], Tensor]], ahead: int) -> Iterator[Tensor]:
    """The results of functions, in order. Several run at the same time, each in a single thread, torch's operators
    included; no more than `ahead` are computed before the first of them is taken."""
    pool = _singles(torch.get_num_threads())
    jobs: deque[Future] = deque()
    try:
        for work in works:
            if len(jobs) == ahead:
                yield jobs.popleft().result()
            jobs.append(pool.submit(_inferred, work))
        while jobs:
            yield jobs.popleft().result()
    finally:
        wait(jobs)


@torch.inference_mode()
def _inferred(work: Callable[[], Tensor]) -> Tensor:
    return work()


@cache
def _singles(threads: int) -> ThreadPoolExecutor:
    """Threads in which torch's operators use no other ones. The number belongs to the thread that sets it, but threads
    that begin later take over the last one: it is set back."""
    pool = ThreadPoolExecutor(threads, "single", initializer=_use_one_thread)
    all_run = Barrier(threads + 1)
    jobs = [pool.submit(all_run.wait) for _ in range(threads)]
    all_run.wait()
    wait(jobs)
    torch.set_num_threads(threads)
    return pool


def _use_one_thread() -> None:
    """Torch takes the number of all threads when one of them first asks for it: later than this, and it would start
    threads of its own here. With more of them than cores OpenMP's no longer poll, so that a step takes a fifth more."""
    torch.get_num_threads()
    torch.set_num_threads(1)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads that help the calling one. They sleep while they wait, unlike OpenMP's."""
    return ThreadPoolExecutor(threads, "decode")


@cache
def compiled():
    """This package with all its modules. None without numba (which supports new versions of Python months after their
    release), where numba finds no folder for its cache, and on CPUs without fp16 conversions (PCs before 2012)."""
    try:
        from llvmlite.binding import get_host_cpu_features

        if machine() == "x86_64" and not get_host_cpu_features().get("f16c"):
            return None
        from h2o_flexgen import compiled
        from h2o_flexgen.compiled import attention, block_rows, block_tiles, blocks, codes, rowwise, tiles  # noqa: F401
    except (ImportError, RuntimeError):
        return None
    return compiled


def float_array(x: Tensor) -> np.ndarray:
    """Floats on the CPU as compiled loops take them, in the same memory: bits of fp16 in int16, bits of bf16 in uint16,
    fp32 and fp64 unchanged."""
    bits = {torch.float16: torch.int16, torch.bfloat16: torch.uint16}
    return x.view(bits.get(x.dtype, x.dtype)).numpy()
