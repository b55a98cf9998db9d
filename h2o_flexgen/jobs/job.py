"""A job from file to file, which goes on where an earlier run of it was stopped."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import tee
from operator import itemgetter
from pathlib import Path

from h2o_flexgen.engine.observer import Observer, Observers
from h2o_flexgen.engine.params import SamplingParams
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.admission import Admission, request
from h2o_flexgen.jobs.input import Row, Rows
from h2o_flexgen.jobs.manifest import Manifest, lock, manifest_path
from h2o_flexgen.jobs.output import DoneRow, Failures, OutputFile, done_row, put_in_order
from h2o_flexgen.jobs.resume import Done, Left, all_of, left_of
from h2o_flexgen.jobs.settings import changes, settings_of
from h2o_flexgen.llm import LLM
from h2o_flexgen.policy import KVBudget

log = logging.getLogger(__name__)

#: rows that are written at once where they all come at once
FLUSH_ROWS = 1000


class Job:
    """An output file and its manifest, locked against other jobs until `close`.

    Args:
        path: the output file. If it holds rows of this job they are kept, and only the others are run.
        restart: begin anew; the old file is kept, with a ~ behind its name.

    Attributes:
        before: the manifest of the run to go on with; None if the job begins.
        done: the rows that the output file held before.
        output: the file while rows are appended to it.
        failures: of all rows, in this run or before.

    Raises:
        UserError: another job has the file, or it is not one that a job wrote, or cannot be read.
    """

    def __init__(self, path: str, restart: bool = False):
        self.path = Path(os.path.realpath(path))  # of a link, what it points to is replaced
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
        """What earlier runs have done. A file without a row is one that nobody began."""
        if self.lock is None and self.path.exists() and self.path.stat().st_size:
            raise UserError(
                f"`output_file` {path} is not one that a job wrote (it has no {self.manifest_path.name}): "
                "name another, or keep this one as another file with `restart`"
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
    def dtype(self) -> str | None:
        """The type that the job computes in since it began."""
        return self.before and self.before.settings.get("dtype")

    @property
    def in_blocks(self) -> bool | None:
        """Whether weights in 4 bits have been multiplied as they are stored since the job began."""
        return self.before and bool(self.before.settings.get("in_blocks"))

    def run(self, llm: LLM, rows: Rows, params: SamplingParams, retry_errors: bool = False) -> None:
        """Run the rows that are left, and put all in the order of the input.

        Args:
            params: of what a row does not set itself.
            retry_errors: failed rows are run again.

        Raises:
            UserError: other settings than those that the job began with, no row that can be run, or as
                `LLM.generate`. Rows that have finished are in the output file. A job runs once: to go on, make another.
        """
        if self.output is not None:
            raise UserError("this Job has run: make another one, which goes on")
        left = self._what_is_left(llm, rows, params, retry_errors) if self.before else all_of(len(rows))
        if self.before and not left.todo.any() and not left.dropped:
            put_in_order(self.path, lambda: map(itemgetter(1), self.done.lines(left)))
            return
        try:
            Run(self, llm, rows, left, params).generate()
        except UserError as e:
            if self.output is None:
                raise
            raise UserError(f"{e}; {self._progress(rows)}") from None
        except KeyboardInterrupt as e:
            if self.output is not None:
                again = f"the same command goes on{', without restart' if self.restart else ''}"
                e.add_note(f"{self._progress(rows)}; {again}")
            raise
        self.output.finish()

    def _progress(self, rows: Rows) -> str:
        self.output.flush()
        return f"{self.output.written} of {len(rows)} rows are done"

    def _what_is_left(self, llm: LLM, rows: Rows, params: SamplingParams, retry_errors: bool) -> Left:
        """And says so. Raises UserError if the job began with other settings, or other rows."""
        if changed := changes(self.before.settings, settings_of(llm, params, self.before.longest_prompt)):
            raise UserError(
                f"the job in {self.path} began with other settings: {'; '.join(changed)}: give the old "
                "ones, or begin anew with `restart`, which keeps the old file"
            )
        left = left_of(self.before.rows, self.done, rows.known, retry_errors)
        if left.dropped == len(self.done):
            raise UserError(
                f"no row in {self.path} is of these rows: name its own input file, or begin anew with "
                "`restart`, which keeps the old file"
            )
        self.failures = self.done.failures(left)
        failed = self.failures.count
        todo = int(left.todo.sum())
        done = f"{len(left.kept) - failed} of {len(rows)} rows are done, {failed} failed, {todo} are left"
        log.warning("%s: %s%s", "goes on" if todo else "nothing to do", done, left.remarks and f"; {left.remarks}")
        return left


class Run(Observer):
    """One run of a job: the rows that are left, written as their batches finish.

    Attributes:
        running: rows that the engine has got, without their prompts, by their places among the prompts.
        manifest: what goes on disk when the run begins.

    Raises:
        UserError: no row can be run.
    """

    def __init__(self, job: Job, llm: LLM, rows: Rows, left: Left, params: SamplingParams):
        self.job = job
        self.llm = llm
        self.rows = rows
        self.left = left
        self.params = params
        self.running: dict[int, Row] = {}
        self.admission = Admission(llm, rows, left.todo, params)  # of all, before the first is run
        longest = self.admission.longest
        if not self.admission.lens and not len(left.kept):
            raise UserError(f"none of the {len(rows)} rows of `input_file` can be run; {self.admission.error}")
        if job.before:
            self.manifest = job.before
            slots = job.before.kv_budget
            self.budget = slots and KVBudget.from_dict(slots)
            self.compress_cache = job.before.compress_cache
            if slots and longest > job.before.longest_prompt:
                known = f"a new prompt has {longest} tokens, the longest so far had {job.before.longest_prompt}"
                log.warning(
                    "%s: its KV budget is %d heavy + %d recent slots too", known, slots["heavy"], slots["recent"]
                )
        else:
            self.budget = llm.kv_budget
            self.compress_cache = llm.compress_cache
            slots = self.budget.to_dict(longest) if isinstance(self.budget, KVBudget) else None
            self.manifest = Manifest(
                settings_of(llm, params, longest), slots, longest, rows.known, [], self.compress_cache
            )

    def generate(self) -> None:
        """Afterwards the model may run another job."""
        if not self.admission.lens:
            self.on_begin()
            return
        before = self.llm.observer, self.llm.kv_budget, self.llm.compress_cache
        self.llm.observer = Observers(self.llm.observer, self)
        self.llm.kv_budget = self.budget
        self.llm.compress_cache = self.compress_cache
        try:
            prompts, params, keys = (map(itemgetter(n), each) for n, each in enumerate(tee(self._requests(), 3)))
            # what the rows that have ended say of the others; else what the user expects
            learnt = self.job.done.mean_len if self.job.before and self.llm.expect_len is None else None
            workload = replace(self.admission.workload(), mean_len=learnt)
            how = dict(keys=keys, skip_errors=True, on_output=self.take, workload=workload)
            self.llm.generate(prompts, params, **how)
        finally:
            self.llm.observer, self.llm.kv_budget, self.llm.compress_cache = before

    def _requests(self) -> Iterator[tuple]:
        """Prompt, sampling and key of each row that is run, read when the engine has room for it."""
        for place, row in enumerate(self.rows.those(self.admission.runs)):
            prompt, own = request(row, self.params, self.llm.model)
            row.prompt = ""
            self.running[place] = row
            yield prompt, own, row.key

    def on_plan(self, choice) -> None:
        """A KV budget "auto" has become one of slots, which stays, and so does a format."""
        self.manifest.compress_cache = choice.compress_cache
        if self.budget == "auto" and choice.kv_budget is not None:
            self.manifest.kv_budget = choice.kv_budget.to_dict(self.manifest.longest_prompt)

    def on_begin(self) -> None:
        """All that may refuse the job has been passed: now files are touched."""
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
        else:  # the manifest behind the rows: a changed one must not be there under its new digest
            job.output = OutputFile(job.path, job.done.lines(self.left) if job.before else ())
            old = job.lock
            job.lock = self.manifest.write(job.manifest_path, is_new=False)
            old.close()

    def take(self, output) -> None:
        """A finished row."""
        row = self.running.pop(output.index)
        self._add(row.index, done_row(row, output, self.llm.model.name, self.llm.tokenizer))

    def _add(self, index: int, row: DoneRow) -> None:
        self.job.output.add(index, row)
        self.job.failures.note(row.id, row.error)

    def on_finished(self, sequences: list) -> None:
        self.job.output.flush()


def keep_old(path: Path, is_moved: bool) -> None:
    """Finished rows that a run does not take over are not thrown away."""
    kept = Path(f"{path}~")
    while os.path.lexists(kept):  # a link to what is not there would be followed
        kept = Path(f"{kept}~")
    os.rename(path, kept) if is_moved else shutil.copyfile(path, kept)
    log.warning("the old output file is kept in %s", kept)
