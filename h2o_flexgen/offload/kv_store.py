"""The KV cache of a block: each (layer, batch) piece has one home and visits the device to be used.

    gpu   resident
    cpu   a copy goes to the device before its step; the new token and the scores come back after it
    disk  as cpu, from and to a file. A step appends the new token to the piece's log, one contiguous write
          behind the piece; loading replays the log, and what is full is folded: of a cache that grows, a segment
          at its end, so that a step reads the tokens that the cache holds and no empty slot; of another the whole
          piece, when reading the log has cost as much as writing the piece anew.

Scores and positions of a piece at home on disk stay in RAM: two percent of the piece, all of it changed by
every step. Where RAM is what the device computes in, they are used where they lie, wherever the piece is.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from h2o_flexgen.offload.device import Device, StagingBuffers, TransferQueue, copy, finish
from h2o_flexgen.offload.disk import DiskIO, File, wait
from h2o_flexgen.sizes import PAGE, aligned, kv_buffers, kv_file_bytes, wal_rows

Key = tuple[int, int]


@dataclass
class _KVBlock:
    tier: str
    kv: Tensor | None = None  # bytes on the gpu or cpu tier
    meta: Tensor | None = None
    file: File | None = None
    offset: int = 0
    base: int = 0  # bytes stored in the file before the log
    log: np.ndarray | None = None  # on disk: the slots of each row, (rows, B, H) int32, or (rows, B, 1) for all heads
    logged: int = 0  # rows in use
    stored: Future | None = None  # the last write home


class KVStore:
    """The caches of `num_layers` x `len(layouts)` pieces.

    Args:
        layouts: the largest layout (KVLayout) of each batch of a block.
        tiers: tier of every (layer, batch).
        load_queue: with several workers the disk has requests for the next piece before one has come.
        cpu_compute: pieces at home on the cpu tier are used where they are.
    """

    def __init__(
        self,
        device: Device,
        num_layers: int,
        layouts: list,
        tiers: dict[Key, str],
        io: DiskIO,
        load_queue: TransferQueue,
        store_queue: TransferQueue,
        make_file,
        cpu_compute: bool = False,
    ):
        self.device, self.io = device, io
        self.load_queue, self.store_queue = load_queue, store_queue
        self.cpu_compute = cpu_compute
        self.cpu_to_gpu_bytes = self.gpu_to_cpu_bytes = 0
        self.layouts = self._largest = layouts
        self.pieces: dict[Key, _KVBlock] = {}
        self.file: File | None = None
        self._loading: dict[Key, tuple[int, Future]] = {}
        self._slot_of: dict[Key, int] = {}

        here = [layouts[batch] for (_, batch), home in tiers.items() if home == "gpu"]
        resident = iter(device.buffers([n for layout in here for n in (layout.kv_bytes, layout.meta_bytes)]))
        disk_bytes = 0
        for (layer, batch), home in tiers.items():
            layout = layouts[batch]
            piece = _KVBlock(home)
            if home == "gpu":
                piece.kv, piece.meta = next(resident), next(resident)
            else:
                piece.meta = device.host_buffer(layout.meta_bytes)
                if home == "cpu":
                    piece.kv = device.host_buffer(layout.kv_bytes)
                else:
                    piece.offset = disk_bytes
                    disk_bytes += kv_file_bytes(layout.segments, layout.row_bytes)
            self.pieces[layer, batch] = piece
        if disk_bytes:
            self.file = make_file("kv_cache", disk_bytes)
            for piece in self.pieces.values():
                piece.file = self.file

        streamed = [layouts[b] for (_, b), home in tiers.items() if home != "gpu"]
        on_disk = [layouts[b] for (_, b), home in tiers.items() if home == "disk"]
        count = kv_buffers(load_queue.overlap, bool(on_disk))
        slot = aligned(max((x.kv_bytes for x in streamed), default=0))
        landing = max((kv_file_bytes(x.segments, x.row_bytes) for x in on_disk), default=0)  # a piece and its log
        self._kv = StagingBuffers(device, slot if device.is_cuda else max(slot, landing), count)
        self._meta: list[Tensor] = []
        self._landing = self._kv.buffers
        if device.is_cuda:
            self._meta = device.buffers([max((x.meta_bytes for x in streamed), default=0)] * count)
            # what crosses a bus between device and disk passes through here
            self._landing = [device.host_buffer(landing) for _ in range(count)]
            self._store_host = device.host_buffer(aligned(max((x.kv_bytes for x in on_disk), default=0)))
        self._landing_free = [None] * count
        self._storing: deque[Future] = deque()  # tokens on their way home
        self._row_host = device.host_buffer(aligned(max((x.row_bytes for x in streamed), default=0)))

    def begin_block(self, layouts: list) -> None:
        """Start a block, whose layouts may be smaller than those the buffers were made for."""
        self.drain()
        for layout, largest in zip(layouts, self._largest):
            assert layout.kv_bytes <= largest.kv_bytes and layout.meta_bytes <= largest.meta_bytes
            assert kv_file_bytes(layout.segments, layout.row_bytes) <= kv_file_bytes(
                largest.segments, largest.row_bytes
            )
        self.layouts = layouts
        for (_, batch), piece in self.pieces.items():
            piece.base = piece.logged = 0
            if piece.tier == "disk" and batch < len(layouts):
                layout = layouts[batch]
                heads = layout.heads if layout.scored else 1
                piece.log = np.empty((wal_rows(layout.segments), layout.batch, heads), np.int32)

    def streams(self, layer: int, batch: int) -> bool:
        """Whether the piece must come to the device to be used."""
        home = self.pieces[layer, batch].tier
        return home == "disk" or (home == "cpu" and not self.cpu_compute)

    # prefill

    def blank(self, layer: int, batch: int):
        """A cache on the device to be filled; `store_all` sends it home."""
        piece, layout = self.pieces[layer, batch], self.layouts[batch]
        if piece.tier == "gpu":
            return layout.view(piece.kv, piece.meta)
        slot, busy = self._kv.take()
        self._slot_of[layer, batch] = slot
        self.device.stall_on(busy, "cache")
        return self._view(piece, layout, slot)

    def store_all(self, layer: int, batch: int, held: int, begin: int = 0) -> None:
        """Send a cache that `blank` or `get` gave home; `held` slots are in use, and those before `begin` are as they
        are at home."""
        piece = self.pieces[layer, batch]
        if piece.tier == "gpu":
            return
        slot = self._slot_of.pop((layer, batch))
        layout = self.layouts[batch]
        part = slice(min(layout.bytes_before(begin), piece.base) // PAGE * PAGE, layout.used_bytes(held))
        job = self.store_queue.submit(lambda: self._store_all(piece, layout, slot, part), after=self.device.record())
        piece.stored = job
        self._kv.give_back(slot, job)

    def _store_all(self, piece: _KVBlock, layout, slot: int, part: slice) -> None:
        self._meta_home(piece, layout, slot)
        buffer = self._kv.buffers[slot]
        self.gpu_to_cpu_bytes += part.stop - part.start
        if piece.tier == "cpu":
            copy(piece.kv[part], buffer[part])
            finish(self.device.record())
            return
        if self.device.is_cuda:
            copy(self._store_host[part], buffer[part])
            finish(self.device.record())
            buffer = self._store_host
        data = buffer[part.start : aligned(part.stop)]
        wait(self.io.write(piece.file, data.numpy(), piece.offset + part.start, True))
        piece.base = part.stop
        piece.logged = 0

    # decode

    def prefetch(self, layer: int, batch: int, held: int) -> bool:
        """Start bringing a piece that streams, and of which `held` slots are in use, to the device; False if it cannot
        be yet: no slot is free, it is still being used, or loading may not overlap."""
        key = (layer, batch)
        if not self.load_queue.overlap or not self._kv.any_free or key in self._loading or key in self._slot_of:
            return False
        self._fetch(key, held)
        return True

    def _fetch(self, key: Key, held: int) -> None:
        (slot, busy), piece, layout = self._kv.take(), self.pieces[key], self.layouts[key[1]]
        self._loading[key] = (slot, self.load_queue.submit(lambda: self._load(piece, layout, slot, busy, held)))

    def _load(self, piece: _KVBlock, layout, slot: int, busy: Future | None, held: int) -> None:
        used = layout.used_bytes(held)
        self.device.wait_for(piece.stored)
        come = piece.kv if piece.tier == "cpu" else self._read(piece, layout, slot, busy, used)
        self.device.wait_for(busy)
        if layout.scored and self.device.is_cuda:
            copy(self._meta[slot][: layout.meta_bytes], piece.meta[: layout.meta_bytes])
            self.cpu_to_gpu_bytes += layout.meta_bytes
        if come is not self._kv.buffers[slot]:
            copy(self._kv.buffers[slot][:used], come[:used])
            self.cpu_to_gpu_bytes += used
            self._landing_free[slot] = self.device.record()

    def _read(self, piece: _KVBlock, layout, slot: int, busy: Future | None, used: int) -> Tensor:
        """What the file holds of a piece: where it has landed."""
        if not self.device.is_cuda:  # in the slot itself
            self.device.wait_for(busy)
        finish(self._landing_free[slot])
        data, behind = self._landing[slot].numpy(), aligned(layout.kv_bytes)
        end = behind + piece.logged * aligned(layout.row_bytes)
        parts = [(0, aligned(piece.base)), (behind, end)] if aligned(piece.base) < behind else [(0, end)]
        wait([read for a, b in parts for read in self.io.read(piece.file, data[a:b], piece.offset + a, True)])
        data, log = data[:used], data[behind:end]
        data[piece.base :] = 0  # a segment that only the log has written to yet
        if piece.logged:  # a slot may be there twice: the last one stays
            rows = log.reshape(piece.logged, -1)[:, : layout.row_bytes]
            places = layout.places(piece.log[: piece.logged])
            layout.vectors(data)[places.reshape(-1)] = layout.vectors(rows).reshape(-1)
        return self._landing[slot]

    def get(self, layer: int, batch: int, held: int):
        """The cache of a piece, ready to be used and changed in place."""
        piece, layout = self.pieces[layer, batch], self.layouts[batch]
        if not self.streams(layer, batch):
            if piece.stored is not None:  # used where it is: prefill's copy must have arrived
                self.device.stall_on(piece.stored, "cache")
                piece.stored = None
            return layout.view(piece.kv, piece.meta)
        key = (layer, batch)
        self.device.hold_back(self._storing, len(self._kv.buffers), "cache")
        if key not in self._loading:
            self._fetch(key, held)
        slot, future = self._loading.pop(key)
        self._slot_of[key] = slot
        self.device.stall_on(future, "cache")
        return self._view(piece, layout, slot)

    def store_step(self, layer: int, batch: int, held: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Send home what a decode step changed: the new token's k and v (B, H, D), which went into `slots`
        (B, H), and the scores. `held` slots are in use after the step."""
        if not self.streams(layer, batch):
            return
        piece, layout = self.pieces[layer, batch], self.layouts[batch]
        # behind the last segment nothing comes any more
        if piece.tier == "disk" and (piece.logged == len(piece.log) or held in layout.ends[:-1]):
            # of a cache that grows, segments that no token went into stay as they are
            begin = 0 if layout.scored else piece.log[: piece.logged].min(initial=int(slots.min()))
            self.store_all(layer, batch, held, begin)
            return
        slot, computed, freed = self._slot_of.pop((layer, batch)), self.device.record(), None
        if self.device.is_cuda:  # two jobs: the next piece may come into the slot while the token is still on its way
            freed = self.store_queue.submit(lambda: self._meta_home(piece, layout, slot), after=computed)
        self._kv.give_back(slot, freed)
        piece.stored = self.store_queue.submit(
            lambda: self._store_token(piece, layout, freed, slots, k, v), after=computed
        )
        self._storing.append(piece.stored)

    def _store_token(self, piece: _KVBlock, layout, freed: Future | None, slots: Tensor, k: Tensor, v: Tensor) -> None:
        if freed is not None:
            freed.result()  # without its scores the piece is not home either
        data = self._row_host[: layout.row_bytes]
        row = data.view(layout.dtype).view(2, layout.batch, layout.heads, layout.head_dim)
        copy(row[0], k)
        copy(row[1], v)
        # of a cache that keeps everything a token has the same slot in all heads
        slots = (slots if layout.scored else slots[:, :1]).to("cpu").numpy()
        finish(self.device.record())
        self.gpu_to_cpu_bytes += layout.row_bytes
        if piece.tier == "cpu":
            layout.vectors(piece.kv[: layout.kv_bytes].numpy())[layout.places(slots)] = layout.vectors(data.numpy())
        else:
            size = aligned(layout.row_bytes)
            at = piece.offset + aligned(layout.kv_bytes) + piece.logged * size
            wait(self.io.write(piece.file, self._row_host[:size].numpy(), at, True))
            piece.log[piece.logged] = slots
            piece.logged += 1

    def _meta_home(self, piece: _KVBlock, layout, slot: int) -> None:
        if layout.scored and self.device.is_cuda:
            copy(piece.meta[: layout.meta_bytes], self._meta[slot][: layout.meta_bytes])
            self.gpu_to_cpu_bytes += layout.meta_bytes

    # slots

    def _view(self, piece: _KVBlock, layout, slot: int):
        return layout.view(self._kv.buffers[slot], self._meta[slot] if self.device.is_cuda else piece.meta)

    def drop(self, layer: int, batch: int) -> None:
        """Forget what is being fetched for a step that will not come."""
        if (layer, batch) in self._loading:
            slot, future = self._loading.pop((layer, batch))
            # waits for it: no request may read into a buffer that another piece fills
            self._kv.give_back(slot, None if future.exception() else future)

    def wipe(self) -> None:
        """Forget every number: a NaN that stayed in a slot not yet in use would spread to who uses it next."""
        buffers = [*self._kv.buffers, *(piece.kv for piece in self.pieces.values() if piece.kv is not None)]
        for buffer in buffers:
            buffer.zero_()

    def drain(self) -> None:
        """Wait for everything in flight and raise what failed."""
        for key in list(self._loading):
            self.drop(*key)
        self._storing.clear()
        for piece in self.pieces.values():
            if piece.stored is not None:
                finish(piece.stored.result())
                piece.stored = None
