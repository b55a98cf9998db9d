"""Where weights come from: safetensors read in place, `.bin` converted once, or random numbers."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from h2o_flexgen import interrupts
from h2o_flexgen.errors import UserError
from h2o_flexgen.offload.convert import converted
from h2o_flexgen.offload.device import as_numpy, convert
from h2o_flexgen.offload.disk import DiskIO, File, wait
from h2o_flexgen.sizes import aligned

#: numbers that are read at once where a tensor must be converted
PART = 1 << 22
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `nbytes` bytes of `dtype` from `offset`, row-major."""

    file: File
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def row(self, index: int) -> Tensor:
        """A row of a matrix, in fp32."""
        size = self.shape[1] * self.dtype.itemsize
        data = os.pread(self.file.fd, size, self.offset + index * size)
        return torch.frombuffer(bytearray(data), dtype=self.dtype).float()


class Checkpoint:
    """The tensors of a model folder, read in place. Names are whole, "model." included.

    Raises:
        UserError: no weights, a shard that is missing or cut short, or a tensor that is missing or has
            another shape than the configuration says.
    """

    def __init__(self, folder: Path, progress: bool = True):
        """`progress`: show a bar if it must be converted."""
        self.folder = folder
        self.tensors: dict[str, Stored] = {}
        self.others: dict[str, str] = {}  # names and types of what holds no floats
        for path in _shards(folder, progress):
            self._index(path)

    def _index(self, path: Path) -> None:
        file = File(path)
        size = path.stat().st_size
        try:
            (length,) = struct.unpack("<Q", os.pread(file.fd, 8, 0))
            if length > size:
                raise ValueError("the header does not end")
            header = json.loads(os.pread(file.fd, length, 8))
            if not isinstance(header, dict):
                raise ValueError("the header is no JSON object")
            header.pop("__metadata__", None)
            for name, entry in header.items():
                self._add(file, name, entry, 8 + length, size)
        except (struct.error, ValueError, KeyError, TypeError, RecursionError, OSError) as e:
            if isinstance(e, UserError):
                raise
            raise UserError(f"{path} is not a whole safetensors file ({e}); download it again") from None

    def _add(self, file: File, name: str, entry: dict, data: int, size: int) -> None:
        """`data`: where the tensors start in a file of `size` bytes."""
        begin, end = entry["data_offsets"]
        shape, dtype = tuple(entry["shape"]), entry["dtype"]
        sizes = (begin, end, *shape)
        if not all(type(n) is int and n >= 0 for n in sizes) or begin > end or not isinstance(dtype, str):
            raise ValueError(f"the header's entry for {name!r} makes no sense")
        if data + end > size:
            raise UserError(
                f"{file.path} is cut short: {name} ends at byte {data + end}, the file has {size}; download it again"
            )
        if dtype not in DTYPES:
            self.others[_canonical(name)] = dtype
            return
        stored = Stored(file, data + begin, shape, DTYPES[dtype])
        if stored.nbytes != end - begin:
            raise ValueError(f"{name!r} of shape {list(shape)} in {dtype} cannot have {end - begin} bytes")
        self.tensors[_canonical(name)] = stored

    def check(self, needed: dict[str, tuple[int, ...]]) -> None:
        """Raises UserError unless every needed tensor is there in its shape."""
        for name, shape in needed.items():
            stored = self.tensors.get(name)
            if stored is None and name in self.others:
                raise UserError(
                    f"the checkpoint {self.folder} has {name!r} in {self.others[name]}: only float weights can be used"
                )
            if stored is None:
                raise UserError(f"the checkpoint {self.folder} has no tensor {name!r}")
            if stored.shape != shape:
                raise UserError(
                    f"the checkpoint {self.folder} has {name!r} in shape {list(stored.shape)}, "
                    f"the config asks for {list(shape)}"
                )

    def check_tied(self, embedding: str, head: str) -> None:
        """Raises UserError if there is a head besides the embedding that the config ties it to, with other values: for
        transformers they are not tied then. A few rows are compared."""
        words, own = self.tensors[embedding], self.tensors.get(head)
        if own is None:
            return
        rows = range(0, words.shape[0], max(1, words.shape[0] // 8))
        if own.shape != words.shape or not all(torch.equal(words.row(n), own.row(n)) for n in rows):
            raise UserError(
                f"the checkpoint {self.folder} has a head {head!r} that is not its embedding, though the config ties "
                "them: set tie_word_embeddings to false in its config.json"
            )

    def stored_dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def on_disk(self, names: list[str], make_file, io: DiskIO, progress: bool) -> dict[str, Stored]:
        """The tensors where they already lie: nothing is copied."""
        return {name: self.tensors[name] for name in names}

    def read(self, name: str, out: Tensor, io: DiskIO) -> None:
        """Fill `out` (contiguous, of the same shape, any float dtype, on any device)."""
        stored = self.tensors[name]
        if out.dtype == stored.dtype and out.device.type == "cpu":
            wait(io.read(stored.file, as_numpy(out), stored.offset))
            return
        flat = out.view(-1)
        for at, part in parts_of(stored, io):
            convert(flat[at : at + len(part)], part)


def parts_of(stored: Stored, io: DiskIO) -> Iterator[tuple[int, Tensor]]:
    """A tensor's numbers, through one buffer, and where in it each part of them begins."""
    count = prod(stored.shape)
    buffer = torch.empty(min(PART, count), dtype=stored.dtype)
    for at in range(0, count, PART):
        interrupts.check()
        part = buffer[: count - at]
        wait(io.read(stored.file, as_numpy(part), stored.offset + at * stored.dtype.itemsize))
        yield at, part


class DummyCheckpoint:
    """Random weights of a named size: normal with the deviation that OPT starts training from.

    A tensor's numbers depend on its name alone, not on where it is placed. They come from a pool of
    normal numbers, rotated by a hash of the name, since drawing 60 GB of them would take many minutes.
    """

    POOL = 1 << 22
    STD = 0.02

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype):
        """`dtype`: of the computation."""
        self.shapes = shapes
        # 16 bits a number, as the published checkpoints
        self.dtype = torch.float16 if dtype == torch.float32 else dtype
        pool = torch.randn(self.POOL, generator=torch.Generator().manual_seed(0)) * self.STD
        self._pool = pool.to(self.dtype).repeat(2)

    def check(self, needed: dict[str, tuple[int, ...]]) -> None:
        pass

    def stored_dtype(self, name: str) -> torch.dtype:
        return self.dtype

    def on_disk(self, names: list[str], make_file, io: DiskIO, progress: bool) -> dict[str, Stored]:
        """Write the tensors to a file of the offload folder, one after the other."""
        offsets, end = {}, 0
        for name in names:
            offsets[name] = end
            end += aligned(prod(self.shapes[name]) * self.dtype.itemsize)
        if not names:
            return {}
        file = make_file("weights", end)
        with bar_of_bytes("writing random weights", end, progress) as bar:
            for name in names:
                count, offset = prod(self.shapes[name]), offsets[name]
                for at in range(0, count, self.POOL):
                    interrupts.check()
                    part = self._slice(name, min(self.POOL, count - at))
                    wait(io.write(file, as_numpy(part), offset + at * self.dtype.itemsize))
                    bar.update(part.numel() * self.dtype.itemsize)
        os.fsync(file.fd)  # else the first steps would share the disk with the write-back
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return {name: Stored(file, offsets[name], self.shapes[name], self.dtype) for name in names}

    def read(self, name: str, out: Tensor, io: DiskIO) -> None:
        flat = out.view(-1)
        if out.dim() == 1:
            flat.copy_(self._vector(name, flat.numel()))
            return
        for at in range(0, flat.numel(), self.POOL):
            part = flat[at : at + self.POOL]
            part.copy_(self._slice(name, part.numel()))

    def _slice(self, name: str, count: int) -> Tensor:
        start = zlib.crc32(name.encode()) % self.POOL
        return self._pool[start : start + count]

    def _vector(self, name: str, count: int) -> Tensor:
        is_norm = name.endswith(".weight")  # a matrix is no vector
        return torch.full((count,), 1.0 if is_norm else 0.0, dtype=self.dtype)


def bar_of_bytes(what: str, total: int, progress: bool) -> tqdm:
    """A bar that goes when it is full; `progress`: show it."""
    return tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=not progress, leave=False)


def _canonical(name: str) -> str:
    # checkpoints saved from the bare decoder lack its name
    name = (
        f"decoder.{name}"
        if name.startswith(("layers.", "embed_tokens", "embed_positions", "project_", "final_"))
        else name
    )
    return f"model.{name}" if name.startswith("decoder.") else name


def _shards(folder: Path, progress: bool) -> list[Path]:
    if (folder / "model.safetensors.index.json").exists():
        return _indexed(folder, "model.safetensors.index.json")
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    if (folder / "pytorch_model.bin.index.json").exists():
        return converted(_indexed(folder, "pytorch_model.bin.index.json"), progress)
    if (folder / "pytorch_model.bin").exists():
        return converted([folder / "pytorch_model.bin"], progress)
    raise UserError(f"no weights in {folder}: expected model.safetensors or pytorch_model.bin, whole or sharded")


def _indexed(folder: Path, index: str) -> list[Path]:
    try:
        names = sorted(set(json.loads((folder / index).read_text())["weight_map"].values()))
        shards = [folder / name for name in names]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as e:
        raise UserError(f"cannot read the shard index {folder / index}: {e}") from None
    for shard in shards:
        if not shard.exists():
            raise UserError(f"the shard {shard} is missing; download it again")
    return shards
