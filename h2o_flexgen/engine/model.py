"""A model that is ready to be run: its sizes, its tokenizer, and where its weights are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path

import torch

from h2o_flexgen.errors import UserError
from h2o_flexgen.models.parts import activation
from h2o_flexgen.models.registry import family, head_name, known_names, named_spec, read_spec, stored_dtype
from h2o_flexgen.models.source import find_model, load_tokenizer
from h2o_flexgen.models.spec import Layer, ModelSpec
from h2o_flexgen.offload.checkpoint import Checkpoint, DummyCheckpoint

#: the path that stands for random weights
DUMMY = "_DUMMY_"


@dataclass
class LoadedModel:
    """A model whose weights have been found, but not read.

    Attributes:
        dtype: to compute in.
        layers: embedding, transformer blocks, head: the tensors of each.
        tokenizer: None if the model has none.
        stored_dtypes: of the matrices in the checkpoint. Vectors do not count: they never stream.
    """

    name: str
    spec: ModelSpec
    dtype: torch.dtype
    layers: list[Layer]
    source: Checkpoint | DummyCheckpoint
    tokenizer: object | None
    stored_dtypes: set[torch.dtype]

    @property
    def is_dummy(self) -> bool:
        return isinstance(self.source, DummyCheckpoint)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end a text; none where weights are random."""
        return frozenset() if self.is_dummy else self.spec.eos

    def encode(self, prompt: str | Seq[int]) -> list[int]:
        """Token ids of a prompt. A UserError stands for a prompt that could not be read, and is raised.

        Raises:
            UserError: empty, of a wrong type, no tokenizer for text, or an id outside the vocabulary.
        """
        if isinstance(prompt, UserError):
            raise prompt
        if not isinstance(prompt, (str, list, tuple)):
            raise UserError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}")
        if isinstance(prompt, str) and self.tokenizer is None:
            raise UserError("this model has no tokenizer: give prompt_token_ids instead of text")
        ids = self._tokenize(prompt) if prompt and isinstance(prompt, str) else prompt
        if not ids:
            raise UserError("the prompt is empty")
        for token in ids:
            is_number = isinstance(token, Integral) and not isinstance(token, bool)  # numpy's are welcome
            if not is_number or not 0 <= token < self.spec.vocab:
                raise UserError(f"token ids are whole numbers below {self.spec.vocab}, the vocabulary, not {token!r}")
        return list(map(int, ids))

    def _tokenize(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError("the prompt is not valid Unicode: it holds half a surrogate pair") from None
        return self.tokenizer(text, verbose=False)["input_ids"]


def load_model(
    model: str | None, path: str | None, choose_dtype: Callable[[str | None], torch.dtype], progress: bool
) -> LoadedModel:
    """Find a model, and check that its checkpoint holds what the model needs.

    Args:
        model, path: as for `LLM`.
        choose_dtype: from the type that the checkpoint is stored in, such as "bfloat16", or None where that is not
            known, to the type to compute in.
        progress: show a bar if the checkpoint must be converted.

    Raises:
        UserError: there is no such model, its family or its format is not known, or its files are not whole.
    """
    if path == DUMMY:
        spec, tokenizer, stored = _dummy_spec(model), None, None
    else:
        weights, folder = find_model(model, path)
        spec, stored, tokenizer = read_spec(folder), stored_dtype(folder), load_tokenizer(folder)
    dtype = choose_dtype(stored)
    activation(spec.activation)  # raises for one that is not known
    layers = family(spec.model_type).tensors(spec)
    shapes = {name: shape for layer in layers for name, shape in layer.shapes.items()}
    if path == DUMMY:
        source = DummyCheckpoint(shapes, dtype)
    else:
        source = Checkpoint(weights, progress)
        source.check(shapes)
        if spec.tied:
            source.check_tied(head_name(spec), head_name(replace(spec, tied=False)))
    stored_dtypes = {source.stored_dtype(name) for name, shape in shapes.items() if len(shape) > 1}
    name = model or (path if path not in (None, DUMMY) else "demo_model")
    return LoadedModel(name, spec, dtype, layers, source, tokenizer, stored_dtypes)


def _dummy_spec(model: str | None) -> ModelSpec:
    spec = named_spec(model or "")
    if spec is None and model and os.path.isdir(model):
        spec = read_spec(Path(model))
    if spec is None:
        raise UserError(
            f"random weights ({DUMMY}) need a folder with a config.json, or the name of a model whose sizes are "
            f"built in, not {model!r}: {', '.join(known_names())}"
        )
    return spec
