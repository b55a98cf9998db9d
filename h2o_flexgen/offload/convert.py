"""Conversion of `.bin` checkpoints into safetensors, which can be streamed: once, a part at a time."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import zipfile
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm

from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.offload.disk import cache_root

#: bytes of a converted file, and so about those of RAM that the conversion takes; its last tensor may exceed them
CONVERTED_BYTES = 1 << 29


def converted(shards: list[Path], progress: bool) -> list[Path]:
    """Safetensors copies of `.bin` shards, made once and kept under the cache folder. Pickled code never runs. Raises
    UserError for a shard that is not whole, or without space."""
    key = hashlib.sha256()
    for shard in shards:
        stat = shard.stat()
        key.update(f"{shard.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
    root = cache_root() / "converted"
    target = root / key.hexdigest()[:16]
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(root / "lock", "w") as lock:  # two jobs of one model convert it once
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _convert(shards, target, progress)
    except (OSError, SafetensorError) as e:
        raise UserError(f"cannot convert the .bin checkpoint into {root}: {reason(e)}") from None
    return sorted(target.glob("*.safetensors"))


def _convert(shards: list[Path], target: Path, progress: bool) -> None:
    from safetensors.torch import save_file

    partial = target.parent / "partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was killed
    partial.mkdir()
    try:
        for shard in tqdm(shards, desc="converting .bin to safetensors", unit="shard", disable=not progress):
            state = load_bin(shard)
            for n, names in _parts(state).items():
                # copies: tensors that share memory, as a tied head does, cannot be saved
                part = {name: state[name].clone().contiguous() for name in names}
                save_file(part, partial / f"{shard.stem}.{n:03}.safetensors")
                del part
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(target)


def _parts(state: dict[str, Tensor]) -> dict[int, list[str]]:
    """The names of the tensors of each converted file, by its number."""
    parts, nbytes = defaultdict(list), 0
    for name, tensor in state.items():
        parts[nbytes // CONVERTED_BYTES].append(name)
        nbytes += tensor.nbytes
    return parts


def load_bin(shard: Path) -> dict[str, Tensor]:
    """The tensors of a `.bin` file, mapped if it can be. Raises UserError if it is not whole or holds anything else."""
    try:  # what torch saved before 1.6 is no zip file, and cannot be mapped
        state = torch.load(shard, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(shard))
    except Exception as e:
        raise UserError(f"cannot load {shard}: {reason(e)}; is it whole? Download it again") from None
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise UserError(f"{shard} does not hold a dict of tensors")
    return state
