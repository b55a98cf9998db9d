"""The quantised matrices of a checkpoint of Hugging Face, converted one at a time to blocks that are streamed: those of
a group of experts together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.formats.forms import names_of
from h2o_flexgen.models.quantised import Method
from h2o_flexgen.models.quantised.method import module_of
from h2o_flexgen.storage.disk import DiskIO
from h2o_flexgen.storage.stored import CODES, Part, Stored, whole
from h2o_flexgen.utils import interrupts

if TYPE_CHECKING:
    from h2o_flexgen.storage.checkpoint import Checkpoint


class Matrix(NamedTuple):
    """A quantised matrix, or the same one of several experts below each other."""

    shape: tuple[int, ...]  # of all together
    parts: list[dict[str, Stored | Part]]  # of each, by suffix


def find_matrices(checkpoint: Checkpoint, method: Method, shapes: dict[str, tuple[int, ...]]) -> dict[str, Matrix]:
    """The matrices that a method quantised, by name; those that the checkpoint has in floats are left out. Raises
    UserError if there are none, or tensors are missing or have other shapes than the config asks for."""
    found = {}
    has_codes = False  # of another method
    floats = []  # that cannot be read in place
    for name in (name for name, shape in shapes.items() if len(shape) == 2):
        key = module_of(name) + method.key
        codes = checkpoint.find(key)
        stored = checkpoint.find(name)
        if codes is not None and not codes.is_direct:
            found[name] = _matrix(checkpoint, method, name, shapes[name])
        elif stored is not None:
            is_code = isinstance(stored.format, str)
            has_codes |= is_code
            if not (is_code or stored.is_direct):
                floats.append(checkpoint.name_in_file((names_of(name) or [name])[0]))
        elif codes is not None:
            what = f"{checkpoint.name_in_file(key)!r} in {codes.format.name} instead of codes"
            raise _contradiction(checkpoint, method, what, "take the files as they were published")
        else:
            missing = next(each for each in names_of(key) or [key] if checkpoint.find(each) is None)
            raise _contradiction(checkpoint, method, f"no tensor {checkpoint.name_in_file(missing)!r}")
    if found and floats:
        raise _contradiction(checkpoint, method, f"{floats[0]!r} in floats beside experts in codes")
    if found or not method.is_declared:
        return found
    if not has_codes:
        raise _contradiction(checkpoint, method, "only floats", "delete quantization_config from its config.json")
    raise _contradiction(checkpoint, method, f"no matrix with {method.key!r}")


def _contradiction(checkpoint: Checkpoint, method: Method, what: str, advice: str = "") -> UserError:
    config = f", though its quantization_config says {method.name}" if method.is_declared else ""
    return UserError(f"the checkpoint {checkpoint.path} has {what}{config}{advice and ': '}{advice}")


def _matrix(checkpoint: Checkpoint, method: Method, name: str, shape: tuple[int, ...]) -> Matrix:
    names = names_of(name) or [name]
    each = (shape[0] // len(names), shape[1])
    return Matrix(shape, [_parts(checkpoint, method, expert, each) for expert in names])


def _parts(checkpoint: Checkpoint, method: Method, name: str, shape: tuple[int, ...]) -> dict[str, Stored | Part]:
    method.format(name, shape)  # raises for a shape that the method cannot have
    module = module_of(name)
    expected = method.parts(shape, lambda suffix: checkpoint.find(module + suffix) is not None)
    found = {}
    for suffix, size in expected.items():
        part = checkpoint.find(module + suffix)
        tensor = repr(checkpoint.name_in_file(module + suffix))
        if part is None:
            raise _contradiction(checkpoint, method, f"no tensor {tensor}")
        if size is not None and part.shape != size:
            problem = f"{tensor} in shape {list(part.shape)}, the config asks for {list(size)}"
        elif isinstance(part.format, str) and part.format not in CODES:
            problem = f"{tensor} in {part.format}, which is not supported"
        else:
            found[suffix] = part
            continue
        raise UserError(f"the checkpoint {checkpoint.path} has {problem}")
    return found


def encoded(method: Method, matrices: dict[str, Matrix]) -> Iterator[tuple[str, Tensor]]:
    """(name, bytes in its format, or floats) of each matrix. Raises UserError for one that is broken."""
    io = DiskIO()
    try:
        for name, (shape, parts) in matrices.items():
            each = (shape[0] // len(parts), shape[1])
            names = names_of(name) or [name]
            yield name, _stacked(method, each, [_encoded(method, *of, each, io) for of in zip(names, parts)])
    finally:
        io.close()


def _encoded(method: Method, name: str, parts: dict[str, Stored | Part], shape: tuple[int, ...], io: DiskIO) -> Tensor:
    interrupts.check()
    tensors = {suffix: whole(part, io) for suffix, part in parts.items()}
    try:
        matrix = method.encode(shape, tensors)
    except (ValueError, RuntimeError) as e:
        raise UserError(f"the weights {name!r} cannot be read as {method.name}: {reason(e)}") from None
    is_encoded = matrix.dtype == torch.uint8
    view = method.format(name, shape).view(matrix, shape) if is_encoded else matrix.isfinite().all()
    if not (view.is_finite() if is_encoded else view):
        what = "scales" if method.is_declared else "values"
        raise UserError(f"the weights {name!r} have NaN or infinite {what}: is the checkpoint broken?")
    return matrix


def _stacked(method: Method, shape: tuple[int, ...], matrices: list[Tensor]) -> Tensor:
    """Matrices of one shape, in their format or in floats, below each other; all in floats if one of them is."""
    if len(matrices) == 1:
        return matrices[0]
    form = method.format("", shape)
    floats = next((matrix.dtype for matrix in matrices if matrix.dtype != torch.uint8), None)
    if floats is None:
        arrays = [(at, at + shape[0] * size) for at, size in form.arrays(shape)]
        return torch.cat([matrix[begin:end] for begin, end in arrays for matrix in matrices])
    decoded = (m if m.dtype == floats else form.view(m, shape).to(floats) for m in matrices)
    return torch.cat([*decoded])
