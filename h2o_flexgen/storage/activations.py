"""Hidden states of prompts between two layers, on the tier of their batch; they move in prefill micro-batches.

In a decode step, with one token of each sequence, hidden states stay on the device and are not kept here.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate, cycle
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.machine.device import as_numpy, finish
from h2o_flexgen.storage.disk import wait
from h2o_flexgen.storage.queues import double_buffers
from h2o_flexgen.storage.transport import Transport

#: micro-batches whose hidden states may be in write-back at once
WRITE_BACKS = 2

Key = tuple[int, int]  # batch, micro-batch


class ActivationBytes(NamedTuple):
    """The bytes that an ActivationStore allocates beside hidden states; the memory plan counts with the same ones."""

    count: int  # number of staging buffers
    staging: int  # each staging buffer on the device
    host: int  # (CUDA) each of the two buffers in RAM between device and disk


def activation_bytes(tiers: list[str], micro_bytes: int, overlap: bool, cuda: bool) -> ActivationBytes:
    """`tiers`: of each batch; `micro_bytes`: the most bytes of one micro-batch."""
    streamed = any(tier != "gpu" for tier in tiers)
    return ActivationBytes(double_buffers(overlap), micro_bytes * streamed, micro_bytes * (cuda and "disk" in tiers))


@dataclass
class _Hidden:
    """The hidden states of one micro-batch."""

    offset: int  # in bytes, within the hidden states of its batch
    tensor: Tensor  # on torch's "meta" device from the write-back until they are loaded again
    stored: Future | None = None  # the write-back
    loading: Future | None = None


class ActivationStore:
    """Hidden states by (batch, micro-batch).

    Args:
        tiers: of each batch.
        batch_bytes: the most bytes that the hidden states of each batch take.
        micro_bytes: the most bytes of one micro-batch.

    Attributes:
        file: holds the batches on disk; None without any.
    """

    def __init__(self, transport: Transport, tiers: list[str], batch_bytes: list[int], micro_bytes: int):
        self.transport = transport
        self.device = transport.device
        self.tiers = tiers
        self._load_queue = transport.queues["activations"]
        self._store_queue = transport.queues["store"]
        self._hidden: dict[Key, _Hidden] = {}
        self._storing: deque[Future] = deque()  # write-backs, the oldest first

        device = transport.device
        sizes = activation_bytes(tiers, micro_bytes, transport.overlap, device.is_cuda)
        self._ram = {k: device.host_buffer(batch_bytes[k]) for k, tier in enumerate(tiers) if tier == "cpu"}
        on_disk = [k for k, tier in enumerate(tiers) if tier == "disk"]
        *offsets, end = accumulate((batch_bytes[k] for k in on_disk), initial=0)
        self._offset = dict(zip(on_disk, offsets))
        self.file = transport.file("activations", end)
        # a cycle: compute uses micro-batches in the order they are loaded in
        self._staging = cycle([device.buffer(sizes.staging) for _ in range(sizes.count)])
        self._load_host = device.host_buffer(sizes.host)
        self._store_host = device.host_buffer(sizes.host)
        self._load_host_free = None  # event

    def moves(self, batch: int) -> bool:
        """Whether the hidden states of a batch leave the device between two stages."""
        return self.tiers[batch] != "gpu"

    def put(self, batch: int, micro: int, offset: int, tensor: Tensor) -> None:
        """Keep the hidden states of a micro-batch, of any shape; they begin `offset` bytes into those of its batch."""
        hidden = self._hidden[batch, micro] = _Hidden(offset, tensor)
        if not self.moves(batch):
            return
        self.device.hold_back(self._storing, WRITE_BACKS, "activations")
        computed = self.device.record()
        hidden.stored = self._store_queue.submit(lambda: self.store(batch, offset, tensor.contiguous()), after=computed)
        hidden.tensor = tensor.to("meta")
        self._storing.append(hidden.stored)

    def prefetch(self, batch: int, micro: int) -> None:
        """Start to stage a micro-batch on the device, if there is overlap and `put` has been called for it."""
        hidden = self._hidden.get((batch, micro))
        if self.transport.overlap and hidden is not None:
            self._fetch(batch, hidden)

    def _fetch(self, batch: int, hidden: _Hidden) -> None:
        if hidden.stored is None or hidden.loading is not None:
            return
        buffer = next(self._staging)[: hidden.tensor.nbytes]
        hidden.tensor = buffer.view(hidden.tensor.dtype).view(hidden.tensor.shape)
        # whatever computes with the buffer's present content is queued already
        computed = self.device.record()
        hidden.loading = self._load_queue.submit(lambda: self.load(batch, hidden, buffer), after=computed)

    def get(self, batch: int, micro: int) -> Tensor:
        """Remove and return the hidden states of a micro-batch, on the device; compute waits until they are loaded."""
        hidden = self._hidden.pop((batch, micro))
        self._fetch(batch, hidden)
        self.device.stall_on(hidden.loading, "activations")
        return hidden.tensor

    def store(self, batch: int, offset: int, hidden: Tensor) -> None:
        """Write contiguous hidden states to RAM or disk."""
        flat = hidden.view(-1).view(torch.uint8)
        if batch in self._ram or self.device.is_cuda:
            ram = self._ram[batch][offset:] if batch in self._ram else self._store_host
            self.transport.to_host(ram[: flat.nbytes], flat)
            finish(self.device.record())
            flat = ram[: flat.nbytes]
        if batch not in self._ram:
            wait(self.transport.io.write(self.file, as_numpy(flat), self._offset[batch] + offset))

    def load(self, batch: int, hidden: _Hidden, buffer: Tensor) -> None:
        """Fill a staging buffer once the write-back has ended."""
        self.device.wait_for(hidden.stored)
        if batch in self._ram:
            self.transport.to_device(buffer, self._ram[batch][hidden.offset :][: buffer.nbytes])
            return
        finish(self._load_host_free)
        target = self._load_host[: buffer.nbytes] if self.device.is_cuda else buffer
        wait(self.transport.io.read(self.file, target.numpy(), self._offset[batch] + hidden.offset))
        if self.device.is_cuda:
            self.transport.to_device(buffer, target)
            self._load_host_free = self.device.record()
