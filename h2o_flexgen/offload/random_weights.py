"""Random weights of a named size, for measuring without a checkpoint."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from h2o_flexgen import interrupts
from h2o_flexgen.offload.checkpoint import Stored, bar_of_bytes
from h2o_flexgen.offload.device import as_numpy
from h2o_flexgen.offload.disk import DiskIO, wait
from h2o_flexgen.sizes import aligned

#: standard deviation of the weights that OPT starts training from
STD = 0.02
#: random elements that all tensors share, since drawing 60 GB of them would take many minutes
POOL = 1 << 22


class DummyCheckpoint:
    """Random weights with the methods of `Checkpoint`, "stored" in 16 bits as those that are published. Matrices are
    normally distributed, norms 1, biases 0.

    A tensor's elements depend on its name alone, not on its tier: a pool of random elements, rotated by a hash of the
    name. `shapes`: of every tensor by name; `dtype`: of the computation.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype):
        self.shapes = shapes
        self.dtype = torch.float16 if dtype == torch.float32 else dtype
        pool = torch.randn(POOL, generator=torch.Generator().manual_seed(0)) * STD
        self._pool = pool.to(self.dtype).repeat(2)

    def stored_dtype(self, name: str) -> torch.dtype:
        return self.dtype

    def on_disk(self, names: list[str], make_file, io: DiskIO, progress: bool) -> dict[str, Stored]:
        """Write the tensors to a file of the offload folder, one after the other, each from the start of a page."""
        if not names:
            return {}
        sizes = (aligned(prod(self.shapes[name]) * self.dtype.itemsize) for name in names)
        *offsets, end = accumulate(sizes, initial=0)
        file = make_file("weights", end)
        stored = {name: Stored(file, at, self.shapes[name], self.dtype) for name, at in zip(names, offsets)}
        with bar_of_bytes("writing random weights", end, progress) as bar:
            for name, tensor in stored.items():
                for at, part in self._parts(name):
                    interrupts.check()
                    wait(io.write(file, as_numpy(part), tensor.offset + at * self.dtype.itemsize))
                    bar.update(part.nbytes)
        os.fsync(file.fd)  # else the write-back would share the disk with the first steps
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return stored

    def read(self, name: str, out: Tensor, io: DiskIO) -> None:
        """Fill `out`, contiguous, of any float dtype, on any device."""
        flat = out.view(-1)
        if out.dim() == 1:  # a norm's weight, or a bias
            flat.fill_(1.0 if name.endswith(".weight") else 0.0)
            return
        for at, part in self._parts(name):
            flat[at : at + len(part)].copy_(part)

    def _parts(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """A matrix, part by part: the index of the part's first element, its elements."""
        start, count = zlib.crc32(name.encode()) % POOL, prod(self.shapes[name])
        for at in range(0, count, POOL):
            yield at, self._pool[start : start + min(POOL, count - at)]
