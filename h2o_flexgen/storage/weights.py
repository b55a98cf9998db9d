"""The weights of a model: each tensor is resident on one tier, and those that are not on the device are streamed to it
layer by layer, through one of two staging buffers:

    gpu   used where it is
    cpu   copied into the staging buffer, from pinned memory on CUDA
    disk  read into the staging buffer; on CUDA through a host buffer

A buffer has room for the largest layer. Smaller layers share one, as many in a row as fit: while a vocabulary head is
computed in one buffer, the other takes the first few layers of the next token step.

    buffer 0   | layer 1 | layer 2 | layer 3 |         | layers 7 to 9 ...
    buffer 1             | layer 4 | layer 5 | layer 6 |         | head ...

A checkpoint of another dtype is converted by the copy to CUDA. On the CPU compute converts a layer right before it
uses it, with all cores: a thread that converts beside compute costs it more time than that takes. Quantised matrices
stay as they are stored on every tier, unless all are decoded when they are loaded (`decoded.py`). Compute
decodes a layer once for all batches, on either device. The head, which may be as large as many layers, is decoded by
its matmul, a slice at a time. For matmuls in int8 (`compute`) codes of another format become codes of 8 bits, by layers
and slices likewise; `Int8`, and with `in_blocks` blocks of 4 bits, are used as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import Dense, Format, Int8, Quantised, convert
from h2o_flexgen.formats.forms import in_memory
from h2o_flexgen.kernels import int8
from h2o_flexgen.kernels.exact import pack
from h2o_flexgen.kernels.int8 import Int8Weight
from h2o_flexgen.kernels.linear import is_as_stored, matmul_format, packs, packs_int8
from h2o_flexgen.machine.device import finish
from h2o_flexgen.machine.pages import aligned, staging_span
from h2o_flexgen.models.spec import Tensors
from h2o_flexgen.storage.checkpoint import Checkpoint
from h2o_flexgen.storage.decoded import COPY
from h2o_flexgen.storage.disk import wait
from h2o_flexgen.storage.dummy import DummyCheckpoint
from h2o_flexgen.storage.queues import double_buffers
from h2o_flexgen.storage.stored import PagedRead, parts_of, read_rows, rows_of
from h2o_flexgen.storage.transport import Transport
from h2o_flexgen.utils import interrupts
from h2o_flexgen.utils.progress import bar

Shape = tuple[int, ...]


class StagingBytes(NamedTuple):
    """The bytes that streamed weights take; the memory plan counts with the same ones."""

    device: int = 0  # of the staging buffer on the device
    host: int = 0  # (CUDA) of the buffer in RAM that is read into from disk
    converted: int = 0  # of weights as matmuls read them that come in another format


@lru_cache(maxsize=4096)  # layers are alike, and a search counts them for each KV budget and format
def staging_bytes(
    tier: str,
    form: Format,
    shape: Shape,
    dtype: torch.dtype,
    cuda: bool,
    read: Format,
) -> StagingBytes:
    """What a tensor that is stored in `form` takes in a job that computes in `dtype`, if matmuls read it in `read`."""
    dense = Dense(dtype)
    held = in_memory(form, dtype)
    decoded = 0 if held == read else aligned(read.nbytes(shape))
    if tier == "gpu":
        return StagingBytes(converted=decoded)
    if tier == "cpu":
        return StagingBytes(staging_span(held.nbytes(shape)), 0, decoded)
    if cuda:
        return StagingBytes(staging_span(held.nbytes(shape)), staging_span(form.nbytes(shape)), decoded)
    if held == dense != form:
        decoded = aligned(dense.nbytes(shape))
    return StagingBytes(staging_span(form.nbytes(shape)), 0, decoded)


def largest_layer(layers: Iterable[list[StagingBytes]]) -> StagingBytes:
    """What buffers must hold that serve every layer."""
    return StagingBytes(*map(max, zip(*map(_sum, layers))))


def _sum(tensors: Iterable[StagingBytes]) -> StagingBytes:
    return StagingBytes(*map(sum, zip(StagingBytes(), *tensors)))


def _share_buffers(
    layers: Iterable[StagingBytes], room: StagingBytes
) -> tuple[list[list[int]], dict[int, StagingBytes]]:
    """Which layers share a buffer, and where each begins in it, of those that need any."""
    groups = []
    begin = {}
    used = room
    for layer, needed in enumerate(layers):
        if needed.device == 0:
            continue
        if used.device + needed.device > room.device or used.host + needed.host > room.host:
            groups.append([])
            used = StagingBytes()
        groups[-1].append(layer)
        begin[layer] = used
        used = _sum([used, needed])
    return groups, begin


@dataclass
class _StagedLayer:
    """A layer in the staging buffer of index `buffer`: its streamed tensors by short name, and what fills them, copies
    (target, source) from RAM and reads from disk."""

    buffer: int
    tensors: dict[str, Tensor | Quantised] = field(default_factory=dict)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    reads: list[PagedRead] = field(default_factory=list)
    job: Future | None = None


class WeightStore:
    """The weights of one model, placed.

    Attributes:
        groups: the layers that stream, in order; those of a group share a staging buffer.

    Args:
        dtype: of the computation.
        layers: per layer the tensors it needs whole.
        gathered: tensors of which only rows are asked for, by `rows`.
        tiers: tier of every tensor by its name in the checkpoint.
        source: the checkpoint, or random weights.
        progress: show a bar while loading.
        compute: "exact", or "int8" for matmuls in int8 with what is quantised; in_blocks: 4 bits as they are stored.

    Raises:
        UserError: NaN or infinite elements in a tensor that is not on disk; a tensor that cannot be read; no memory.
    """

    def __init__(
        self,
        transport: Transport,
        dtype: torch.dtype,
        layers: list[Tensors],
        gathered: Tensors,
        tiers: dict[str, str],
        source: Checkpoint | DummyCheckpoint,
        progress: bool = True,
        compute: str = "exact",
        in_blocks: bool = False,
    ):
        self.compute = compute
        self.in_blocks = in_blocks
        self.transport = transport
        self.device = transport.device
        self._queue = transport.queues["weights"]
        self.dtype = dtype
        self.layers = layers
        self.gathered = gathered
        self.tiers = tiers
        self._source = source
        shapes = {name: shape for spec in (*layers, gathered) for name, shape in spec.values()}
        on_disk = [name for name in shapes if tiers[name] == "disk"]
        self.stored = source.on_disk(on_disk, transport.file, transport.io, progress)
        self.resident: dict[str, Tensor | Quantised | Int8Weight] = {}
        self._load({n: shape for n, shape in shapes.items() if tiers[n] != "disk"}, source, progress)

        staging = [
            [self._staging_bytes(name, shape, spec is layers[-1]) for name, shape in spec.values()] for spec in layers
        ]
        sizes = largest_layer(staging)
        self.groups, self._begin = _share_buffers(map(_sum, staging), sizes)
        count = double_buffers(transport.overlap)
        self._converted = self.device.buffer(sizes.converted)
        self._buffers = [self.device.buffer(sizes.device) for _ in range(count)] if sizes.device else []
        self._hosts = [self.device.host_buffer(sizes.host) for _ in range(count)] if sizes.host else []
        self._buffer_free, self._host_free = [None] * count, [None] * count  # events
        self._buffer = 0  # of the group whose layers are staged next
        self._staged: dict[int, _StagedLayer] = {}

    def _form(self, name: str) -> Format:
        """In which a tensor is on the gpu and cpu tiers."""
        return in_memory(self._source.format(name), self.dtype)

    def _staging_bytes(self, name: str, shape: Shape, is_head: bool) -> StagingBytes:
        form, cuda = self._source.format(name), self.device.is_cuda
        return staging_bytes(self.tiers[name], form, shape, self.dtype, cuda, self._read(form, is_head))

    def _read(self, form: Format, is_head: bool) -> Format:
        """In which matmuls are given what is kept in `form`."""
        return matmul_format(form, self.dtype, self.compute, self.in_blocks, is_head)

    def _load(self, shapes: dict[str, Shape], source: Checkpoint | DummyCheckpoint, progress: bool) -> None:
        sizes = {name: self._form(name).nbytes(shape) for name, shape in shapes.items()}
        on_gpu = [name for name in shapes if self.device.is_cuda and self.tiers[name] == "gpu"]
        buffers = dict(zip(on_gpu, self.device.buffers([sizes[name] for name in on_gpu])))
        packed = self._packed()
        with bar(desc="loading weights", total=sum(sizes.values()), unit="B", show=progress) as shown:
            for name, shape in shapes.items():
                interrupts.check()
                buffer = buffers[name] if name in buffers else self.device.host_buffer(sizes[name])
                tensor = self._form(name).view(buffer, shape)
                source.read(name, tensor, self.transport.io)
                if not _is_finite(tensor):
                    narrowed = self.dtype == torch.float16 and source.format(name) != Dense(torch.float16)
                    advice = ", or too large for float16: use `dtype` bfloat16 or float32" if narrowed else ""
                    cause = f"the weights {name.removesuffix(COPY)!r} hold NaN or infinite numbers"
                    raise UserError(f"{cause}: the checkpoint is broken{advice}")
                self.resident[name] = _packed(tensor) if name in packed else tensor
                shown.update(sizes[name])

    def _packed(self) -> set[str]:
        """Names of matrices that are kept as the CPU multiplies with them fastest, and are used for nothing else."""
        if self.device.is_cuda:
            return set()
        forms = [Dense(self.dtype)] if packs(self.dtype) else []
        forms += [Int8()] if self.compute == "int8" and packs_int8() else []
        matrices = {name for spec in self.layers for name, shape in spec.values() if len(shape) == 2}
        gathered = {name for name, _ in self.gathered.values()}
        return {n for n in matrices - gathered if self.tiers[n] == "gpu" and self._form(n) in forms}

    def held_bytes(self, cuda: bool) -> int:
        """Bytes that the store holds of a GPU's memory (`cuda`) or of RAM."""
        held = (*self.resident.values(), *self._buffers, *self._hosts, self._converted)
        return sum(t.nbytes for t in held if t.is_cuda == cuda)

    def prefetch(self, layer: int) -> None:
        """Start to stage a layer, if there is overlap and it is not staged already. What is prefetched stays for the
        next block, or the next job."""
        if self.transport.overlap:
            self._start(layer)

    def _start(self, layer: int) -> None:
        if layer in self._staged or layer not in self._begin:
            return
        if self._is_first(layer):
            self._buffer = (self._buffer + 1) % len(self._buffers)
        staged = self._staged[layer] = self._layout(layer)
        if not self.device.is_cuda:  # the buffer is free now: queue its reads behind those of the layer before
            self._request(staged)
        if self.device.is_cuda and self._is_first(layer):
            self._queue.submit(lambda: finish(self._host_free[staged.buffer]))
        staged.job = self._queue.submit(lambda: self.fill(staged), after=self._buffer_free[staged.buffer])

    def _is_first(self, layer: int) -> bool:
        """Whether a layer is at the start of its buffer."""
        return self._begin[layer].device == 0

    def _layout(self, layer: int) -> _StagedLayer:
        index = self._buffer
        (at, host_at, _) = self._begin[layer]
        staged = _StagedLayer(index)
        for short, (name, shape) in self.layers[layer].items():
            if self.tiers[name] == "gpu":
                continue
            is_head = layer == len(self.layers) - 1
            sizes = self._staging_bytes(name, shape, is_head)
            stored = self.stored.get(name)
            span = self._buffers[index][at : at + sizes.device]
            if stored is not None and not self.device.is_cuda:
                staged.reads.append(PagedRead(stored, span))
                tensor = staged.reads[-1].tensor  # in the format that is stored
            else:
                tensor = self._form(name).view(span, shape)
                target = tensor.raw if isinstance(tensor, Quantised) else tensor
                if stored is None:
                    source = self.resident[name]
                    staged.copies.append((target, source.raw if isinstance(source, Quantised) else source))
                else:
                    host = self._hosts[index][host_at : host_at + sizes.host]
                    staged.reads.append(PagedRead(stored, host, target))
            staged.tensors[short] = tensor
            at += sizes.device
            host_at += sizes.host
        return staged

    def get(self, layer: int) -> dict[str, Tensor | Quantised | Int8Weight]:
        """The weights of a layer on the device by short name, until `release`; compute waits until they are loaded."""
        self._start(layer)
        staged = self._staged.get(layer)
        if staged is not None:
            self.device.stall_on(staged.job, "weights")
        found = {}
        at = 0
        for short, (name, shape) in self.layers[layer].items():
            tensor = self.resident[name] if self.tiers[name] == "gpu" else staged.tensors[short]
            if isinstance(tensor, Int8Weight):
                found[short] = tensor
                continue
            held = tensor.format if isinstance(tensor, Quantised) else Dense(tensor.dtype)
            read = self._read(held, layer == len(self.layers) - 1)
            if read != held:
                source = tensor
                tensor = read.view(self._converted[at:], shape)
                _convert(tensor, source)
                at += aligned(tensor.nbytes)
            if self.compute == "int8" and read == Int8():
                tensor = Int8Weight(*read.parts(tensor.raw, shape))
            elif self.compute == "int8" and isinstance(tensor, Quantised):
                tensor = replace(tensor, in_int8=True, in_blocks=is_as_stored(read, self.in_blocks))
            found[short] = tensor
        return found

    def release(self, layer: int) -> None:
        """The layer's last computation is queued: its staging buffer may be filled again after it."""
        staged = self._staged.pop(layer, None)
        if staged is not None:
            self._buffer_free[staged.buffer] = self.device.record()

    def fill(self, staged: _StagedLayer) -> None:
        """Fill a staging buffer; without CUDA its reads have been requested."""
        if self.device.is_cuda:
            self._request(staged)
        try:
            for target, source in staged.copies:
                self.transport.to_gpu(target, source)
            for read in staged.reads:
                self.transport.count("cpu_to_gpu", read.finish())
        finally:
            wait([request for read in staged.reads for request in read.requests])
        self._host_free[staged.buffer] = self.device.record()

    def _request(self, staged: _StagedLayer) -> None:
        for read in staged.reads:
            read.start(self.transport.io, direct=True)

    def rows(self, short: str, ids: Tensor) -> Tensor:
        """Rows `ids` (any shape, int64, on the CPU) of a gathered tensor: ids.shape + (width,), on the device."""
        name, _ = self.gathered[short]
        device = self.device.torch_device
        stored = self.stored.get(name)
        held = self.resident.get(name)
        if self.tiers[name] == "gpu" and not isinstance(held, Quantised):
            return F.embedding(ids.to(device), held)
        unique, inverse = torch.unique(ids, return_inverse=True)
        if self.tiers[name] == "gpu":
            rows = held.take(unique.to(device))
        elif stored is None:
            rows = held.take(unique) if isinstance(held, Quantised) else held[unique]
        else:
            with self.device.stalling("weights"):
                raw = read_rows(stored, [range(n, n + 1) for n in unique.tolist()], self.transport.io)
            rows = stored.format.view(raw, (len(unique), stored.shape[1]))
        if self.tiers[name] != "gpu":
            self.transport.count("cpu_to_gpu", rows.nbytes)
        if isinstance(rows, Quantised):
            out = torch.empty(rows.shape, dtype=self.dtype, device=rows.device)
            rows.decode(out)
            rows = out
        return F.embedding(inverse.to(device), rows.to(device=device, dtype=self.dtype))

    def check_finite(self) -> None:
        """Raises UserError if a tensor on disk holds NaN or infinite elements; the others were checked when loaded."""
        for name, stored in self.stored.items():
            parts = rows_of if len(stored.shape) > 1 else parts_of
            if not all(_is_finite(part) for _, part in parts(stored, self.transport.io)):
                raise UserError(f"the weights {name!r} hold NaN or infinite numbers: the checkpoint is broken")


def _packed(tensor: Tensor | Quantised) -> Tensor | Int8Weight:
    """As the CPU multiplies with it fastest."""
    if not isinstance(tensor, Quantised):
        return pack(tensor)
    codes, scale = tensor.format.parts(tensor.raw, tensor.shape)
    return Int8Weight(int8.pack(codes), scale.clone())


def _convert(out: Tensor | Quantised, source: Tensor | Quantised) -> None:
    """Into the format that matmuls read."""
    if isinstance(source, Quantised):
        source.into(out)
    else:
        convert(out, source)


def _is_finite(tensor: Tensor | Quantised) -> bool:
    """Whether all elements are finite; unlike torch.isfinite without a second tensor of that size."""
    if isinstance(tensor, Quantised):
        return tensor.is_finite()
    return bool(torch.stack(tensor.aminmax()).isfinite().all())
