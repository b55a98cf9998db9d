"""Rows that a model can run, and why it cannot run the others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.engine.params import SamplingParams, check_stop
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.content import temporary_file
from h2o_flexgen.jobs.input import Row, Rows
from h2o_flexgen.jobs.output import DoneRow, encoded, failed_row
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.utils.progress import bar


class Admission:
    """Which rows can be run, and what that takes.

    Args:
        wanted: (N,) bool, the rows in question.
        params: of what a row does not set itself.

    Attributes:
        runs: (N,) bool, those that can be run.
        lens: how many of these have each number of tokens.
        gen_len: tokens of the longest output; output_tokens: the most of all together.
        error: why the first of the others cannot be run.
    """

    def __init__(self, llm: LLM, rows: Rows, wanted: np.ndarray, params: SamplingParams):
        self.runs = wanted.copy()
        self.lens = Counter()
        self.gen_len = 1
        self.output_tokens = 0
        self.error = ""
        self._refused = temporary_file()  # lines of the output file
        for row in bar(rows.those(wanted), "reading", total=int(wanted.sum()), unit="rows", show=llm.progress):
            prompt, own = request(row, params, llm.model)
            try:
                self.lens[len(llm.admit(prompt, own.max_tokens))] += 1
                self.gen_len = max(self.gen_len, own.max_tokens)
                self.output_tokens += own.max_tokens
            except UserError as e:
                self._refuse(row, e)

    def _refuse(self, row: Row, error: UserError) -> None:
        self.runs[row.index] = False
        self.error = self.error or f"row {row.index}: {error}"
        try:
            self._refused.write(b"%d %b" % (row.index, encoded(failed_row(row, error).data)))
        except OSError as e:
            raise UserError(f"cannot write a temporary file: {e.strerror}; TMPDIR names the folder for it") from None

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.lens, default=1)

    def workload(self) -> Workload:
        lens = sorted(self.lens, reverse=True)
        prompt_lens = np.repeat(np.array(lens, np.int32), [self.lens[n] for n in lens])
        return Workload(prompt_lens, self.gen_len, path=self.longest - 1, output_tokens=self.output_tokens)

    def refused(self) -> Iterator[tuple[int, DoneRow]]:
        """Index and output row of those that cannot be run."""
        self._refused.seek(0)
        for line in self._refused:
            index, _, data = line.partition(b" ")
            yield int(index), DoneRow.of(json.loads(data))


def request(row: Row, params: SamplingParams, model: LoadedModel) -> tuple:
    """The prompt of a row, or the UserError that stands for one, and its sampling: `params` and what it sets itself."""
    try:
        own = replace(params, **row.params) if row.params else params
        check_stop(own, model.tokenizer, model.spec.vocab)
        return row.prompt, own
    except UserError as e:
        return e, params
