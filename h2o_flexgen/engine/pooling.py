"""Embeddings: the hidden states of a text after the model's final norm, pooled into one vector."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.model import LoadedModel, Prompt
from h2o_flexgen.engine.params import PoolingParams, SamplingParams
from h2o_flexgen.errors import UserError

#: of a sequence that is not continued: it ends with its prompt
ONE_PASS = SamplingParams(max_tokens=1)


@dataclass(eq=False)
class Pooled:
    """The task of a sequence whose hidden states are pooled.

    Attributes:
        embedding: (W,) fp32, once its prompt is computed.
    """

    params: PoolingParams
    embedding: np.ndarray | None = None


@dataclass
class EmbeddingOutput:
    """The embedding of one text.

    Attributes:
        index: place among the texts.
        embedding: (W,) fp32, W the width of the hidden states; None with an error.
        error: why the text could not be embedded; or None.
    """

    index: int
    prompt_token_ids: list[int]
    embedding: np.ndarray | None = None
    error: str | None = None


def to_embed(index: int, ids: list[int], params: PoolingParams) -> Sequence:
    """The sequence of a text. Its logits are not wanted, so that the head is not run."""
    return Sequence(index, ids, ONE_PASS, wanted=len(ids), task=Pooled(params))


def encode_whole(model: LoadedModel, prompt: Prompt) -> list[int]:
    """Token ids of a text to embed. Raises UserError if it is longer than the model's positions, or as
    `LoadedModel.encode`."""
    ids = model.encode(prompt)
    if len(ids) > model.spec.positions:
        raise UserError(f"the text has {len(ids)} tokens, more than the model's {model.spec.positions} positions")
    return ids


def embedding_width(model: LoadedModel) -> int:
    """Elements of an embedding: what the head's matrix is multiplied with."""
    _, shape = model.layers[-1].streamed["head.weight"]
    return shape[1]


def embed_each(
    model: LoadedModel, prompts: Seq[Prompt], params: PoolingParams
) -> tuple[list[Sequence], list[EmbeddingOutput]]:
    """Sequences of the texts, and the outputs of all texts: one that cannot be embedded has an error, and no
    sequence."""
    sequences = []
    outputs = []
    for index, prompt in enumerate(prompts):
        outputs.append(EmbeddingOutput(index, []))
        try:
            outputs[index].prompt_token_ids = encode_whole(model, prompt)
            sequences.append(to_embed(index, outputs[index].prompt_token_ids, params))
        except UserError as e:
            outputs[index].error = str(e)
    return sequences, outputs


def complete_embedding(output: EmbeddingOutput, s: Sequence) -> EmbeddingOutput:
    """Fill in the output of a text whose states have been pooled."""
    if s.finish_reason == "error":
        output.error = "the model's hidden states overflowed for this text"
    else:
        output.embedding = s.task.embedding
    return output
