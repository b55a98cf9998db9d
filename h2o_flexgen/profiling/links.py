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
from h2o_flexgen.offload.transport import Transport
from h2o_flexgen.profiling.compute import HEAD_DIMS, Attention, layer_call
from h2o_flexgen.profiling.scale import Scale

#: for which calls of compute are counted, small transfers made, and KV blocks fetched and stored
ALONE_SECONDS, SMALL_SECONDS, VISIT_SECONDS = 0.2, 0.2, 0.3
#: sequences and heads of these KV blocks
VISIT_BATCH, VISIT_HEADS = 4, 16


def links(device: Device, dtype: torch.dtype, offload_root: Path, scale: Scale) -> Iterator[tuple[tuple, float]]:
    """Keys and seconds of all links: for a byte of "large" transfers, and for each of "small" ones from and to disk.

    ("alone", size, name), ("beside", size, name): while nothing else runs, and while something computes
    ("lost", size, name): of compute that it took away meanwhile
    ("visit",): of compute that a KV block from disk takes away
    """
    pinned = device.pinned_count()
    work = layer_call(device, dtype, scale.shapes[0], scale.logits[0], scale.weight_bytes)
    folder = OffloadFolder(offload_root)
    io, queue = DiskIO(), TransferQueue(device, "measure")
    try:
        for key, job in _jobs(device, io, folder.file("measure", scale.file_bytes), scale).items():
            alone = _calls_per_second(device, work, _after(ALONE_SECONDS))
            yield ("alone", *key), _timed(queue, job)[0]
            beside, calls = _timed(queue, job, partial(_calls_per_second, device, work))
            yield ("beside", *key), beside
            yield ("lost", *key), beside * max(0.0, 1 - calls / alone)
        alone = _calls_per_second(device, work, _after(ALONE_SECONDS))
        beside = _calls_between_visits(device, dtype, work, offload_root, scale)
        yield ("visit",), max(0.0, 1 / beside - 1 / alone)
    finally:
        queue.close()
        io.close()
        folder.close()
        device.unpin(pinned)


def _jobs(device: Device, io: DiskIO, file, scale: Scale) -> dict[tuple[str, str], Callable[[], int]]:
    """Jobs for a transfer queue by (size, link), each of which returns how much it has moved: bytes, or transfers."""
    buffer, host = device.buffer(scale.transfer_bytes), device.host_buffer(scale.transfer_bytes)
    for tensor in (host, buffer):
        tensor.fill_(1)
    data, written = as_numpy(host), 0

    def large(call: Callable, most: int) -> int:
        ended, done = _after(scale.disk_seconds), 0
        while done < most and not (done and ended()):
            wait(call(file, data, done, True))
            done += scale.transfer_bytes
        return done

    def write() -> int:
        nonlocal written
        written = large(io.write, scale.file_bytes)
        return written

    def small(call: Callable, size: int) -> int:
        ended, count = _after(SMALL_SECONDS), 0
        while not (count and ended()):
            wait(call(file, data[:size], count * size % scale.transfer_bytes, True))
            count += 1
        return count

    def copies(dst: Tensor, src: Tensor) -> int:
        for _ in range(scale.file_bytes // scale.transfer_bytes):
            copy(dst, src)
        finish(device.record())
        return scale.file_bytes

    return {
        ("large", "cpu_to_disk"): write,  # before it is read
        ("small", "cpu_to_disk"): partial(small, io.write, scale.small_bytes["cpu_to_disk"]),
        ("large", "disk_to_cpu"): lambda: large(io.read, written),
        ("small", "disk_to_cpu"): partial(small, io.read, scale.small_bytes["disk_to_cpu"]),
        ("large", "cpu_to_gpu"): partial(copies, buffer, host),
        ("large", "gpu_to_cpu"): partial(copies, host, buffer),
    }


def _timed(queue: TransferQueue, job: Callable[[], int], compute: Callable = lambda ended: 0.0) -> tuple[float, float]:
    """Seconds for each thing that a job moves, and the calls per second of what computes until it has ended."""
    start, moved = time.perf_counter(), []
    future = queue.submit(lambda: moved.append(job()))
    calls = compute(future.done)
    future.result()
    return (time.perf_counter() - start) / moved[0], calls


def _calls_per_second(device: Device, work: Callable[[], object], ended: Callable[[], bool]) -> float:
    """Of calls one after the other, until `ended`."""
    done, start = 0, time.perf_counter()
    while not (done and ended()):
        work()
        finish(device.record())  # not the copies beside it
        done += 1
    return done / (time.perf_counter() - start)


def _after(seconds: float) -> Callable[[], bool]:
    """A function that says whether so many seconds have passed since now."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


def visit_attention(scale: Scale) -> Attention:
    """Whose KV blocks are fetched and stored while something computes."""
    return Attention("full", VISIT_BATCH, VISIT_HEADS, HEAD_DIMS[0], scale.short)


def _calls_between_visits(
    device: Device, dtype: torch.dtype, work: Callable[[], object], offload_root: Path, scale: Scale
) -> float:
    """Calls per second of `work` while a KV block of a full cache comes from disk before each and goes back after."""
    layout, held = visit_attention(scale).layout(dtype), scale.short - 1
    transport = Transport(device, offload_root)
    blocks = [(0, 0), (0, 1)]
    slots = torch.full((layout.batch, layout.heads), held, device=device.torch_device)
    k = torch.zeros(*slots.shape, layout.head_dim, dtype=dtype, device=device.torch_device)
    try:
        store = KVStore(transport, [layout] * 2, dict.fromkeys(blocks, "disk"))
        store.begin_block([layout] * 2)
        for block in blocks:
            store.blank(*block)
            store.store_all(*block, held)

        def visit() -> None:
            for block in blocks:
                store.prefetch(*block, held)
            store.get(*blocks[0], held)
            work()
            store.store_step(*blocks[0], held, slots, k, k)
            blocks.reverse()

        rate = _calls_per_second(device, visit, _after(VISIT_SECONDS))
        store.drain()
        return rate
    finally:
        transport.close()
