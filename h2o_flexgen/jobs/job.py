"""A job from file to file, which resumes where an earlier run of it stopped."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

import numpy as np

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.observer import Observer
from h2o_flexgen.engine.outputs import RequestOutput, complete
from h2o_flexgen.engine.params import PoolingParams, SamplingParams
from h2o_flexgen.engine.requests import JobSpec
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.admission import Admission
from h2o_flexgen.jobs.input import Row, Rows
from h2o_flexgen.jobs.manifest import Manifest, lock, manifest_path
from h2o_flexgen.jobs.output import DoneRow, Failures, OutputFile, done_row, put_in_order
from h2o_flexgen.jobs.resume import Done, Left, all_of, left_of
from h2o_flexgen.jobs.settings import changes, settings_of
from h2o_flexgen.jobs.task_rows import done_task, task_sink
from h2o_flexgen.kv_cache import option_layers
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.execution_plan import ExecutionPlan
from h2o_flexgen.planning.workload import WINDOW
from h2o_flexgen.policy import KVBudget

log = logging.getLogger(__name__)

#: refused rows that are written at once
FLUSH_ROWS = 1000


class Job:
    """An output file and its manifest, locked against other jobs until `close`.

    Args:
        path: the output file. If it holds rows of this job they are kept, and only the others are run.
        restart: start over; the old file is kept, with a ~ appended to its name.

    Attributes:
        before: the manifest of the run to resume; None if there is none.
        done: the rows that the output file held before.
        output: the file while rows are appended to it.
        failures: of all rows, in this run or before.

    Raises:
        UserError: another job is writing the file, no job wrote it, or it cannot be read.
    """

    def __init__(self, path: str, restart: bool = False):
        self.path = Path(os.path.realpath(path))  # replacing a link would leave its target behind
        self.manifest_path = manifest_path(self.path)
        self.restart = restart
        if self.path.exists() and not self.path.is_file():
            raise UserError(f"`output_file` {path} is not a file")
        if not os.access(self.path.parent, os.W_OK):
            raise UserError(f"`output_file` {path} cannot be written: nothing can be made in its folder")
        self.before: Manifest | None = None
        self.done: Done | None = None
        self.failures = Failures()
        self.output: OutputFile | None = None
        self.lock = lock(self.manifest_path)
        try:
            if not restart:
                self._read(path)
        except BaseException:
            self.close()
            raise

    def _read(self, path: str) -> None:
        """Read what earlier runs have done. A file without a row counts as new."""
        if self.lock is None and self.path.exists() and self.path.stat().st_size:
            raise UserError(
                f"`output_file` {path} is not one that a job wrote (it has no {self.manifest_path.name}): "
                "name another, or rename this one with `restart`"
            )
        if self.lock is None:
            return
        self.done = Done(self.path)
        if len(self.done):
            self.before = Manifest.read(self.manifest_path)
            self.done.check(self.before.rows[:, 0])

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        for file in (self.output, self.done, self.lock):
            if file is not None:
                file.close()

    @property
    def known(self) -> np.ndarray | None:
        """The rows that the job had, as `Rows.known`."""
        return self.before and self.before.rows

    @property
    def dtype(self) -> str | None:
        """The compute dtype that the job began with."""
        return self.before and self.before.settings.get("dtype")

    @property
    def matmuls(self) -> dict:
        """The options of `LLM` that give the int8 matmuls that the job began with; manifests of earlier versions have
        one answer for all formats."""
        if self.before is None:
            return {}
        settings = self.before.settings
        if "operands" in settings:
            return {"operands": settings["operands"]}
        return {"in_blocks": bool(settings.get("in_blocks"))}

    def run(
        self,
        llm: LLM,
        rows: Rows,
        params: SamplingParams | PoolingParams,
        retry_errors: bool = False,
        *,
        may_all_fail: bool = False,
    ) -> None:
        """Run the rows that are left, and put all in the order of the input. A `Job` runs once: make another to resume.

        Args:
            params: of what a row does not set itself; `PoolingParams` if no row generates.
            retry_errors: run failed rows again.
            may_all_fail: no error if no row can be run: the output file says of each why.

        Raises:
            UserError: the job began with other settings, no row can be run, or as `LLM.run`. Finished rows are in the
                output file.
        """
        if self.output is not None:
            raise UserError("this Job has run: make another one to resume")
        left = self._what_is_left(llm, rows, params, retry_errors) if self.before else all_of(len(rows))
        if self.before and not left.todo.any() and not left.dropped:
            put_in_order(self.path, lambda: map(itemgetter(1), self.done.lines(left)))
            return
        try:
            writer = JobWriter(self, llm, rows, left, params)
            if not may_all_fail:
                writer.check()
            writer.run()
        except UserError as e:
            if self.output is None:
                raise
            raise UserError(f"{e}; {self._progress(rows)}") from None
        except KeyboardInterrupt as e:
            if self.output is not None:
                again = f"the same command resumes the job{', without restart' if self.restart else ''}"
                e.add_note(f"{self._progress(rows)}; {again}")
            raise
        self.output.finish()

    def _progress(self, rows: Rows) -> str:
        self.output.flush()
        return f"{self.output.written} of {len(rows)} rows are done"

    def _what_is_left(self, llm: LLM, rows: Rows, params: SamplingParams | PoolingParams, retry_errors: bool) -> Left:
        """Compare the job with its earlier runs, and log how much is left. Raises UserError if it began with other
        settings, or other rows."""
        if changed := changes(self.before.settings, settings_of(llm, params, self.before.longest_prompt)):
            raise UserError(
                f"the job in {self.path} began with other settings: {'; '.join(changed)}: give the old "
                "ones, or start over with `restart`, which keeps the old file"
            )
        left = left_of(self.before.rows, self.done, rows.known, retry_errors)
        if left.dropped == len(self.done):
            raise UserError(
                f"no row in {self.path} belongs to this input: name its own input file, or start over with "
                "`restart`, which keeps the old file"
            )
        self.failures = self.done.failures(left)
        failed = self.failures.count
        todo = int(left.todo.sum())
        done = f"{len(left.kept) - failed} of {len(rows)} rows are done, {failed} failed, {todo} are left"
        log.warning("%s: %s%s", "resuming" if todo else "nothing to do", done, left.remarks and f"; {left.remarks}")
        return left


@dataclass
class Running:
    """A row that the engine has read; `left`: how many of its sequences have not ended."""

    row: Row
    sequences: list[Sequence]
    left: int


class JobWriter(Observer):
    """One run of a job: gives the rows that are left to the engine, and writes each as soon as it has finished.

    Attributes:
        running: rows that the engine has read, by their indices.
        manifest: what goes on disk when the run begins.
    """

    def __init__(self, job: Job, llm: LLM, rows: Rows, left: Left, params: SamplingParams | PoolingParams):
        self.job = job
        self.llm = llm
        self.rows = rows
        self.left = left
        self.running: dict[int, Running] = {}
        self.admission = Admission(llm, rows, left.todo, params)  # of all, before the first is run
        if job.before:
            self._continue(job.before)
        else:
            self._begin(params)

    def check(self) -> None:
        """Raises UserError if no row can be run."""
        if not self.admission.lens and not len(self.left.kept):
            raise UserError(f"none of the {len(self.rows)} rows of `input_file` can be run; {self.admission.error}")

    def _begin(self, params: SamplingParams | PoolingParams) -> None:
        longest = self.admission.longest
        self.budget = self.llm.kv_budget
        self.compress_cache = self.llm.compress_cache
        slots = self.budget.to_dict(longest) if isinstance(self.budget, KVBudget) else None
        settings = settings_of(self.llm, params, longest)
        self.manifest = Manifest(settings, slots, longest, self.rows.known, [], self.compress_cache)

    def _continue(self, before: Manifest) -> None:
        """With the slots and the format that the job began with, whatever is left of it."""
        longest = self.admission.longest
        slots = before.kv_budget
        self.budget = slots and KVBudget.from_dict(slots)
        if self.budget and self.budget.by_head is None and not option_layers(self.budget.rule):
            self.budget = replace(self.budget, by_head=())  # all heads had the same slots
        self.compress_cache = before.compress_cache
        self.manifest = before
        if slots and longest > before.longest_prompt:
            known = f"a new prompt has {longest} tokens, the longest so far had {before.longest_prompt}"
            log.warning(
                "%s: it gets the job's KV budget, %d heavy + %d recent slots", known, slots["heavy"], slots["recent"]
            )

    def run(self) -> None:
        if not self.admission.lens:
            self.on_begin()
            return
        # rows that have ended predict the others, unless the user does
        mean_len = self.job.done.mean_len if self.job.before and self.llm.expect_len is None else None
        workload = replace(self.admission.workload(), mean_len=mean_len, window=WINDOW)
        sink = task_sink(self.llm) if self.admission.has_tasks else None
        self.llm.run(JobSpec(self._sequences(), workload, self.budget, self.compress_cache, sink), self)

    def _sequences(self) -> Iterator[Sequence]:
        """Read when the engine has room for them."""
        for row, sequences in self.admission.admitted():
            self.running[row.index] = Running(row, sequences, len(sequences))
            yield from sequences

    def on_plan(self, choice: ExecutionPlan) -> None:
        """What the KV budget has become stays: the slots of each head, and of "auto". So does a format."""
        self.manifest.compress_cache = choice.compress_cache
        if choice.kv_budget is not None:
            self.manifest.kv_budget = choice.kv_budget.to_dict(self.manifest.longest_prompt)

    def on_begin(self) -> None:
        """Nothing can refuse the job any more: now files are touched."""
        self.manifest.rows = self.rows.known
        self.manifest.runs.append({"start": time.time(), "done": len(self.left.kept)})
        try:
            self._begin_files()
        except (BlockingIOError, FileExistsError):
            raise UserError(f"`output_file` {self.job.path}: another job is writing it") from None
        except OSError as e:
            raise UserError(f"`output_file` {self.job.path} cannot be written: {e.strerror}") from None
        for n, (index, row) in enumerate(self.admission.refused(), 1):
            self._add(index, row)
            if n % FLUSH_ROWS == 0:
                self.job.output.flush()
        self.job.output.flush()

    def _begin_files(self) -> None:
        job = self.job
        if (job.restart or self.left.dropped) and job.path.exists() and job.path.stat().st_size:
            keep_old(job.path, is_moved=job.restart)  # first: another run must not take its rows for this job's
        if job.lock is None:
            job.lock = self.manifest.write(job.manifest_path, is_new=True)
            job.output = OutputFile(job.path)
        else:  # the manifest after the rows: a changed row must not be found under its new digest
            held = job.done.held(self.left) if job.before else None
            kept = job.done.lines(self.left) if job.before and held is None else ()
            job.output = OutputFile(job.path, kept, held)
            old = job.lock
            job.lock = self.manifest.write(job.manifest_path, is_new=False)
            old.close()

    def on_finished(self, sequences: list[Sequence]) -> None:
        for s in sequences:
            running = self.running[s.index]
            running.left -= 1
            if not running.left:
                self._add(s.index, self._done(self.running.pop(s.index)))
        self.job.output.flush()

    def _done(self, running: Running) -> DoneRow:
        model = self.llm.model
        row = running.row
        if row.task is not None:
            return done_task(row, running.sequences, model.name)
        output = complete(
            RequestOutput(row.index, None, running.sequences[0].prompt), running.sequences, model.tokenizer
        )
        return done_row(row, output, model.name, model.tokenizer)

    def _add(self, index: int, row: DoneRow) -> None:
        self.job.output.add(index, row)
        self.job.failures.note(row.id, row.error)


def keep_old(path: Path, is_moved: bool) -> None:
    """Back up the output file before finished rows are dropped from it."""
    kept = Path(f"{path}~")
    while os.path.lexists(kept):  # a dangling link would be followed
        kept = Path(f"{kept}~")
    os.rename(path, kept) if is_moved else shutil.copyfile(path, kept)
    log.warning("the old output file is kept in %s", kept)
