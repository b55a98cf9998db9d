"""A worker: an LLM that runs rows as they are brought to it. It knows nothing of Ray, files and other workers."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.observer import Observer
from h2o_flexgen.engine.requests import JobSpec
from h2o_flexgen.formats import dtype_name
from h2o_flexgen.jobs.dispatch import Numbered
from h2o_flexgen.jobs.task_rows import task_sink
from h2o_flexgen.llm import LLM
from h2o_flexgen.machine import memory
from h2o_flexgen.planning.execution_plan import ExecutionPlan
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.policy import MARGIN, KVBudget
from h2o_flexgen.profiling.machine import described, mount_point
from h2o_flexgen.storage.disk import default_root

#: what the engine sets of a sequence
RESULTS = "tokens logprobs finish_reason text error top_logprobs prompt_logprobs task".split()


@dataclass(frozen=True)
class Place:
    """Where a worker is.

    Attributes:
        host: name of the machine.
        cpu: its processor.
        ram: bytes that its workers may use together.
        disk, mount: the same of the disk of the offload folder, and where it is mounted.
    """

    host: str
    cpu: str
    ram: int
    disk: int
    mount: str


@dataclass(frozen=True)
class Settings:
    """What decides the tokens of a worker's rows: the name of its type, what int8 matmuls read, its model."""

    dtype: str
    operands: dict[str, str] | None
    fingerprint: str


@dataclass(frozen=True)
class Progress:
    """What has happened since the last exchange.

    Attributes:
        ended: RESULTS of the rows that have ended, by number.
        wants: the engine has room for more rows.
        has_begun: the weights are loaded, and the first pass has begun.
        report: the measurements of the run, once it is over.
    """

    ended: dict[int, dict]
    wants: bool
    has_begun: bool
    report: dict | None


def place(offload_dir: str | Path | None) -> Place:
    """Where this process is."""
    root = default_root() if offload_dir is None else Path(offload_dir)
    machine = described()
    ram = int(MARGIN * memory.ram_available())
    disk = int(MARGIN * memory.disk_free(root))
    return Place(socket.gethostname(), machine["cpu_model"] or machine["cpu"], ram, disk, mount_point(root))


class Worker:
    """Runs rows of one job after the other, each a few at a time: `plan`, then `begin` and `exchange` until the run is
    over, again and again."""

    llm_class = LLM

    def pid(self) -> int:
        return os.getpid()

    def place(self, offload_dir: str | Path | None) -> Place:
        return place(offload_dir)

    def load(self, options: dict, shares: dict[str, dict]) -> Settings:
        """Find the model. Raises UserError as `LLM` does.

        Args:
            options: of the worker's LLM.
            shares: by host, those that limit its memory.
        """
        limits = shares.get(socket.gethostname(), {})
        self.llm = self.llm_class(**options | limits, progress=False)
        model = self.llm.model
        return Settings(dtype_name(self.llm.dtype), model.operands, model.fingerprint)

    def plan(self, workload: Workload, kv_budget: KVBudget | str | None, compress_cache: str | None) -> ExecutionPlan:
        """Choose the policy of a job of which the worker gets rows like these; returns what fits into a message. Raises
        UserError if it does not fit into the worker's memory."""
        self.choice = self.llm.plan(workload, kv_budget, compress_cache)
        self.choice.plan.check()
        short = replace(workload, prompt_lens=workload.prompt_lens[:1])
        return replace(self.choice, workload=short, layers=[], forms={}, predict=None)

    def begin(self, has_tasks: bool, is_sound: bool) -> None:
        """Begin a run. `has_tasks`: some rows of the job are not continued; `is_sound`: as of a `JobSpec`."""
        self.flow = Flow()
        rows = max(1, self.choice.policy.block_size)
        budget = (self.choice.kv_budget, self.choice.compress_cache)
        sink = task_sink(self.llm) if has_tasks else None
        job = JobSpec(self.flow.rows(), self.choice.workload, *budget, sink, self.choice, rows, is_sound)
        threading.Thread(target=self.flow.run, args=(self.llm, job), daemon=True).start()

    def exchange(self, rows: Numbered, is_last: bool) -> Progress:
        """Bring rows to the run, and wait until some have ended, or more are wanted. `is_last`: no more will come.
        Raises what has ended the run."""
        return self.flow.exchange(rows, is_last)


class Flow(Observer):
    """The rows of one run, between the engine's thread and that of `exchange`."""

    def __init__(self):
        self.changed = threading.Condition()
        self.numbers: dict[Sequence, int] = {}
        self.waiting: deque[Sequence] = deque()
        self.ended: dict[int, dict] = {}
        self.is_last = False
        self.has_begun = False
        self.has_told = False  # the driver that it has begun
        self.is_known = False  # to the driver
        self.report: dict | None = None
        self.error: BaseException | None = None

    def run(self, llm: LLM, job: JobSpec) -> None:
        """The engine's thread."""
        try:
            llm.run(job, self)
        except BaseException as e:  # raised where the driver sees it
            self.error = e
        with self.changed:
            self.report = llm.report
            self.changed.notify_all()

    def rows(self) -> Iterator[Sequence]:
        """What the engine reads; it waits for rows that are on their way."""
        while True:
            with self.changed:
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.waiting or self.is_last)
                if not self.waiting:
                    return
                s = self.waiting.popleft()
            yield s

    @property
    def wants(self) -> bool:
        return not self.waiting and not self.is_last

    @property
    def has_news(self) -> bool:
        return bool(self.ended) or self.wants or self.has_begun != self.has_told or self.report is not None

    def exchange(self, rows: Numbered, is_last: bool) -> Progress:
        with self.changed:
            self.numbers.update((s, number) for number, s in rows.items())
            self.waiting.extend(rows.values())
            self.is_last = self.is_last or is_last
            self.is_known = self.has_told
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.has_news)
            self.has_told = self.has_begun
            if self.error is not None and not self.ended:
                raise self.error
            ended = self.ended
            self.ended = {}
            return Progress(ended, self.wants, self.has_begun, None if self.error else self.report)

    def on_begin(self) -> None:
        """Wait until the driver knows: if the worker dies now, it is one of its rows that does it."""
        with self.changed:
            self.has_begun = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.is_known)

    def on_finished(self, rows: list[Sequence]) -> None:
        with self.changed:
            for s in rows:
                self.ended[self.numbers.pop(s)] = {name: getattr(s, name) for name in RESULTS}
            self.changed.notify_all()
