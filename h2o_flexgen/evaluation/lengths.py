"""How long greedy answers are: a cache that loses its place lets a model run on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from h2o_flexgen.engine.messages import Conversation
from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.engine.params import SamplingParams
from h2o_flexgen.evaluation.asking import asks, fitted, has_chat, prompt
from h2o_flexgen.evaluation.passages import Passage
from h2o_flexgen.evaluation.settings import Setting, check_outputs, measure_each
from h2o_flexgen.evaluation.trials import spread
from h2o_flexgen.llm import LLM

QUESTION = "What is this text about? Answer in one short sentence."
#: ends the answer of a model without a chat template
STOP = "\n"

BEHIND = "tokens, asked behind"
IN_FRONT = "tokens, asked in front"


@dataclass(frozen=True)
class Request:
    """Token ids of a prompt, and the column of the results that counts its answer."""

    prompt: list[int]
    column: str


def requests_of(llm: LLM, passage: Passage, gen_len: int) -> list[Request]:
    """The passage with the question behind it, and in front. Raises UserError if there is no room for an answer."""
    begun = "" if has_chat(llm.model) else "Answer:"
    found = []
    for column in (BEHIND, IN_FRONT):
        ask = partial(_prompt, llm.model, column == IN_FRONT, begun)
        found.append(Request(llm.admit(ask(fitted(llm.model, passage, ask(""))), gen_len), column))
    return found


def _prompt(model: LoadedModel, in_front: bool, begun: str, text: str) -> Conversation | str:
    return prompt(model, asks(text, QUESTION, in_front), begun)


def measure(llm: LLM, requests: list[Request], settings: list[Setting], gen_len: int) -> Iterator[dict]:
    """Yields a row for the full cache, then one for each setting: `row_of`, with `scores`: column -> `spread` of the
    answers' tokens, `ended`: the fraction of answers that ended before `gen_len`, and the answers (`texts`)."""
    prompts = [request.prompt for request in requests]
    params = SamplingParams(max_tokens=gen_len, stop=() if has_chat(llm.model) else STOP)
    full: dict[str, list[float]] = {}  # the lengths of the full cache, which is measured first

    def job() -> dict:
        outputs = llm.generate(prompts, params, skip_errors=True)
        check_outputs(outputs, "passage")
        answers = [output.outputs[0] for output in outputs]
        values: dict[str, list[float]] = {}
        for request, answer in zip(requests, answers):
            values.setdefault(request.column, []).append(len(answer.token_ids))
        full.update({} if full else values)
        return {
            "scores": {column: spread(values[column], full[column]) for column in values},
            "ended": fmean(answer.finish_reason == "stop" for answer in answers),
            "texts": [answer.text for answer in answers],
        }

    return measure_each(llm, settings, len(prompts) * gen_len, job)
