"""A stand-in for Ray: workers are threads of this process, and messages are pickled as Ray does. And workers whose
engine computes nothing, some of whose rows are fatal."""

from __future__ import annotations

import pickle
import queue
import random
import threading
import time
from concurrent.futures import Future, wait
from types import SimpleNamespace

from stub_engine import StubLLM

from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.cluster import WorkerDied, Workers
from h2o_flexgen.jobs.worker import Worker
from h2o_flexgen.utils import interrupts

#: a row whose prompt begins with this token kills its worker
FATAL_TOKEN = 97


class Died(Exception):
    """A worker's process has gone."""


class MortalLLM(StubLLM):
    """A stub that takes any number of rows, a few at a time."""

    window = 8
    stop = 1 << 60

    def run(self, job, writer):
        super().run(SimpleNamespace(rows=self._checked(job.rows), workload=job.workload), writer)

    def _checked(self, rows):
        for s in rows:
            self.meet(s)
            yield s

    def meet(self, s) -> None:
        if s.prompt[0] == FATAL_TOKEN:
            raise Died("a fatal row")


class StubWorker(Worker):
    llm_class = MortalLLM


class Actor:
    """Calls of a worker, one after the other in a thread."""

    def __init__(self, kind: type[Worker]):
        self.worker = kind()
        self.calls: queue.Queue = queue.Queue()
        self.is_dead = False
        self.open: Future | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def __getattr__(self, name: str):
        return SimpleNamespace(remote=lambda *args: self._call(name, pickle.dumps(args)))

    def _call(self, name: str, args: bytes) -> Future:
        ref = Future()
        self.calls.put((ref, name, args))
        if self.is_dead:
            self._drop()
        return ref

    def _run(self) -> None:
        while not self.is_dead:
            ref, name, args = self.calls.get()
            self.open = ref
            try:
                found = pickle.dumps(getattr(self.worker, name)(*pickle.loads(args)))
            except Exception as e:
                found = e
            if not ref.done():
                ref.set_exception(found) if isinstance(found, Exception) else ref.set_result(found)

    def die(self) -> None:
        self.is_dead = True
        if self.open is not None and not self.open.done():
            self.open.set_exception(Died("it was killed"))
        self._drop()

    def _drop(self) -> None:
        while not self.calls.empty():
            self.calls.get()[0].set_exception(Died("it was killed"))


class LocalCluster:
    """As `jobs.cluster.Cluster`."""

    asked = "1 core"

    def __init__(self, wanted: Workers, device: str):
        self.wanted = wanted
        self.count = wanted.count
        self.actors: list[Actor] = []

    def actor(self, kind: type[Worker]) -> Actor:
        self.actors.append(Actor(kind))
        return self.actors[-1]

    def outcome(self, ref: Future):
        try:
            return pickle.loads(ref.result())
        except UserError:
            raise
        except Exception as e:
            raise WorkerDied(str(e)) from None

    def ready(self, refs: list[Future], seconds: float) -> list[Future]:
        interrupts.check()
        wait(refs, seconds, "FIRST_COMPLETED")
        return [ref for ref in refs if ref.done()]

    def get(self, ref: Future):
        return self.outcome(ref)

    def kill(self, actor: Actor) -> None:
        actor.die()

    def close(self) -> None:
        for actor in self.actors:
            actor.die()


class Killer:
    """Kills random workers of a cluster until it is stopped."""

    def __init__(self, cluster: LocalCluster, seconds: float, seed: int = 0):
        self.cluster = cluster
        self.seconds = seconds
        self.rng = random.Random(seed)
        self.kills = 0
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Killer:
        self.thread.start()
        return self

    def __exit__(self, *exc) -> None:
        self.stopped.set()
        self.thread.join()

    def _run(self) -> None:
        while not self.stopped.is_set():
            time.sleep(self.rng.uniform(0, self.seconds))
            living = [actor for actor in self.cluster.actors if not actor.is_dead]
            if living:
                self.rng.choice(living).die()
                self.kills += 1
