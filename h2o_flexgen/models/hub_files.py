"""What the names of a repository's files tell about it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from h2o_flexgen.errors import UserError
from h2o_flexgen.models.folder import numbered, unnumbered
from h2o_flexgen.models.repository import Repository

#: suffixes of weights for other programs
_FOREIGN = (".onnx", ".h5", ".msgpack", ".npz", ".ckpt", ".pt", ".pth", ".tflite", ".engine", ".xml")
#: most names in a message
_MOST = 12


def chosen(repo: Repository, names: Sequence[str]) -> list[str]:
    """The GGUF files among `names` that `repo.gguf` means: all parts of one model, in order, or []. Raises UserError if
    it could mean several models."""
    is_path = repo.gguf.lower().endswith(".gguf")
    of_type = re.compile(rf"(?!.*mmproj)(?:.*[-._/])?{re.escape(repo.gguf)}\.gguf", re.I)
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        whole = unnumbered(name)
        if whole == unnumbered(repo.gguf) if is_path else of_type.fullmatch(whole):
            models.setdefault(whole, []).append(name)
    if len(models) > 1:
        raise UserError(f"{repo.name}:{repo.gguf} may mean several files, name one: {join_names(list(models))}")
    return next(iter(models.values()), [])


def are_all_parts(files: Sequence[str]) -> bool:
    """Whether these GGUF files, in order, are a complete model according to their names."""
    return bool(files) and numbered(Path(files[0])) == [Path(file) for file in files]


def gguf_files(repo: Repository, names: Sequence[str]) -> str:
    """A message with the GGUF files of a repository, and how to name one."""
    files = sorted({unnumbered(name) for name in names if name.endswith(".gguf")})
    return f"name one of its GGUF files, as {repo.name}/{files[0]}: {join_names(files)}" if files else "it has none"


def what_it_is(repo: Repository, names: Sequence[str], folder: Path, lacks: str) -> str:
    """A message about a repository that lacks what every model has, and a remedy. `folder`: of its small files."""
    if any(name.endswith(".gguf") for name in names):
        return f"the repository {repo.name} has no {lacks}: {gguf_files(repo, names)}"
    if "adapter_config.json" in names:
        try:
            base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        except (OSError, ValueError, KeyError, TypeError):
            base = "its base model"
        advice = "merge the two with peft (merge_and_unload), save that, and give its folder"
        return f"{repo.name} is an adapter (LoRA) of {base}, not a model: {advice}"
    foreign = [name for name in names if name.endswith(_FOREIGN)]
    instead = f" but {join_names(foreign)}, which cannot be read" if foreign else ""
    return f"the repository {repo.name} has no {lacks}{instead}: take one that has config.json and safetensors"


def join_names(names: Sequence[str]) -> str:
    """The first names and the number of the others."""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more
