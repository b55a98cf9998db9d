"""The weight files of a model: safetensors and GGUF's blocks are read in place, all else is converted once."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Container, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import Dense, Format, Quantised, convert
from h2o_flexgen.formats.forms import experts_of, names_of
from h2o_flexgen.machine.device import as_numpy
from h2o_flexgen.models.folder import describe_choice, describe_unreadable, weight_files
from h2o_flexgen.models.gguf import in_place, is_gguf
from h2o_flexgen.models.gguf_file import parts
from h2o_flexgen.models.quantised import Method
from h2o_flexgen.models.spec import Layer, shapes_of
from h2o_flexgen.policy import gib
from h2o_flexgen.storage.convert import bins_to_safetensors, gguf_to_safetensors, made_once
from h2o_flexgen.storage.disk import DiskIO, File, wait
from h2o_flexgen.storage.fused import FUSED_NAME, place_of
from h2o_flexgen.storage.quantised import encoded, find_matrices
from h2o_flexgen.storage.stored import DTYPES, Part, Stack, Stored, parts_of, rows_of, whole

#: part of the names of a text model in a multimodal checkpoint
TEXT_MODEL = "language_model."

log = logging.getLogger(__name__)


class Checkpoint:
    """The tensors of a model. Methods take full names, such as "model.decoder.layers.0.fc1.weight".

    Args:
        path: a folder, or a GGUF file.
        layers, dtype: as for `convert.gguf_to_safetensors`.

    Attributes:
        tensors: by their names in the files.
        files: the weight files.
        copy_bytes: size of the copies in the cache folder that `compress` and `convert_quantised` use.

    Raises:
        UserError: no weights, or a file that is missing, cut short, or in another format.
    """

    def __init__(self, path: Path, layers: Seq[Layer] = (), dtype: torch.dtype = torch.float32, progress: bool = True):
        self.path = path
        self.copy_bytes = 0
        self._is_fused = False  # experts are as `fused` describes
        self._origin = ""  # what the values of matrices depend on besides the files
        self.tensors: dict[str, Stored] = {}
        if is_gguf(path):
            self.files = parts(path)
            self._add_gguf(layers, dtype, progress)
            return
        self.files = _weight_files(path)
        is_bin = self.files[0].suffix == ".bin"
        for file in bins_to_safetensors(self.files, layers, progress) if is_bin else self.files:
            self.add_file(file)

    def _add_gguf(self, layers: Seq[Layer], dtype: torch.dtype, progress: bool) -> None:
        """Read matrices in blocks in place, all other tensors from a copy."""
        in_file = in_place(self.path, layers)
        others = [_without(layer, in_file) for layer in layers]
        for file in gguf_to_safetensors(self.path, others, dtype, progress):
            self.add_file(file)
        paths = {path for path, *_ in in_file.values()}
        files = {path: File(path) for path in paths}
        for name, (file, offset, shape, form) in in_file.items():
            self.tensors[name] = Stored(files[file], offset, shape, form)

    def compress(self, formats: dict[str, Format], disk_mem: int | None, progress: bool) -> None:
        """Read these tensors in these formats from now on, from a copy in the cache folder that is made once and takes
        at most `disk_mem` bytes. Raises UserError for NaN or infinite elements, or lack of space."""
        shapes = {name: self.find(name).shape for name in formats}
        sizes = {name: form.nbytes(shapes[name]) for name, form in formats.items()}
        total = sum(sizes.values())
        if disk_mem is not None and total > disk_mem:
            raise UserError(f"the weights in fewer bits take {gib(total)} on disk, and `disk_mem` is {gib(disk_mem)}")
        # another config, or another dtype that a GGUF file was converted to, makes another copy
        made = [(name, shapes[name], form, self.find(name).format) for name, form in formats.items()]
        tensors = lambda: self.encoded(formats)
        files = made_once(self.files, f"weights as {made}{self._origin}", tensors, len(formats), total, progress)
        self._take(files, formats, shapes)

    def encoded(self, formats: dict[str, Format]) -> Iterator[tuple[str, Tensor]]:
        """(name, bytes) of matrices in other formats. Raises UserError for NaN or infinite elements."""
        io = DiskIO()
        try:
            for name, form in formats.items():
                stored = self.find(name)
                buffer = torch.empty(form.nbytes(stored.shape), dtype=torch.uint8)
                parts = ((begin, rows.to(torch.float32)) for begin, rows in rows_of(stored, io))
                form.encode_parts(stored.shape, parts, buffer)
                if not form.view(buffer, stored.shape).is_finite():
                    raise UserError(
                        f"the weights {name!r} contain NaN or infinite values, or values too large for {form.name}: is "
                        "the checkpoint broken?"
                    )
                yield name, buffer
        finally:
            io.close()

    def convert_quantised(self, method: Method, layers: Seq[Layer], disk_mem: int | None, progress: bool) -> None:
        """Read the matrices that a method quantised, or arranged, from a copy likewise, with the same codes and scales.
        Raises UserError for tensors that contradict the config or are broken, or lack of space."""
        self._is_fused = method.is_fused
        matrices = find_matrices(self, method, shapes_of(layers))
        if not matrices:
            return
        formats = {name: method.format(name, matrix.shape) for name, matrix in matrices.items()}
        shapes = {name: matrix.shape for name, matrix in matrices.items()}
        total = sum(method.expected(name, shape).nbytes(shape) for name, shape in shapes.items())
        if disk_mem is not None and total > disk_mem:
            raise UserError(f"the quantised weights take {gib(total)} more on disk, and `disk_mem` is {gib(disk_mem)}")
        tensors = lambda: encoded(method, matrices)
        self._origin = f"quantised weights {method.config.data} {shapes}"
        self._take(made_once(self.files, self._origin, tensors, len(shapes), total, progress), formats, shapes)
        quantised = [name for name, form in formats.items() if not form.is_dense]
        floats = [self.format(name) for name in quantised if self.format(name).is_dense]
        if floats:
            log.warning(
                "%s: %d of %d matrices are read in %s: neighbours in their rows have different scales (desc_act), or "
                "scales that float16 cannot hold",
                self.path,
                len(floats),
                len(formats),
                floats[0].name,
            )

    def check_experts(self, layers: Seq[Layer]) -> None:
        """Raises UserError for a tensor of another number of experts than a layer has."""
        experts = max(layer.experts for layer in layers)
        for name, stored in self.tensors.items():
            if FUSED_NAME.fullmatch(name) and (stored.shape[:1] != (experts,) or len(stored.shape) < 2):
                problem = f"{name!r} in shape {list(stored.shape)}, the config asks for {experts} experts"
                raise UserError(f"the checkpoint {self.path} has {problem}")

    def _take(self, files: list[Path], formats: dict[str, Format], shapes: dict[str, tuple[int, ...]]) -> None:
        """Read these tensors from a copy from now on: in their formats, or in floats where the copy has these."""
        copied = {}
        for file in files:
            copied |= tensors_of(file)
        for name, form in formats.items():
            stored = as_format(copied.get(name), form, shapes[name])
            if stored is None:
                raise UserError(f"the copy {files[0].parent} lacks the weights {name!r}: delete it")
            self.tensors[name] = stored
            self.copy_bytes += stored.nbytes

    def take_formats(self, formats: dict[str, Format], shapes: dict[str, tuple[int, ...]]) -> None:
        """Read matrices in these formats, in which their bytes are stored. Raises UserError for other bytes."""
        for name, form in formats.items():
            stored = as_format(self.find(name), form, shapes[name])
            if stored is None:
                raise UserError(f"the checkpoint {self.path} lacks {name!r} in {form.name}, which its config names")
            self.tensors[name] = stored

    def add_file(self, path: Path) -> None:
        self.tensors |= {name.replace(TEXT_MODEL, ""): stored for name, stored in tensors_of(path).items()}

    def find(self, name: str) -> Stored | Stack | None:
        """The tensor of a full name; experts may be apart in the files."""
        if found := self._find(name):
            return found
        parts = [self._find(each) for each in names_of(name)]
        return None if not parts or None in parts else Stack(tuple(parts))

    def _find(self, name: str) -> Stored | Part | None:
        """A checkpoint saved from an inner module lacks up to two leading parts of its names."""
        modules = name.split(".")
        for missing in range(min(3, len(modules) - 1)):  # a module and its parameter remain
            if stored := self.tensors.get(".".join(modules[missing:])):
                return stored
        if not self._is_fused:
            return self._of_stack(name)
        place = place_of(name)
        stored = place and self._find(place.name)
        return stored and place.of(stored)

    def _of_stack(self, name: str) -> Stored | None:
        """A range of a layer's experts, in a file that has them all below each other."""
        stack, experts = stack_of(name)
        stored = self._find(stack) if experts else None
        return stored and stored.entries(experts)

    def name_in_file(self, name: str) -> str:
        """The name of the tensor that a full name means."""
        place = place_of(name) if self._is_fused and name not in self.tensors else None
        stack, _ = stack_of(name)
        return place.name if place else stack if stack in self.tensors else name

    def check(self, needed: dict[str, tuple[int, ...]]) -> None:
        """Raises UserError unless the checkpoint has every tensor in its shape."""
        for name, shape in needed.items():
            names = [name] if self._find(name) else names_of(name) or [name]
            formats = {each: self._checked_format(each, (shape[0] // len(names), *shape[1:])) for each in names}
            first = formats[names[0]]
            other = next((each for each in names if formats[each] != first), None)
            if other is not None:
                kinds = f"{formats[other].name}, other experts in {first.name}"
                raise UserError(f"the checkpoint {self.path} has {other!r} in {kinds}: it must be the same type")

    def _checked_format(self, name: str, shape: tuple[int, ...]) -> Format:
        stored = self._find(name)
        problem = None
        if stored is None:
            problem = f"no tensor {self.name_in_file(name)!r}"
        elif isinstance(stored.format, str):
            problem = f"{name!r} in {stored.format}: only float weights can be used"
        elif stored.shape != shape:
            problem = f"{self.name_in_file(name)!r} in shape {list(stored.shape)}, the config asks for {list(shape)}"
        if problem is not None:
            raise UserError(f"the checkpoint {self.path} has {problem}")
        return stored.format

    def check_tied(self, embedding: str, head: str) -> None:
        """Raises UserError if a head that the config ties to the embedding is a different tensor, since transformers
        would not tie that."""
        words = self.find(embedding)
        own = self.tensors.get(head)
        if own is not None and not words.equals(own):
            raise UserError(
                f"the checkpoint {self.path} has a head {head!r} that is not its embedding, though the config ties "
                "them: set tie_word_embeddings to false in its config.json"
            )

    def format(self, name: str) -> Format:
        return self.find(name).format

    def on_disk(self, names: list[str], make_file, io: DiskIO, progress: bool) -> dict[str, Stored]:
        """The tensors that stay on disk; nothing is copied."""
        return {name: self.find(name) for name in names}

    def read(self, name: str, out: Tensor | Quantised, io: DiskIO) -> None:
        """Fill `out`: contiguous, of the same shape, in any float dtype or the stored format, on any device."""
        stored = self.find(name)
        flat = out.raw if isinstance(out, Quantised) else out.view(-1)
        if len(stored.shape) == 1:
            convert(flat, whole(stored, io))
            return
        if flat.dtype == stored.dtype and flat.device.type == "cpu":
            size = len(flat) // len(stored.parts)
            parts = zip(stored.parts, flat.split(size))
            wait([request for part, out in parts for request in io.read(part.file, as_numpy(out), part.offset)])
            return
        for at, part in parts_of(stored, io):
            convert(flat[at : at + len(part)], part)


def tensors_of(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, by name. Raises UserError if it is damaged."""
    file = File(path)
    try:
        with safe_open(path, "numpy"):
            pass  # checks the header, and that the file is as long as the header says
        length = int.from_bytes(os.pread(file.fd, 8, 0), "little")
        header = json.loads(os.pread(file.fd, length, 8))
    except (SafetensorError, OSError) as e:
        raise UserError(f"{path} is a damaged safetensors file ({e}): if it was cut short, download it again") from None
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        dtype = entry["dtype"]
        form = Dense(DTYPES[dtype]) if dtype in DTYPES else dtype
        found[name] = Stored(file, 8 + length + entry["data_offsets"][0], tuple(entry["shape"]), form)
    return found


def stack_of(name: str) -> tuple[str, range]:
    """The name of the tensor with all experts of a layer, given that of a range of them, and these; none without a
    range."""
    template, experts = experts_of(name)
    return (template.replace(".{}", "").removesuffix(".weight") if experts else name), experts


def as_format(stored: Stored | None, form: Format, shape: tuple[int, ...]) -> Stored | None:
    """A tensor whose bytes are a matrix in this format, or which is the matrix in floats; None if it is neither."""
    if stored is not None and (stored.shape, stored.format) == ((form.nbytes(shape),), "U8"):
        return replace(stored, shape=shape, format=form)
    return stored if stored is not None and stored.shape == shape else None


def _without(layer: Layer, names: Container[str]) -> Layer:
    return Layer({name: (name, shape) for name, shape in layer.shapes.items() if name not in names})


def _weight_files(path: Path) -> list[Path]:
    """The weight files of a model in a folder."""
    files = weight_files(path)
    if not files:
        expected = "expected model.safetensors, its shards, pytorch_model.bin or one .gguf file"
        raise UserError(f"no weights in {path}: {expected}{describe_unreadable(path)}")
    for file in files:
        if not os.path.isfile(file):
            what = "not a regular file" if os.path.exists(file) else "missing"
            raise UserError(f"the shard {file} is {what}; download it again")
    if choice := describe_choice(path):
        log.warning("%s", choice)
    return files
