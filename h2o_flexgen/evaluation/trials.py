"""Trials: questions about passages whose answers are fed token by token, and what a cache makes of them.

A trial is right where the model's most likely token is the answer's, at every token of it: then greedy decoding writes
this answer. So a trial costs one pass over its text, and a row of results is one job of `LLM.score`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean, stdev

from h2o_flexgen.engine.outputs import ScoreOutput
from h2o_flexgen.errors import UserError
from h2o_flexgen.evaluation.passages import Passage
from h2o_flexgen.evaluation.settings import Setting, check_outputs, measure_each
from h2o_flexgen.llm import LLM


@dataclass(frozen=True)
class Span:
    """An answer: tokens `begin` to `end` of a text, as one of the answers that `column` of the results counts."""

    column: str
    begin: int
    end: int


@dataclass(frozen=True)
class Trial:
    """A text with answers.

    Attributes:
        token_ids: of the whole text; the first `prompt_len` are the prompt.
        answers: behind the prompt.
        group: trials with the same one, such as the answers to one question, are judged together.
    """

    token_ids: list[int]
    prompt_len: int
    answers: list[Span]
    group: int


#: what a task makes of its trials and their scores: for each column the values, one for each passage
Judge = Callable[[list[Trial], list[ScoreOutput]], dict[str, list[float]]]


def of_each(passages: list[Passage], make: Callable[[Passage, int], list]) -> tuple[list, list[str]]:
    """What `make` makes of each passage and its place, and an error for each that it refuses."""
    items = []
    errors = []
    for index, passage in enumerate(passages):
        try:
            items += make(passage, index)
        except UserError as e:
            errors.append(f"passage {index}: {e}")
    return items, errors


def measure(llm: LLM, trials: list[Trial], settings: list[Setting], judge: Judge) -> Iterator[dict]:
    """Yields a row for the full cache, then one for each setting: `row_of`, with `scores`: column -> `spread`. Raises
    UserError if a text cannot be scored."""
    texts = [trial.token_ids for trial in trials]
    prompt_lens = [trial.prompt_len for trial in trials]
    full: dict[str, list[float]] = {}  # the values of the full cache, which is measured first

    def job() -> dict:
        scores = llm.score(texts, prompt_lens)
        check_outputs(scores, "text")
        values = judge(trials, scores)
        full.update({} if full else values)
        return {"scores": {column: spread(values[column], full[column]) for column in values}}

    return measure_each(llm, settings, sum(map(len, texts)) - sum(prompt_lens), job)


def is_right(score: ScoreOutput, span: Span) -> list[bool]:
    """For each token of an answer, whether it was the most likely one."""
    first = len(score.token_ids) - len(score.greedy_token_ids)
    return score.is_greedy[span.begin - first : span.end - first]


def spread(values: list[float], full: list[float]) -> dict[str, float | None]:
    """The `mean` of values and its standard `error`; the `ratio` of the mean to the full cache's, and the standard
    error of this ratio (`ratio_error`), both None if the full cache's is 0. The values belong to the same passages."""
    mean = fmean(values)
    base = fmean(full)
    found = {"mean": mean, "error": standard_error(values), "ratio": None, "ratio_error": None}
    if base:
        residuals = [value - mean / base * other for value, other in zip(values, full, strict=True)]
        found |= {"ratio": mean / base, "ratio_error": standard_error(residuals) / base}
    return found


def standard_error(values: list[float]) -> float:
    """Of the mean of values; 0 for one value."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
