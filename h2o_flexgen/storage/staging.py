"""Weights on their way to matmuls: from a tier into a staging buffer, from there as the operand that a matmul reads.

A staging buffer has room for the largest unit: a layer, a group of a layer's experts, or the head. Smaller ones share
one, as many in a row as fit: while a vocabulary head is computed in one buffer, the other takes the first few layers of
the next token step.

    buffer 0   | layer 1 | layer 2 | layer 3 |         | layers 7 to 9 ...
    buffer 1             | layer 4 | layer 5 | layer 6 |         | head ...

Where memory is short the head has no part in them: its matmul reads it from disk a slice at a time (`SlicedTensor`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import add, attrgetter
from typing import NamedTuple

from torch import Tensor

from h2o_flexgen.formats import Int8, Quantised, Shape, convert
from h2o_flexgen.formats.forms import Form
from h2o_flexgen.kernels.linear import slice_rows
from h2o_flexgen.kernels.operands import Int8Weight, SlicedWeight, split_rows
from h2o_flexgen.machine.device import Device
from h2o_flexgen.machine.pages import PAGE, aligned, staging_span
from h2o_flexgen.storage.disk import DiskIO, wait
from h2o_flexgen.storage.stored import HostCopy, PagedRead, Stack, Stored
from h2o_flexgen.utils import interrupts


class StagingBytes(NamedTuple):
    """Bytes of weights in each kind of buffer; the memory plan counts with the same ones."""

    device: int = 0  # in a staging buffer on the device
    host: int = 0  # (CUDA) in the buffer in RAM that disk reads land in
    converted: int = 0  # as operands, where those are in another format

    def __add__(self, other: StagingBytes) -> StagingBytes:
        return StagingBytes(*map(add, self, other))

    def times(self, count: int) -> StagingBytes:
        return StagingBytes(*(count * nbytes for nbytes in self))


@lru_cache(maxsize=4096)  # layers are alike, and a search counts them for each KV budget and format
def staging_bytes(tier: str, form: Form, shape: Shape, cuda: bool, experts: int = 0) -> StagingBytes:
    """Of a tensor on a tier; of `experts` experts below each other each can be staged by itself."""
    if experts:
        return expert_bytes(tier, form, (shape[0] // experts, *shape[1:]), cuda).times(experts)
    arriving = form.kept if cuda or tier != "disk" else form.stored
    converted = 0 if arriving == form.given else aligned(form.given.nbytes(shape))
    if tier == "gpu":
        return StagingBytes(converted=converted)
    host = staging_span(form.stored.nbytes(shape)) if cuda and tier == "disk" else 0
    return StagingBytes(staging_span(arriving.nbytes(shape)), host, converted)


def expert_bytes(tier: str, form: Form, shape: Shape, cuda: bool) -> StagingBytes:
    """Of a matrix or a bias of one of several experts."""
    size = staging_bytes(tier, form, shape, cuda)
    apart = PAGE * (tier == "disk" and len(form.stored.row_bytes(shape[-1])) > 1)  # as for `slice_bytes`
    return size + (StagingBytes(host=apart) if cuda else StagingBytes(device=apart))


def slice_shape(form: Form, shape: Shape) -> Shape:
    """Of a slice of a matrix on disk."""
    return min(shape[0], slice_rows(shape[1], form.operand.dtype.itemsize)), shape[1]


def slice_bytes(form: Form, shape: Shape) -> StagingBytes:
    """Of a slice of a matrix on disk, on the CPU, in a buffer of its own; it is made the operand once it is read."""
    size = staging_bytes("disk", form._replace(is_sliced=False), slice_shape(form, shape), cuda=False)
    return size + StagingBytes(device=PAGE)  # scales that are apart from the codes begin a page


def largest_unit(units: Iterable[list[StagingBytes]]) -> StagingBytes:
    """The size of buffers that serve every unit."""
    needed = (map(sum, zip(StagingBytes(), *tensors)) for tensors in units)
    return StagingBytes(*map(max, zip(*needed)))


@dataclass
class StagedTensor:
    """A weight of one unit, resident or streamed."""

    source: Tensor | Quantised | Int8Weight | Stored  # on the device, in RAM, or on disk
    shape: Shape
    form: Form
    size: StagingBytes  # in the buffers
    begin: StagingBytes = StagingBytes()  # where it begins in them

    def __post_init__(self):
        self.tensor = self.source  # on the device; a streamed one is in the staging buffer from `stage` on

    def stage(self, buffer: Tensor, host: Tensor) -> list[HostCopy | PagedRead]:
        """Take its part of a staging buffer; returns the transfers that fill it. On CUDA disk reads land in `host`."""
        return [self._transfer(buffer, host)]

    def _transfer(self, buffer: Tensor, host: Tensor) -> HostCopy | PagedRead:
        span = buffer[self.begin.device :][: self.size.device]
        is_on_disk = isinstance(self.source, Stored)
        if is_on_disk and not self.size.host:
            read = PagedRead(self.source, span)
            self.tensor = read.tensor  # in the format that is stored
            return read
        self.tensor = self.form.kept.view(span, self.shape)
        if is_on_disk:
            return PagedRead(self.source, host[self.begin.host :][: self.size.host], _payload(self.tensor))
        return HostCopy(_payload(self.source), _payload(self.tensor))

    def operand(self, buffer: Tensor) -> Tensor | Quantised | Int8Weight:
        """What the matmul is given: the tensor itself, or what it is converted to in `buffer`."""
        tensor = self.tensor
        if self.size.converted:
            tensor = self.form.given.view(buffer[self.begin.converted :], self.shape)
            if isinstance(self.tensor, Quantised):
                self.tensor.decode_into(tensor)
            else:
                convert(tensor, self.tensor)
        if not self.form.in_int8 or isinstance(tensor, Int8Weight):
            return tensor
        if tensor.format == Int8():
            return Int8Weight(*tensor.format.parts(tensor.raw, self.shape))
        return replace(tensor, operand=self.form.operand)


class StagedExperts(StagedTensor):
    """The same matrix of several experts, below each other in `source`. They are staged and converted together, or each
    by itself if only some are wanted or they are apart in the files."""

    def __init__(
        self, source: Tensor | Quantised | Stored | Stack, shape: Shape, form: Form, each: StagingBytes, count: int
    ):
        super().__init__(source, shape, form, each.times(count))
        self.each = each
        self.count = count
        self._chosen: list[StagedTensor | None] | None = None  # by expert; None: all are together

    def choose(self, wanted: Collection[int] | None) -> None:
        """Which experts are staged and converted, counted from the first one here; None: all. All stay together where
        one of them is in several places in RAM: its codes, and its scales."""
        is_apart = isinstance(self.source, Quantised) and len(self.form.kept.row_bytes(self.shape[-1])) > 1
        if is_apart or (wanted is None and not isinstance(self.source, Stack)):
            self._chosen = None
            return
        wanted = range(self.count) if wanted is None else wanted
        self._chosen = [self._expert(n, part) if n in wanted else None for n, part in enumerate(self._parts())]

    def _parts(self) -> list[Tensor | Quantised | Stored]:
        """Each expert's part of the source."""
        if isinstance(self.source, Stored | Stack):
            height = self.shape[0] // self.count
            return [self.source.rows(n * height, height) for n in range(self.count)]
        return split_rows(self.source, self.count)

    def _expert(self, n: int, source: Tensor | Quantised | Stored) -> StagedTensor:
        shape = (self.shape[0] // self.count, *self.shape[1:])
        return StagedTensor(source, shape, self.form, self.each, self.begin + self.each.times(n))

    def stage(self, buffer: Tensor, host: Tensor) -> list[HostCopy | PagedRead]:
        if self._chosen is None:
            return super().stage(buffer, host)
        return [transfer for each in self._chosen if each for transfer in each.stage(buffer, host)]

    def operand(self, buffer: Tensor) -> list[Tensor | Quantised | Int8Weight | None]:
        """What the matmuls of each expert are given; None for those that are not wanted."""
        if self._chosen is None:
            return split_rows(super().operand(buffer), self.count)
        return [each and each.operand(buffer) for each in self._chosen]


class SlicedTensor(SlicedWeight):
    """A matrix on disk that its matmul reads a slice at a time: one is multiplied with while the next one is read.

    Args:
        buffers: for a slice each.

    Attributes:
        size, begin: as of a `StagedTensor`; only conversion is in the buffers of its layer.
    """

    def __init__(self, stored: Stored, form: Form, buffers: list[Tensor], device: Device, io: DiskIO):
        self.stored = stored
        self.form = form._replace(is_sliced=False)
        self.buffers = buffers
        self.device = device
        self.io = io
        self.size = slice_bytes(form, stored.shape)._replace(device=0)
        self.begin = StagingBytes()
        self.height = stored.shape[0]
        self._begins = range(0, self.height, slice_shape(form, stored.shape)[0])
        self._requested: dict[int, tuple[StagedTensor, PagedRead]] = {}  # by the number of the slice

    def operand(self, buffer: Tensor) -> SlicedTensor:
        self._converted = buffer
        return self

    def prefetch(self) -> None:
        """Request the first slices, behind all other requests."""
        self._request(0, prefetch=True)

    def _request(self, first: int, prefetch: bool = False) -> None:
        """Request the slices from number `first` on, as far as the buffers reach."""
        for number in range(len(self._begins))[first : first + len(self.buffers)]:
            if number not in self._requested:
                begin = self._begins[number]
                stored = self.stored.rows(begin, min(self._begins.step, self.height - begin))
                buffer = self.buffers[number % len(self.buffers)]
                size = self.size._replace(device=len(buffer))
                part = StagedTensor(stored, stored.shape, self.form, size, self.begin._replace(device=0))
                (read,) = part.stage(buffer, buffer)
                read.start(self.io, prefetch)
                self._requested[number] = part, read

    def slices(self) -> Iterator[tuple[int, Tensor | Quantised | Int8Weight]]:
        for number, begin in enumerate(self._begins):
            interrupts.check()
            self._request(number)
            part, read = self._requested.pop(number)
            with self.device.stalling("weights"):
                wait(read.requests)
                read.finish()
            yield begin, part.operand(self._converted)


def _payload(tensor: Tensor | Quantised) -> Tensor:
    """The tensor that holds the bytes."""
    return tensor.raw if isinstance(tensor, Quantised) else tensor


def share_buffers(units: list[dict[str, StagedTensor | SlicedTensor]]) -> tuple[list[list[int]], StagingBytes]:
    """Set where each tensor begins in the buffers. Returns the units that share a staging buffer, in groups, and the
    size of the buffers."""
    sizes = [list(map(attrgetter("size"), tensors.values())) for tensors in units]
    room = largest_unit(sizes)
    groups = []
    used = room
    for unit, tensors in enumerate(units):
        needed = sum(sizes[unit], StagingBytes())
        if needed.device:
            if used.device + needed.device > room.device or used.host + needed.host > room.host:
                groups.append([])
                used = StagingBytes()
            groups[-1].append(unit)
        begin = used._replace(converted=0)
        for tensor in tensors.values():
            tensor.begin = begin
            begin += tensor.size
        used += needed
    return groups, room
