"""How busy 64 workers are that share a job: a discrete simulation, with the driver's own `Dispatch`.

    python -m bench.simulate_workers

A worker's engine is simulated pass by pass: rows enter as places become free, end when they end, and more are asked for
as the engine does. The seconds of a pass are the cost model's, of OPT-6.7B on a T4 with H2O (512 prompt tokens, up to
512 of output, of any length). A tenth of the workers is three times slower, one dies every minute, and is back after
half a minute. Results go to docs/benchmarks/workers_simulated.json.
"""

from __future__ import annotations

import heapq
import json
import random
from dataclasses import dataclass, field

from bench import common
from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.params import SamplingParams
from h2o_flexgen.jobs.dispatch import Dispatch

WORKERS = 64
ROWS = 100_000
#: of 10 workers one is so many times slower
SLOWER = 3
#: seconds between deaths, and until the next worker has loaded the model
DEATHS = 60.0
LOADING = 30.0
#: the share of rows after which the job counts as ending
ENDING = 0.98
POLICY = common.ROOT / "policies" / "t4-opt-6.7b-512-512-h2o.json"
LONGEST = 512


@dataclass
class Engine:
    """A simulated worker; rows are (number, passes that are left).

    Attributes:
        life: how many workers have died in its place.
        busy: seconds of passes.
        used: of these, times the share of its places that are taken.
    """

    slower: int
    life: int = 0
    running: list[list[int]] = field(default_factory=list)
    waiting: list[list[int]] = field(default_factory=list)
    is_closed: bool = False
    busy: float = 0.0
    used: float = 0.0


class Simulation:
    """A job of rows with outputs of any length up to `LONGEST`.

    Args:
        places: of each worker.
        pass_seconds, prefill_seconds: of a pass of decode steps, and of a prompt.
    """

    def __init__(self, places: int, pass_seconds: float, prefill_seconds: float, seed: int = 0):
        self.rng = random.Random(seed)
        self.places = places
        self.pass_seconds = pass_seconds
        self.prefill_seconds = prefill_seconds
        params = SamplingParams()
        self.lengths = [self.rng.randint(1, LONGEST) for _ in range(ROWS)]
        self.dispatch = Dispatch((Sequence(n, [], params) for n in range(ROWS)), ROWS, WORKERS)
        self.engines = [Engine(SLOWER if n % 10 == 0 else 1) for n in range(WORKERS)]
        self.events = [(0.0, n, 0) for n in range(WORKERS)]
        self.deaths = 0
        self.failed = 0

    def run(self) -> dict:
        """Run all rows; returns what was measured."""
        heapq.heapify(self.events)
        death = DEATHS
        found = {}
        while not self.dispatch.is_done:
            now, n, life = heapq.heappop(self.events)
            while death <= now:
                self._die(self.rng.randrange(WORKERS), death)
                death += DEATHS
            if life == self.engines[n].life:
                self._pass(n, now)
            if not found and self.dispatch.left <= ROWS * (1 - ENDING):
                found = self._measured(now)
        return found | {"all_seconds": now, "deaths": self.deaths, "failed": self.failed}

    def _measured(self, now: float) -> dict:
        busy = sum(engine.busy for engine in self.engines)
        used = sum(engine.used for engine in self.engines)
        return {"seconds": now, "busy": busy / (now * WORKERS), "places": used / busy}

    def _die(self, n: int, now: float) -> None:
        old = self.engines[n]
        self.deaths += 1
        self.failed += len(self.dispatch.died(n))
        self.engines[n] = Engine(old.slower, old.life + 1, busy=old.busy, used=old.used)
        heapq.heappush(self.events, (now + LOADING, n, old.life + 1))

    def _pass(self, n: int, now: float) -> None:
        """End the pass that has run until now, and begin the next one."""
        engine = self.engines[n]
        for row in engine.running:
            row[1] -= 1
            if row[1] == 0:
                self.dispatch.ended(n, row[0])
        engine.running = [row for row in engine.running if row[1]]
        self._read(n, engine)
        new = engine.waiting[: self.places - len(engine.running)]
        del engine.waiting[: len(new)]
        engine.running += new
        if not engine.running:  # the run is over: another one, or wait for rows of workers that die
            engine.is_closed = False
            heapq.heappush(self.events, (now + self.pass_seconds, n, engine.life))
            return
        seconds = engine.slower * (self.pass_seconds + len(new) * self.prefill_seconds)
        engine.busy += seconds
        engine.used += seconds * len(engine.running) / self.places
        heapq.heappush(self.events, (now + seconds, n, engine.life))

    def _read(self, n: int, engine: Engine) -> None:
        """Read ahead, as the scheduler does: a window of as many rows as there are places."""
        if 2 * len(engine.waiting) >= self.places:
            return
        while not engine.is_closed and len(engine.waiting) < self.places:
            rows = self.dispatch.take(n, -(-self.places // 2))
            engine.is_closed = not rows
            engine.waiting += [[number, self.lengths[s.index]] for number, s in rows.items()]


def main() -> None:
    kept = json.loads(POLICY.read_text())
    policy = kept["policy"]
    places = policy["gpu_batch_size"] * policy["num_gpu_batches"]
    predicted = kept["predicted"]
    pass_seconds = predicted["decode_seconds"] / (LONGEST - 1)
    found = Simulation(places, pass_seconds, predicted["prefill_seconds"] / places).run()
    settings = {"workers": WORKERS, "rows": ROWS, "places": places, "pass_seconds": pass_seconds}
    settings |= {"slower": SLOWER, "deaths_every": DEATHS, "loading": LOADING, "ending": ENDING}
    common.save("workers_simulated", {"settings": settings, "rows": [found]})


if __name__ == "__main__":
    main()
