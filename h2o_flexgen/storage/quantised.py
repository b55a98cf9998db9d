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
    config = f"its quantization_config says {method.name}"
    found = {}
    for name, shape in shapes.items():
        key = module_of(name) + method.key
        codes = checkpoint.find(key)
        is_quantised = codes is not None and isinstance(codes.format, str)
        if len(shape) == 2 and is_quantised:
            found[name] = Matrix(shape, _parts(checkpoint, method, name, shape))
        elif len(shape) == 2 and checkpoint.find(name) is None:
            raise UserError(f"the checkpoint {checkpoint.path} has no tensor {key!r}, though {config}")
    if not found:
        raise UserError(f"the checkpoint {checkpoint.path} has no matrix with {method.key!r}, though {config}")
    return found


def _parts(checkpoint: Checkpoint, method: Method, name: str, shape: tuple[int, ...]) -> dict[str, Stored]:
    method.format(name, shape)  # raises for a shape that the method cannot have
    module = module_of(name)
    expected = method.parts(shape, lambda suffix: checkpoint.find(module + suffix) is not None)
    found = {}
    for suffix, size in expected.items():
        part = checkpoint.find(module + suffix)
        if part is None:
            problem = f"no tensor {module + suffix!r}, though its quantization_config says {method.name}"
        elif size is not None and part.shape != size:
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
