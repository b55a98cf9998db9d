"""The KV cache of a block of sequences. The cache of each (layer, batch), a KV block, is resident on one tier:

    gpu   on the device: used in place
    cpu   in RAM: staged on the device for a step; then the new token, the scores and the sequences that took a place
          are written back
    disk  likewise, in a file with a write-ahead log (`storage.wal`)

Scores and positions of a block on disk stay in RAM: they are two percent of the block, and every step changes them all.
Where the compute device is the CPU they are never staged.
"""

from __future__ import annotations

from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.kv_cache.layout import KVLayout, KVTensors
from h2o_flexgen.machine.device import finish
from h2o_flexgen.machine.pages import aligned
from h2o_flexgen.policy import TIERS
from h2o_flexgen.storage.queues import StagingBuffers, kv_buffers
from h2o_flexgen.storage.transport import Transport
from h2o_flexgen.storage.wal import LoggedBlock, file_bytes, slots_bytes

Key = tuple[int, int]


class Occupied(NamedTuple):
    """The places of a KV block after a step."""

    cached_len: int  # slots in use, of the longest text
    places: list[int]  # those that a sequence took in this step
    count: int  # places in use, which are the first ones


class KVBytes(NamedTuple):
    """The bytes that a KVStore allocates; the memory plan counts with the same ones."""

    tiers: dict[str, int]  # all blocks; scores, and the slots of logs, are in RAM unless the block is on the device
    count: int  # number of staging buffers, and of host buffers
    staging: int  # each staging buffer on the device
    meta: int  # (CUDA) the scores and positions beside it
    host: int  # (CUDA) each buffer in RAM that disk reads land in
    write: int  # (CUDA) the buffer in RAM that disk writes leave from
    row: int  # the buffer in RAM for the token that a step writes back


def kv_bytes(layouts: dict[Key, KVLayout], tiers: dict[Key, str], overlap: bool, cuda: bool) -> KVBytes:
    """`layouts` and `tiers` as for `KVStore`."""
    alike = {id(layout): layout for layout in layouts.values()}  # few, while comparing thousands takes long
    counts = Counter((id(layouts[key]), tier) for key, tier in tiers.items())
    blocks = [(alike[n], tier, count) for (n, tier), count in counts.items()]
    total = dict.fromkeys(TIERS, 0)
    for layout, tier, count in blocks:
        total[tier] += count * (file_bytes(layout) if tier == "disk" else layout.kv_bytes)
        total["gpu" if tier == "gpu" else "cpu"] += count * layout.meta_bytes
        total["cpu"] += count * slots_bytes(layout) if tier == "disk" else 0
    staged = [layout for layout, tier, _ in blocks if tier != "gpu"]
    on_disk = [layout for layout, tier, _ in blocks if tier == "disk"]
    kv = aligned(max((x.kv_bytes for x in staged), default=0))
    file = max(map(file_bytes, on_disk), default=0)
    return KVBytes(
        tiers=total,
        count=kv_buffers(overlap, bool(on_disk)),
        staging=kv if cuda else max(kv, file),
        meta=max((x.meta_bytes for x in staged), default=0) if cuda else 0,
        host=file if cuda else 0,
        write=aligned(max((x.kv_bytes for x in on_disk), default=0)) if cuda else 0,
        row=aligned(max((x.row_bytes for x in staged), default=0)),
    )


@dataclass
class _KVBlock:
    tier: str
    kv: Tensor | None = None  # on the gpu and cpu tiers
    meta: Tensor | None = None
    disk: LoggedBlock | None = None
    layout: KVLayout | None = None
    tensors: KVTensors | None = None  # a view of it in place
    staged: int | None = None  # index of its staging buffer
    loading: Future | None = None  # the transfer into the staging buffer
    loaded: int = 0  # bytes of K and V that this transfer brings
    stored: Future | None = None  # the last write-back


