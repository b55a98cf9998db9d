"""The weights in a model folder."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.utils.files import JSON_BYTES, open_regular, read_bytes

#: a checkpoint in one file
NAMES = ("model.safetensors", "pytorch_model.bin")
STEMS = ("model", "pytorch_model")
#: suffixes of files of weights, readable or not
WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".h5", ".msgpack", ".onnx")
#: the name of one part of a model
NUMBERED = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.\w+)$")
#: the beginning of a file that stands in for a large one until Git LFS fetches it
POINTER = b"version https://git-lfs.github.com/spec/"


def weight_files(folder: Path) -> list[Path]:
    """The files of the weights in a folder, some of which may be missing; [] without weights. Of several checkpoints
    transformers' choice is taken.

    Raises:
        UserError: a folder that cannot be listed, a shard index that cannot be read or names files elsewhere, shards of
            several checkpoints without an index, or a pointer of Git LFS.
    """
    found = _checkpoints(folder)
    if not found:
        return []
    files = _indexed(found[0]) if found[0].suffix == ".json" else numbered(found[0])
    if len(files) > 1 and found[0] in files and len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise UserError(f"{folder} holds shards of several checkpoints, and no index that says which to read: {names}")
    for file in files:
        check_fetched(file)
    return files


def is_whole(folder: Path) -> bool:
    """Whether there are weights and none of their files is missing, as after an interrupted download."""
    files = weight_files(folder)
    return bool(files) and all(map(os.path.isfile, files))


def describe_choice(folder: Path) -> str | None:
    """A message about which of several checkpoints in a folder is read; None if there is only one."""
    first, *others = (path.name for path in _checkpoints(folder))
    others += [name for name in listed(folder) if name.startswith("adapter_model.") or name.endswith(".gguf")]
    return f"{folder} holds several checkpoints: {first} is read, not {', '.join(others)}" if others else None


def describe_unreadable(folder: Path) -> str:
    """What to do about weights in a folder that cannot be read, as the end of a message."""
    names = [name for name in (listed(folder) if os.path.isdir(folder) else []) if name.endswith(WEIGHTS)]
    if any(name.startswith("adapter_model.") for name in names):
        return "; it holds an adapter: merge it into its base model, with peft's merge_and_unload, and give the result"
    if any(name.startswith("consolidated.") for name in names):
        return f"; {names[0]} is in the format of its publisher: take the files for transformers"
    return f"; it holds {', '.join(names[:3])}, which cannot be read" if names else ""


def numbered(path: Path) -> list[Path]:
    """All parts of a model, from the name of one, such as model-00001-of-00003.safetensors. Any other file stands for
    itself."""
    found = NUMBERED.fullmatch(path.name)
    if not found:
        return [path]
    stem, count, suffix = found.groups()
    parts = [path.with_name(f"{stem}-{number:05}-of-{count}{suffix}") for number in range(1, int(count) + 1)]
    return parts if path in parts else [path]


def unnumbered(name: str) -> str:
    """The name of a file without its part number."""
    return NUMBERED.sub(r"\1\3", name)


def listed(folder: Path) -> list[str]:
    """The names in a folder, sorted. Raises UserError if they cannot be read."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as e:
        raise UserError(f"cannot list the folder {folder}: {e.strerror}") from None
    if not os.access(folder, os.X_OK):
        raise UserError(f"cannot open files in the folder {folder}: Permission denied")
    return names


def check_fetched(file: Path) -> None:
    """Raises UserError for a pointer of Git LFS."""
    try:
        with open(open_regular(file), "rb") as opened:
            begins = opened.read(len(POINTER))
    except (OSError, ValueError):  # what needs the file says so; ValueError: no file can have this name
        return
    if begins == POINTER:
        raise UserError(f"{file} is a pointer of Git LFS, not the file itself: run git lfs pull in its folder")


def _checkpoints(folder: Path) -> list[Path]:
    """The only file, the index or, without an index, the first shard of each checkpoint; in transformers' order, which
    knows no shards without an index."""
    names = [name for name in listed(folder) if name.startswith(STEMS) and os.path.isfile(folder / name)]
    found = []
    without_index = set()
    for kind in NAMES:
        index = f"{kind}.index.json"
        found += [folder / name for name in (kind, index) if name in names]
        if index not in names:
            shards = [name for name in names if name != kind and unnumbered(name) == kind]
            without_index |= {numbered(folder / name)[0] for name in shards}
    return found + sorted(without_index)


def _indexed(index: Path) -> list[Path]:
    """The shards that an index names."""
    try:
        names = sorted(set(json.loads(read_bytes(index, JSON_BYTES))["weight_map"].values()))
    except Exception as e:
        raise UserError(f"cannot read the shard index {index}: {reason(e)}") from None
    for name in names:
        if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", ".."):
            raise UserError(f"the shard index {index} names {name!r:.100}: shards are files in its own folder")
    return [index.with_name(name) for name in names]
