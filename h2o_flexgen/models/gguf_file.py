"""Reads and checks the headers of GGUF files: metadata and the places of tensors.

The package `gguf` reads them too, but trusts every number in a file and takes seconds for a large vocabulary.
"""

from __future__ import annotations

import mmap
import os
import struct
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from h2o_flexgen.errors import UserError
from h2o_flexgen.models.folder import check_fetched, numbered
from h2o_flexgen.models.spec import shortened
from h2o_flexgen.utils.files import open_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)
#: numeric types of the metadata -> codes of `struct` and numpy
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
#: other types of the metadata
TEXT = 8
ARRAY = 9
SIZE = struct.Struct("<Q")
#: dimensions of a tensor, as in ggml
MOST_DIMENSIONS = 4
#: size of metadata and tensor descriptions; the largest vocabularies take 16 MiB
MOST_HEADER_BYTES = 1 << 26


class GGUFTensor(NamedTuple):
    """A tensor in a file: `nbytes` bytes from `offset`, row-major."""

    path: Path
    type: str  # the package's name, such as "Q4_K"
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def part(self, experts: range) -> GGUFTensor:
        """Some matrices of a stack (experts, rows, columns), as one matrix; or biases of a stack (experts, rows)."""
        count, rows, *columns = self.shape
        size = self.nbytes // count
        shape = (len(experts) * rows, *columns)
        return self._replace(shape=shape, offset=self.offset + experts.start * size, nbytes=len(experts) * size)


class Header(NamedTuple):
    """The header of a file. Arrays of numbers in the metadata are numpy's."""

    fields: dict[str, object]
    tensors: dict[str, GGUFTensor]

    def value(self, name: str, default=None):
        """A value of the metadata, or `default`; arrays as lists."""
        value = self.fields.get(name, default)
        return value.tolist() if isinstance(value, np.ndarray) else value


def parts(path: Path) -> list[Path]:
    """All files of the model that a file is part of. Raises UserError if one is missing."""
    files = numbered(path)
    missing = [file.name for file in files if not os.path.exists(file)] if len(files) > 1 else []
    if missing:
        count = f"{missing[0]} is missing" if len(missing) == 1 else f"{len(missing)} are missing, as {missing[0]}"
        raise UserError(f"{path} belongs to a model in {len(files)} parts, and {count}")
    return files


def read_model(path: Path) -> Header:
    """The metadata and the tensors of a model, from all of its files.

    Raises:
        UserError: as `parts` and `read_header`, the package `gguf` is missing, or the parts do not belong together.
    """
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UserError(f"reading {path} needs the package gguf: pip install gguf") from None
    files = parts(path)
    headers = [read_header(file) for file in files]
    tensors = {}
    for number, (file, header) in enumerate(zip(files, headers)):
        no = header.value("split.no", 0)
        count = header.value("split.count", 1)
        if (no, count) != (number, len(files)):
            said = f"claims to be part {shortened(no)} of {shortened(count)}, counting from 0"
            advice = "parts of a split model must keep their names, such as model-00001-of-00003.gguf"
            raise UserError(f"{file} {said}: {advice}")
        if again := tensors.keys() & header.tensors.keys():
            raise UserError(f"{file} and another part both have {shortened(min(again))}: they are of different models")
        tensors |= header.tensors
    expected = headers[0].value("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise UserError(f"{path} has {len(tensors)} tensors in all its parts, and should have {shortened(expected)}")
    return Header(headers[0].fields, tensors)


def read_header(path: Path) -> Header:
    """Raises UserError for a file that cannot be read, is truncated, or describes tensors that it cannot hold."""
    check_fetched(path)
    try:
        with open(open_regular(path), "rb") as file:
            size = file.seek(0, 2)
            if not size:
                raise ValueError("it is empty")
            with mmap.mmap(file.fileno(), min(size, MOST_HEADER_BYTES), access=mmap.ACCESS_READ) as data:
                return _header(path, _Cursor(data), size)
    except UserError:
        raise
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    except ValueError as e:
        raise UserError(f"{path} is not a whole GGUF file ({e}); download it again") from None


class _Cursor:
    """Reads one value after another. Methods raise ValueError at the end of the data."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise ValueError("its header ends too early")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str):
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        (count,) = SIZE.unpack(self.take(8))  # there are hundreds of thousands of these
        return self.take(count).decode("utf-8", "surrogateescape")

    def value(self, type_: int):
        if type_ in NUMBERS:
            return self.number(NUMBERS[type_])
        if type_ == TEXT:
            return self.text()
        if type_ == ARRAY:
            return self._array()
        raise ValueError(f"it has metadata of the unknown type {type_}")

    def _array(self) -> list[str] | np.ndarray:
        type_ = self.number("I")
        count = self.number("Q")
        if type_ == TEXT:
            return [self.text() for _ in range(count)]
        if type_ not in NUMBERS:  # llama.cpp reads no arrays of arrays either
            raise ValueError(f"it has an array of the type {type_}, which is not supported")
        dtype = np.dtype(NUMBERS[type_])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)


def _header(path: Path, cursor: _Cursor, size: int) -> Header:
    if cursor.take(4) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = cursor.number("I")
    if version & 0xFFFF == 0:
        raise UserError(f"{path} is a big-endian file, which is not supported")
    if version not in VERSIONS:
        raise UserError(f"{path} is in version {version} of GGUF, which is not supported: versions 2 and 3 are")
    tensor_count = cursor.number("Q")
    fields = {}
    for _ in range(cursor.number("Q")):
        name = cursor.text()
        if name in fields:
            raise ValueError(f"it has two values of {shortened(name)}")
        fields[name] = cursor.value(cursor.number("I"))
    tensors = {}
    for _ in range(tensor_count):
        name = cursor.text()
        if name in tensors:
            raise ValueError(f"it has two tensors {shortened(name)}")
        tensors[name] = _tensor(path, name, cursor)
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"its alignment must be a power of two, not {shortened(alignment)}")
    begin = -(-cursor.at // alignment) * alignment
    _check_places(tensors, alignment, size - begin)
    return Header(fields, {name: tensor._replace(offset=begin + tensor.offset) for name, tensor in tensors.items()})


def _tensor(path: Path, name: str, cursor: _Cursor) -> GGUFTensor:
    """The next description of a tensor; its offset is relative to the first tensor."""
    import gguf

    dimensions = cursor.number("I")
    if dimensions > MOST_DIMENSIONS:
        raise ValueError(f"{shortened(name)} has {dimensions} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
    code = cursor.number("I")
    offset = cursor.number("Q")
    try:
        type_ = gguf.GGMLQuantizationType(code)
    except ValueError:
        raise UserError(
            f"{path}: {shortened(name)} is of the type {code}, which the package gguf does not know"
        ) from None
    elements, nbytes = gguf.GGML_QUANT_SIZES[type_]
    if 0 in shape or (shape[-1] if shape else 1) % elements:
        raise ValueError(f"{shortened(name)} cannot have the shape {list(shape)}")
    return GGUFTensor(path, type_.name, shape, offset, prod(shape) // elements * nbytes)


def _check_places(tensors: dict[str, GGUFTensor], alignment: int, room: int) -> None:
    """Raises ValueError unless the tensors follow one another, each at the next multiple of `alignment`, within `room`
    bytes."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        expected = -(-end // alignment) * alignment
        if tensor.offset != expected:
            raise ValueError(
                f"{shortened(name)} begins at {tensor.offset}, not at {expected} after the previous tensor"
            )
        end = expected + tensor.nbytes
        if end > room:
            raise ValueError(f"{shortened(name)} goes beyond the end of the file")
