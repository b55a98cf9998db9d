"""Runs batches, in the order in which they were created, each as a job from file to file.

A batch can be taken up in any state, as often as it takes: its job resumes, and its results are written again. So a
server that was killed, and a full disk, need no code of their own beyond trying again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.observer import Observer, Observers
from h2o_flexgen.engine.params import SamplingParams
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.input import read_rows
from h2o_flexgen.jobs.job import Job
from h2o_flexgen.jobs.progress import Progress
from h2o_flexgen.jobs.settings import changes, settings_of
from h2o_flexgen.llm import LLM
from h2o_flexgen.server.errors import is_full
from h2o_flexgen.server.objects import Batch
from h2o_flexgen.server.results import Tally
from h2o_flexgen.server.store import Store
from h2o_flexgen.server.validation import error_of, without_path

log = logging.getLogger(__name__)

#: after which a full disk is tried again
FULL_SECONDS = 10.0


class Cancelled(Exception):
    """A client has cancelled the batch that runs."""


class OtherSettings(UserError):
    """A batch began with other settings than those of the server."""


class Worker:
    """Runs the batches of a store.

    Args:
        params: of what a request does not set itself.
        restart: start batches over that began with other settings, rather than refuse to run.
    """

    def __init__(self, store: Store, llm: LLM, params: SamplingParams, restart: bool = False):
        self.store = store
        self.llm = llm
        self.params = params
        self.restart = restart
        self.observer = llm.observer
        self.running: Running | None = None

    def run(self) -> None:
        """Run all batches, present and future, until a signal ends it. Raises OtherSettings."""
        while True:
            self.run_batch(self.store.next())

    def run_batch(self, batch: Batch) -> None:
        """Run a batch to its end. If the disk is full, wait a moment: the next call goes on. Raises OtherSettings."""
        try:
            batch = self.store.begin(batch.id)
            if batch.has_ended:  # it was cancelled just before
                return
            problem = None if batch.status == "cancelling" else self._run_job(batch)
            self._end(self.store.finalize(batch.id), problem)
        except (OSError, UserError) as e:
            if not is_full(e):
                raise
            log.warning("%s waits for room on the disk: %s", batch.id, e)
            time.sleep(FULL_SECONDS)
        finally:
            self.running = None

    def progress(self, batch: Batch) -> Progress | None:
        """How far a batch is; None unless it runs now."""
        running = self.running
        return running.progress(batch.total) if running is not None and running.id == batch.id else None

    def _run_job(self, batch: Batch) -> str | None:
        """Run what is left of a batch's job; returns why it failed, or None. Raises OSError or UserError if the disk is
        full, and OtherSettings."""
        source = self.store.path(self.store.file(batch.input_file_id))
        try:
            with self._open(batch) as job:
                self.running = Running(batch.id, job, lambda: self.store.batch(batch.id).status == "cancelling")
                self.llm.observer = Observers(self.observer, self.running)
                self._run(job, source)
        except Cancelled:
            return None
        except OtherSettings:
            raise
        except Exception as e:
            if is_full(e):
                raise
            if not isinstance(e, UserError):
                log.exception("%s failed", batch.id)
            return without_path(str(e) or type(e).__name__, source)
        finally:
            self.llm.observer = self.observer
        return None

    def _open(self, batch: Batch) -> Job:
        """The job of a batch."""
        path = str(self.store.job_path(batch.id))
        job = Job(path)
        if job.before is None:
            return job
        changed = changes(job.before.settings, settings_of(self.llm, self.params, job.before.longest_prompt))
        if not changed:
            return job
        job.close()
        if self.restart:
            return Job(path, restart=True)
        raise OtherSettings(
            f"{batch.id} began with other settings: {'; '.join(changed)}: give the old ones, or start it over with "
            "`restart`"
        )

    def _run(self, job: Job, source: Path) -> None:
        """Run a job to its end, for which rows in memory may have to wait for a full disk."""
        rows = read_rows(str(source))
        try:
            job.run(self.llm, rows, self.params, may_all_fail=True)
        except Cancelled:
            if job.output is not None:
                self._finish(job)
            raise
        except UserError:
            if job.output is None or not is_full(job.output.error):
                raise
            self._finish(job)
            if job.output.written < len(rows):  # not only the disk has ended the job
                raise

    def _finish(self, job: Job) -> None:
        job.output.flush()
        while is_full(job.output.error):
            time.sleep(FULL_SECONDS)
            job.output.flush()
        job.output.finish()

    def _end(self, batch: Batch, problem: str | None) -> None:
        """Keep the results of a batch, and remove its job. Raises OSError if they cannot be written."""
        try:
            found = self._results(batch)
        except UserError as e:  # its rows are damaged
            if is_full(e):
                raise
            found = {}
            problem = problem or str(e)
        if problem is not None:
            self.store.move(batch.id, "failed", errors=[error_of(problem) | {"code": "job_failed"}], **found)
        else:
            self.store.move(batch.id, "cancelled" if batch.status == "cancelling" else "completed", **found)
        self.store.remove_job(batch.id)

    def _results(self, batch: Batch) -> dict:
        """The files of a batch's rows, and what is counted of them, as fields of a `Batch`."""
        tally = Tally(self.store.job_path(batch.id))
        name = f"file-{batch.id.removeprefix('batch_')}"
        found = {
            "output_file_id": self.store.add_results(f"{name}-output", f"{batch.id}_output.jsonl", tally.responses()),
            "error_file_id": self.store.add_results(f"{name}-error", f"{batch.id}_error.jsonl", tally.errors()),
        }
        return found | {"completed": tally.completed, "failed": tally.failed, "usage": tally.usage()}


class Running(Observer):
    """Watches the job of a batch, and ends it if the batch is cancelled.

    Args:
        is_cancelled: asked with every layer; must be quick.
    """

    def __init__(self, id: str, job: Job, is_cancelled: Callable[[], bool]):
        self.id = id
        self.job = job
        self.is_cancelled = is_cancelled
        self.begin = 0.0
        self.before = 0  # rows that had been completed then
        self.new = 0
        self.tokens = 0
        self.seconds = 0.0

    def on_begin(self) -> None:
        self.begin = time.monotonic()
        self.before = self._completed()

    def on_layer(self, j: int) -> None:
        if self.is_cancelled():
            raise Cancelled

    def on_finished(self, rows: list[Sequence]) -> None:
        self.new = self._completed() - self.before  # the job has seen these rows before
        self.tokens += sum(len(row.tokens) for row in rows if row.finish_reason != "error")
        self.seconds = time.monotonic() - self.begin

    def progress(self, total: int) -> Progress:
        return Progress(total, self._done(), self.job.failures.count, self.new, self.tokens, self.seconds)

    def _done(self) -> int:
        job = self.job
        if job.output is not None:
            return job.output.written
        return 0 if job.before is None else len(job.done)

    def _completed(self) -> int:
        return self._done() - self.job.failures.count
