"""The checkpoint of a model: safetensors are read in place, `.bin` files are converted once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from h2o_flexgen import interrupts
from h2o_flexgen.errors import UserError
from h2o_flexgen.models.source import weight_files
from h2o_flexgen.offload.convert import converted
from h2o_flexgen.offload.device import as_numpy, convert, copy
from h2o_flexgen.offload.disk import DiskIO, File, wait
from h2o_flexgen.sizes import PAGE, aligned

#: elements that are read at once where a tensor must be converted or checked
PART = 1 << 22
#: names that safetensors has for the dtypes of weights
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `nbytes` bytes from `offset`, row-major."""

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
    """The tensors of a model folder. Methods take full names, such as "model.decoder.layers.0.fc1.weight".

    Attributes:
        tensors: float tensors by their names in the files.
        others: the dtypes of all other tensors, as safetensors names them.

    Raises:
        UserError: no weights, or a file that is missing, cut short, or no safetensors file.
    """

    def __init__(self, folder: Path, progress: bool = True):
        self.folder = folder
        self.tensors: dict[str, Stored] = {}
        self.others: dict[str, str] = {}
        for path in _shards(folder, progress):
            self.add_file(path)

    def add_file(self, path: Path) -> None:
        """Index the tensors of a safetensors file."""
        file = File(path)
        size = path.stat().st_size
        try:
            length = int.from_bytes(os.pread(file.fd, 8, 0), "little")
            if not 0 < length <= size:
                raise ValueError("the header does not end")
            header = json.loads(os.pread(file.fd, length, 8))
            if not isinstance(header, dict):
                raise ValueError("the header is no JSON object")
            header.pop("__metadata__", None)
            for name, entry in header.items():
                self._add(file, name, entry, 8 + length, size)
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError, OSError) as e:
            raise UserError(f"{path} is not a whole safetensors file ({e}); download it again") from None

    def _add(self, file: File, name: str, entry: dict, data: int, size: int) -> None:
        """`data`: where the tensors begin in a file of `size` bytes."""
        begin, end = entry["data_offsets"]
        shape, dtype = tuple(entry["shape"]), entry["dtype"]
        sizes = (begin, end, *shape)
        if not all(type(n) is int and n >= 0 for n in sizes) or begin > end or not isinstance(dtype, str):
            raise ValueError(f"the header's entry for {name!r} makes no sense")
        if data + end > size:
            where = f"{name} ends at byte {data + end}, the file has {size}"
            raise UserError(f"{file.path} is cut short: {where}; download it again")
        if dtype not in DTYPES:
            self.others[name] = dtype
            return
        stored = Stored(file, data + begin, shape, DTYPES[dtype])
        if stored.nbytes != end - begin:
            raise ValueError(f"{name!r} of shape {list(shape)} in {dtype} cannot have {end - begin} bytes")
        self.tensors[name] = stored

    def find(self, name: str) -> Stored | None:
        """The tensor of a full name, of which a checkpoint saved from an inner module lacks up to two leading parts."""
        return _lookup(self.tensors, name)

    def check(self, needed: dict[str, tuple[int, ...]]) -> None:
        """Raises UserError unless the checkpoint has every tensor in its shape."""
        checkpoint = f"the checkpoint {self.folder} has"
        for name, shape in needed.items():
            stored, other = self.find(name), _lookup(self.others, name)
            if stored is None and other is not None:
                raise UserError(f"{checkpoint} {name!r} in {other}: only float weights can be used")
            if stored is None:
                raise UserError(f"{checkpoint} no tensor {name!r}")
            if stored.shape != shape:
                raise UserError(
                    f"{checkpoint} {name!r} in shape {list(stored.shape)}, the config asks for {list(shape)}"
                )

    def check_tied(self, embedding: str, head: str) -> None:
        """Raises UserError if a head that the config ties to the embedding is a tensor of its own, which transformers
        would not tie. A few rows are compared."""
        words, own = self.find(embedding), self.tensors.get(head)
        if own is None:
            return
        rows = range(0, words.shape[0], max(1, words.shape[0] // 8))
        if own.shape != words.shape or not all(torch.equal(words.row(n), own.row(n)) for n in rows):
            raise UserError(
                f"the checkpoint {self.folder} has a head {head!r} that is not its embedding, though the config ties "
                "them: set tie_word_embeddings to false in its config.json"
            )

    def stored_dtype(self, name: str) -> torch.dtype:
        return self.find(name).dtype

    def on_disk(self, names: list[str], make_file, io: DiskIO, progress: bool) -> dict[str, Stored]:
        """Where the tensors are on disk: nothing is copied."""
        return {name: self.find(name) for name in names}

    def read(self, name: str, out: Tensor, io: DiskIO) -> None:
        """Fill `out` (contiguous, of the same shape, any float dtype, on any device)."""
        stored = self.find(name)
        if out.dtype == stored.dtype and out.device.type == "cpu":
            wait(io.read(stored.file, as_numpy(out), stored.offset))
            return
        flat = out.view(-1)
        for at, part in parts_of(stored, io):
            convert(flat[at : at + len(part)], part)


def _lookup(found: dict, name: str):
    """What `found` has for a name, or for it without one or two leading parts; a module and its parameter stay."""
    parts = name.split(".")
    names = [name, *(".".join(parts[n:]) for n in (1, 2) if len(parts) >= n + 2)]
    return next((found[each] for each in names if each in found), None)


@dataclass
class PagedRead:
    """A stored tensor that is read by whole pages, page for page as in the file, so that O_DIRECT is possible."""

    stored: Stored
    span: Tensor  # bytes to read into, from the start of a page, as many as `sizes.staging_span` says
    target: Tensor | None = None  # of as many elements on another device, to which it is copied then
    requests: list[Future] = field(default_factory=list)  # those that read it, once it is started

    def __post_init__(self):
        self.phase = self.stored.offset % PAGE  # bytes of the first page before the tensor
        # elements that are not aligned at the phase move to the start of the span: the format asks for no alignment
        self.begin = 0 if self.phase % self.stored.dtype.itemsize else self.phase

    @property
    def tensor(self) -> Tensor:
        """The flat tensor in the span."""
        return self.span[self.begin :][: self.stored.nbytes].view(self.stored.dtype)

    def start(self, io: DiskIO, direct: bool) -> None:
        """Request the pages as a prefetch: behind all other requests."""
        first = self.stored.offset - self.phase
        nbytes = min(aligned(self.phase + self.stored.nbytes), self.stored.file.size - first)
        self.requests = io.read(self.stored.file, self.span[:nbytes].numpy(), first, direct, prefetch=True)

    def finish(self) -> int:
        """Align the tensor, and copy it to the target, each part as soon as it is read. Returns the bytes copied."""
        if self.begin != self.phase:
            wait(self.requests)
            copy(self.tensor.view(torch.uint8), self.span[self.phase :][: self.stored.nbytes])
        if self.target is None:
            return 0
        source, target = self.tensor, self.target.view(-1)
        for request in self.requests:
            begin, end = map(self._elements, request.result())
            copy(target[begin:end], source[begin:end])
        return target.nbytes

    def _elements(self, nbytes: int) -> int:
        """Elements within the first bytes of the pages."""
        return min(max(0, nbytes - self.phase), self.stored.nbytes) // self.stored.dtype.itemsize


def parts_of(stored: Stored, io: DiskIO) -> Iterator[tuple[int, Tensor]]:
    """A tensor's elements part by part, through one buffer: (index of the first, elements)."""
    count = prod(stored.shape)
    buffer = torch.empty(min(PART, count), dtype=stored.dtype)
    for at in range(0, count, PART):
        interrupts.check()
        part = buffer[: count - at]
        wait(io.read(stored.file, as_numpy(part), stored.offset + at * stored.dtype.itemsize))
        yield at, part


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are finite; unlike torch.isfinite without a second tensor of that size."""
    for part in tensor.view(-1).split(PART):
        low, high = part.aminmax()
        if not (torch.isfinite(low) and torch.isfinite(high)):
            return False
    return True


def bar_of_bytes(what: str, total: int, progress: bool) -> tqdm:
    """A progress bar that is removed when it is full; `progress`: show it."""
    return tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=not progress, leave=False)


def _shards(folder: Path, progress: bool) -> list[Path]:
    files = weight_files(folder)
    if not files:
        raise UserError(f"no weights in {folder}: expected model.safetensors or pytorch_model.bin, whole or sharded")
    for file in files:
        if not file.exists():
            raise UserError(f"the shard {file} is missing; download it again")
    return converted(files, progress) if files[0].suffix == ".bin" else files
