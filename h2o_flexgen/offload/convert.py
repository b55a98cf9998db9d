"""Conversion into safetensors, which can be streamed, of `.bin` checkpoints and GGUF files: once, a part at a time."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.files import cache_root, converted
from h2o_flexgen.kernels.linear import dtype_name
from h2o_flexgen.models.gguf import GGUFFile, is_gguf
from h2o_flexgen.models.spec import Layer
from h2o_flexgen.progress import bar

#: bytes of a converted file, and so about those of RAM that the conversion takes; its last tensor may exceed them
CONVERTED_BYTES = 1 << 29


def to_safetensors(files: list[Path], layers: Sequence[Layer], dtype: torch.dtype, progress: bool) -> list[Path]:
    """Safetensors of a checkpoint's files, themselves if they are safetensors; else copies of them, made once and kept
    under the cache folder.

    Args:
        layers: the tensors of the model; other ones of a GGUF file are left out.
        dtype: of those that are quantised in a GGUF file.

    Raises:
        UserError: a file that is not whole, or no space.
    """
    if files[0].suffix == ".safetensors":
        return files
    if is_gguf(files[0]):
        what, kind = "the GGUF file", f"weights in {dtype_name(dtype)}"
    else:
        what, kind = "the .bin checkpoint", "weights"

    def tensors() -> Iterator[tuple[str, Tensor]]:
        if is_gguf(files[0]):
            return GGUFFile(files[0]).checkpoint_tensors(layers, dtype)
        return (pair for file in files for pair in load_bin(file).items())

    count = sum(len(layer.shapes) for layer in layers)
    try:
        with bar(desc=f"converting {what}", total=count, unit="tensors", show=progress) as shown:
            folder = converted(files, kind, lambda folder: _save(tensors(), folder, shown))
    except (OSError, SafetensorError) as e:
        raise UserError(f"cannot convert {what} into {cache_root()}: {reason(e)}") from None
    return sorted(folder.glob("*.safetensors"))


def _save(tensors: Iterator[tuple[str, Tensor]], folder: Path, shown) -> None:
    """Write (name, tensor) into files of about CONVERTED_BYTES; `shown` counts them."""
    from safetensors.torch import save_file

    part, nbytes, files = {}, 0, 0
    for name, tensor in tensors:
        # a copy: tensors that share memory, as a tied head does, cannot be saved
        part[name] = tensor.clone().contiguous()
        nbytes += tensor.nbytes
        shown.update(1)
        if nbytes >= CONVERTED_BYTES:
            save_file(part, folder / f"{files:05}.safetensors")
            part, nbytes, files = {}, 0, files + 1
    if part:
        save_file(part, folder / f"{files:05}.safetensors")


def load_bin(shard: Path) -> dict[str, Tensor]:
    """The tensors of a `.bin` file, mapped if it can be. Raises UserError if it is not whole or holds anything else."""
    try:  # what torch saved before 1.6 is no zip file, and cannot be mapped
        state = torch.load(shard, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(shard))
    except Exception as e:
        raise UserError(f"cannot load {shard}: {reason(e)}; is it whole? Download it again") from None
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise UserError(f"{shard} does not hold a dict of tensors")
    return state
