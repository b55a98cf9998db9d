"""Conversion of `.bin` checkpoints and GGUF files to safetensors, which can be streamed: once, a part at a time."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.formats import dtype_name
from h2o_flexgen.models.gguf import GGUFFile
from h2o_flexgen.models.gguf_file import parts
from h2o_flexgen.models.spec import Layer, shapes_of
from h2o_flexgen.policy import gib
from h2o_flexgen.utils.copies import converted
from h2o_flexgen.utils.files import OTHER_HOME, cache_root
from h2o_flexgen.utils.progress import bar

#: bytes of a converted file, and about the RAM that the conversion takes; the last tensor may exceed it
CONVERTED_BYTES = 1 << 27


def gguf_to_safetensors(file: Path, layers: Sequence[Layer], dtype: torch.dtype, progress: bool) -> list[Path]:
    """Safetensors copies of the tensors of `layers` in a GGUF file, quantised ones in `dtype`; made once and kept in
    the cache folder. Raises UserError as `GGUFFile`, or for lack of space."""
    shapes = shapes_of(layers)
    needed = sum(map(prod, shapes.values())) * dtype.itemsize
    kind = f"weights in {dtype_name(dtype)}: {shapes}"  # another config needs other tensors
    tensors = lambda: GGUFFile(file).checkpoint_tensors(layers, dtype)  # opened only if there is no copy yet
    return made_once(parts(file), kind, tensors, len(shapes), needed, progress)


def bins_to_safetensors(files: list[Path], layers: Sequence[Layer], progress: bool) -> list[Path]:
    """Safetensors copies of `.bin` shards, likewise. Pickled code never runs. Raises UserError for a shard that is
    damaged, or if there is no space."""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for file in files:
            for name, tensor in load_bin(file).items():
                yield name, tensor.clone()  # tensors that share memory, like a tied head, cannot be saved

    needed = sum(file.stat().st_size for file in files)
    return made_once(files, "weights", tensors, sum(len(layer.shapes) for layer in layers), needed, progress)


def made_once(
    files: list[Path],
    kind: str,
    tensors: Callable[[], Iterator[tuple[str, Tensor]]],
    count: int,
    needed: int,
    progress: bool,
) -> list[Path]:
    """Files with what `tensors` yields, about `count` tensors in `needed` bytes; written unless they exist."""

    def make(folder: Path) -> None:
        write_tensors(folder, files[0].name, tensors(), count, needed, progress)

    try:
        folder = converted(files, kind, make)
    except (OSError, SafetensorError) as e:
        cause = (isinstance(e, OSError) and e.strerror) or reason(e)
        raise UserError(f"cannot convert {files[0]} into {cache_root()}: {cause}; {OTHER_HOME}") from None
    return sorted(folder.glob("*.safetensors"))


def write_tensors(
    folder: Path,
    what: str,
    tensors: Iterator[tuple[str, Tensor]],
    count: int,
    needed: int,
    progress: bool,
    advice: str = OTHER_HOME,
) -> None:
    """Write about `count` tensors in `needed` bytes into files in a folder. Raises UserError for lack of space, with
    `advice`; OSError or SafetensorError if that turns out later."""
    check_room(folder, what, needed, advice)
    with bar(desc=f"converting {what}", total=count, unit="tensors", show=progress) as shown:
        _save(tensors, folder, shown)


def check_room(folder: Path, what: str, needed: int, advice: str) -> None:
    """Raises UserError, with `advice`, if a folder lacks space for so many bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(f"converting {what} takes {gib(needed)} in {folder}, where {gib(free)} is free: {advice}")


def _save(tensors: Iterator[tuple[str, Tensor]], folder: Path, shown) -> None:
    """Write (name, tensor) into files of about CONVERTED_BYTES; `shown` counts them."""
    from safetensors.torch import save_file

    part: dict[str, Tensor] = {}
    nbytes = 0
    files = 0
    for name, tensor in tensors:
        part[name] = tensor.contiguous()
        nbytes += tensor.nbytes
        shown.update(1)
        if nbytes >= CONVERTED_BYTES:
            save_file(part, folder / f"{files:05}.safetensors")
            part.clear()
            nbytes = 0
            files += 1
    if part:
        save_file(part, folder / f"{files:05}.safetensors")


def load_bin(shard: Path) -> dict[str, Tensor]:
    """The tensors of a `.bin` file, mapped if possible. Raises UserError if it is damaged or holds anything else."""
    try:  # files saved before torch 1.6 are not zip files, and cannot be mapped
        state = torch.load(shard, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(shard))
    except Exception as e:
        raise UserError(f"cannot load {shard}: {reason(e)}; is it whole? Download it again") from None
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise UserError(f"{shard} does not hold a dict of tensors")
    return state
