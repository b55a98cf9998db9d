"""The quantised matrices of a checkpoint of Hugging Face, converted one at a time to blocks that are streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.models.quantised import Method
from h2o_flexgen.models.quantised.method import module_of
from h2o_flexgen.storage.disk import DiskIO
from h2o_flexgen.storage.stored import CODES, Stored, whole
from h2o_flexgen.utils import interrupts

if TYPE_CHECKING:
    from h2o_flexgen.storage.checkpoint import Checkpoint


class Matrix(NamedTuple):
    """A quantised matrix."""

    shape: tuple[int, ...]
    parts: dict[str, Stored]  # by suffix


def find_matrices(checkpoint: Checkpoint, method: Method, shapes: dict[str, tuple[int, ...]]) -> dict[str, Matrix]:
    """The matrices that a method quantised, by name; those that the checkpoint has in floats are left out. Raises
    UserError if there are none, or tensors are missing or have other shapes than the config asks for."""
    found = {}
    has_codes = False  # of another method
    for name in (name for name, shape in shapes.items() if len(shape) == 2):
        key = module_of(name) + method.key
        codes = checkpoint.find(key)
        stored = checkpoint.find(name)
        if codes is not None and isinstance(codes.format, str):
            found[name] = Matrix(shapes[name], _parts(checkpoint, method, name, shapes[name]))
        elif stored is not None:
            has_codes |= isinstance(stored.format, str)
        elif codes is not None:
            what = f"{key!r} in {codes.format.name} instead of codes"
            raise _contradiction(checkpoint, method, what, "take the files as they were published")
        else:
            raise _contradiction(checkpoint, method, f"no tensor {key!r}")
    if not found and not has_codes:
        raise _contradiction(checkpoint, method, "only floats", "delete quantization_config from its config.json")
    if not found:
        raise _contradiction(checkpoint, method, f"no matrix with {method.key!r}")
    return found


def _contradiction(checkpoint: Checkpoint, method: Method, what: str, advice: str = "") -> UserError:
    config = f"though its quantization_config says {method.name}"
    return UserError(f"the checkpoint {checkpoint.path} has {what}, {config}{advice and ': '}{advice}")


def _parts(checkpoint: Checkpoint, method: Method, name: str, shape: tuple[int, ...]) -> dict[str, Stored]:
    method.format(name, shape)  # raises for a shape that the method cannot have
    module = module_of(name)
    expected = method.parts(shape, lambda suffix: checkpoint.find(module + suffix) is not None)
    found = {}
    for suffix, size in expected.items():
        part = checkpoint.find(module + suffix)
        if part is None:
            raise _contradiction(checkpoint, method, f"no tensor {module + suffix!r}")
        if size is not None and part.shape != size:
            problem = f"{module + suffix!r} in shape {list(part.shape)}, the config asks for {list(size)}"
        elif isinstance(part.format, str) and part.format not in CODES:
            problem = f"{module + suffix!r} in {part.format}, which is not supported"
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
            interrupts.check()
            tensors = {suffix: whole(part, io) for suffix, part in parts.items()}
            try:
                matrix = method.encode(shape, tensors)
            except (ValueError, RuntimeError) as e:
                raise UserError(f"the weights {name!r} cannot be read as {method.name}: {reason(e)}") from None
            is_encoded = matrix.dtype == torch.uint8
            view = method.format(name, shape).view(matrix, shape) if is_encoded else matrix.isfinite().all()
            if not (view.is_finite() if is_encoded else view):
                raise UserError(f"the weights {name!r} have NaN or infinite scales: is the checkpoint broken?")
            yield name, matrix
    finally:
        io.close()
