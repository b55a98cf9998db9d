"""Ray: a connection to it, and workers as its actors. Nothing else here imports Ray."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.jobs.dispatch import MOST_DEATHS
from h2o_flexgen.jobs.worker import Place, Settings, Worker
from h2o_flexgen.policy import gib
from h2o_flexgen.utils import interrupts

log = logging.getLogger(__name__)

#: seconds that a cluster has to place all workers; those that come later join in
PLACE_SECONDS = 60.0
#: seconds to reach a cluster
CONNECT_SECONDS = 10.0
#: seconds between looks for a signal
LOOK_SECONDS = 0.5
#: bytes of Ray's object store on this machine: rows on their way
STORE_BYTES = 256 << 20
#: the environment of a Ray that is started here: plans keep within the memory, so that Ray need not kill workers
ENVIRONMENT = {"RAY_memory_monitor_refresh_ms": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


class WorkerDied(Exception):
    """A worker has died, or ended with an error that is not the user's; the message says why."""


@dataclass(frozen=True)
class Workers:
    """What is asked of the workers.

    Attributes:
        count: how many; None: one for each GPU of the cluster, or for each machine if there are none.
        address: of a Ray cluster, or "auto" for the one that this machine is part of; None starts Ray here.
        cpus: cores of each; None: an even share.
        mem: bytes of RAM of each; None: an even share of what is free on its machine.
    """

    count: int | None = None
    address: str | None = None
    cpus: int | None = None
    mem: int | None = None


