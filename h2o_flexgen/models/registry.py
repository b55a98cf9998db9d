"""Finds the module of a model family, and the spec of a model by its config or its built-in name."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from pathlib import Path

from h2o_flexgen.errors import UserError
from h2o_flexgen.models.folder import check_fetched, describe_unreadable
from h2o_flexgen.models.quantised import Method, method_of
from h2o_flexgen.models.spec import Config, ModelSpec, shortened
from h2o_flexgen.utils.files import check_small, read_json

#: `model_type` of every family, each a module of this package
FAMILIES = ("opt", "llama", "mistral", "qwen2", "qwen3", "gpt_neox", "gemma2", "gemma3_text", "gemma4_text", "phi3")
FAMILIES += ("qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss")
#: `model_type` of models of several kinds of input, whose config holds that of their text model -> its family
MULTIMODAL = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}
#: types of weights that a job can compute in
STORED_DTYPES = ("float16", "bfloat16", "float32")
#: those of families whose published configs name none
UNNAMED_DTYPES = {"gpt_oss": "bfloat16"}

#: files of a model folder that transformers reads whole
TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json added_tokens.json vocab.json "
    "vocab.txt merges.txt chat_template.jinja chat_template.json"
).split()


def family(model_type: str):
    """The module of a family, as described in the package's docstring."""
    return import_module(f"h2o_flexgen.models.{model_type}")


def head_name(spec: ModelSpec) -> str:
    """The checkpoint's name of the head's matrix."""
    return family(spec.model_type).tensors(spec)[-1].streamed["head.weight"][0]


def spec_of(config: dict, where: str = "the config") -> ModelSpec:
    """The spec of a model with this config.json, called `where` in messages. Raises UserError for an unknown family, an
    unknown kind of quantised checkpoint, or a value that is missing, of the wrong type or in contradiction to others.
    """
    config = text_config(config, where)
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(
            f"{where}: the architecture {shortened(model_type)} is not supported; known model types: {known}"
        )
    method_of(config, where)  # raises
    return family(model_type).spec(Config(config, where))


def text_config(config: dict, where: str) -> dict:
    """The config of a model's text model, with what is only in that of the whole model. Raises UserError for one that
    is not an object."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MULTIMODAL:
        return config
    inner = config.get("text_config") or {}
    if not isinstance(inner, dict):
        raise UserError(f"{where}: text_config must be an object, not {shortened(inner)}")
    ends = Config(inner, where).tokens("eos_token_id") | Config(config, where).tokens("eos_token_id")
    ends = {"eos_token_id": sorted(ends)} if ends else {}
    return {**config, **inner, **ends, "model_type": MULTIMODAL[model_type]}


def read_spec(folder: Path) -> ModelSpec:
    """The spec of a model folder, with the end-of-text ids of its generation_config.json too. Raises UserError as
    `spec_of`, and for a config.json or tokenizer file that cannot be read."""
    for name in TOKENIZER_FILES:
        check_small("the model's", folder / name)
    where = str(folder / "config.json")
    config = _read(folder / "config.json")
    if config is None:
        expected = "a model folder holds one and the weights, or one .gguf file"
        raise UserError(f"no config.json in {folder}: {expected}{describe_unreadable(folder)}")
    generation = _read(folder / "generation_config.json") or {}
    if generation.get("eos_token_id") is not None:
        ids = Config(generation, str(folder / "generation_config.json")).tokens("eos_token_id")
        config = config | {"eos_token_id": [*ids, *Config(config, where).tokens("eos_token_id")]}
    return spec_of(config, where)


def stored_dtype(folder: Path) -> str | None:
    """The type of a checkpoint's weights, such as "bfloat16"; None if neither its config.json nor its family tells."""
    path = folder / "config.json"
    config = text_config(_read(path) or {}, str(path))
    name = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return name if name in STORED_DTYPES else UNNAMED_DTYPES.get(str(config.get("model_type")))


def read_method(folder: Path) -> Method | None:
    """The method by which the checkpoint of a model folder is quantised; None if it is not. Raises UserError as
    `method_of`."""
    path = folder / "config.json"
    return method_of(_read(path) or {}, str(path))


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
    """Lower-case name, with and without owner and version suffix -> hub name, config."""
    found = {}
    for model_type in FAMILIES:
        for hub_name, config in family(model_type).named().items():
            name = hub_name.lower()
            bare = name.rpartition("/")[2]
            for alias in (name, bare, bare.removesuffix("-hf"), bare.partition("-v0")[0]):
                found[alias] = (hub_name, {"model_type": model_type, **config})
    return found


def hub_name(name: str) -> str:
    """The hub name of a built-in model, such as "opt-125m" or "llama-3.1-8b"; other names are returned unchanged."""
    return _named().get(name.lower(), (name, None))[0]


def named_config(name: str) -> dict | None:
    """The config.json of a built-in model, or None."""
    return _named().get(name.lower(), (name, None))[1]


def named_spec(name: str) -> ModelSpec | None:
    """The spec of a built-in model, or None."""
    config = named_config(name)
    return None if config is None else spec_of(config)


def named_dtype(name: str) -> str:
    """The type of the published weights of a built-in model."""
    return (named_config(name) or {}).get("torch_dtype", "float16")


def known_names() -> list[str]:
    """The hub names of all built-in models."""
    return list(dict.fromkeys(name for name, _ in _named().values()))
