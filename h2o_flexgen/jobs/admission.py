"""Rows that a model can run, and why it cannot run the others."""

from __future__ import annotations

import json
import pickle
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import BinaryIO, NamedTuple

import numpy as np

from h2o_flexgen.engine.answers import AnswerParser
from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.engine.params import PoolingParams, SamplingParams, check_params
from h2o_flexgen.engine.requests import answers_to
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.content import temporary_file
from h2o_flexgen.jobs.input import Row, Rows
from h2o_flexgen.jobs.keys import SAMPLING, RowError
from h2o_flexgen.jobs.output import DoneRow, encoded, failed_row
from h2o_flexgen.jobs.task_rows import sequences_of
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.utils.progress import bar


class Packed(NamedTuple):
    """A sequence as it waits; `own`: its parameters, unless they are the job's."""

    ids: array
    wanted: int
    task: object | None
    own: SamplingParams | None
    answer: int
    answer_parser: AnswerParser | None


class Admission:
    """Checks rows, once, and adds up what running them takes. Their token ids, and the errors of rows that cannot be
    run, wait in temporary files: memory does not grow with the job.

    Args:
        wanted: (N,) bool, the rows to check.
        params: of what a row does not set itself.

    Attributes:
        count: rows that can be run.
        lens: how many of their sequences have each number of prompt tokens.
        has_tasks: whether some are not continued.
        logits, is_structured: as of a `Workload`.
        gen_len: tokens of the longest output.
        output_tokens: the most of all outputs together.
        error: why the first of the other rows cannot be run.

    Raises:
        UserError: a temporary file cannot be written.
    """

    def __init__(self, llm: LLM, rows: Rows, wanted: np.ndarray, params: SamplingParams | PoolingParams):
        self.llm = llm
        self.params = params
        self.count = 0
        self.lens = Counter()
        self.has_tasks = False
        self.logits = 0
        self.gen_len = 1
        self.logits = 1
        self.is_structured = False
        self.output_tokens = 0
        self.error = ""
        self._admitted = temporary_file()  # pickles of a row and its `Packed` sequences
        self._refused = temporary_file()  # lines of the output file
        for row in bar(rows.those(wanted), "reading", total=int(wanted.sum()), unit="rows", show=llm.progress):
            try:
                sequences = self._sequences(row)
            except UserError as e:
                self.error = self.error or f"row {row.index}: {e}"
                _write(self._refused, b"%d %b" % (row.index, encoded(failed_row(row, e).data)))
            else:
                self._admit(row, sequences)
        _write(self._admitted)
        _write(self._refused)

    def _sequences(self, row: Row) -> list[Sequence]:
        """Raises UserError for a row that cannot be run."""
        if isinstance(self.params, PoolingParams):
            return sequences_of(row, self.llm.model, self.params)
        if row.task is not None:
            return sequences_of(row, self.llm.model, PoolingParams())
        prompt, own = request(row, self.params, self.llm.model)
        ids = self.llm.admit(prompt, own.max_tokens)
        return answers_to(row.index, ids, own, row.key, self.llm.model.answer_parser(prompt))

    def _admit(self, row: Row, sequences: list[Sequence]) -> None:
        self.count += 1
        self.has_tasks |= row.task is not None
        for s in sequences:
            self.lens[len(s.prompt)] += 1
            self.logits = max(self.logits, len(s.prompt) - s.wanted)
            self.gen_len = max(self.gen_len, s.params.max_tokens)
            self.output_tokens += s.params.max_tokens
            self.is_structured |= s.params.structured is not None
        row.prompt = ""
        _write(self._admitted, pickle.dumps((row, [self._packed(s) for s in sequences])))

    def _packed(self, s: Sequence) -> Packed:
        own = None if s.params is self.params else s.params
        return Packed(array("i", s.prompt), s.wanted, s.task, own, s.answer, s.answer_parser)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.lens, default=1)

    def workload(self) -> Workload:
        lens = sorted(self.lens, reverse=True)
        prompt_lens = np.repeat(np.array(lens, np.int32), [self.lens[n] for n in lens])
        sums = {"output_tokens": self.output_tokens, "logits": self.logits, "is_structured": self.is_structured}
        return Workload(prompt_lens, self.gen_len, path=self.longest - 1, **sums)

    def admitted(self) -> Iterator[tuple[Row, list[Sequence]]]:
        """The rows that can be run, without their prompts, and their sequences."""
        self._admitted.seek(0)
        for _ in range(self.count):
            row, sequences = pickle.load(self._admitted)
            yield row, [self._unpacked(row, s) for s in sequences]

    def _unpacked(self, row: Row, s: Packed) -> Sequence:
        found = Sequence(row.index, s.ids.tolist(), s.own or self.params, row.key, wanted=s.wanted, task=s.task)
        found.answer = s.answer
        found.answer_parser = s.answer_parser
        return found

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
    """The prompt of a row that is continued, or a UserError in place of one, and its parameters: `params` with what it
    sets itself."""
    try:
        if row.task is not None:
            raise UserError("a row to embed, or with answers to score, needs an `output_file`")
        own = replace(params, **row.params) if row.params else params
        check_params(own, model.tokenizer, model.spec.vocab)
        return row.prompt, own
    except UserError as e:
        name = str(e).split()[0]
        return (RowError(str(e), name) if name in SAMPLING else e), params
