"""Rows that a model can run, as token ids and sampling, and why it cannot run the others."""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.engine.params import SamplingParams, check_stop
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.input import Row
from h2o_flexgen.llm import LLM


def admitted(llm: LLM, rows: list[Row], params: SamplingParams) -> tuple[list[tuple], list[tuple]]:
    """(row, token ids, sampling) of the rows that can be run, and (row, error) of the others."""
    todo = []
    refused = []
    for row in rows:
        prompt, own = request(row, params, llm.model)
        try:
            todo.append((row, llm.admit(prompt, own.max_tokens), own))
        except UserError as e:
            refused.append((row, e))
    return todo, refused


def request(row: Row, params: SamplingParams, model: LoadedModel) -> tuple:
    """The prompt of a row, or the UserError that stands for one, and its sampling: `params` and what it sets itself."""
    try:
        own = replace(params, **row.params)
        check_stop(own, model.tokenizer, model.spec.vocab)
        return row.prompt, own
    except UserError as e:
        return e, params
