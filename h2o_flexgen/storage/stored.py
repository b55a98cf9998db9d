"""Tensors in files, and how they are read: whole, by pages, or a part at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from h2o_flexgen.formats import Format, Quantised
from h2o_flexgen.machine.device import as_numpy, copy
from h2o_flexgen.machine.pages import PAGE, aligned
from h2o_flexgen.storage.disk import DiskIO, File, wait
from h2o_flexgen.utils import interrupts

#: safetensors' names of dtypes
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
CODES = {"F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64}
#: elements read at once where a tensor must be converted or checked
PART = 1 << 22


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `nbytes` bytes from `offset`, row-major."""

    file: File
    offset: int
    shape: tuple[int, ...]
    format: Format | str  # of a tensor that is not float, safetensors' name of its dtype; only `whole` reads it
    apart: tuple[tuple[int, int], ...] = ()  # (offset, bytes) of first arrays, where `offset` is only the last one's

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that its bytes are moved in."""
        return self.format.dtype

    @property
    def nbytes(self) -> int:
        return self.format.nbytes(self.shape)

    @property
    def is_direct(self) -> bool:
        """Whether it can be used as it lies in the file."""
        return not isinstance(self.format, str)

    @property
    def parts(self) -> tuple[Stored, ...]:
        """As of a `Stack`: only itself."""
        return (self,)

    def entry(self, n: int) -> Stored:
        """Of a tensor of floats or of CODES, entry `n` along its first dimension."""
        shape = self.shape[1:]
        dtype = CODES.get(self.format, torch.uint8) if isinstance(self.format, str) else self.dtype
        return replace(self, offset=self.offset + n * prod(shape) * dtype.itemsize, shape=shape)

    def entries(self, numbers: range) -> Stored | None:
        """Of a tensor of floats some of its matrices, as one; None if it has not so many."""
        if len(self.shape) != 3 or numbers.stop > self.shape[0]:
            return None
        height, width = self.shape[1:]
        return replace(self.entry(numbers.start), shape=(len(numbers) * height, width))

    def rows(self, begin: int, count: int) -> Stored:
        """Some rows of a matrix without heads."""
        arrays = self.format.arrays(self.shape)
        *apart, (offset, _) = [(self.offset + at + begin * size, count * size) for at, size in arrays]
        return replace(self, offset=offset, shape=(count, self.shape[1]), apart=tuple(apart))

    def equals(self, other: Stored) -> bool:
        """Whether both have the same shape, format and bytes."""
        if (self.shape, self.format) != (other.shape, other.format):
            return False
        return all(self._part(at) == other._part(at) for at in range(0, self.nbytes, PART))

    def _part(self, at: int) -> bytes:
        return os.pread(self.file.fd, min(PART, self.nbytes - at), self.offset + at)


@dataclass(frozen=True)
class Part:
    """Some outputs of a tensor in a file, which are not neighbours there; only `whole` reads it."""

    stored: Stored
    outputs: slice
    is_transposed: bool = False  # outputs are the second dimension of the file's tensor

    @property
    def shape(self) -> tuple[int, ...]:
        (height, *others) = self.stored.shape[::-1] if self.is_transposed else self.stored.shape
        return (len(range(height)[self.outputs]), *others)

    @property
    def format(self) -> Format | str:
        return self.stored.format

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    @property
    def nbytes(self) -> int:
        return self.format.nbytes(self.shape)

    @property
    def is_direct(self) -> bool:
        return False


@dataclass(frozen=True)
class Stack:
    """Tensors of one shape and format, in different places of files, as one tensor with all their rows."""

    parts: tuple[Stored | Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        height, *width = self.parts[0].shape
        return (len(self.parts) * height, *width)

    @property
    def is_direct(self) -> bool:
        return all(part.is_direct for part in self.parts)

    @property
    def format(self) -> Format | str:
        return self.parts[0].format

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def rows(self, begin: int, count: int) -> Stored:
        """The rows of one of the matrices."""
        return self.parts[begin // count]


@dataclass
class HostCopy:
    """The copy of a tensor in RAM to the device, with the methods of `PagedRead`."""

    source: Tensor
    target: Tensor
    requests = ()

    def start(self, io: DiskIO) -> None:
        """Nothing is read."""

    def finish(self) -> int:
        copy(self.target, self.source)
        return self.target.nbytes


@dataclass
class PagedRead:
    """A stored tensor that is read in whole pages, laid out as in the file, so that O_DIRECT is possible.

    | arrays apart |      | of the first page: `phase` | last array, or the whole tensor |
    0             lead   pages                                                   end of the span
    """

    stored: Stored
    span: Tensor  # `staging_span` bytes to read into, page-aligned
    target: Tensor | None = None  # on another device, of the same size: it is copied there
    requests: list[Future] = field(default_factory=list)  # the reads, since `start`

    def __post_init__(self):
        self.phase = self.stored.offset % PAGE  # bytes of the first page before the tensor
        self.lead = sum(nbytes for _, nbytes in self.stored.apart)
        self.pages = aligned(self.lead)
        # elements that this leaves unaligned move to the start of the span: safetensors does not align them
        begin = self.pages + self.phase - self.lead
        self.begin = 0 if begin % self.stored.format.alignment else begin

    @property
    def tensor(self) -> Tensor | Quantised:
        """The tensor in the span."""
        return self.stored.format.view(self.span[self.begin :], self.stored.shape)

    def start(self, io: DiskIO, prefetch: bool = True) -> None:
        """Request the pages; as a prefetch, behind all other requests."""
        file = self.stored.file
        first = self.stored.offset - self.phase
        nbytes = min(aligned(self.phase + self.stored.nbytes - self.lead), file.size - first)
        self.requests = io.read(file, self.span[self.pages :][:nbytes].numpy(), first, direct=True, prefetch=prefetch)
        at = 0
        for offset, nbytes in self.stored.apart:
            self.requests += io.read(file, self.span[at : at + nbytes].numpy(), offset, prefetch=prefetch)
            at += nbytes

    def finish(self) -> int:
        """Align the tensor and copy it to the target, each part as soon as it is read. Returns the bytes copied."""
        arrived = self.pages + self.phase
        last = self.begin + self.lead
        if self.lead or last != arrived:
            wait(self.requests)
            copy(self.span[self.begin : last], self.span[: self.lead])
        if last != arrived:
            nbytes = self.stored.nbytes - self.lead
            copy(self.span[last:][:nbytes], self.span[arrived:][:nbytes])
        if self.target is None:
            return 0
        source = self.span[self.begin :][: self.stored.nbytes].view(self.stored.dtype)
        target = self.target.view(-1)
        done = 0
        read = -self.phase
        for request in self.requests:
            read += request.result()
            end = max(0, min(read, self.stored.nbytes)) // self.stored.dtype.itemsize
            copy(target[done:end], source[done:end])
            done = end
        return target.nbytes


def parts_of(stored: Stored | Stack, io: DiskIO) -> Iterator[tuple[int, Tensor]]:
    """A tensor's elements, or a quantised one's bytes, part by part through one buffer: (index of the first, part)."""
    count = stored.parts[0].nbytes // stored.dtype.itemsize
    buffer = torch.empty(min(PART, count), dtype=stored.dtype)
    for n, piece in enumerate(stored.parts):
        for at in range(0, count, PART):
            interrupts.check()
            part = buffer[: count - at]
            wait(io.read(piece.file, as_numpy(part), piece.offset + at * stored.dtype.itemsize))
            yield n * count + at, part


def whole(stored: Stored | Part | Stack, io: DiskIO) -> Tensor:
    """A tensor of floats or of CODES."""
    if isinstance(stored, Stack):
        return torch.cat([whole(part, io) for part in stored.parts])
    if isinstance(stored, Part):
        tensor = whole(stored.stored, io)
        return (tensor.t() if stored.is_transposed else tensor)[stored.outputs].contiguous()
    dtype = CODES[stored.format] if isinstance(stored.format, str) else stored.dtype
    tensor = torch.empty(stored.shape, dtype=dtype)
    if tensor.numel():
        wait(io.read(stored.file, tensor.view(-1).view(torch.uint8).numpy(), stored.offset))
    return tensor


def rows_of(stored: Stored | Stack, io: DiskIO) -> Iterator[tuple[int, Tensor | Quantised]]:
    """A matrix part by part: (first row, rows). A matrix with heads is one part, since its rows are reordered."""
    (rows, width) = stored.parts[0].shape
    form = stored.format
    step = rows if form.heads else max(1, PART // width)
    for n, piece in enumerate(stored.parts):
        for begin in range(0, rows, step):
            interrupts.check()
            ids = range(begin, min(begin + step, rows))
            yield n * rows + begin, form.view(read_rows(piece, [ids], io), (len(ids), width))


def read_rows(stored: Stored, runs: Seq[range], io: DiskIO) -> Tensor:
    """The bytes of the matrix that some rows of a stored one make; `runs`: of neighbouring rows."""
    count = sum(map(len, runs))
    width = stored.shape[1]
    buffer = torch.empty(stored.format.nbytes((count, width)), dtype=torch.uint8)
    reads = []
    for (offset, size), (at, _) in zip(stored.format.arrays(stored.shape), stored.format.arrays((count, width))):
        for run in runs:
            nbytes = len(run) * size
            reads += io.read(stored.file, buffer[at : at + nbytes].numpy(), stored.offset + offset + run.start * size)
            at += nbytes
    wait(reads)
    return buffer
