"""Random weights of a model of a named size, for measuring without a checkpoint."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from h2o_flexgen.formats import Dense, Format, Quantised
from h2o_flexgen.machine.device import as_numpy
from h2o_flexgen.machine.pages import aligned
from h2o_flexgen.models.source import dummy_dtype
from h2o_flexgen.models.spec import Layer, shapes_of
from h2o_flexgen.storage.disk import DiskIO, wait
from h2o_flexgen.storage.stored import Stored
from h2o_flexgen.utils import interrupts
from h2o_flexgen.utils.progress import bar

#: standard deviation of random weights, the one OPT starts training with
STD = 0.02
#: random elements that all tensors share, since drawing 60 GB of them would take many minutes
POOL = 1 << 22
#: ends of the names of vectors that something is multiplied by
FACTORS = (".weight", "scale", "scalar")


class DummyCheckpoint:
    """Random weights with the methods of `Checkpoint`, "stored" in 16 bits like published ones, or compressed. Matrices
    are normally distributed, norms 1, biases 0. A tensor's elements depend on its name alone, not on its tier: a pool
    of random elements, rotated by a hash of the name. `dtype`: of the computation."""

    copy_bytes = 0

    def __init__(self, layers: Seq[Layer], dtype: torch.dtype):
        self.shapes = shapes_of(layers)
        self.formats = dict.fromkeys(self.shapes, Dense(dummy_dtype(dtype)))
        pool = torch.randn(POOL, generator=torch.Generator().manual_seed(0)) * STD
        self._pool = pool.to(dummy_dtype(dtype)).repeat(2)

    def compress(self, formats: dict[str, Format], disk_mem: int | None, progress: bool) -> None:
        """Take the tensors in these formats: nothing is copied."""
        self.formats |= formats

    def format(self, name: str) -> Format:
        return self.formats[name]

    def on_disk(self, names: list[str], make_file, io: DiskIO, progress: bool) -> dict[str, Stored]:
        """Write the tensors one after the other to a file of the offload folder, each from the start of a page."""
        if not names:
            return {}
        sizes = (aligned(self.formats[name].nbytes(self.shapes[name])) for name in names)
        *offsets, end = accumulate(sizes, initial=0)
        file = make_file("weights", end)
        stored = {name: Stored(file, at, self.shapes[name], self.formats[name]) for name, at in zip(names, offsets)}
        with bar(desc="writing random weights", total=end, unit="B", show=progress) as shown:
            for name, tensor in stored.items():
                at = tensor.offset
                parts = self._parts(name) if tensor.format.is_dense else [(0, self._encoded(name))]
                for _, part in parts:
                    interrupts.check()
                    wait(io.write(file, as_numpy(part), at))
                    at += part.nbytes
                    shown.update(part.nbytes)
        os.fsync(file.fd)  # else the write-back would share the disk with the first steps
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return stored

    def read(self, name: str, out: Tensor | Quantised, io: DiskIO) -> None:
        """Fill `out`, as `Checkpoint.read`."""
        if isinstance(out, Quantised):
            out.raw.copy_(self._encoded(name))
            return
        flat = out.view(-1)
        if out.dim() == 1:  # a norm's weight or another factor, or a bias
            flat.fill_(1.0 if name.endswith(FACTORS) else 0.0)
            return
        for at, part in self._parts(name):
            flat[at : at + len(part)].copy_(part)

    def _parts(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """A matrix, part by part: (index of the first element, elements)."""
        count = prod(self.shapes[name])
        for at in range(0, count, POOL):
            yield at, self._random(name, min(POOL, count - at))

    def _random(self, name: str, count: int) -> Tensor:
        start = zlib.crc32(name.encode()) % POOL
        return self._pool[start : start + count]

    def _encoded(self, name: str) -> Tensor:
        """The bytes of a compressed matrix, whose rows repeat once the pool is used up."""
        form = self.formats[name]
        rows, width = self.shapes[name]
        step = min(rows, POOL // width)
        buffer = torch.empty(form.nbytes((rows, width)), dtype=torch.uint8)
        begins = range(0, rows, step)
        parts = ((at, self._random(name, min(step, rows - at) * width).view(-1, width)) for at in begins)
        form.encode_parts((rows, width), parts, buffer)
        return buffer
