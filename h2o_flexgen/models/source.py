"""From what the user calls a model to a folder with its files."""

from __future__ import annotations

import json
import os
from pathlib import Path

from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.models.registry import hub_name, read_spec

DEMO_MODEL = Path(__file__).resolve().parent.parent / "demo_model"

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
_SMALL_FILES = ["*.json", "*.txt", "*.model"]


def find_model(model: str | None, path: str | None = None) -> tuple[Path, Path]:
    """The folders of a model's weights, and of its configuration and tokenizer. Raises UserError if there are none.

    `model` is a local folder, None for the demo model, or a Hugging Face repository, taken from the local cache if it
    is there and downloaded otherwise. With `path` the weights come from there, and the rest too unless `model` is a
    local folder that has it.
    """
    if path is None:
        folder = _find(model)
        return folder, folder
    weights = _expand(path)
    if not os.path.isdir(weights):
        raise UserError(f"`path` {path}: no such folder")
    if model is not None and os.path.isdir(_expand(model)):
        return weights, _expand(model)
    if model is None or (weights / "config.json").exists():
        return weights, weights
    return weights, _find(model, weights=False)


def find_config(model: str | None, path: str | None = None) -> Path:
    """The folder of a model's configuration and tokenizer: that of `find_model`, but no weights are downloaded."""
    return _find(model, weights=False) if path is None else find_model(model, path)[1]


def _find(model: str | None, weights: bool = True) -> Path:
    if model is None:
        if not (DEMO_MODEL / "config.json").exists():
            raise UserError("the demo model is not in this installation: name a `model`")
        return DEMO_MODEL
    folder = _expand(model)
    if os.path.isdir(folder):
        return folder
    if os.path.exists(folder) or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UserError(f"`model` {model}: no such folder")
    return _snapshot(hub_name(model), weights)


def _expand(path: str) -> Path:
    return Path(os.path.expanduser(path))


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder's weights, safetensors if it has both formats; none if it has no weights. Raises UserError
    for an index of shards that cannot be read."""
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


def _is_whole(folder: Path) -> bool:
    """Whether no file of the weights is missing, as after a download that was interrupted."""
    files = weight_files(folder)
    return bool(files) and all(file.exists() for file in files)


def _snapshot(name: str, weights: bool) -> Path:
    """The folder of a repository's config and tokenizer, and of its `weights` if they are wanted: what is not in the
    local cache is downloaded."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    is_whole = _is_whole if weights else _has_tokenizer
    try:
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str) and is_whole(Path(cached).parent):
            return Path(cached).parent
        folder = Path(snapshot_download(name, allow_patterns=_SMALL_FILES))
        read_spec(folder)  # before gigabytes of a model that cannot be run
        for kind in ("model*.safetensors", "pytorch_model*.bin"):
            if weights and not _is_whole(folder):
                folder = Path(snapshot_download(name, allow_patterns=[*_SMALL_FILES, kind]))
        return folder
    except UserError:
        raise
    except Exception as e:
        cause = f"neither a local folder nor to be had from the Hugging Face hub ({reason(e)})"
        advice = "check the name and the network, or give a folder"
        raise UserError(f"cannot get the model {name!r}: {cause}; {advice}") from None


def load_tokenizer(folder: Path):
    """The folder's tokenizer, padding on the left, or None if there is none."""
    if not _has_tokenizer(folder):
        return None
    from transformers import AutoTokenizer

    try:
        # code that comes with a model is never run, and never asked about
        return AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
    except Exception as e:
        raise UserError(f"cannot load the tokenizer of {folder}: {reason(e)}") from None


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in _TOKENIZER_FILES)
