"""A model that is ready to run: its sizes, its tokenizer, and the source of its weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path

import torch

from h2o_flexgen.engine.answers import AnswerParser
from h2o_flexgen.engine.chat import ChatTemplate
from h2o_flexgen.engine.messages import Conversation, as_conversation, is_conversation
from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import Format, prepare
from h2o_flexgen.formats.forms import cache_formats, check_compute, compressed
from h2o_flexgen.kernels import int8, rowwise
from h2o_flexgen.kv_cache.full import prepare_cache
from h2o_flexgen.models.fingerprint import fingerprint
from h2o_flexgen.models.gguf import is_gguf
from h2o_flexgen.models.hub import commit
from h2o_flexgen.models.parts import activation
from h2o_flexgen.models.registry import (
    family,
    head_name,
    known_names,
    named_dtype,
    named_spec,
    read_method,
    read_spec,
    stored_dtype,
)
from h2o_flexgen.models.source import DUMMY, find_model, model_name
from h2o_flexgen.models.spec import Layer, ModelSpec, shapes_of
from h2o_flexgen.models.tokenizer import end_ids, load_tokenizer
from h2o_flexgen.storage.checkpoint import Checkpoint
from h2o_flexgen.storage.dummy import DummyCheckpoint

#: a text, token ids, or a conversation, which may be just its messages
Prompt = str | Seq[int] | Seq[dict] | Conversation


@dataclass
class LoadedModel:
    """A model whose weights have been found, but not read.

    Attributes:
        dtype: of the computation.
        layers: the tensors of each stage: embedding, transformer blocks, head.
        tokenizer: None if the model has none.
        chat: its chat template.
        formats: of the matrices in the checkpoint. Vectors are left out, since they never stream.
        compress_weight: as for `LLM`.
        operands: what int8 matmuls read, as from `linear.int8_operands`; None if matmuls are exact.
        revision: the commit of weights from the Hugging Face hub; None for others.
    """

    name: str
    spec: ModelSpec
    dtype: torch.dtype
    layers: list[Layer]
    source: Checkpoint | DummyCheckpoint
    tokenizer: object | None
    formats: dict[str, Format]
    compress_weight: str | None = None
    operands: dict[str, str] | None = None
    revision: str | None = None

    def __post_init__(self):
        self.chat = ChatTemplate(self.tokenizer)

    @property
    def is_quantised(self) -> bool:
        """Whether some matrices are quantised."""
        return not all(form.is_dense for form in self.formats.values())

    @property
    def compute(self) -> str:
        """As for `LLM`."""
        return "exact" if self.operands is None else "int8"

    @property
    def is_dummy(self) -> bool:
        return isinstance(self.source, DummyCheckpoint)

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.spec, None if self.is_dummy else self.source.path, self.tokenizer)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end a text, according to the configs, the tokenizer or the chat template; none if the weights
        are random."""
        return frozenset() if self.is_dummy else self.spec.eos | end_ids(self.tokenizer)

    def encode(self, prompt: Prompt, begins: bool = True) -> list[int]:
        """Token ids of a prompt. A UserError stands for a prompt that could not be read, and is raised.

        A conversation is rendered by the model's chat template (`ChatTemplate.render`). With `begins` false a text
        continues another one, without a token that marks its beginning.

        Raises:
            UserError: the prompt is empty or of a wrong type, there is no tokenizer for a text, an id is outside the
                vocabulary, or as `ChatTemplate.render`.
        """
        if isinstance(prompt, UserError):
            raise prompt
        if is_conversation(prompt):
            ids = self._tokenize(self.chat.render(as_conversation(prompt)), begins=False)  # it has special tokens
        elif isinstance(prompt, str):
            ids = self._tokenize(prompt, begins)
        elif isinstance(prompt, (list, tuple)):
            ids = prompt
        else:
            kinds = "a text, a list of token ids or a conversation"
            raise UserError(f"a prompt is {kinds}, not {type(prompt).__name__}")
        if not ids:
            raise UserError("the prompt is empty")
        is_fine = set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self.spec.vocab  # faster than the loop
        for token in () if is_fine else ids:
            is_number = isinstance(token, Integral) and not isinstance(token, bool)  # NumPy's integers are accepted
            if not is_number or not 0 <= token < self.spec.vocab:
                if ids is not prompt:
                    limit = f"the model's vocabulary has {self.spec.vocab}"
                    raise UserError(
                        f"the tokenizer makes token {token!r} of this text, but {limit}: it belongs to another model"
                    )
                raise UserError(f"token ids are whole numbers below {self.spec.vocab}, the vocabulary, not {token!r}")
        return list(ids) if is_fine else list(map(int, ids))

    def answer_parser(self, prompt: Prompt) -> AnswerParser | None:
        """How the answer to a prompt that `encode` takes is split; None if it is not. Raises UserError as `encode`."""
        return self.chat.answer_parser(as_conversation(prompt)) if is_conversation(prompt) else None

    def encode_next(self, question: str) -> list[int]:
        """Token ids of the text that the chat template writes after an answer. Raises UserError as `encode` and
        `ChatTemplate.render_next`."""
        if not isinstance(question, str):
            raise UserError(f"a message is a text, not {type(question).__name__}")
        return self.encode(self.chat.render_next(question), begins=False)

    def _tokenize(self, text: str, begins: bool = True) -> list[int]:
        if self.tokenizer is None:
            raise UserError("this model has no tokenizer: give prompt_token_ids instead of text")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError("the prompt is not valid Unicode: it holds half a surrogate pair") from None
        return self.tokenizer(text, add_special_tokens=begins, verbose=False)["input_ids"] if text else []


