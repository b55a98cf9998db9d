"""A model described by its config alone, without loading weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from h2o_flexgen.formats import Format, dtype_name
from h2o_flexgen.formats.forms import compressed
from h2o_flexgen.models.fingerprint import fingerprint
from h2o_flexgen.models.folder import weight_files
from h2o_flexgen.models.gguf import in_place, is_gguf
from h2o_flexgen.models.hub import commit, downloaded
from h2o_flexgen.models.quantised import Method, method_of
from h2o_flexgen.models.registry import (
    family,
    named_config,
    named_dtype,
    named_spec,
    read_method,
    read_spec,
    stored_dtype,
)
from h2o_flexgen.models.repository import repository
from h2o_flexgen.models.source import DUMMY, dummy_dtype, find_model, model_name
from h2o_flexgen.models.spec import ModelSpec, shapes_of
from h2o_flexgen.models.tokenizer import load_tokenizer


class Found(NamedTuple):
    """A model without its weights."""

    name: str  # human-readable
    spec: ModelSpec
    declared: str | None  # the type of the weights; None if the config does not name one
    is_dummy: bool = False  # the weights are random
    weights: Path | None = None  # the folder or GGUF file with the weights, if they are on this machine
    tokenizer: object = None  # None if there is none, or if it was not read because the sizes are built in
    revision: str | None = None  # the commit of a repository on the hub; None for other models and one not cached
    method: Method | None = None  # by which the checkpoint is quantised, if it is

    @property
    def to_fetch(self) -> bool:
        """Whether the weights are not on this machine yet."""
        return self.weights is None and not self.is_dummy

    @property
    def gguf(self) -> Path | None:
        """The GGUF file of the weights, if any."""
        return self.weights if self.weights and is_gguf(self.weights) else None

    @property
    def fingerprint(self) -> str:
        """As of `LoadedModel`. Raises UserError if the weights cannot be read."""
        return fingerprint(self.spec, self.weights, self.tokenizer)

    def stored(self, dtype: str) -> str:
        """The type of the weights in the checkpoint, for a job that computes in `dtype`."""
        if self.is_dummy:
            return dtype_name(dummy_dtype(getattr(torch, dtype)))
        return self.declared or (dtype if self.gguf else "float32")  # transformers' default

    def formats(self, compress_weight: str | None) -> tuple[dict[str, Format], int]:
        """Formats of the quantised matrices by name, and the bytes of the copies that are made: of the matrices that a
        method quantised, and by `compress_weight`, as in `LLM`. Raises UserError for a format that the model cannot
        have."""
        layers = family(self.spec.model_type).tensors(self.spec)
        shapes = shapes_of(layers)
        size = lambda formats: sum(form.nbytes(shapes[name]) for name, form in formats.items())
        converted = self.method.formats(layers) if self.method else {}
        if compress_weight is not None:
            found = compressed(compress_weight, [layer.compressible for layer in layers])
            copied = {} if self.method and self.method.is_in_place else converted
            return found, 0 if self.is_dummy else size(found) + size(copied)
        if self.gguf:
            return {name: form for name, (*_, form) in in_place(self.gguf, layers).items()}, 0
        return converted, 0 if self.method and self.method.is_in_place else size(converted)


def find(model: str | None, path: str | None = None) -> Found:
    """A model as `LLM` finds it. From the hub only the config and the tokenizer are fetched, and nothing if its sizes
    are built in. Raises UserError if there is no such model."""
    named = _named(model) if path in (None, DUMMY) else None
    if path == DUMMY:
        dummy = named or find(model)
        return dummy._replace(declared=named_dtype(model or ""), is_dummy=True, weights=None, method=None)
    if named is None:
        weights, folder = find_model(model, path, weights=False)
        return _found(model_name(model, path, weights), weights, folder)
    folder = downloaded(repository(model))
    if folder is None:
        return named
    if not (folder / "config.json").exists():
        return named._replace(weights=folder, revision=commit(folder))
    return _found(model, folder, folder)


def _named(model: str | None) -> Found | None:
    """A model whose sizes are built in; None if it is another one, or a file or folder of that name exists."""
    if model is None or os.path.exists(os.path.expanduser(model)):
        return None
    spec = named_spec(model)
    return spec and Found(model, spec, named_dtype(model), method=method_of(named_config(model)))


def _found(name: str, weights: Path, folder: Path) -> Found:
    """The model whose weights, if they are there, are in `weights`, and its config in `folder`."""
    is_file = is_gguf(weights)
    return Found(
        name,
        read_spec(folder),
        stored_dtype(folder),
        weights=weights if is_file or weight_files(weights) else None,
        tokenizer=load_tokenizer(folder),
        revision=commit(weights),
        method=None if is_file else read_method(folder),
    )
