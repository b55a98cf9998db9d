"""The weights in a model folder."""

from __future__ import annotations

import json
from pathlib import Path

from h2o_flexgen.errors import UserError, reason


def weight_files(folder: Path) -> list[Path]:
    """The files of the weights in a folder, safetensors if it has both formats; none if it has no weights. Raises
    UserError for an index of shards that cannot be read."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if index.exists():
            try:
                return [folder / shard for shard in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
            except Exception as e:
                raise UserError(f"cannot read the shard index {index}: {reason(e)}") from None
        if (folder / name).exists():
            return [folder / name]
    return []


def is_whole(folder: Path) -> bool:
    """Whether no file of the weights is missing, as after a download that was interrupted."""
    files = weight_files(folder)
    return bool(files) and all(file.exists() for file in files)
