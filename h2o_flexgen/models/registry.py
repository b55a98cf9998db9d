"""Finds the file of a model family, and the spec of a model: by its config, or by a name that is built in."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from pathlib import Path

from h2o_flexgen.errors import UserError
from h2o_flexgen.models.folder import check_fetched, describe_unreadable
from h2o_flexgen.models.spec import Config, ModelSpec, shortened
from h2o_flexgen.utils.files import check_small, read_json

#: `model_type` of every family, each a module of this package
FAMILIES = ("opt", "llama", "mistral", "qwen2", "qwen3", "gpt_neox")
#: types of weights that a job may compute in
STORED_DTYPES = ("float16", "bfloat16", "float32")

#: files of a model folder that transformers reads whole
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def family(model_type: str):
    """The module of a family; what it has says the package's docstring."""
    return import_module(f"h2o_flexgen.models.{model_type}")


def head_name(spec: ModelSpec) -> str:
    """The checkpoint's name of the head's matrix."""
    return family(spec.model_type).tensors(spec)[-1].streamed["head.weight"][0]


def spec_of(config: dict, where: str = "the config") -> ModelSpec:
    """The spec of a model with this config.json, which messages call `where`.

    Raises:
        UserError: a family that is not known, a quantised checkpoint, a value that is missing, of a wrong type or does
            not fit the others.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(
            f"{where}: the architecture {shortened(model_type)} is not supported; known model types: {known}"
        )
    if any(config.get(name) is not None for name in ("quantization_config", "quantization")):  # the latter by MLX
        advice = "take one in float16, bfloat16 or float32"
        raise UserError(f"{where}: the checkpoint is quantised, which is not supported: {advice}")
    return family(model_type).spec(Config(config, where))


def read_spec(folder: Path) -> ModelSpec:
    """The spec of a model folder; the ids in a generation_config.json end a text too. Raises UserError as `spec_of`, or
    for a config.json, or a file of the tokenizer, that cannot be read."""
    for name in TOKENIZER_FILES:
        check_small("the model's", folder / name)
    config = _read(folder / "config.json")
    if config is None:
        expected = "a model folder holds one and the weights, or one .gguf file"
        raise UserError(f"no config.json in {folder}: {expected}{describe_unreadable(folder)}")
    generation = _read(folder / "generation_config.json") or {}
    if generation.get("eos_token_id") is not None:
        config = config | {"eos_token_id": _listed(config, "eos_token_id") + _listed(generation, "eos_token_id")}
    return spec_of(config, str(folder / "config.json"))


def _listed(config: dict, key: str) -> list:
    """A value, or several, or none, as a list."""
    value = config.get(key)
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def stored_dtype(folder: Path) -> str | None:
    """The type of a checkpoint's weights, such as "bfloat16", if its config.json names it."""
    config = _read(folder / "config.json") or {}
    name = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return name if name in STORED_DTYPES else None


def _read(path: Path) -> dict | None:
    if not os.path.exists(path):
        return None
    check_fetched(path)
    data = read_json("the model's", path)
    if not isinstance(data, dict):
        raise UserError(f"{path} does not hold a JSON object")
    return data


@cache
def _named() -> dict[str, tuple[str, dict]]:
    """Lower-case name -> hub name, config; with and without the owner and a suffix of the version."""
    found = {}
    for model_type in FAMILIES:
        for hub_name, config in family(model_type).named().items():
            name = hub_name.lower()
            bare = name.rpartition("/")[2]
            for alias in (name, bare, bare.removesuffix("-hf"), bare.partition("-v0")[0]):
                found[alias] = (hub_name, {"model_type": model_type, **config})
    return found


def hub_name(name: str) -> str:
    """The hub's name of a built-in model, for example of "opt-125m" or "llama-3.1-8b"; any other name as it is."""
    return _named().get(name.lower(), (name, None))[0]


def named_config(name: str) -> dict | None:
    """The config.json of a model whose sizes are built in, or None."""
    return _named().get(name.lower(), (name, None))[1]


def named_spec(name: str) -> ModelSpec | None:
    """The spec of a model whose sizes are built in, or None."""
    config = named_config(name)
    return None if config is None else spec_of(config)


def named_dtype(name: str) -> str:
    """The type in which a model whose sizes are built in publishes its weights."""
    return (named_config(name) or {}).get("torch_dtype", "float16")


def known_names() -> list[str]:
    """The hub's names of all models whose sizes are built in."""
    return list(dict.fromkeys(name for name, _ in _named().values()))
