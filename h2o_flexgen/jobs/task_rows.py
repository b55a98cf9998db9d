"""What rows that are not continued become: sequences for the engine, then lines of the output file."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import replace

import numpy as np

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.engine.params import PoolingParams
from h2o_flexgen.engine.pooling import embedding_width, encode_whole, to_embed
from h2o_flexgen.engine.sampling import Sampler
from h2o_flexgen.engine.scoring import AnswersOutput, Question, has_failed, question_of
from h2o_flexgen.engine.tasks import TaskSink
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs import openai
from h2o_flexgen.jobs.input import Row
from h2o_flexgen.jobs.keys import RowError
from h2o_flexgen.jobs.output import DoneRow, begin
from h2o_flexgen.jobs.tasks import Embed, Inputs
from h2o_flexgen.llm import LLM

#: digits of an element in JSON, which tell all numbers in fp32 apart
DIGITS = 9
OVERFLOWED = "the model's hidden states overflowed for this row"


def task_sink(llm: LLM) -> TaskSink:
    """The sink of a job in which some rows have a task."""
    return TaskSink(Sampler(llm.eos_ids, llm.tokenizer, llm.spec.vocab))


def sequences_of(row: Row, model: LoadedModel, pooling: PoolingParams) -> list[Sequence]:
    """The sequences of a row that has a task. `pooling`: of what it does not set itself. Raises UserError if it cannot
    be run."""
    if isinstance(row.prompt, UserError):
        raise row.prompt
    if isinstance(row.task, Embed):
        return _to_embed(row, model, pooling)
    question = question_of(model, row.prompt, row.task.answers)
    row.task.token_ids = question.token_ids
    return question.sequences(row.index)


def _to_embed(row: Row, model: LoadedModel, pooling: PoolingParams) -> list[Sequence]:
    width = embedding_width(model)
    if row.task.dimensions not in (None, width):
        raise RowError(f"dimensions must be {width}, the model's own: embeddings are not shortened", "dimensions")
    params = replace(pooling, **row.task.own)
    prompts = row.prompt if isinstance(row.prompt, Inputs) else [row.prompt]
    return [to_embed(row.index, encode_whole(model, prompt), params) for prompt in prompts]


def done_task(row: Row, sequences: list[Sequence], model: str) -> DoneRow:
    """The line of a row with a task, whose sequences have ended. `model`: the model's name."""
    is_plain = row.kind == "plain"
    if has_failed(sequences):
        error = UserError(OVERFLOWED)
        return DoneRow.of(begin(row) | {"error": str(error)} if is_plain else openai.failure(row, error, 500))
    if isinstance(row.task, Embed):
        found = [_encoded(s.task.embedding, row.task.encoding_format) for s in sequences]
        return DoneRow.of(
            begin(row) | {"embedding": found[0]} if is_plain else _embeddings(row, found, sequences, model)
        )
    output = _output(row, sequences)
    return DoneRow.of(begin(row) | _plain_scores(output) if is_plain else _scores(row, output, model))


def _encoded(embedding: np.ndarray, encoding_format: str) -> list[float] | str:
    if encoding_format == "base64":
        return b64encode(embedding.astype("<f4").tobytes()).decode()
    return [float(f"{element:.{DIGITS}g}") for element in embedding.tolist()]


def _embeddings(row: Row, embeddings: list, sequences: list[Sequence], model: str) -> dict:
    """The response of /v1/embeddings, as OpenAI has it."""
    data = [{"object": "embedding", "index": n, "embedding": each} for n, each in enumerate(embeddings)]
    return _response(row, {"data": data}, sum(len(s.prompt) for s in sequences), model)


def _output(row: Row, sequences: list[Sequence]) -> AnswersOutput:
    prompt = sequences[0].prompt[: sequences[0].wanted + 1]
    question = Question(prompt, row.task.answers, row.task.token_ids)
    return AnswersOutput(row.index, prompt, question.scores(sequences))


def _plain_scores(output: AnswersOutput) -> dict:
    """What a plain row has: the score of each answer, and the most likely one."""
    scores = []
    for score in output.scores:
        tokens = {"num_tokens": len(score.token_ids), "probability": score.probability}
        scores.append({"answer": score.answer, "logprob": score.logprob, **tokens})
    return {"scores": scores, "answer": output.answer}


def _scores(row: Row, output: AnswersOutput, model: str) -> dict:
    """The response of /v1/score."""
    found = _plain_scores(output)
    data = [{"object": "score", "index": n, **score} for n, score in enumerate(found["scores"])]
    tokens = len(output.prompt_token_ids) + sum(len(score.token_ids) for score in output.scores)
    return _response(row, {"data": data, "answer": found["answer"]}, tokens, model)


def _response(row: Row, found: dict, tokens: int, model: str) -> dict:
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return openai.success(row, {"object": "list", "model": row.model or model, **found, "usage": usage})