def load_model(
    model: str | None,
    path: str | None,
    choose_dtype: Callable[[str | None], torch.dtype],
    progress: bool,
    compress_weight: str | None = None,
    compress_cache: str | None = None,
    compute: str = "exact",
    disk_mem: int | None = None,
) -> LoadedModel:
    """Find a model, and check that its checkpoint is complete and that it supports the formats, before a copy of lower
    precision is made.

    Args:
        model, path: as for `LLM`.
        choose_dtype: maps the type that the checkpoint is stored in, such as "bfloat16", or None if that is unknown, to
            the type to compute in.
        progress: show a bar if the checkpoint must be converted.
        compress_weight, compress_cache, compute, disk_mem: as for `LLM`.

    Raises:
        UserError: there is no such model, its family or format is unknown, its files are incomplete, or it does not
            support the formats.
    """
    if path == DUMMY:
        weights = folder = tokenizer = None
        spec = _dummy_spec(model)
        stored = named_dtype(model)
    else:
        weights, folder = find_model(model, path)
        spec = read_spec(folder)
        stored = stored_dtype(folder)
        tokenizer = load_tokenizer(folder)
    dtype = choose_dtype(stored)
    activation(spec.activation)  # raises for one that is not known
    layers = family(spec.model_type).tensors(spec)
    source = open_source(weights, folder, spec, layers, dtype, disk_mem, progress)
    formats = {name: source.format(name) for name, shape in shapes_of(layers).items() if len(shape) > 1}
    matrices = [layer.compressible for layer in layers]
    compressed_to = {} if compress_weight is None else compressed(compress_weight, matrices)
    formats |= compressed_to
    check_compute(compute, formats)
    for head_dim in spec.head_dims:
        cache_formats(compress_cache, dtype, head_dim)  # raises for one that the model does not support
    if compressed_to:
        source.compress(compressed_to, disk_mem, progress)
    name = model_name(model, path, weights)
    found = LoadedModel(name, spec, dtype, layers, source, tokenizer, formats, compress_weight)
    found.revision = weights and commit(weights)
    prepare_loops(dtype, found.is_quantised, compute)
    return found


def open_source(
    weights: Path | None,
    folder: Path | None,
    spec: ModelSpec,
    layers: list[Layer],
    dtype: torch.dtype,
    disk_mem: int | None,
    progress: bool,
) -> Checkpoint | DummyCheckpoint:
    """The checkpoint of a model whose config is in `folder`; random weights if it has none. Raises UserError if it is
    not complete."""
    if weights is None:
        return DummyCheckpoint(layers, dtype)
    found = Checkpoint(weights, layers, dtype, progress)
    found.check_experts(layers)
    method = None if is_gguf(weights) else read_method(folder)
    if method is not None and method.is_in_place:
        found.take_formats(method.formats(layers), shapes_of(layers))
    elif method is not None:
        found.convert_quantised(method, layers, disk_mem, progress)
    for layer in layers:
        found.check(layer.shapes)
    if spec.tied:
        found.check_tied(head_name(spec), head_name(replace(spec, tied=False)))
    return found


def prepare_loops(dtype: torch.dtype, quantised: bool, compute: str) -> None:
    """Load or compile the loops of a job that computes in `dtype`, so that their memory is part of the baseline.
    `quantised`: whether some matrices are."""
    if quantised:
        prepare(dtype)
    if compute == "int8":
        int8.prepare(dtype)


def prepare_cpu_loops(model: LoadedModel, compress_cache: str | None, position_rolling: bool) -> None:
    """As `prepare_loops`, for the loops that only the CPU needs; arguments as for `LLM`."""
    rowwise.prepare(model.dtype)
    head_dim = min(model.spec.head_dims)
    for form in cache_formats(compress_cache, model.dtype, head_dim):
        prepare_cache(form, model.dtype, head_dim, position_rolling)


def _dummy_spec(model: str | None) -> ModelSpec:
    spec = named_spec(model or "")
    if spec is None and model and os.path.isdir(model):
        spec = read_spec(Path(model))
    if spec is None and named_spec((model or "").partition("@")[0]):
        raise UserError("random weights have no `revision`: leave it out")
    if spec is None:
        raise UserError(
            f"random weights ({DUMMY}) need a folder with a config.json, or the name of a model whose sizes are "
            f"built in, not {model!r}: {', '.join(known_names())}"
        )
    return spec
