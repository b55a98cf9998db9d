"""A class for `map_batches` of Ray Data, which owns input, output and workers then. It does not import Ray."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from operator import itemgetter

import numpy as np

from h2o_flexgen.engine.outputs import RequestOutput
from h2o_flexgen.engine.params import SamplingParams
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.admission import request
from h2o_flexgen.jobs.input import Row, parse_row
from h2o_flexgen.llm import LLM
from h2o_flexgen.policy import KVBudget

#: columns that are added to those of a row
ADDED = ("generated_text", "generated_tokens", "finish_reason", "error")

Preprocess = Callable[[dict], dict]


class H2OFlexGen:
    """An LLM for batches of rows: `dataset.map_batches(H2OFlexGen, fn_constructor_kwargs={...}, concurrency=2,
    batch_size=512)`. A row keeps its columns and gets `ADDED`; one that cannot be run has an `error`, and None in the
    others.

    What a sampled row draws depends on its `custom_id`, or else on its content, so that it gets the same text in any
    batch.

    Args:
        preprocess: row -> what a plain row of a job may hold (docs/jobs.md): `prompt`, `prompt_token_ids` or
            `messages`, and sampling parameters. None: the row's own columns of these names.
        postprocess: row with the added columns -> columns of the output.
        params: of what a row does not set itself; also as a dict.
        longest_prompt: tokens of the longest prompt of all batches: required by a KV budget that is a ratio.
        options: of `LLM`.

    Raises:
        UserError: a KV budget that would differ from batch to batch, or as `LLM`.
    """

    def __init__(
        self,
        preprocess: Preprocess | None = None,
        postprocess: Preprocess | None = None,
        params: SamplingParams | dict | None = None,
        longest_prompt: int | None = None,
        **options,
    ):
        self.preprocess = preprocess or (lambda row: row)
        self.postprocess = postprocess or (lambda row: row)
        self.params = SamplingParams(**params) if isinstance(params, Mapping) else params or SamplingParams()
        options = {"progress": False, **options}
        options["kv_budget"] = fixed(options.get("kv_budget"), longest_prompt)
        if options.get("compress_cache") == "auto":
            raise UserError('`compress_cache` "auto" may differ from batch to batch: give "int8", "int4" or None')
        self.llm = LLM(**options)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, list]:
        rows = rows_of(batch)
        asked = [self._asked(row, n) for n, row in enumerate(rows)]
        each = [request(row, self.params, self.llm.model) for row in asked]
        prompts = [prompt for prompt, _ in each]
        params = [own for _, own in each]
        keys = [row.key if row.custom_id is not None else int(row.digest, 16) for row in asked]
        outputs = self.llm.generate(prompts, params, keys=keys, skip_errors=True) if rows else []
        return columns_of([self.postprocess(row | added(output)) for row, output in zip(rows, outputs)])

    def _asked(self, row: dict, index: int) -> Row:
        """The row of a job that a row asks for; one whose preprocessing fails has the error in place of a prompt."""
        try:
            line = json.dumps(self.preprocess(dict(row)), default=_plain).encode()
        except Exception as e:
            return Row(index, index + 1, "0", prompt=UserError(f"preprocess: {type(e).__name__}: {e}"))
        found = parse_row(line, index, index + 1)
        if found.kind != "plain" or found.task is not None:
            found.task = None
            found.prompt = UserError("a batch holds plain rows that are continued: requests and answers are for jobs")
        return found


def fixed(budget: KVBudget | str | None, longest_prompt: int | None) -> KVBudget | None:
    """A KV budget in slots, the same in all KV heads, which no batch changes. Raises UserError if it depends on prompts
    that are not known."""
    if budget is None:
        return None
    if isinstance(budget, KVBudget):
        if longest_prompt is not None:
            budget = KVBudget.from_dict(budget.to_dict(longest_prompt))
        if budget.by_head is None:
            budget = replace(budget, by_head=())
    if budget == "auto" or (budget.hh_ratio, budget.recent_ratio) != (None, None):
        raise UserError(
            "a KV budget that is a ratio, or auto, would differ from batch to batch: give it in slots "
            "(`KVBudget.from_size`), or a ratio with `longest_prompt`"
        )
    return budget


def rows_of(batch: dict[str, np.ndarray]) -> list[dict]:
    """The rows of a batch of columns, without the nulls."""
    columns = map(_values, batch.values())
    return [_without_nulls(zip(batch, values)) for values in zip(*columns)]


def _values(column: np.ndarray | list) -> list:
    """The values of a column. If some of its numbers are null, NumPy has NaN for them and floats for the others."""
    if not isinstance(column, np.ndarray):
        return list(column)
    if column.ndim > 1 or column.dtype.kind != "f" or not np.isnan(column).any():
        return column.tolist()
    known = column[~np.isnan(column)]
    kind = int if np.array_equal(known, np.trunc(known)) and np.isfinite(known).all() else float
    return [None if value != value else kind(value) for value in column.tolist()]


def _without_nulls(pairs: Iterable[tuple]) -> dict:
    return {name: value for name, value in pairs if value is not None}


def columns_of(rows: Iterable[dict]) -> dict[str, list]:
    """The columns of rows; None where a row lacks one."""
    rows = list(rows)
    names = dict.fromkeys(chain.from_iterable(rows))
    filled = [dict.fromkeys(names) | row for row in rows]
    return {name: [*map(itemgetter(name), filled)] for name in names}


def added(output: RequestOutput) -> dict:
    """The columns that a row gets; the first answer, if there are several."""
    if output.error is not None:
        return dict(zip(ADDED, (None, None, None, output.error)))
    first = output.outputs[0]
    return dict(zip(ADDED, (first.text, first.token_ids, first.finish_reason, None)))


def _plain(value):
    """What JSON lacks: NumPy's arrays and numbers, dates."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
