"""Timing the links between disk, RAM and the compute device, with the engine's own transfers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from h2o_flexgen.offload.device import Device, as_numpy, copy, finish
from h2o_flexgen.offload.disk import DiskIO, OffloadFolder, wait
from h2o_flexgen.offload.kv_store import KVStore
from h2o_flexgen.offload.queues import TransferQueue
from h2o_flexgen.profiling.compute import HEAD_DIMS, RULES, Attention, layer_call
from h2o_flexgen.profiling.scale import Scale
from h2o_flexgen.profiling.timing import after, calls_per_second
from h2o_flexgen.sizes import KV_BUFFERS

#: calls of compute are counted for so many seconds, small transfers made for so many, KV blocks visited for so many
ALONE_SECONDS, SMALL_SECONDS, BESIDE_SECONDS, VISIT_SECONDS = 0.2, 0.1, 0.2, 0.3
#: sequences and heads of the KV blocks that visit the device
VISITED_BATCH, VISITED_HEADS = 4, 16


def links(device: Device, dtype: torch.dtype, offload_root: Path, scale: Scale) -> Iterator[tuple[tuple, float]]:
    """Keys and seconds of all links.

    ("link", name), ("beside", name): seconds per byte of large transfers, alone and while something computes
    ("lost", name): seconds of compute that a byte took away meanwhile
    ("small", name), ("lost small", name): the same of one small transfer, from or to disk
    ("visit",): seconds of compute that a KV block from disk takes away
    """
    pinned = device.pinned_count()
    work = layer_call(device, dtype, scale)
    folder = OffloadFolder(offload_root)
    io, queue = DiskIO(), TransferQueue(device, "measure")
    try:
        transfers = _Transfers(device, io, folder.file("measure", scale.file_bytes), scale)
        for name, job in transfers.large.items():
            yield ("link", name), _timed(device, queue, job)[0]
            alone = calls_per_second(device, work, after(ALONE_SECONDS))
            beside, lost = _timed(device, queue, job, work, alone)
            yield ("beside", name), beside
            yield ("lost", name), lost
            if name in scale.small_bytes:
                yield ("small", name), _timed(device, queue, partial(transfers.small, name, SMALL_SECONDS))[0]
                job = partial(transfers.small, name, BESIDE_SECONDS)
                yield ("lost small", name), _timed(device, queue, job, work, alone)[1]
        alone = calls_per_second(device, work, after(ALONE_SECONDS))
        beside = _calls_between_visits(device, dtype, work, io, folder.file, scale)
        yield ("visit",), max(0.0, 1 / beside - 1 / alone)
    finally:
        queue.close()
        io.close()
        folder.close()
        device.unpin(pinned)


class _Transfers:
    """Jobs for a transfer queue, each of which returns how much it has moved: bytes, or small transfers."""

    def __init__(self, device: Device, io: DiskIO, file, scale: Scale):
        self.device, self.io, self.file, self.scale = device, io, file, scale
        buffer, host = device.buffer(scale.transfer_bytes), device.host_buffer(scale.transfer_bytes)
        for tensor in (host, buffer):
            tensor.fill_(1)
        self.source, self.target = as_numpy(host), as_numpy(device.host_buffer(scale.transfer_bytes))
        self.written = 0
        self.large: dict[str, Callable[[], int]] = {
            "cpu_to_disk": self.write,  # before it is read
            "disk_to_cpu": self.read,
            "cpu_to_gpu": partial(self.copy, buffer, host),
            "gpu_to_cpu": partial(self.copy, host, buffer),
        }

    def write(self) -> int:
        ended, done = after(self.scale.disk_seconds), 0
        while done < self.scale.file_bytes and not (done and ended()):
            wait(self.io.write(self.file, self.source, done, True))
            done += self.scale.transfer_bytes
        self.written = max(self.written, done)
        return done

    def read(self) -> int:
        ended, done = after(self.scale.disk_seconds), 0
        while done < self.written and not (done and ended()):
            wait(self.io.read(self.file, self.target, done, True))
            done += self.scale.transfer_bytes
        return done

    def copy(self, dst: Tensor, src: Tensor) -> int:
        for _ in range(self.scale.file_bytes // self.scale.transfer_bytes):
            copy(dst, src)
        finish(self.device.record())
        return self.scale.file_bytes

    def small(self, name: str, seconds: float) -> int:
        """Small transfers one after the other."""
        call, data = {"cpu_to_disk": (self.io.write, self.source), "disk_to_cpu": (self.io.read, self.target)}[name]
        ended, size, count = after(seconds), self.scale.small_bytes[name], 0
        while not (count and ended()):
            wait(call(self.file, data[:size], count * size % self.scale.transfer_bytes, True))
            count += 1
        return count


def _timed(
    device: Device,
    queue: TransferQueue,
    job: Callable[[], int],
    work: Callable[[], object] | None = None,
    alone: float = 0.0,
) -> tuple[float, float]:
    """Seconds for each thing that a job moves, and those of compute that it takes away.

    Args:
        work: computes meanwhile, and makes `alone` calls per second otherwise.
    """
    moved, share = [], 0.0
    start = time.perf_counter()
    future = queue.submit(lambda: moved.append(job()))
    if work is not None:
        share = max(0.0, 1 - calls_per_second(device, work, future.done) / alone)
    future.result()
    seconds = (time.perf_counter() - start) / moved[0]
    return seconds, share * seconds


def visited(scale: Scale) -> Attention:
    """The KV blocks that come and go while something computes."""
    return Attention(RULES["full"], VISITED_BATCH, VISITED_HEADS, HEAD_DIMS[0], scale.short)


def _calls_between_visits(
    device: Device, dtype: torch.dtype, work: Callable[[], object], io: DiskIO, make_file, scale: Scale
) -> float:
    """Calls per second of `work` while a KV block of a full cache comes from disk before each and goes back after."""
    layout, held = visited(scale).layout(dtype), scale.short - 1
    queues = [TransferQueue(device, "cache", workers=KV_BUFFERS), TransferQueue(device, "store")]
    try:
        blocks = [(0, 0), (0, 1)]
        store = KVStore(device, [layout] * 2, dict.fromkeys(blocks, "disk"), io, *queues, make_file)
        store.begin_block([layout] * 2)
        for block in blocks:
            store.blank(*block)
            store.store_all(*block, held)
        slots = torch.full((layout.batch, layout.heads), held, device=device.torch_device)
        k = torch.zeros(layout.batch, layout.heads, layout.head_dim, dtype=dtype, device=device.torch_device)
        done, ended, start = 0, after(VISIT_SECONDS), time.perf_counter()
        while done < 2 or not ended():
            now, following = blocks[done % 2], blocks[(done + 1) % 2]
            store.prefetch(*now, held)
            store.prefetch(*following, held)
            store.get(*now, held)
            work()
            store.store_step(*now, held, slots, k, k)
            finish(device.record())
            done += 1
        rate = done / (time.perf_counter() - start)
        store.drain()
        return rate
    finally:
        for queue in queues:
            queue.close()