class Cluster:
    """A connection to Ray, which is started if it does not run.

    Attributes:
        count: of workers.

    Raises:
        UserError: Ray is not installed, there is no cluster at the address, or one of another version; or this machine
            has too few cores.
    """

    def __init__(self, wanted: Workers, device: str):
        self.wanted = wanted
        self.ray = _import_ray()
        self.is_ours = not self.ray.is_initialized()
        if self.is_ours:
            _connect(self.ray, wanted.address)
        try:
            self._reserve(device)
        except UserError:
            self.close()
            raise

    def _reserve(self, device: str) -> None:
        """What Ray reserves for each worker."""
        found = self.ray.cluster_resources()
        cores = int(found.get("CPU", 0))
        gpus = 0 if device == "cpu" else int(found.get("GPU", 0))
        machines = sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in self.ray.nodes())
        self.count = self.wanted.count or gpus or max(1, machines)
        cpus = self.wanted.cpus or max(1, cores // max(self.count, machines))
        self._resources = {"num_cpus": cpus, "num_gpus": int(gpus > 0)}
        if self.wanted.address is not None:
            self._resources["memory"] = self.wanted.mem
        room = min(cores // cpus, gpus or cores)
        if self.wanted.address is None and room < self.count:
            kind = "a GPU" if 0 < gpus < self.count else f"{cpus} core{'s' * (cpus > 1)}"
            raise UserError(f"`workers` {self.count} with {kind} each: this machine has room for {room}")

    @property
    def asked(self) -> str:
        """What Ray reserves for each worker, in words."""
        cpus = self._resources["num_cpus"]
        mem = self._resources.get("memory")
        gpu = ", a GPU" * self._resources["num_gpus"]
        return f"{cpus} core{'s' * (cpus > 1)}{gpu}{f', {gib(mem)} of RAM' if mem else ''}"

    def actor(self, kind: type[Worker]):
        """A new worker; Ray places it as soon as there is room."""
        return self.ray.remote(kind).options(**self._resources).remote()

    def outcome(self, ref):
        """What a call has returned. Raises UserError if the call did, and WorkerDied for anything else."""
        try:
            return self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as e:
            if isinstance(e.cause, UserError):
                raise e.cause from None
            raise WorkerDied(_last_line(e)) from None
        except self.ray.exceptions.RayError as e:
            raise WorkerDied(_last_line(e)) from None

    def ready(self, refs: list, seconds: float) -> list:
        """Which of some calls have returned, once one has or the time is over. Raises Interrupted."""
        interrupts.check()
        self.ray.wait(refs, timeout=seconds)
        interrupts.check()
        return self.ray.wait(refs, num_returns=len(refs), timeout=0)[0]

    def get(self, ref):
        """As `outcome`, for a call that may take a while."""
        while not self.ready([ref], LOOK_SECONDS):
            pass
        return self.outcome(ref)

    def kill(self, actor) -> None:
        self.ray.kill(actor)

    def close(self) -> None:
        if self.is_ours:
            self.ray.shutdown()


def _import_ray():
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise UserError("`workers` needs Ray, which is not installed: pip install 'h2o_flexgen[ray]'") from None
    return ray


def _connect(ray, address: str | None) -> None:
    """Connect to a cluster, or start one on this machine. Raises UserError if that fails."""
    if address is not None:
        _check_reachable(address)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    handlers = {s: signal.getsignal(s) for s in interrupts.STOPPING}  # Ray sets its own
    cores = len(os.sched_getaffinity(0))
    local = {"num_cpus": cores, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    options = local if address is None else {}
    try:
        ray.init(address or "local", log_to_driver=False, logging_level=logging.CRITICAL, **options)
    except (ConnectionError, ValueError) as e:
        raise UserError(f"there is no Ray cluster at `ray` {address}: {reason(e)}") from None
    except RuntimeError as e:  # it has another version of Ray or Python
        raise UserError(f"cannot use the Ray cluster at `ray` {address}: {' '.join(str(e).split())}") from None
    finally:
        for s, handler in handlers.items():
            signal.signal(s, handler)


def _check_reachable(address: str) -> None:
    """Raises UserError if nothing listens at an address, where Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():  # auto
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as e:
        raise UserError(f"there is no Ray cluster at `ray` {address}: {reason(e)}") from None


def _last_line(error: Exception) -> str:
    """Of a message of Ray, which ends with the cause; without Ray's guesses at causes of the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(" Some common causes")[0] if lines else type(error).__name__


@dataclass
class Hired:
    """A worker that Ray has, or will have; `place`, `settings`: what its calls of these names return, as references."""

    actor: object
    place: object
    settings: object = None


class Crew:
    """The workers of an LLM, by number.

    Args:
        options: of each worker's LLM.
        kind: the class of the workers.

    Attributes:
        workers: None for those that are not wanted yet, or were killed.
        places: of those that Ray has placed.
        shares: as `shares_of`; None before they are known.
        first: the number of the one that loads the model first.
        settings: of the first one, which all must have.

    Raises:
        UserError: they need more memory than a machine has, or the first one cannot load the model.
    """

    def __init__(self, cluster: Cluster, options: dict, kind: type[Worker]):
        self.cluster = cluster
        self.options = options
        self.kind = kind
        self.places: dict[int, Place] = {}
        self.shares: dict[str, dict] | None = None
        self.workers: list[Hired | None] = [None] * cluster.count
        self._wait_for_places()
        self.shares = shares_of([*self.places.values()], cluster.wanted.mem, options)
        self.first = min(self.places)
        self._load(self.first)
        self.settings: Settings = self.get(self.first, lambda worker: worker.settings)
        self.options |= {"dtype": self.settings.dtype, "operands": self.settings.operands}
        self._cpus = {place.cpu for place in self.places.values()}
        for n in range(cluster.count):
            if n != self.first:
                self._load(n)
        warn_of_processors([*self.places.values()], self.settings.dtype)

    def _wait_for_places(self) -> None:
        """Wait until all workers run; after a while, until one does."""
        until = time.monotonic() + PLACE_SECONDS
        count = len(self.workers)
        while len(self.places) < count:
            waiting = {self.worker(n).place: n for n in range(count) if n not in self.places}
            for ref in self.cluster.ready([*waiting], LOOK_SECONDS):
                n = waiting[ref]
                self.places[n] = self.get(n, lambda worker: worker.place)
            if len(self.places) == count or time.monotonic() < until:
                continue
            room = f"the cluster has room for {len(self.places)} of {count} workers with {self.cluster.asked} each"
            if self.places:
                log.warning("%s: the others join in as soon as there is more", room)
                return
            log.warning("%s: the job begins as soon as there is more", room)
            until += PLACE_SECONDS

    def worker(self, n: int) -> Hired:
        """A worker, which is started if there is none."""
        if self.workers[n] is None:
            actor = self.cluster.actor(self.kind)
            self.workers[n] = Hired(actor, actor.place.remote(self.options["offload_dir"]))
            if self.shares is not None:
                self._load(n)
        return self.workers[n]

    def _load(self, n: int) -> None:
        worker = self.worker(n)
        mem = self.cluster.wanted.mem or self.options["mem"]  # on a machine that has joined in later
        worker.settings = worker.actor.load.remote(self.options | {"mem": mem}, self.shares)

    def arrive(self, n: int, place: Place) -> None:
        """Note where a worker is, which may have been started later than the others."""
        self.places[n] = place
        if place.cpu not in self._cpus:
            self._cpus.add(place.cpu)
            warn_of_processors([*self.places.values()], self.settings.dtype)

    def check(self, n: int, settings: Settings) -> None:
        """Raises UserError for a worker with another model than the first one."""
        if settings.fingerprint != self.settings.fingerprint:
            raise UserError(f"its model is not that of {self.name(self.first)}: give all machines the same files")

    def remove(self, n: int) -> None:
        """Kill a worker, if it lives; `worker` starts another one in its place."""
        if self.workers[n] is not None:
            self.cluster.kill(self.workers[n].actor)
            self.workers[n] = None
            self.places.pop(n, None)

    def kill(self) -> None:
        for n in range(len(self.workers)):
            self.remove(n)

    def get(self, n: int, call: Callable[[Hired], object]):
        """What a call of a worker returns, which may take a while; if the worker dies, of the one in its place.

        Args:
            call: worker -> the reference of its result.

        Raises:
            UserError: the call did, or several workers have died.
        """
        for _ in range(MOST_DEATHS):
            try:
                return self.cluster.get(call(self.worker(n)))
            except UserError as e:
                raise self.named(n, e) from None
            except WorkerDied as e:
                log.warning("%s has died: %s", self.name(n), e)
                error = self.named(n, e)
                self.remove(n)
        raise error

    def named(self, n: int, error: Exception) -> UserError:
        return UserError(f"{self.name(n)}: {error}")

    def name(self, n: int) -> str:
        place = self.places.get(n)
        return f"worker {n} on {place.host}" if place else f"worker {n}"


def shares_of(places: list[Place], mem: int | None, options: dict) -> dict[str, dict]:
    """By host, the memory limits of each of its workers, as options of `LLM`: even shares of what is free, or allowed
    by the options. `mem`: bytes of RAM that each asks for. Raises UserError if a machine lacks them."""
    found = {}
    for host, count in Counter(place.host for place in places).items():
        place = next(place for place in places if place.host == host)
        ram = min(place.ram, options["mem"] or place.ram)
        disk = min(place.disk, options["disk_mem"] or place.disk)
        if mem is not None and mem * count > ram:
            room = f"{host} has room for {ram // mem} of {count} workers with {gib(mem)} each"
            raise UserError(f"{room}: it has {gib(ram)} of RAM left; take fewer `workers`, or a smaller `worker_mem`")
        found[host] = {"mem": mem or ram // count, "disk_mem": disk // count}
    return found


def warn_of_processors(places: list[Place], dtype: str) -> None:
    """Kernels differ from one processor to another, and with them the last bits of sums."""
    found = sorted({place.cpu for place in places})
    if len(found) > 1 and dtype != "float32":
        log.warning(
            "workers have different processors (%s): in %s a text may depend on which of them runs it, in float32 not",
            ", ".join(found),
            dtype,
        )
