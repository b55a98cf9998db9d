"""Time the links between disk, host and device, with the engine's own transfers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.machine.device import Device, as_numpy, copy, finish
from h2o_flexgen.machine.profile import LINKS, Link
from h2o_flexgen.profiling.compute import Scale, layer_call, shapes_with_room
from h2o_flexgen.storage.disk import DiskIO, OffloadFolder, requests, wait
from h2o_flexgen.storage.queues import TransferQueue

#: how long small transfers are repeated
SMALL_SECONDS = 0.2
#: rows of the matmuls that run beside transfers
COMPUTE_ROWS = 32


class Times(NamedTuple):
    """Seconds per byte of large transfers, or per small transfer."""

    idle: float  # while nothing else runs
    busy: float  # beside compute
    lost: float  # of the compute beside it


def measure_links(device: Device, dtype: torch.dtype, offload_root: Path, scale: Scale) -> dict[str, Link]:
    """All LINKS, by name."""
    pinned = device.pinned_count()
    largest_square = max(shape for shape in shapes_with_room(device, dtype, scale) if shape[0] == shape[1])
    work = layer_call(device, dtype, largest_square, COMPUTE_ROWS, scale.weight_bytes)
    folder = OffloadFolder(offload_root)
    io = DiskIO()
    queue = TransferQueue(device, "measure")
    try:
        jobs = _jobs(device, io, folder.file("measure", scale.file_bytes), scale)
        work()  # once before it is timed
        times = {key: _times(device, queue, job, work, scale.read_seconds) for key, job in jobs.items()}
    finally:
        queue.close()
        io.close()
        folder.close()
        device.unpin(pinned)
    return {name: _link(name, times, scale) for name in LINKS}


def _link(name: str, times: dict[tuple[str, str], Times], scale: Scale) -> Link:
    """A request costs the time of a small transfer that its bytes do not explain."""
    large = times["large", name]
    small = times.get(("small", name))
    link = Link(1 / large.idle, large.lost, max(0.0, 1 - large.idle / large.busy))
    if small is None:
        return link
    size = scale.small_bytes[name]
    request, _, lost = (max(0.0, taken - size * each) / requests(size) for taken, each in zip(small, large))
    return replace(link, request_seconds=request, compute_seconds_per_request=lost)


def _jobs(device: Device, io: DiskIO, file, scale: Scale) -> dict[tuple[str, str], Callable[[], int]]:
    """Jobs for a transfer queue by (size, link). Each returns how much it moved, in bytes or in small transfers."""
    buffer = device.buffer(scale.transfer_bytes)
    host = device.host_buffer(scale.transfer_bytes)
    for tensor in (host, buffer):
        tensor.fill_(1)
    data = as_numpy(host)
    starts = range(0, scale.file_bytes, scale.transfer_bytes)
    transfers = count()

    def repeated(seconds: float, once: Callable[[], int]) -> int:
        """Repeat a transfer, at least once, until the seconds have passed."""
        ended = _deadline(seconds)
        moved = once()
        while not ended():
            moved += once()
        return moved

    def large(call: Callable) -> int:
        for start in starts:
            wait(call(file, data, start, True))
        return scale.file_bytes

    def small(call: Callable, size: int) -> int:
        wait(call(file, data[:size], next(transfers) * size % scale.transfer_bytes, True))
        return 1

    def copies(dst: Tensor, src: Tensor) -> int:
        for _ in starts:
            copy(dst, src)
        finish(device.record())
        return scale.file_bytes

    few = scale.small_bytes
    return {
        ("large", "cpu_to_disk"): partial(large, io.write),  # the file that reads need
        ("small", "cpu_to_disk"): partial(repeated, SMALL_SECONDS, partial(small, io.write, few["cpu_to_disk"])),
        ("large", "disk_to_cpu"): partial(repeated, scale.read_seconds, partial(large, io.read)),
        ("small", "disk_to_cpu"): partial(repeated, SMALL_SECONDS, partial(small, io.read, few["disk_to_cpu"])),
        ("large", "cpu_to_gpu"): partial(repeated, scale.read_seconds, partial(copies, buffer, host)),
        ("large", "gpu_to_cpu"): partial(repeated, scale.read_seconds, partial(copies, host, buffer)),
    }


def _times(
    device: Device, queue: TransferQueue, job: Callable[[], int], work: Callable[[], object], seconds: float
) -> Times:
    calls_alone = _calls_per_second(device, work, _deadline(seconds))
    idle, _ = _timed(queue, job)
    busy, calls_beside = _timed(queue, job, partial(_calls_per_second, device, work))
    return Times(idle, busy, busy * max(0.0, 1 - calls_beside / calls_alone))


def _timed(queue: TransferQueue, job: Callable[[], int], compute: Callable = lambda ended: 0.0) -> tuple[float, float]:
    """Seconds per byte or transfer that a job moves, and what `compute(ended)` returns, called beside the job."""
    start = time.perf_counter()
    ends = []
    future = queue.submit(lambda: ends.append((job(), time.perf_counter())))
    calls = compute(future.done)
    future.result()
    ((moved, end),) = ends
    return (end - start) / moved, calls


def _calls_per_second(device: Device, work: Callable[[], object], ended: Callable[[], bool]) -> float:
    """The rate of consecutive calls, until `ended`."""
    done = 0
    start = time.perf_counter()
    while not (done and ended()):
        work()
        finish(device.record())  # waits for compute, not for the copies beside it
        done += 1
    return done / (time.perf_counter() - start)


def _deadline(seconds: float) -> Callable[[], bool]:
    """A function that returns whether `seconds` have passed since this call."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end
