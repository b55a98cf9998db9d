"""Jobs on several workers, which are Ray actors, on this machine or on a cluster.

The driver reads and admits rows, hands them out, and writes each as soon as it has ended; the workers compute.

    driver    rows --> dispatch --- rows ----------------> worker 0: engine      window by window
                                --- rows ----------------> worker 1: engine
    output <-- writer <----------- rows that have ended --
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Generator
from dataclasses import asdict, dataclass, field, replace

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.observer import Observer, Observers
from h2o_flexgen.engine.requests import JobSpec
from h2o_flexgen.engine.runner import NAN_EVERYWHERE
from h2o_flexgen.engine.tasks import TaskSink
from h2o_flexgen.engine_args import EngineArgs
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.cluster import LOOK_SECONDS, Cluster, Crew, WorkerDied, Workers
from h2o_flexgen.jobs.dispatch import MOST_DEATHS, Dispatch, Numbered
from h2o_flexgen.jobs.worker import Progress, Worker
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.execution_plan import ExecutionPlan
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.policy import TIERS, KVBudget, Policy
from h2o_flexgen.utils import interrupts
from h2o_flexgen.utils.progress import bar

log = logging.getLogger(__name__)

#: so often a worker may die before its first row in a job that has begun: machines are lost, or somebody kills them
MOST_STARTS = 20
#: options of `LLM` that the driver, which computes nothing, has as its workers do
DRIVERS = "model path compress_weight chat_template_kwargs progress observer".split()
#: options of the workers that `EngineArgs` resolves on the driver, some by files that only it has
RESOLVED = "model path policy kv_budget compress_cache compress_weight compute chat_template_kwargs hardware".split()


class RayLLM(LLM):
    """An LLM whose jobs run on workers: in fp32 their rows are those of an `LLM` alone, to the token.

    `generate`, `chat`, `embed` and `score_answers` are those of `LLM`, and a `Job` runs with it. `score` and `session`
    are for an `LLM` alone.

    Args:
        workers: how many, where, and with what of a machine each.
        options: of each worker's `LLM`; memory limits are those of a machine.

    Raises:
        UserError: as `Cluster`, `Crew` and `LLM`; or the driver has another model than its workers.
    """

    worker_class = Worker

    def __init__(self, workers: Workers, **options):
        args = EngineArgs(**options)
        if len(args.device_names) > 1:
            raise UserError("`workers` have one device each: name one `device`, or leave it out")
        self.cluster = Cluster(workers, args.device)
        try:
            self.crew = Crew(self.cluster, _worker_options(args, options), self.worker_class)
            own = {name: getattr(args, name) for name in DRIVERS}
            super().__init__(**own, device="cpu", dtype="float32")  # it tokenises, and computes nothing
            self._take_settings(args)
        except BaseException:
            self.cluster.close()
            raise

    def _take_settings(self, args: EngineArgs) -> None:
        """Take what decides tokens from the workers. Raises UserError if they have another model."""
        settings = self.crew.settings
        self.policy = args.policy
        self.kv_budget = args.kv_budget
        self.compress_cache = args.compress_cache
        self.dtype = self.device.dtype(settings.dtype)
        self.model.dtype = self.dtype
        self.model.operands = settings.operands
        if self.model.fingerprint != settings.fingerprint:
            name = self.crew.name(self.crew.first)
            raise UserError(f"{name} has another model at {args.model}: give all machines the same files")

    def close(self) -> None:
        super().close()
        self.crew.kill()
        self.cluster.close()

    def _run(self, job: JobSpec, writer: Observer) -> None:
        if job.sink is not None and not isinstance(job.sink, TaskSink):
            raise UserError("texts are scored by one LLM, not by several workers")
        self.choice = None
        if job.workload.mean_len is None:
            job = replace(job, workload=replace(job.workload, mean_len=self.expect_len))
        run = Run(self.crew, job, Observers(writer, self.observer), self.progress)
        with interrupts.deferred():
            try:
                self.report = {"model": self.model.name, "dtype": self.crew.settings.dtype} | run.run()
            except BaseException:
                self.crew.kill()  # they may be in the middle of a run; the next job has new ones
                raise
            finally:
                self.choice = run.choice


def _worker_options(args: EngineArgs, given: dict) -> dict:
    """The options of each worker's LLM."""
    found = {"offload_dir": None, "mem": None, "disk_mem": None, **given}
    found |= {name: getattr(args, name) for name in RESOLVED}
    for name in ("model", "path"):
        if found[name] is not None and os.path.exists(found[name]):
            found[name] = os.path.abspath(found[name])  # workers may run in another folder
    return {name: value for name, value in found.items() if name not in ("revision", "progress", "observer")}


