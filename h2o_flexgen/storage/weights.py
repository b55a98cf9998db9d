"""The weights of a model: each tensor is resident on one tier, and those that are not on the device are streamed to it
unit by unit (a layer, or a group of its experts), through one of two staging buffers:

    gpu   on the device: used in place
    cpu   in RAM: copied into the staging buffer, from pinned memory on CUDA
    disk  read into the staging buffer, on CUDA through a host buffer

A checkpoint in another dtype is converted by the copy to CUDA. On a CPU each layer is converted just before it is
used, by all cores: a converting thread beside compute would slow it by more than the conversion takes. What a matrix
is on its tier, and what its matmul reads, is its `Form`. Quantised matrices stay as stored on every tier, unless all
are decoded when they are loaded. Compute decodes a layer once for all batches, on either device; the head, which may be
as large as many layers, is decoded by its matmul, a slice at a time, and where the plan says so also read like that.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import Dense, Int8, Quantised, Shape
from h2o_flexgen.formats.forms import COPY, Form
from h2o_flexgen.kernels import int8
from h2o_flexgen.kernels.exact import pack
from h2o_flexgen.kernels.int8 import Int8Weight
from h2o_flexgen.kernels.linear import packs, packs_int8
from h2o_flexgen.machine.device import finish
from h2o_flexgen.models.spec import Unit, shapes_of
from h2o_flexgen.storage.checkpoint import Checkpoint
from h2o_flexgen.storage.disk import wait
from h2o_flexgen.storage.dummy import DummyCheckpoint
from h2o_flexgen.storage.queues import double_buffers
from h2o_flexgen.storage.staging import (
    SlicedTensor,
    StagedExperts,
    StagedTensor,
    expert_bytes,
    share_buffers,
    slice_bytes,
    staging_bytes,
)
from h2o_flexgen.storage.stored import HostCopy, PagedRead, parts_of, read_rows, rows_of
from h2o_flexgen.storage.transport import Transport
from h2o_flexgen.utils import interrupts
from h2o_flexgen.utils.progress import bar


class WeightStore:
    """The weights of one model, placed. Units are numbered in the order in which a pass needs them.

    Attributes:
        groups: the units that stream, in order; those of a group share a staging buffer.
        resident: tensors on the gpu and cpu tiers, by name.
        stored: tensors on disk, by name.

    Args:
        dtype: of the computation.
        units: the tensors of each unit.
        forms: of every tensor, by its name in the checkpoint.
        tiers: of every tensor.
        source: the checkpoint, or random weights.
        progress: show a bar while loading.
        sliced: the matrix on disk that is read a slice at a time, if any.

    Raises:
        UserError: NaN or infinite elements in a tensor that is not on disk; a tensor that cannot be read; no memory.
    """

    def __init__(
        self,
        transport: Transport,
        dtype: torch.dtype,
        units: list[Unit],
        forms: dict[str, Form],
        tiers: dict[str, str],
        source: Checkpoint | DummyCheckpoint,
        progress: bool = True,
        sliced: str | None = None,
    ):
        self.transport = transport
        self.device = transport.device
        self._queue = transport.queues["weights"]
        self.dtype = dtype
        self.forms = forms
        self.tiers = tiers
        self._source = source
        self._gathered = {short: tensor for unit in units for short, tensor in unit.gathered.items()}
        shapes = shapes_of(units)
        on_disk = [name for name in shapes if tiers[name] == "disk"]
        self.stored = source.on_disk(on_disk, transport.file, transport.io, progress)
        self.resident: dict[str, Tensor | Quantised | Int8Weight] = {}
        loaded = {name: shape for name, shape in shapes.items() if tiers[name] != "disk"}
        self._load(loaded, self._packed(units), progress)

        count = double_buffers(transport.overlap)
        slice_size = slice_bytes(forms[sliced], shapes[sliced]).device if sliced else 0
        self._slices = [self.device.buffer(slice_size) for _ in range(count)]
        self._units = [self._tensors_of(unit, sliced) for unit in units]
        self.groups, sizes = share_buffers(self._units)
        self._first = {number: group[0] for group in self.groups for number in group}
        self._converted = self.device.buffer(sizes.converted)
        self._buffers = [self.device.buffer(sizes.device) for _ in range(count)]
        self._hosts = [self.device.host_buffer(sizes.host) for _ in range(count)]
        self._buffer_free = [None] * count  # events
        self._host_free = [None] * count  # events
        self._buffer = 0  # of the group whose units are staged next
        self._staged_in: dict[int, int] = {}  # by unit, the index of its buffer
        self._jobs: dict[int, Future] = {}  # by unit, what fills its buffer

    def _tensors_of(self, unit: Unit, sliced: str | None) -> dict[str, StagedTensor | SlicedTensor]:
        """The tensors that a unit needs whole, by short name."""
        found = {}
        # those in RAM first, since their copies wait for no disk
        for short, (name, shape) in sorted(unit.streamed.items(), key=lambda item: item[1][0] in self.stored):
            source = self.stored[name] if name in self.stored else self.resident[name]
            if name == sliced:
                found[short] = SlicedTensor(source, self.forms[name], self._slices, self.device, self.transport.io)
                continue
            where = (self.tiers[name], self.forms[name])
            if count := len(unit.experts):
                each = expert_bytes(*where, (shape[0] // count, *shape[1:]), self.device.is_cuda)
                found[short] = StagedExperts(source, shape, self.forms[name], each, count)
            else:
                size = staging_bytes(*where, shape, self.device.is_cuda)
                found[short] = StagedTensor(source, shape, self.forms[name], size)
        return found

    def _packed(self, units: list[Unit]) -> set[str]:
        """Names of matrices that are kept as the CPU multiplies with them fastest, and are used for nothing else."""
        if self.device.is_cuda:
            return set()
        formats = [Dense(self.dtype)] if packs(self.dtype) else []
        formats += [Int8()] if any(form.in_int8 for form in self.forms.values()) and packs_int8() else []
        whole = [unit for unit in units if not unit.experts]
        matrices = {name for unit in whole for name, shape in unit.streamed.values() if len(shape) == 2}
        matrices -= {name for name, _ in self._gathered.values()}
        fit = {name for name, form in self.forms.items() if form.is_direct and form.kept in formats}
        return {name for name in matrices & fit if self.tiers[name] == "gpu"}

    def _load(self, shapes: dict[str, Shape], packed: set[str], progress: bool) -> None:
        sizes = {name: self.forms[name].kept.nbytes(shape) for name, shape in shapes.items()}
        on_gpu = [name for name in shapes if self.device.is_cuda and self.tiers[name] == "gpu"]
        buffers = dict(zip(on_gpu, self.device.buffers([sizes[name] for name in on_gpu])))
        with bar(desc="loading weights", total=sum(sizes.values()), unit="B", show=progress) as shown:
            for name, shape in shapes.items():
                interrupts.check()
                buffer = buffers[name] if name in buffers else self.device.host_buffer(sizes[name])
                tensor = self.forms[name].kept.view(buffer, shape)
                found = name.removesuffix(COPY)
                self._read(found, self.forms[name], tensor)
                if not _is_finite(tensor):
                    narrowed = self.dtype == torch.float16 and self._source.format(found) != Dense(torch.float16)
                    advice = ", or too large for float16: use `dtype` bfloat16 or float32" if narrowed else ""
                    cause = f"the weights {found!r} contain NaN or infinite values"
                    raise UserError(f"{cause}: the checkpoint is broken{advice}")
                self.resident[name] = _pack(tensor) if name in packed else tensor
                shown.update(sizes[name])

    def _read(self, name: str, form: Form, out: Tensor | Quantised) -> None:
        """Fill `out`, a tensor as it is kept; a quantised one may be decoded."""
        io = self.transport.io
        if form.stored.is_dense or form.kept == form.stored:
            self._source.read(name, out, io)
        elif isinstance(out, Tensor) and not out.is_cuda:  # without a second matrix in RAM
            for begin, rows in rows_of(self._source.find(name), io):
                rows.decode(out[begin : begin + rows.height])
        else:
            raw = torch.empty(form.stored.nbytes(tuple(out.shape)), dtype=torch.uint8, device=out.device)
            whole = form.stored.view(raw, tuple(out.shape))
            self._source.read(name, whole, io)
            whole.decode_into(out)

    def held_bytes(self, cuda: bool) -> int:
        """Bytes that the store holds of a GPU's memory (`cuda`) or of RAM."""
        held = (*self.resident.values(), *self._buffers, *self._hosts, *self._slices, self._converted)
        return sum(t.nbytes for t in held if t.is_cuda == cuda)

    def prefetch(self, number: int, wanted: Collection[int] | None = None) -> None:
        """Start to stage a unit, if there is overlap and it is not staged yet, or to read its first slices. What is
        prefetched stays for the next block, or the next job. `wanted`: as for `StagedExperts.choose`."""
        if self.transport.overlap:
            self._start(number, wanted)
            for tensor in self._units[number].values():
                if isinstance(tensor, SlicedTensor):
                    tensor.prefetch()

    def _start(self, number: int, wanted: Collection[int] | None = None) -> None:
        if number in self._jobs:
            return
        for tensor in self._units[number].values():
            if isinstance(tensor, StagedExperts):
                tensor.choose(wanted)
        if number not in self._first:
            return
        is_first = self._first[number] == number
        if is_first:
            self._buffer = (self._buffer + 1) % len(self._buffers)
        index = self._buffer
        buffers = (self._buffers[index], self._hosts[index])
        streamed = [tensor for tensor in self._units[number].values() if tensor.size.device]
        transfers = [transfer for tensor in streamed for transfer in tensor.stage(*buffers)]
        if not self.device.is_cuda:  # the buffer is free now: queue its reads behind those of the unit before
            self._request(transfers)
        elif is_first:
            self._queue.submit(lambda: finish(self._host_free[index]))
        self._staged_in[number] = index
        self._jobs[number] = self._queue.submit(lambda: self.fill(transfers, index), after=self._buffer_free[index])

    def _request(self, transfers: list[HostCopy | PagedRead]) -> None:
        for transfer in transfers:
            transfer.start(self.transport.io)

    def fill(self, transfers: list[HostCopy | PagedRead], index: int) -> None:
        """Fill a unit's part of the staging buffer of this index; without CUDA its reads have been requested."""
        if self.device.is_cuda:
            self._request(transfers)
        try:
            for transfer in transfers:
                self.transport.count("cpu_to_gpu", transfer.finish())
        finally:
            wait([request for transfer in transfers for request in transfer.requests])
        self._host_free[index] = self.device.record()

    def get(
        self, number: int, wanted: Collection[int] | None = None
    ) -> dict[str, Tensor | Quantised | Int8Weight | SlicedTensor | list]:
        """The weights of a unit on the device by short name, until `release`: of experts a list each. Compute waits
        until they are loaded. `wanted`: as for `StagedExperts.choose`."""
        self._start(number, wanted)
        self.device.stall_on(self._jobs.get(number), "weights")
        return {short: tensor.operand(self._converted) for short, tensor in self._units[number].items()}

    def release(self, number: int) -> None:
        """The unit's last computation is queued: its staging buffer may be filled again after it."""
        if self._jobs.pop(number, None) is not None:
            self._buffer_free[self._staged_in[number]] = self.device.record()

    def rows(self, short: str, ids: Tensor) -> Tensor:
        """Rows `ids` (any shape, int64, on the CPU) of a gathered tensor: ids.shape + (width,), on the device."""
        name, _ = self._gathered[short]
        device = self.device.torch_device
        on_device = self.tiers[name] == "gpu"
        if on_device and isinstance(self.resident[name], Tensor):
            return F.embedding(ids.to(device), self.resident[name])
        unique, inverse = torch.unique(ids, return_inverse=True)
        rows = self._take(name, unique)
        if not on_device:
            self.transport.count("cpu_to_gpu", rows.nbytes)
        return F.embedding(inverse.to(device), rows.to(self.dtype).to(device))

    def _take(self, name: str, ids: Tensor) -> Tensor | Quantised:
        """Rows `ids` (n,) of a matrix, on its tier or from disk."""
        if self.tiers[name] == "disk":
            stored = self.stored[name]
            with self.device.stalling("weights"):
                raw = read_rows(stored, [range(n, n + 1) for n in ids.tolist()], self.transport.io)
            return stored.format.view(raw, (len(ids), stored.shape[1]))
        held = self.resident[name]
        return held.take(ids.to(held.device)) if isinstance(held, Quantised) else held[ids]

    def check_finite(self) -> None:
        """Raises UserError if a tensor on disk holds NaN or infinite elements; the others were checked when loaded."""
        for name, stored in self.stored.items():
            parts = rows_of if len(stored.shape) > 1 else parts_of
            if not all(_is_finite(part) for _, part in parts(stored, self.transport.io)):
                raise UserError(f"the weights {name!r} contain NaN or infinite values: the checkpoint is broken")


def _pack(tensor: Tensor | Quantised) -> Tensor | Int8Weight:
    """As the CPU multiplies with it fastest."""
    if not isinstance(tensor, Quantised):
        return pack(tensor)
    codes, scale = tensor.format.parts(tensor.raw, tensor.shape)
    return Int8Weight(int8.pack(codes), scale.clone())


def _is_finite(tensor: Tensor | Quantised) -> bool:
    """Whether all elements are finite; unlike torch.isfinite without a second tensor of that size."""
    if isinstance(tensor, Quantised):
        return tensor.is_finite()
    return bool(torch.stack(tensor.aminmax()).isfinite().all())
