"""Where weights come from: a checkpoint, whose safetensors and GGUF's blocks are read in place and whose other files
are converted once; or random ones of a named size, for measuring without a checkpoint."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from h2o_flexgen import interrupts
from h2o_flexgen.compression import compressed
from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import Dense, Format, Quantised, convert
from h2o_flexgen.models.gguf import in_place, is_gguf
from h2o_flexgen.models.source import weight_files
from h2o_flexgen.models.spec import Layer
from h2o_flexgen.offload.convert import bins_to_safetensors, gguf_to_safetensors, made_once
from h2o_flexgen.offload.device import as_numpy, copy
from h2o_flexgen.offload.disk import DiskIO, File, wait
from h2o_flexgen.progress import bar
from h2o_flexgen.sizes import PAGE, aligned

#: elements that are read at once where a tensor must be converted or checked
PART = 1 << 22
#: names that safetensors has for the dtypes of weights
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
#: standard deviation of random weights, as OPT starts training with
STD = 0.02
#: elements that all random tensors share, since drawing 60 GB of them would take many minutes
POOL = 1 << 22


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


class Checkpoint:
    """The tensors of a model. Methods take full names, such as "model.decoder.layers.0.fc1.weight".

    Args:
        path: a folder, or a GGUF file.
        layers, dtype: as for `convert.gguf_to_safetensors`.

    Attributes:
        tensors: by their names in the files.
        files: those of the model.
        copy_bytes: of a copy in the cache folder that `compress` has made.

    Raises:
        UserError: no weights, or a file that is missing, cut short, or of another format.
    """

    def __init__(self, path: Path, layers: Seq[Layer] = (), dtype: torch.dtype = torch.float32, progress: bool = True):
        self.path, self.copy_bytes = path, 0
        self.tensors: dict[str, Stored] = {}
        if is_gguf(path):
            self.files = [path]
            self._add_gguf(layers, dtype, progress)
            return
        self.files = _weight_files(path)
        is_bin = self.files[0].suffix == ".bin"
        for file in bins_to_safetensors(self.files, layers, progress) if is_bin else self.files:
            self.add_file(file)

    def _add_gguf(self, layers: Seq[Layer], dtype: torch.dtype, progress: bool) -> None:
        """Matrices in blocks are read in place, all others from a copy."""
        in_file = in_place(self.path, layers)
        others = [
            Layer({name: (name, shape) for name, shape in layer.shapes.items() if name not in in_file})
            for layer in layers
        ]
        for file in gguf_to_safetensors(self.path, others, dtype, progress):
            self.add_file(file)
        file = File(self.path)
        for name, (offset, shape, form) in in_file.items():
            self.tensors[name] = Stored(file, offset, shape, form)

    def compress(self, kind: str, layers: Seq[Layer], progress: bool) -> None:
        """Take the matrices from a copy of lower precision in the cache folder, which is made if there is none.

        Args:
            kind: as for `compression.compressed`.

        Raises:
            UserError: as `compression.compressed`; NaN or infinite elements; or no room.
        """
        formats = compressed(kind, [layer.shapes for layer in layers])
        shapes = {name: self.find(name).shape for name in formats}
        sizes = {name: form.nbytes(shapes[name]) for name, form in formats.items()}
        io = DiskIO()

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, form in formats.items():
                buffer = torch.empty(sizes[name], dtype=torch.uint8)
                form.encode_parts(shapes[name], _decoded_parts(self.find(name), io), buffer)
                if not form.view(buffer, shapes[name]).is_finite():
                    raise UserError(f"the weights {name!r} hold NaN or infinite numbers: the checkpoint is broken")
                yield name, buffer

        try:
            total = sum(sizes.values())
            # another config, or floats of another type that a GGUF file was converted to, make another copy
            made = [(name, shapes[name], form, self.find(name).format) for name, form in formats.items()]
            files = made_once(self.files, f"weights as {made}", tensors, len(formats), total, progress)
        finally:
            io.close()
        for file in files:
            self.add_file(file)
        for name, form in formats.items():
            self.tensors[name] = replace(self.tensors[name], shape=shapes[name], format=form)
        self.copy_bytes = total

    def add_file(self, path: Path) -> None:
        """Index the tensors of a safetensors file."""
        try:
            with safe_open(path, "numpy"):
                pass  # it has checked the header, and that the file is as long as the header says
            file = File(path)
            length = int.from_bytes(os.pread(file.fd, 8, 0), "little")
            header = json.loads(os.pread(file.fd, length, 8))
        except (SafetensorError, OSError) as e:
            raise UserError(
                f"{path} is no whole safetensors file ({e}): if it was cut short, download it again"
            ) from None
        header.pop("__metadata__", None)
        for name, entry in header.items():
            offset, dtype = 8 + length + entry["data_offsets"][0], entry["dtype"]
            form = Dense(DTYPES[dtype]) if dtype in DTYPES else dtype
            self.tensors[name] = Stored(file, offset, tuple(entry["shape"]), form)

    def find(self, name: str) -> Stored | None:
        """The tensor of a full name, of which a checkpoint saved from an inner module lacks up to two leading parts."""
        parts = name.split(".")
        for missing in range(min(3, len(parts) - 1)):  # a module and its parameter stay
            if stored := self.tensors.get(".".join(parts[missing:])):
                return stored
        return None

    def check(self, needed: dict[str, tuple[int, ...]]) -> None:
        """Raises UserError unless the checkpoint has every tensor in its shape."""
        for name, shape in needed.items():
            stored = self.find(name)
            if stored is None:
                problem = f"no tensor {name!r}"
            elif isinstance(stored.format, str):
                problem = f"{name!r} in {stored.format}: only float weights can be used"
            elif stored.shape != shape:
                problem = f"{name!r} in shape {list(stored.shape)}, the config asks for {list(shape)}"
            else:
                continue
            raise UserError(f"the checkpoint {self.path} has {problem}")

    def check_tied(self, embedding: str, head: str) -> None:
        """Raises UserError if a head that the config ties to the embedding is a tensor of its own, which transformers
        would not tie."""
        words, own = self.find(embedding), self.tensors.get(head)
        if own is not None and not words.equals(own):
            raise UserError(
                f"the checkpoint {self.path} has a head {head!r} that is not its embedding, though the config ties "
                "them: set tie_word_embeddings to false in its config.json"
            )

    def format(self, name: str) -> Format:
        return self.find(name).format

    def on_disk(self, names: list[str], make_file, io: DiskIO, progress: bool) -> dict[str, Stored]:
        """Where the tensors are on disk: nothing is copied."""
        return {name: self.find(name) for name in names}

    def read(self, name: str, out: Tensor | Quantised, io: DiskIO) -> None:
        """Fill `out` (contiguous, of the same shape, any float dtype or the format that is stored, on any device)."""
        stored, flat = self.find(name), out.raw if isinstance(out, Quantised) else out.view(-1)
        if flat.dtype == stored.dtype and flat.device.type == "cpu":
            wait(io.read(stored.file, as_numpy(flat), stored.offset))
            return
        for at, part in parts_of(stored, io):
            convert(flat[at : at + len(part)], part)


def dummy_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which random weights are "stored", for a job that computes in `dtype`."""
    return torch.float16 if dtype == torch.float32 else dtype


