"""Weights: each tensor has one home; the others of a layer stream into one of two slots on the device.

gpu   resident, used as it is
cpu   copied into the slot, from pinned memory where there is CUDA
disk  read into the slot (CPU), or through a host buffer into the slot (CUDA)

A checkpoint in another dtype is converted by the copy to CUDA. On the CPU compute converts a layer right before it
uses it, with all cores: a thread that converts beside compute costs it more time than that takes.
"""

from __future__ import annotations

from concurrent.futures import Future
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen import interrupts
from h2o_flexgen.errors import UserError
from h2o_flexgen.kernels.linear import pack, packs
from h2o_flexgen.offload.checkpoint import PART, Checkpoint, DummyCheckpoint, Stored, bar_of_bytes, parts_of
from h2o_flexgen.offload.device import Device, TransferQueue, as_numpy, convert, copy, finish
from h2o_flexgen.offload.disk import DiskIO, wait
from h2o_flexgen.sizes import PAGE, aligned, staging_span

Spec = dict[str, tuple[str, tuple[int, ...]]]


class WeightStore:
    """The weights of one model, placed.

    Args:
        layers: per layer the tensors it needs whole, {short name: (name, shape)}.
        gathered: tensors of which only rows are asked for, by `rows`.
        tiers: tier of every tensor by name.
        make_file: makes a file in the offload folder (random weights at home on disk need one).
    """

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        layers: list[Spec],
        gathered: Spec,
        tiers: dict[str, str],
        source: Checkpoint | DummyCheckpoint,
        io: DiskIO,
        lane: TransferQueue,
        make_file,
        direct: bool = True,
        progress: bool = True,
    ):
        self.device, self.dtype, self.layers, self.tiers = device, dtype, layers, tiers
        self.io, self.queue, self.direct = io, lane, direct
        self.cpu_to_gpu_bytes = 0
        shapes = {name: shape for spec in (*layers, gathered) for name, shape in spec.values()}
        self.gathered = gathered
        self.stored = source.on_disk([n for n in shapes if tiers[n] == "disk"], make_file, io, progress)
        self.resident: dict[str, Tensor] = {}
        self._load([(n, s) for n, s in shapes.items() if tiers[n] != "disk"], source, progress)

        slot_bytes = max(self._slot_bytes(spec) for spec in layers)
        host_bytes = max(self._host_bytes(spec) for spec in layers)
        self._converted = device.buffer(max(map(self._converted_bytes, layers)))
        count = 2 if lane.overlap else 1
        self._slots = [device.buffer(slot_bytes) for _ in range(count)] if slot_bytes else []
        self._hosts = [device.host_buffer(host_bytes) for _ in range(count)] if host_bytes else []
        self._host_free = [None] * count
        self._slot_free = [None] * count
        self._turn = 0
        self._loading: dict[int, tuple[Future | None, int, dict[str, Tensor]]] = {}  # job, slot, as stored

    def _load(self, names: list[tuple[str, tuple[int, ...]]], source, progress: bool) -> None:
        sizes = {name: prod(shape) * self.dtype.itemsize for name, shape in names}
        packed = self._packed()
        away = [name for name, _ in names if self.device.is_cuda and self.tiers[name] == "gpu"]
        on_device = dict(zip(away, self.device.buffers([sizes[name] for name in away])))
        with bar_of_bytes("loading weights", sum(sizes.values()), progress) as bar:
            for name, shape in names:
                interrupts.check()
                data = on_device[name] if name in on_device else self.device.host_buffer(sizes[name])
                tensor = data.view(self.dtype).view(shape)
                source.read(name, tensor, self.io)
                if not is_finite(tensor):
                    fp16 = self.dtype == torch.float16 != source.stored_dtype(name)
                    or_large = ", or its numbers too large for float16: use --dtype bfloat16 or float32" if fp16 else ""
                    raise UserError(
                        f"the weights {name!r} hold NaN or infinite numbers: the checkpoint is broken{or_large}"
                    )
                self.resident[name] = pack(tensor) if name in packed else tensor
                bar.update(sizes[name])

    def _packed(self) -> set[str]:
        """Names of the matrices that stay on the device and are used for nothing but matmuls."""
        if self.device.is_cuda or not packs(self.dtype):
            return set()
        matrices = {name for spec in self.layers for name, shape in spec.values() if len(shape) == 2}
        gathered = {name for name, _ in self.gathered.values()}
        return {name for name in matrices - gathered if self.tiers[name] == "gpu"}

    def held_bytes(self, cuda: bool) -> int:
        """What is taken while these weights are loaded, of a card's memory or of RAM."""
        held = (*self.resident.values(), *self._slots, *self._hosts, self._converted)
        return sum(t.nbytes for t in held if t.is_cuda == cuda)

    # what a layer takes in a slot

    def _streams(self, spec: Spec) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(short, n, shape) for short, (n, shape) in spec.items() if self.tiers[n] != "gpu"]

    def _in_place(self, name: str) -> bool:
        """Read from disk straight into the slot: no bus to cross."""
        return self.tiers[name] == "disk" and not self.device.is_cuda

    def _slot_bytes(self, spec: Spec) -> int:
        return sum(
            staging_span(self.stored[n].nbytes if self._in_place(n) else prod(shape) * self.dtype.itemsize)
            for _, n, shape in self._streams(spec)
        )

    def _host_bytes(self, spec: Spec) -> int:
        names = [n for _, n, _ in self._streams(spec) if self.tiers[n] == "disk" and self.device.is_cuda]
        return sum(staging_span(self.stored[n].nbytes) for n in names)

    def _converted_bytes(self, spec: Spec) -> int:
        return sum(
            aligned(prod(shape) * self.dtype.itemsize)
            for _, n, shape in self._streams(spec)
            if self._in_place(n) and self.stored[n].dtype != self.dtype
        )

    # the schedule's calls

    def streams(self, layer: int) -> bool:
        """Whether anything of the layer must come to the device."""
        return bool(self._streams(self.layers[layer]))

    def prefetch(self, layer: int) -> None:
        """Start bringing a layer's weights into a slot, if loading may overlap and they are not coming already."""
        if self.queue.overlap:
            self._start(layer)

    def _start(self, layer: int) -> None:
        if layer in self._loading:
            return
        streams = self._streams(self.layers[layer])
        if not streams:
            self._loading[layer] = (None, 0, {})
            return
        slot = self._turn
        self._turn = (self._turn + 1) % len(self._slots)
        views, jobs, at, host_at = {}, [], 0, 0
        for short, name, shape in streams:
            stored = self.stored.get(name)
            if self._in_place(name):
                span, begin = staging_span(stored.nbytes), at + _begin(stored)
                views[short] = self._slots[slot][begin : begin + stored.nbytes].view(stored.dtype).view(shape)
                jobs.append((self._slots[slot][at : at + span], None, stored))
                at += span
                continue
            nbytes = prod(shape) * self.dtype.itemsize
            views[short] = self._slots[slot][at : at + nbytes].view(self.dtype).view(shape)
            at += staging_span(nbytes)
            if stored is None:
                jobs.append((views[short], self.resident[name], None))
            else:
                span = staging_span(stored.nbytes)
                jobs.append((views[short], self._hosts[slot][host_at : host_at + span], stored))
                host_at += span
        # without CUDA the slot is free now: its reads queue up behind those of the layer before
        reads = None if self.device.is_cuda else self._read_all(jobs)
        future = self.queue.submit(lambda: self._fill(slot, jobs, reads), after=self._slot_free[slot])
        self._loading[layer] = (future, slot, views)

    def _read_all(self, jobs: list) -> list[list[Future]]:
        return [
            [] if stored is None else self._read(stored, target if host is None else host)
            for target, host, stored in jobs
        ]

    def _fill(self, slot: int, jobs: list, reads: list[list[Future]] | None) -> None:
        if reads is None:
            finish(self._host_free[slot])
            reads = self._read_all(jobs)
        try:
            for target, host, stored in jobs:
                if stored is None:
                    copy(target, host)
                    self.cpu_to_gpu_bytes += target.nbytes
            for (target, host, stored), parts in zip(jobs, reads):
                if stored is None:
                    continue
                phase, begin = stored.offset % PAGE, _begin(stored)
                if begin != phase:
                    wait(parts)
                    span = target if host is None else host
                    copy(span[begin : begin + stored.nbytes], span[phase : phase + stored.nbytes])
                if host is not None:
                    self._pass_on(stored, host, target, parts)
                    self.cpu_to_gpu_bytes += target.nbytes
        finally:
            wait([part for parts in reads for part in parts])
        self._host_free[slot] = self.device.record()

    def _pass_on(self, stored: Stored, host: Tensor, target: Tensor, reads: list) -> None:
        """Copy a tensor that is being read into `host` to `target`, part by part as it comes."""
        phase, size = stored.offset % PAGE, stored.dtype.itemsize
        data = host[_begin(stored) :][: stored.nbytes].view(stored.dtype)
        target = target.view(-1)
        for read in reads:
            begin, end = (min(max(0, x - phase), stored.nbytes) // size for x in read.result())
            copy(target[begin:end], data[begin:end])

    def _read(self, stored: Stored, span: Tensor) -> list:
        """Read whole pages around the tensor, so that O_DIRECT is possible and its phase is kept; `later`, because
        compute may still be a layer away from it."""
        phase = stored.offset % PAGE
        begin = stored.offset - phase
        return self.io.read(stored.file, _clip(span, stored, phase), begin, self.direct, later=True)

    def get(self, layer: int) -> dict[str, Tensor]:
        """The weights of a layer on the device, until `release`; compute waits until they are there."""
        self._start(layer)
        future, _, views = self._loading[layer]
        self.device.stall_on(future, "weights")
        found, at = {}, 0
        for short, (name, shape) in self.layers[layer].items():
            if short not in views:
                found[short] = self.resident[name]
            elif views[short].dtype == self.dtype:
                found[short] = views[short]
            else:
                nbytes = prod(shape) * self.dtype.itemsize
                found[short] = self._converted[at : at + nbytes].view(self.dtype).view(shape)
                convert(found[short], views[short])
                at += aligned(nbytes)
        return found

    def release(self, layer: int) -> None:
        """The layer's last computation is queued: its slot may be filled anew after it."""
        future, slot, _ = self._loading.pop(layer)
        if future is not None:
            self._slot_free[slot] = self.device.record()

    def drop_prefetched(self) -> None:
        """Forget what was fetched for a step that will not come."""
        for layer in list(self._loading):
            future, _, _ = self._loading[layer]
            if future is not None:
                future.exception()
            self.release(layer)

    def rows(self, short: str, ids: Tensor) -> Tensor:
        """Rows `ids` (any shape, int64, on the CPU) of a gathered tensor: ids.shape + (width,)."""
        name, shape = self.gathered[short]
        home = self.tiers[name]
        if home == "gpu":
            return F.embedding(ids.to(self.device.torch_device), self.resident[name])
        unique, inverse = torch.unique(ids, return_inverse=True)
        if home == "cpu":
            rows = self.resident[name][unique]
        else:
            stored = self.stored[name]
            rows = torch.empty((len(unique), shape[1]), dtype=stored.dtype)
            width = shape[1] * stored.dtype.itemsize
            reads = []
            for row, index in zip(as_numpy(rows), unique.tolist()):
                reads += self.io.read(stored.file, row, stored.offset + index * width)
            with self.device.stalling("weights"):
                wait(reads)
        device = self.device.torch_device
        self.cpu_to_gpu_bytes += rows.nbytes
        return F.embedding(inverse.to(device), rows.to(device=device, dtype=self.dtype))

    def find_broken(self) -> str | None:
        """The name of a tensor at home on disk that holds NaN or infinite numbers, or None."""
        for name, stored in self.stored.items():
            if not all(is_finite(part) for _, part in parts_of(stored, self.io)):
                return name
        return None


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite; holds no second tensor, unlike torch.isfinite."""
    for part in tensor.view(-1).split(PART):
        low, high = part.aminmax()
        if not (torch.isfinite(low) and torch.isfinite(high)):
            return False
    return True


def _begin(stored: Stored) -> int:
    """Where a tensor begins in the span it is read into: at the phase it has in the file, so that pages match pages, or
    moved to the start if its numbers would not be aligned there (the format does not ask for that)."""
    phase = stored.offset % PAGE
    return 0 if phase % stored.dtype.itemsize else phase


def _clip(span: Tensor, stored: Stored, phase: int):
    whole = aligned(phase + stored.nbytes)
    size = stored.file.size
    return span[: min(whole, size - (stored.offset - phase))].numpy()
