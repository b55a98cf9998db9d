"""A tensor in a file, and how it is read: whole, by pages, or a part at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from h2o_flexgen.formats import Format, Quantised
from h2o_flexgen.machine.device import as_numpy, copy
from h2o_flexgen.machine.pages import PAGE, aligned
from h2o_flexgen.storage.disk import DiskIO, File, wait
from h2o_flexgen.utils import interrupts

#: elements that are read at once where a tensor must be converted or checked
PART = 1 << 22


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `nbytes` bytes from `offset`, row-major."""

    file: File
    offset: int
    shape: tuple[int, ...]
    format: Format | str  # what is no float has safetensors' name of its dtype, and is never read

    @property
    def dtype(self) -> torch.dtype:
        """Of the bytes as they are moved."""
        return self.format.dtype

    @property
    def nbytes(self) -> int:
        return self.format.nbytes(self.shape)

    def equals(self, other: Stored) -> bool:
        """Whether the two are alike in shape, format and every byte."""
        if (self.shape, self.format) != (other.shape, other.format):
            return False
        sides = [(x.file.fd, x.offset) for x in (self, other)]
        parts = range(0, self.nbytes, PART)
        reads = ([os.pread(fd, min(PART, self.nbytes - n), at + n) for fd, at in sides] for n in parts)
        return all(a == b for a, b in reads)


@dataclass
class PagedRead:
    """A stored tensor that is read by whole pages, page for page as in the file, so that O_DIRECT is possible."""

    stored: Stored
    span: Tensor  # bytes to read into, from the start of a page, as many as `sizes.staging_span` says
    target: Tensor | None = None  # of as many elements, or bytes, on another device, to which it is copied then
    requests: list[Future] = field(default_factory=list)  # those that read it, once it is started

    def __post_init__(self):
        self.phase = self.stored.offset % PAGE  # bytes of the first page before the tensor
        # elements that are not aligned at the phase move to the start of the span: the format asks for no alignment
        self.begin = 0 if self.phase % self.stored.format.alignment else self.phase

    @property
    def tensor(self) -> Tensor | Quantised:
        """In the span."""
        return self.stored.format.view(self.span[self.begin :], self.stored.shape)

    def start(self, io: DiskIO, direct: bool) -> None:
        """Request the pages as a prefetch: behind all other requests."""
        first = self.stored.offset - self.phase
        nbytes = min(aligned(self.phase + self.stored.nbytes), self.stored.file.size - first)
        self.requests = io.read(self.stored.file, self.span[:nbytes].numpy(), first, direct, prefetch=True)

    def finish(self) -> int:
        """Align the tensor, and copy it to the target, each part as soon as it is read. Returns the bytes copied."""
        if self.begin != self.phase:
            wait(self.requests)
            copy(self.span[self.begin :][: self.stored.nbytes], self.span[self.phase :][: self.stored.nbytes])
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


def parts_of(stored: Stored, io: DiskIO) -> Iterator[tuple[int, Tensor]]:
    """A tensor's elements part by part, through one buffer: (index of the first, elements); of one that is quantised
    its bytes."""
    count = stored.nbytes // stored.dtype.itemsize
    buffer = torch.empty(min(PART, count), dtype=stored.dtype)
    for at in range(0, count, PART):
        interrupts.check()
        part = buffer[: count - at]
        wait(io.read(stored.file, as_numpy(part), stored.offset + at * stored.dtype.itemsize))
        yield at, part


def rows_of(stored: Stored, io: DiskIO) -> Iterator[tuple[int, Tensor | Quantised]]:
    """A matrix part by part: (first row, rows). One with heads is a single part, since their rows have no order."""
    (rows, width) = stored.shape
    form = stored.format
    step = rows if form.heads else max(1, PART // width)
    for begin in range(0, rows, step):
        interrupts.check()
        ids = range(begin, min(begin + step, rows))
        yield begin, form.view(read_rows(stored, [ids], io), (len(ids), width))


def read_rows(stored: Stored, runs: Seq[range], io: DiskIO) -> Tensor:
    """The bytes of a matrix made of some rows of a stored one, which are given as runs of neighbours."""
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
