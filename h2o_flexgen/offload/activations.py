"""Hidden states of prompts between layers. A piece is one micro-batch of one batch; its home is that of the batch.
Those of a decode step, one token of each sequence, stay on the device."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate, cycle

import torch
from torch import Tensor

from h2o_flexgen.offload.device import Device, TransferQueue, as_numpy, copy, finish
from h2o_flexgen.offload.disk import DiskIO, File, wait
from h2o_flexgen.sizes import WRITE_BACKS

Key = tuple[int, int]


@dataclass
class _Stored:
    future: Future
    shape: torch.Size
    dtype: torch.dtype
    nbytes: int


class ActivationStore:
    """Hidden states at home on the gpu, cpu or disk tier.

    Args:
        tiers: tier per batch.
        batch_bytes: per batch the most bytes of hidden states it has (all its micro-batches in prefill).
        block_bytes: the most bytes of one micro-batch.
    """

    def __init__(
        self,
        device: Device,
        tiers: list[str],
        batch_bytes: list[int],
        block_bytes: int,
        io: DiskIO,
        load_queue: TransferQueue,
        store_queue: TransferQueue,
        make_file,
    ):
        self.device, self.tiers, self.io = device, tiers, io
        self.load_queue, self.store_queue = load_queue, store_queue
        self.cpu_to_gpu_bytes = self.gpu_to_cpu_bytes = 0
        self._resident: dict[Key, Tensor] = {}
        self._stored: dict[Key, _Stored] = {}
        self._loading: dict[Key, tuple[Future, Tensor]] = {}
        self._storing: deque[Future] = deque()  # on their way home
        self._ram = {k: device.host_buffer(batch_bytes[k]) for k, home in enumerate(tiers) if home == "cpu"}
        on_disk = [k for k, home in enumerate(tiers) if home == "disk"]
        *starts, end = accumulate((batch_bytes[k] for k in on_disk), initial=0)
        self._offset = dict(zip(on_disk, starts))
        self.file: File | None = make_file("activations", end) if on_disk else None
        count = 2 if load_queue.overlap else 1
        away = any(home != "gpu" for home in tiers)
        self._buffers = cycle([device.buffer(block_bytes) for _ in range(count)] if away else [])  # used in turn
        staging = block_bytes if on_disk and device.is_cuda else 0
        self._load_host, self._store_host = device.host_buffer(staging), device.host_buffer(staging)
        self._load_host_free = None

    def put(self, batch: int, micro: int, offset: int, hidden: Tensor) -> None:
        """Send the hidden states of a micro-batch home, `offset` bytes into its batch's."""
        key = (batch, micro)
        home = self.tiers[batch]
        if home == "gpu":
            self._resident[key] = hidden
            return
        self.device.hold_back(self._storing, WRITE_BACKS, "activations")
        job = self.store_queue.submit(
            lambda: self._store(batch, offset, hidden.contiguous()), after=self.device.record()
        )
        self._storing.append(job)
        self._stored[key] = _Stored(job, hidden.shape, hidden.dtype, hidden.nbytes)

    def _store(self, batch: int, offset: int, hidden: Tensor) -> None:
        flat = hidden.view(-1).view(torch.uint8)
        self.gpu_to_cpu_bytes += flat.nbytes
        if self.tiers[batch] == "cpu":
            copy(self._ram[batch][offset : offset + flat.nbytes], flat)
            finish(self.device.record())
            return
        if self.device.is_cuda:
            copy(self._store_host[: flat.nbytes], flat)
            finish(self.device.record())
            flat = self._store_host[: flat.nbytes]
        wait(self.io.write(self.file, as_numpy(flat), self._offset[batch] + offset))

    def prefetch(self, batch: int, micro: int, offset: int) -> None:
        """Start bringing a micro-batch's hidden states to the device, if loading may overlap."""
        if self.load_queue.overlap:
            self._fetch(batch, micro, offset)

    def _fetch(self, batch: int, micro: int, offset: int) -> None:
        key = (batch, micro)
        if self.tiers[batch] == "gpu" or key in self._loading or key not in self._stored:
            return
        stored = self._stored[key]
        buffer = next(self._buffers)[: stored.nbytes]
        # what computed on this buffer before is queued already: wait for it before writing over it
        job = self.load_queue.submit(lambda: self._load(batch, offset, stored, buffer), after=self.device.record())
        self._loading[key] = (job, buffer.view(stored.dtype).view(stored.shape))

    def _load(self, batch: int, offset: int, stored: _Stored, buffer: Tensor) -> None:
        self.device.wait_for(stored.future)
        self.cpu_to_gpu_bytes += buffer.nbytes
        if self.tiers[batch] == "cpu":
            copy(buffer, self._ram[batch][offset : offset + buffer.nbytes])
            return
        if self.device.is_cuda:
            finish(self._load_host_free)
        target = self._load_host[: buffer.nbytes] if self.device.is_cuda else buffer
        wait(self.io.read(self.file, target.numpy(), self._offset[batch] + offset))
        if self.device.is_cuda:
            copy(buffer, target)
            self._load_host_free = self.device.record()

    def get(self, batch: int, micro: int, offset: int) -> Tensor:
        """The hidden states of a micro-batch, on the device."""
        key = (batch, micro)
        if self.tiers[batch] == "gpu":
            return self._resident.pop(key)
        self._fetch(batch, micro, offset)
        job, hidden = self._loading.pop(key)
        self.device.stall_on(job, "activations")
        del self._stored[key]
        return hidden

    def drain(self) -> None:
        """Wait for everything in flight, raise what failed, and forget all hidden states."""
        for job, _ in self._loading.values():
            job.exception()
        self._loading.clear()
        self._resident.clear()
        self._storing.clear()
        for stored in self._stored.values():
            finish(stored.future.result())
        self._stored.clear()
