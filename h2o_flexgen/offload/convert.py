"""Checkpoints that cannot be streamed as they are: converted once, a part at a time, into safetensors."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from h2o_flexgen.errors import UserError
from h2o_flexgen.offload.disk import cache_root

#: bytes of a file that is made of a `.bin` shard, which takes as much RAM
CONVERTED_BYTES = 1 << 29


def converted(shards: list[Path], progress: bool) -> list[Path]:
    """Safetensors copies of `.bin` shards, made once and kept under the cache folder.

    A shard is loaded with `weights_only=True`: pickled code in it never runs.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

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
                _clear(root)
                partial = target.with_suffix(".partial")
                partial.mkdir()
                try:
                    bar = tqdm(shards, desc="converting .bin to safetensors", unit="shard", disable=not progress)
                    for shard in bar:
                        state = _load_bin(shard)
                        for n, names in enumerate(_parts(state)):
                            # they share memory with the file or with each other (a tied head): safetensors wants copies
                            part = {name: state[name].clone().contiguous() for name in names}
                            save_file(part, partial / f"{shard.stem}.{n:03}.safetensors")
                            del part
                except BaseException:
                    shutil.rmtree(partial, ignore_errors=True)
                    raise
                partial.rename(target)
    except (OSError, SafetensorError) as e:
        reason = getattr(e, "strerror", None) or e
        raise UserError(f"cannot convert the .bin checkpoint into {root}: {reason}") from None
    return sorted(target.glob("*.safetensors"))


def sweep_conversions() -> None:
    """Remove conversions that were killed."""
    try:
        root = cache_root() / "converted"
        with open(root / "lock", "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _clear(root)
    except (OSError, UserError):
        pass  # there are none, or one is at work, or nobody has a home


def _clear(root: Path) -> None:
    for left in root.glob("*.partial"):
        shutil.rmtree(left, ignore_errors=True)


def _parts(state: dict[str, Tensor]) -> list[list[str]]:
    """Names of tensors that take up to CONVERTED_BYTES together; of a larger one, its own."""
    parts, nbytes = [], 0
    for name, tensor in state.items():
        nbytes += tensor.nbytes
        if not parts or nbytes > CONVERTED_BYTES:
            parts.append([])
            nbytes = tensor.nbytes
        parts[-1].append(name)
    return parts


def _load_bin(shard: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(shard, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:
        try:  # files older than torch 1.6 cannot be mapped
            state = torch.load(shard, map_location="cpu", weights_only=True)
        except Exception:
            reason = str(e).splitlines()[0]
            raise UserError(f"cannot load {shard}: {reason}; is it whole? Download it again") from None
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise UserError(f"{shard} does not hold a dict of tensors")
    return state
