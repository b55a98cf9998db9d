"""Conversion of `.bin` checkpoints into safetensors, which can be streamed: once, a part at a time."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from h2o_flexgen.errors import UserError
from h2o_flexgen.offload.disk import cache_root

#: bytes of a converted file, and so of the RAM that the conversion takes
CONVERTED_BYTES = 1 << 29


def converted(shards: list[Path], progress: bool) -> list[Path]:
    """Safetensors copies of `.bin` shards, made once and kept under the cache folder. Pickled code never runs. Raises
    UserError for a shard that is not whole, or without space."""
    from safetensors import SafetensorError

    key = hashlib.sha256()
    for shard in shards:
        stat = shard.stat()
        key.update(f"{shard.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
    root = cache_root() / "converted"
    target = root / key.hexdigest()[:16]
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(root / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _remove_partial(root)
                _convert(shards, target, progress)
    except (OSError, SafetensorError) as e:
        reason = getattr(e, "strerror", None) or e
        raise UserError(f"cannot convert the .bin checkpoint into {root}: {reason}") from None
    return sorted(target.glob("*.safetensors"))


def _convert(shards: list[Path], target: Path, progress: bool) -> None:
    from safetensors.torch import save_file

    partial = target.with_suffix(".partial")
    partial.mkdir()
    try:
        for shard in tqdm(shards, desc="converting .bin to safetensors", unit="shard", disable=not progress):
            state = load_bin(shard)
            for n, names in enumerate(_parts(state)):
                # copies: tensors that share memory, as a tied head does, cannot be saved
                part = {name: state[name].clone().contiguous() for name in names}
                save_file(part, partial / f"{shard.stem}.{n:03}.safetensors")
                del part
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(target)


def sweep_conversions() -> None:
    """Remove what killed conversions have left."""
    with suppress(OSError, UserError):  # there are none, one is running, or there is no home folder
        root = cache_root() / "converted"
        with open(root / "lock", "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_partial(root)


def _remove_partial(root: Path) -> None:
    for left in root.glob("*.partial"):
        shutil.rmtree(left, ignore_errors=True)


def _parts(state: dict[str, Tensor]) -> list[list[str]]:
    """Names of tensors for each converted file: up to CONVERTED_BYTES together, or one larger tensor."""
    parts, nbytes = [], 0
    for name, tensor in state.items():
        nbytes += tensor.nbytes
        if not parts or nbytes > CONVERTED_BYTES:
            parts.append([])
            nbytes = tensor.nbytes
        parts[-1].append(name)
    return parts


def load_bin(shard: Path) -> dict[str, Tensor]:
    """The tensors of a `.bin` file, mapped if it can be. Raises UserError if it is not whole or holds anything else."""
    try:
        state = torch.load(shard, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:
        try:  # files older than torch 1.6 cannot be mapped
            state = torch.load(shard, map_location="cpu", weights_only=True)
        except Exception:
            raise UserError(f"cannot load {shard}: {str(e).splitlines()[0]}; is it whole? Download it again") from None
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise UserError(f"{shard} does not hold a dict of tensors")
    return state
