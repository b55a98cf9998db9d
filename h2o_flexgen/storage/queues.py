"""Transfer queues, which move data beside compute, and the staging buffers that streamed data lands in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from h2o_flexgen.machine.device import Device, finish

#: the most KV blocks that are staged on the device at once
KV_BUFFERS = 3


class TransferQueue:
    """Moves one kind of data in one direction, on threads of its own and, on CUDA, a stream. Jobs start in order, up to
    `workers` at a time, and run beside compute; without `overlap` they have ended before `submit` returns."""

    def __init__(self, device: Device, name: str, overlap: bool = True, workers: int = 1):
        self.device = device
        self.overlap = overlap
        self.stream = torch.cuda.Stream(device.torch_device) if device.is_cuda else None
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix=name)

    def submit(self, job: Callable[[], None], after=None) -> Future:
        """Run `job` once `after` (an event of `Device.record`) has happened. The future's result is an event behind
        everything that the job queued on the stream."""
        future = self._pool.submit(self.run, job, after)
        if not self.overlap and future.exception() is None:  # `exception` waits
            finish(future.result())
        return future

    @torch.inference_mode()  # set per thread; tensors made in it can be changed in no other mode
    def run(self, job: Callable[[], None], after=None):
        """Run a job on the queue's stream; returns the event behind what it queued."""
        if self.stream is None:
            job()
            return None
        # `stream` alone would make a context on GPU 0 when it ends, whatever GPU this is
        with torch.cuda.device(self.device.torch_device), torch.cuda.stream(self.stream):
            self.device.wait(after)
            job()
            return self.device.record()

    def close(self) -> None:
        """Wait for running jobs and cancel waiting ones."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class StagingBuffers:
    """`count` device buffers of `nbytes` that streamed data takes in turn; none if `nbytes` is 0."""

    def __init__(self, device: Device, nbytes: int, count: int):
        self.buffers = [device.buffer(nbytes) for _ in range(count)] if nbytes else []
        self._last_job: list[Future | None] = [None] * count
        self._free = deque(range(len(self.buffers)))

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    def take(self) -> tuple[int, Future | None]:
        """The index of the buffer that has been free the longest, and the job to wait for before filling it."""
        index = self._free.popleft()
        return index, self._last_job[index]

    def give_back(self, index: int, job: Future | None = None) -> None:
        """Free a buffer that `job` may still be using."""
        self._last_job[index] = job
        self._free.append(index)


def double_buffers(overlap: bool) -> int:
    """Staging buffers of weights and of activations: one is computed with while the other is filled."""
    return 2 if overlap else 1


def kv_buffers(overlap: bool, on_disk: bool) -> int:
    """Staging buffers for KV blocks: one in use, one being loaded or written back; with blocks on disk one more, so
    that the disk has something to read during the matmuls of a layer, which use none."""
    if not overlap:
        return 1
    return KV_BUFFERS if on_disk else 2