class KVStore:
    """The caches of every (layer, batch).

    Args:
        layouts: the largest layout of every (layer, batch).
        tiers: the tier of every (layer, batch).
        cpu_compute: the CPU computes attention over blocks on the cpu tier, in place.

    Attributes:
        file: holds the blocks on disk; None without any.
        blocks: by (layer, batch).
        storing: write-backs of decode steps, the oldest first.
    """

    def __init__(
        self, transport: Transport, layouts: dict[Key, KVLayout], tiers: dict[Key, str], cpu_compute: bool = False
    ):
        self.transport = transport
        self.device = transport.device
        self.cpu_compute = cpu_compute
        self._load_queue = transport.queues["cache"]
        self._store_queue = transport.queues["store"]
        self.storing: deque[Future] = deque()
        sizes = kv_bytes(layouts, tiers, transport.overlap, self.device.is_cuda)
        self.file = transport.file("kv_cache", sizes.tiers["disk"])
        self.blocks = {key: _KVBlock(tier) for key, tier in tiers.items()}
        self._allocate(layouts)
        self._staging = StagingBuffers(self.device, sizes.staging, sizes.count)
        self._host = self._staging.buffers  # where disk reads land
        if self.device.is_cuda:
            self._meta = self.device.buffers([sizes.meta] * sizes.count)
            self._host = [self.device.host_buffer(sizes.host) for _ in range(sizes.count)]
            self._write_host = self.device.host_buffer(sizes.write)
        self._host_free = [None] * sizes.count  # events
        self._row = self.device.host_buffer(sizes.row)

    def _allocate(self, layouts: dict[Key, KVLayout]) -> None:
        """Allocate each block on its tier."""
        on_gpu = [layouts[key] for key, block in self.blocks.items() if block.tier == "gpu"]
        buffers = iter(self.device.buffers([n for x in on_gpu for n in (x.kv_bytes, x.meta_bytes)]))
        offset = 0
        for key, block in self.blocks.items():
            layout = layouts[key]
            if block.tier == "gpu":
                block.kv = next(buffers)
                block.meta = next(buffers)
                continue
            block.meta = self.device.host_buffer(layout.meta_bytes)
            if block.tier == "cpu":
                block.kv = self.device.host_buffer(layout.kv_bytes)
            else:
                block.disk = LoggedBlock(self.transport.io, self.file, offset)
                offset += file_bytes(layout)

    def begin(self, layouts: dict[Key, KVLayout]) -> None:
        """Empty some caches and lay them out again, in no more bytes than their largest layout takes. Earlier transfers
        end first, since they follow the old layouts."""
        for key, layout in layouts.items():
            block = self.blocks[key]
            self.drop(*key)
            self._finish(block)
            block.layout = layout
            block.tensors = None
            if block.tier == "cpu":  # prefill leaves empty slots, and a NaN in one would spread
                block.kv[layout.used_bytes(1) :].zero_()
            elif block.tier == "disk":
                block.disk.begin(layout)

    def is_staged(self, layer: int, batch: int, is_new: bool = False) -> bool:
        """Whether the block is used in a staging buffer on the device. `is_new`: while prefill fills it."""
        tier = self.blocks[layer, batch].tier
        return tier == "disk" or (tier == "cpu" and (is_new or not self.cpu_compute))

    def blank(self, layer: int, batch: int) -> KVTensors:
        """A cache on the device for prefill to fill; `store_all` writes it back."""
        block = self.blocks[layer, batch]
        if block.tier == "gpu":
            return self._in_place(block)
        block.staged, last_job = self._staging.take()
        self.device.stall_on(last_job, "cache")
        return self._view(block)

    def store_all(self, layer: int, batch: int, cached_len: int, slots: Tensor | None = None) -> None:
        """Write back a cache of `blank` or `get` with `cached_len` slots in use: all of it, or, on disk, only what its
        log and the newest token, in `slots`, have changed."""
        block = self.blocks[layer, batch]
        if block.staged is None:  # used in place
            return
        index = block.staged
        block.staged = None
        part = slice(0, block.layout.used_bytes(cached_len))
        if block.disk is not None:
            part = block.disk.dirty(cached_len, slots)
        computed = self.device.record()
        block.stored = self._store_queue.submit(lambda: self.store_block(block, index, part), after=computed)
        self._staging.give_back(index, block.stored)

    def prefetch(self, layer: int, batch: int, cached_len: int) -> bool:
        """Start to stage a block that is expected to have `cached_len` slots in use. False if that is not possible yet:
        no staging buffer is free, the block has one already, or there is no overlap."""
        block = self.blocks[layer, batch]
        if not self.transport.overlap or not self._staging.any_free or block.staged is not None:
            return False
        self._fetch(block, cached_len)
        return True

    def _fetch(self, block: _KVBlock, cached_len: int) -> None:
        block.staged, last_job = self._staging.take()
        block.loaded = block.layout.used_bytes(cached_len)
        block.loading = self._load_queue.submit(lambda: self.load_block(block, last_job))

    def get(self, layer: int, batch: int, cached_len: int) -> KVTensors:
        """A block on the device for a step to change, after which `cached_len` slots are in use; compute waits until it
        is loaded."""
        block = self.blocks[layer, batch]
        if not self.is_staged(layer, batch):
            self.device.stall_on(block.stored, "cache")  # prefill's write-back, if the CPU computes attention
            block.stored = None
            return self._in_place(block)
        self.device.hold_back(self.storing, len(self._staging.buffers), "cache")
        if block.loading is None:
            self._fetch(block, cached_len)
        self.device.stall_on(block.loading, "cache")
        block.loading = None
        self._staging.buffers[block.staged][block.loaded : block.layout.used_bytes(cached_len)].zero_()
        return self._view(block)

    def store_step(
        self, layer: int, batch: int, cache: KVTensors, slots: Tensor, rows: list[int], after: Occupied
    ) -> None:
        """Write back what a step changed in the `cache` of `get`: the scores, the new tokens of the sequences `rows`
        in `slots` (rows, H), and whole sequences that took a place."""
        if not self.is_staged(layer, batch):
            return
        cached_len, places, count = after
        B = len(cache.k[0])
        if len(rows) < B:  # the others write an unchanged token, in a segment that changes anyway
            slots = slots[:1].repeat(B, 1).index_copy_(0, torch.tensor(rows, device=slots.device), slots)
        block = self.blocks[layer, batch]
        if block.disk is not None and (2 * len(places) > count or block.disk.is_due(cached_len)):
            self.store_all(layer, batch, cached_len, None if places else slots)
            return
        index = block.staged
        block.staged = None
        token = cache.token(slots)
        computed = self.device.record()
        scores = None
        if places:
            scores = self._store_queue.submit(lambda: self.store_rows(block, index, after), after=computed)
        elif self.device.is_cuda:  # a job of its own: the buffer is free while the token is still being written
            scores = self._store_queue.submit(lambda: self.store_scores(block, index), after=computed)
        self._staging.give_back(index, scores)
        block.stored = self._store_queue.submit(lambda: self.store_token(block, scores, slots, token), after=computed)
        self.storing.append(block.stored)

    def load_block(self, block: _KVBlock, last_job: Future | None) -> None:
        """Fill the block's staging buffer, once `last_job` no longer uses it."""
        used = block.loaded
        source = block.kv
        index = block.staged
        self.device.wait_for(block.stored)
        if not self.device.is_cuda:  # the disk reads into the staging buffer
            self.device.wait_for(last_job)
        if block.disk is not None:
            finish(self._host_free[index])
            source = self._host[index]
            block.disk.read(source.numpy(), used)
        self.device.wait_for(last_job)
        if self.device.is_cuda:
            meta_bytes = block.layout.meta_bytes
            self.transport.to_device(self._meta[index][:meta_bytes], block.meta[:meta_bytes])
        if source is not self._staging.buffers[index]:
            self.transport.to_device(self._staging.buffers[index][:used], source[:used])
            self._host_free[index] = self.device.record()

    def store_block(self, block: _KVBlock, index: int, part: slice) -> None:
        """Write back the scores and a part of a staged block."""
        self.store_scores(block, index)
        kv = self._in_ram(block, index, [(part.start, part.stop)])
        if block.disk is not None:
            block.disk.compact(kv.numpy(), part)

    def store_rows(self, block: _KVBlock, index: int, after: Occupied) -> None:
        """Write back the scores of a staged block and the sequences that took a place in it."""
        self.store_scores(block, index)
        layout = block.layout
        used = layout.used_bytes(after.cached_len)
        if block.disk is None:
            whole = [span for place in after.places for span in layout.row_spans(place, layout.kv_bytes)]
            spans = [span for span in whole if span[1] <= used]
            for begin, end in whole:
                if end > used:  # not staged, and a NaN left in an empty slot would spread
                    block.kv[begin:end].zero_()
        else:
            spans = block.disk.changed(after.places, after.count, used)
        kv = self._in_ram(block, index, spans)
        if block.disk is not None:
            block.disk.write(kv.numpy(), spans)

    def _in_ram(self, block: _KVBlock, index: int, spans: list[tuple[int, int]]) -> Tensor:
        """Copy the (begin, end) `spans` of a staged block to RAM: to the block itself, or to where disk writes leave
        from. Returns the bytes of the block there."""
        kv = self._staging.buffers[index]
        if block.disk is not None and not self.device.is_cuda:
            return kv
        ram = block.kv if block.disk is None else self._write_host
        for begin, end in spans:
            self.transport.to_host(ram[begin:end], kv[begin:end])
        finish(self.device.record())
        return ram

    def store_scores(self, block: _KVBlock, index: int) -> None:
        """Write back scores and positions, which without CUDA were changed in place."""
        if self.device.is_cuda:
            meta_bytes = block.layout.meta_bytes
            self.transport.to_host(block.meta[:meta_bytes], self._meta[index][:meta_bytes])

    def store_token(self, block: _KVBlock, scores: Future | None, slots: Tensor, token: tuple[Tensor, Tensor]) -> None:
        """Write back the token of a decode step, K and V (B, H, W) each."""
        if scores is not None:
            scores.result()  # raises the error of their write-back
        layout = block.layout
        row = self._row[: layout.row_bytes]
        sizes = [x.nbytes for x in token]
        for target, source in zip(row.split(sizes), token):
            self.transport.to_host(target, source.view(torch.uint8).view(-1))
        slots = slots.to("cpu").numpy()
        finish(self.device.record())
        if block.disk is None:
            layout.put(block.kv[: layout.kv_bytes].numpy(), row.numpy()[None], slots[None])
        else:
            block.disk.append(self._row[: aligned(layout.row_bytes)].numpy(), slots)

    def _in_place(self, block: _KVBlock) -> KVTensors:
        block.tensors = block.tensors or block.layout.view(block.kv, block.meta)
        return block.tensors

    def _view(self, block: _KVBlock) -> KVTensors:
        meta = self._meta[block.staged] if self.device.is_cuda else block.meta
        return block.layout.view(self._staging.buffers[block.staged], meta)

    def drop(self, layer: int, batch: int) -> None:
        """Free the staging buffer of a block prefetched for a step that will not be computed."""
        block = self.blocks[layer, batch]
        if block.loading is not None:
            # `exception` waits: no read may still fill a buffer that another block takes
            self._staging.give_back(block.staged, None if block.loading.exception() else block.loading)
            block.staged = block.loading = None

    def drain(self) -> None:
        """Wait for all transfers and raise what failed."""
        self.storing.clear()
        for block in self.blocks.values():
            self._finish(block)

    def _finish(self, block: _KVBlock) -> None:
        """Wait for the last write-back of a block."""
        if block.stored is not None:
            finish(block.stored.result())
            block.stored = None
