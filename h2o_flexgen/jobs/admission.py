"""Rows that a model can run, and why it cannot run the others."""

from __future__ import annotations

import json
import pickle
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import BinaryIO

import numpy as np

from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.engine.params import SamplingParams, check_params
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.content import temporary_file
from h2o_flexgen.jobs.input import Row, Rows
from h2o_flexgen.jobs.keys import SAMPLING, RowError
from h2o_flexgen.jobs.output import DoneRow, encoded, failed_row
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.utils.progress import bar


class Admission:
    """Checks rows, once, and adds up what running them takes. Their token ids, and the errors of rows that cannot be
    run, wait in temporary files: memory does not grow with the job.

    Args:
        wanted: (N,) bool, the rows to check.
        params: of what a row does not set itself.

    Attributes:
        count: how many rows can be run.
        lens: how many of their answers have each number of prompt tokens.
        logits, is_structured: as of a `Workload`.
        gen_len: tokens of the longest output.
        output_tokens: the most of all outputs together.
        error: why the first of the other rows cannot be run.

    Raises:
        UserError: a temporary file cannot be written.
    """

    def __init__(self, llm: LLM, rows: Rows, wanted: np.ndarray, params: SamplingParams):
        self.params = params
        self.count = 0
        self.lens = Counter()
        self.gen_len = 1
        self.logits = 1
        self.is_structured = False
        self.output_tokens = 0
        self.error = ""
        self._admitted = temporary_file()  # pickles of (row, token ids, parameters)
        self._refused = temporary_file()  # lines of the output file
        for row in bar(rows.those(wanted), "reading", total=int(wanted.sum()), unit="rows", show=llm.progress):
            prompt, own = request(row, params, llm.model)
            try:
                ids = llm.admit(prompt, own.max_tokens)
                row.answer_parser = llm.model.answer_parser(prompt)
            except UserError as e:
                self.error = self.error or f"row {row.index}: {e}"
                _write(self._refused, b"%d %b" % (row.index, encoded(failed_row(row, e).data)))
            else:
                self._admit(row, ids, own)
        _write(self._admitted)
        _write(self._refused)

    def _admit(self, row: Row, ids: list[int], own: SamplingParams) -> None:
        self.count += 1
        self.lens[len(ids)] += own.answers
        self.gen_len = max(self.gen_len, own.max_tokens)
        self.output_tokens += own.max_tokens * own.answers
        self.is_structured |= own.structured is not None
        if own.prompt_logprobs is not None:
            self.logits = max(self.logits, len(ids))
        row.prompt = ""
        _write(self._admitted, pickle.dumps((row, array("i", ids), None if own is self.params else own)))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.lens, default=1)

    def workload(self) -> Workload:
        lens = sorted(self.lens, reverse=True)
        prompt_lens = np.repeat(np.array(lens, np.int32), [self.lens[n] for n in lens])
        return Workload(
            prompt_lens,
            self.gen_len,
            path=self.longest - 1,
            output_tokens=self.output_tokens,
            logits=self.logits,
            is_structured=self.is_structured,
        )

    def admitted(self) -> Iterator[tuple[Row, list[int], SamplingParams]]:
        """The rows that can be run, without their prompts, with token ids and parameters."""
        self._admitted.seek(0)
        for _ in range(self.count):
            row, ids, own = pickle.load(self._admitted)
            yield row, ids.tolist(), own or self.params

    def refused(self) -> Iterator[tuple[int, DoneRow]]:
        """Index and output row of those that cannot be run."""
        self._refused.seek(0)
        for line in self._refused:
            index, _, data = line.partition(b" ")
            yield int(index), DoneRow.of(json.loads(data))


def _write(file: BinaryIO, data: bytes = b"") -> None:
    """Without data: what is buffered."""
    try:
        file.write(data) if data else file.flush()
    except OSError as e:
        raise UserError(f"cannot write a temporary file: {e.strerror}; TMPDIR names the folder for it") from None


def request(row: Row, params: SamplingParams, model: LoadedModel) -> tuple:
    """The prompt of a row, or a UserError in place of one, and its parameters: `params` with what it sets itself."""
    try:
        own = replace(params, **row.params) if row.params else params
        check_params(own, model.tokenizer, model.spec.vocab)
        return row.prompt, own
    except UserError as e:
        name = str(e).split()[0]
        return (RowError(str(e), name) if name in SAMPLING else e), params
