"""Workers whose engine computes nothing: for what a job costs besides. Ray imports this module by its name."""

from __future__ import annotations

from itertools import islice

from h2o_flexgen.engine.observer import Observer
from h2o_flexgen.engine.requests import JobSpec
from h2o_flexgen.jobs.ray import RayLLM
from h2o_flexgen.jobs.worker import Worker
from h2o_flexgen.llm import LLM

#: rows that end together
WINDOW = 256


class StubLLM(LLM):
    """An output is the first token of its prompt."""

    def run(self, job: JobSpec, writer: Observer) -> None:
        writer.on_begin()
        rows = iter(job.rows)
        while window := list(islice(rows, WINDOW)):
            for s in window:
                s.tokens = s.prompt[:1]
                s.logprobs = [-1.0]
                s.finish_reason = "length"
            writer.on_finished(window)


class StubWorker(Worker):
    llm_class = StubLLM


class StubRayLLM(RayLLM):
    worker_class = StubWorker