class DummyCheckpoint:
    """Random weights with the methods of `Checkpoint`, "stored" in 16 bits as those that are published, or compressed.
    Matrices are normally distributed, norms 1, biases 0.

    A tensor's elements depend on its name alone, not on its tier: a pool of random elements, rotated by a hash of the
    name. `layers`: the tensors of the model; `dtype`: of the computation; `compress`: as for `compression.compressed`.
    """

    copy_bytes = 0

    def __init__(self, layers: Seq[Layer], dtype: torch.dtype, compress: str | None = None):
        self.shapes = {name: shape for layer in layers for name, shape in layer.shapes.items()}
        self.formats = dict.fromkeys(self.shapes, Dense(dummy_dtype(dtype)))
        if compress is not None:
            self.formats |= compressed(compress, [layer.shapes for layer in layers])
        pool = torch.randn(POOL, generator=torch.Generator().manual_seed(0)) * STD
        self._pool = pool.to(dummy_dtype(dtype)).repeat(2)

    def format(self, name: str) -> Format:
        return self.formats[name]

    def on_disk(self, names: list[str], make_file, io: DiskIO, progress: bool) -> dict[str, Stored]:
        """Write the tensors to a file of the offload folder, one after the other, each from the start of a page."""
        if not names:
            return {}
        sizes = (aligned(self.formats[name].nbytes(self.shapes[name])) for name in names)
        *offsets, end = accumulate(sizes, initial=0)
        file = make_file("weights", end)
        stored = {name: Stored(file, at, self.shapes[name], self.formats[name]) for name, at in zip(names, offsets)}
        with bar(desc="writing random weights", total=end, unit="B", show=progress) as shown:
            for name, tensor in stored.items():
                at = tensor.offset
                for part in self._stored_parts(name):
                    interrupts.check()
                    wait(io.write(file, as_numpy(part), at))
                    at += part.nbytes
                    shown.update(part.nbytes)
        os.fsync(file.fd)  # else the write-back would share the disk with the first steps
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return stored

    def read(self, name: str, out: Tensor | Quantised, io: DiskIO) -> None:
        """Fill `out`, contiguous, of any float dtype or of the tensor's format, on any device."""
        if isinstance(out, Quantised):
            out.raw.copy_(self._encoded(name))
            return
        flat = out.view(-1)
        if out.dim() == 1:  # a norm's weight, or a bias
            flat.fill_(1.0 if name.endswith(".weight") else 0.0)
            return
        for at, part in self._parts(name):
            flat[at : at + len(part)].copy_(part)

    def _parts(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """A matrix, part by part: the index of the part's first element, its elements."""
        count = prod(self.shapes[name])
        for at in range(0, count, POOL):
            yield at, self._random(name, min(POOL, count - at))

    def _random(self, name: str, count: int) -> Tensor:
        start = zlib.crc32(name.encode()) % POOL
        return self._pool[start : start + count]

    def _stored_parts(self, name: str) -> Iterator[Tensor]:
        """The bytes of a matrix, part by part."""
        if isinstance(self.formats[name], Dense):
            return (part for _, part in self._parts(name))
        return iter((self._encoded(name),))

    def _encoded(self, name: str) -> Tensor:
        """The bytes of a matrix that is compressed, whose rows in the pool begin anew now and then."""
        form, (rows, width) = self.formats[name], self.shapes[name]
        step, buffer = min(rows, POOL // width), torch.empty(form.nbytes((rows, width)), dtype=torch.uint8)
        begins = range(0, rows, step)
        parts = ((at, self._random(name, min(step, rows - at) * width).view(-1, width)) for at in begins)
        form.encode_parts((rows, width), parts, buffer)
        return buffer


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
        done, read = 0, -self.phase
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
    (rows, width), form = stored.shape, stored.format
    step = rows if form.heads else max(1, PART // width)
    for begin in range(0, rows, step):
        interrupts.check()
        ids = range(begin, min(begin + step, rows))
        yield begin, form.view(read_rows(stored, [ids], io), (len(ids), width))


def read_rows(stored: Stored, runs: Seq[range], io: DiskIO) -> Tensor:
    """The bytes of a matrix made of some rows of a stored one, which are given as runs of neighbours."""
    count, width = sum(map(len, runs)), stored.shape[1]
    buffer, reads = torch.empty(stored.format.nbytes((count, width)), dtype=torch.uint8), []
    for (offset, size), (at, _) in zip(stored.format.arrays(stored.shape), stored.format.arrays((count, width))):
        for run in runs:
            nbytes = len(run) * size
            reads += io.read(stored.file, buffer[at : at + nbytes].numpy(), stored.offset + offset + run.start * size)
            at += nbytes
    wait(reads)
    return buffer


def _decoded_parts(stored: Stored, io: DiskIO) -> Iterator[tuple[int, Tensor]]:
    """As `rows_of`, in fp32."""
    for begin, rows in rows_of(stored, io):
        if isinstance(rows, Quantised):
            out = torch.empty(rows.shape)
            rows.decode(out)
            yield begin, out
        else:
            yield begin, rows.float()


def is_finite(tensor: Tensor | Quantised) -> bool:
    """Whether all elements are finite; unlike torch.isfinite without a second tensor of that size."""
    if isinstance(tensor, Quantised):
        return tensor.is_finite()
    return bool(torch.stack(tensor.aminmax()).isfinite().all())


def _weight_files(path: Path) -> list[Path]:
    """The files of a model in a folder."""
    files = weight_files(path)
    if not files:
        raise UserError(f"no weights in {path}: expected *.safetensors, pytorch_model.bin or one .gguf file")
    for file in files:
        if not file.exists():
            raise UserError(f"the shard {file} is missing; download it again")
    return files