class Run:
    """One job on the workers of a crew.

    What becomes of a worker is a generator (`_life`): it yields what it waits for, a reference of Ray, or None for
    rows, and receives what that has returned.

    Args:
        writer: is notified of the plan, the beginning, and rows that have ended.

    Attributes:
        choice: the plan of the first worker, whose KV budget and formats all have; None before it is known.
    """

    def __init__(self, crew: Crew, job: JobSpec, writer: Observers, progress: bool):
        self.crew = crew
        self.job = job
        self.writer = writer
        self.progress = progress
        self.choice: ExecutionPlan | None = None
        count = len(crew.workers)
        self.workload = share_of(job.workload, count)
        self.dispatch = Dispatch(job.rows, len(job.workload.prompt_lens), count)
        self.tallies = [Tally() for _ in range(count)]
        self.is_sound = job.is_sound
        self.begun: float | None = None  # when the first pass of a worker was next
        self._plans: dict[int, ExecutionPlan] = {}
        self._finished: list[Sequence] = []  # not written yet
        self._lives = {n: self._life(n) for n in range(count)}
        self._failures = [0] * count  # to begin a run, one after the other
        self._idle = set(self._lives)  # workers that wait for rows
        self._waiting: dict[object, int] = {}  # the others, by what they wait for
        self._running: dict[int, bool] = {}  # of these, those in a run: whether its first pass has begun

    def run(self) -> dict:
        """Run all rows; returns the report. Raises UserError as an `LLM` does, naming the worker."""
        self._plan()
        shown = bar(desc="generating", total=self.dispatch.left, unit="rows", show=self.progress, leave=True)
        try:
            while not self.dispatch.is_done or self._running:
                for n in sorted(self._idle) if self.dispatch.has_more else ():
                    self._go_on(n)
                for ref in self.crew.cluster.ready([*self._waiting], LOOK_SECONDS):
                    self._go_on(self._waiting.pop(ref), ref)
                shown.update(self._write())
        finally:
            self._write()  # rows that had ended before an error
            shown.close()
        return self._report()

    def _plan(self) -> None:
        """Let every worker plan. The first one finds a KV budget and a format that are "auto"."""
        first = self.crew.first
        self.choice = self._planned_by(first, self.job.kv_budget, self.job.compress_cache)
        self.writer.on_plan(self.choice)
        fixed = (self.choice.kv_budget, self.choice.compress_cache)
        self._plans = {n: self.choice if n == first else self._planned_by(n, *fixed) for n in sorted(self.crew.places)}
        for workers in on_one_disk(self.crew, self._plans):
            log.warning("%s are limited by the same disk: together they are no faster than one of them", workers)

    def _planned_by(self, n: int, kv_budget: KVBudget | str | None, compress_cache: str | None) -> ExecutionPlan:
        self.crew.get(n, lambda worker: worker.settings)
        return self.crew.get(n, lambda worker: worker.actor.plan.remote(self.workload, kv_budget, compress_cache))

    def _go_on(self, n: int, ref=None) -> None:
        """Let a worker go on with what it has waited for."""
        life = self._lives[n]
        self._idle.discard(n)
        try:
            try:
                found = None if ref is None else self.crew.cluster.outcome(ref)
            except (UserError, WorkerDied) as e:
                wanted = life.throw(e)
            else:
                wanted = life.send(found)
        except StopIteration:  # it is given up
            return
        if wanted is None:
            self._idle.add(n)
        else:
            self._waiting[wanted] = n

    def _life(self, n: int) -> Generator:
        """A worker, and those that replace it when it has died."""
        while self._failures[n] < (MOST_DEATHS if self.begun is None else MOST_STARTS):
            try:
                yield from self._work(n)
            except WorkerDied as e:
                has_begun = self._running.pop(n, False)
                self._failures[n] += not has_begun
                self._bury(n, e, has_begun)
        del self._lives[n]
        if not self._lives:
            times = f"{self._failures[n]} times before its first row"
            raise UserError(f"every worker has died {times}: {self.tallies[n].error}")

    def _bury(self, n: int, error: WorkerDied, has_begun: bool) -> None:
        """A worker has died: its rows go to others."""
        held = len(self.dispatch.held[n])
        log.warning("%s has died with %d rows, which are run again: %s", self.crew.name(n), held, error)
        self.tallies[n].deaths += 1
        self.tallies[n].error = str(error)
        self._plans.pop(n, None)  # of the process that has died
        if has_begun:
            self._finished += self.dispatch.died(n)
        else:
            self.dispatch.give_back(n)
        self.crew.remove(n)

    def _work(self, n: int) -> Generator:
        """Load the model, then run rows until the job ends."""
        worker = self.crew.worker(n)
        try:
            self.crew.arrive(n, (yield worker.place))
            self.crew.check(n, (yield worker.settings))
            plan = self._plans.pop(n, None)
            fixed = (self.choice.kv_budget, self.choice.compress_cache)
            plan = plan or (yield worker.actor.plan.remote(self.workload, *fixed))
        except UserError as e:
            if self.begun is None:
                raise self.crew.named(n, e) from None
            raise WorkerDied(str(e)) from None  # the job goes on without it
        self.tallies[n].host = self.crew.places[n].host
        self.tallies[n].policy = plan.policy
        places = min(plan.policy.block_size, len(self.workload.prompt_lens))
        while True:
            if rows := self.dispatch.take(n, places):
                yield from self._run_rows(n, rows, -(-places // 2))
            else:
                yield None

    def _run_rows(self, n: int, rows: Numbered, count: int) -> Generator:
        """One run of a worker's engine: these rows, and more of them, `count` at a time."""
        actor = self.crew.worker(n).actor
        self._running[n] = False
        yield actor.begin.remote(self.job.sink is not None, self.is_sound)
        is_last = False
        while True:
            try:
                progress: Progress = yield actor.exchange.remote(rows, is_last)
            except UserError as e:
                if str(e) != NAN_EVERYWHERE or not self.is_sound:
                    raise self.crew.named(n, e) from None
                self.dispatch.give_back(n)  # another worker has shown that the model is not broken
                break
            if progress.has_begun and not self._running[n]:
                self._begin(n)
            self._note(n, progress.ended)
            if progress.report is not None:
                self.tallies[n].reports.append(progress.report)
                break
            rows = self.dispatch.take(n, count) if progress.wants else {}
            is_last = progress.wants and not rows
        del self._running[n]

    def _begin(self, n: int) -> None:
        self._running[n] = True
        self._failures[n] = 0
        if self.begun is None:
            self.begun = time.monotonic()
            self.writer.on_begin()

    def _note(self, n: int, ended: dict[int, dict]) -> None:
        """Keep what has become of rows until they are written."""
        for number, results in ended.items():
            s = self.dispatch.ended(n, number)
            vars(s).update(results)
            self.is_sound = self.is_sound or s.finish_reason != "error"
            self.tallies[n].rows += 1
            self.tallies[n].tokens += len(s.logprobs)
            self._finished.append(s)

    def _write(self) -> int:
        """Write rows that have ended; returns how many."""
        finished = self._finished
        self._finished = []
        if finished:
            self.writer.on_finished(finished)
        return len(finished)

    def _report(self) -> dict:
        seconds = time.monotonic() - self.begun
        tokens = sum(tally.tokens for tally in self.tallies)
        workload = self.job.workload
        return {
            "workload": {
                "num_prompts": self.dispatch.count,
                "prompt_len": workload.longest,
                "gen_len": workload.gen_len,
            },
            "kv_budget": self.choice.rule.to_dict(),
            "compress_cache": self.choice.compress_cache,
            "total": {"seconds": seconds, "generated_tokens": tokens, "tokens_per_s": tokens / seconds},
            "workers": [tally.to_dict() for tally in self.tallies],
        }


@dataclass
class Tally:
    """What a worker and those before it have done in a job.

    Attributes:
        deaths: of workers; `error`: of the last one.
        rows, tokens: that have ended.
        reports: of its runs.
    """

    host: str | None = None
    policy: Policy | None = None
    deaths: int = 0
    error: str = ""
    rows: int = 0
    tokens: int = 0
    reports: list[dict] = field(default_factory=list)

    def to_dict(self) -> dict:
        """For a report."""
        reports = [report for report in self.reports if report]
        seconds = sum(report["total"]["seconds"] for report in reports)
        peaks = {tier: 0 for tier in TIERS}
        for report in reports:
            peaks = {tier: max(peak, report["peak_memory_bytes"][tier]) for tier, peak in peaks.items()}
        return {
            "host": self.host,
            "policy": self.policy and asdict(self.policy),
            "rows": self.rows,
            "generated_tokens": self.tokens,
            "seconds": seconds,
            "deaths": self.deaths,
            "peak_memory_bytes": peaks,
        }


def share_of(workload: Workload, workers: int) -> Workload:
    """What each of several workers gets of a workload: every so many of its rows."""
    most = workload.output_tokens
    return replace(
        workload,
        prompt_lens=workload.prompt_lens[::workers],
        shared=workload.shared // workers,
        output_tokens=None if most is None else -(-most // workers),
    )


def on_one_disk(crew: Crew, plans: dict[int, ExecutionPlan]) -> list[str]:
    """The names of workers that wait for the same disk most of the time."""
    groups = defaultdict(list)
    for n, plan in plans.items():
        place = crew.places.get(n)  # None: it has died since
        streams = plan.policy.fractions("weights")[2] > 0
        if place is not None and (plan.prediction.bound_by == "disk" if plan.prediction else streams):
            groups[place.host, place.mount].append(n)
    return [f"workers {', '.join(map(str, each))} on {host}" for (host, _), each in groups.items() if len(each) > 1]
