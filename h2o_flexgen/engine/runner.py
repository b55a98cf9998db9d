"""The engine: owns weights and transport, and runs jobs pass by pass."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path

import torch

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.engine.observer import Observer
from h2o_flexgen.engine.report import Meter, report_of
from h2o_flexgen.engine.scheduler import Scheduler
from h2o_flexgen.engine.step import LogitsSink, Walk
from h2o_flexgen.engine.stores import Stores
from h2o_flexgen.engine.streams import Streams
from h2o_flexgen.errors import UserError
from h2o_flexgen.machine import memory
from h2o_flexgen.machine.device import Device, pool_names
from h2o_flexgen.models.rope import unchanged
from h2o_flexgen.models.spec import units_of
from h2o_flexgen.planning.execution_plan import ExecutionPlan
from h2o_flexgen.planning.placement import of_span
from h2o_flexgen.policy import MARGIN
from h2o_flexgen.storage.transport import Transport
from h2o_flexgen.storage.weights import WeightStore
from h2o_flexgen.utils import interrupts

NAN_EVERYWHERE = (
    "the model gives NaN for every prompt: its hidden states overflow (use `dtype` bfloat16 or float32), or the "
    "checkpoint is broken"
)
#: if this many rows give NaN, and no other row has run, the model is at fault
MANY_FAILED = 8


class Runner:
    """Runs jobs of one model, one at a time. Weights stay loaded if the next job places them alike.

    Args:
        devices: each holds a span of the model's layers.
        offload_root: folder for offloaded data.
        gpu_mem: the most bytes of each device's memory, with CUDA.
        progress: show bars on stderr while weights load.

    Attributes:
        transport: of the first device, None while nothing is loaded.
        loaded: the weights on each device.
    """

    def __init__(
        self,
        model: LoadedModel,
        devices: list[Device],
        offload_root: Path,
        gpu_mem: list[int | None],
        progress: bool,
    ):
        self.model = model
        self.devices = devices
        self.offload_root = offload_root
        self.progress = progress
        self.transport: Transport | None = None
        self.loaded: list[WeightStore] = []
        self.streams: Streams | None = None
        self._placed = None  # what the job before wanted of them
        for device, most_bytes in zip(devices, gpu_mem, strict=True):
            device.start(most_bytes)
        memory.hold_heap()
        self._at_start = memory.baseline()

    @property
    def weights(self) -> WeightStore | None:
        """Those on the first device; None while nothing is loaded."""
        return self.loaded[0] if self.loaded else None

    def available(self) -> dict[str, int]:
        """Bytes that a plan may use of each device and tier; those that loaded weights hold count as free."""
        ram = int(MARGIN * memory.ram_in_all())
        disk = int(MARGIN * memory.disk_free(self.offload_root)) + self.model.source.copy_bytes
        found = dict.fromkeys(pool_names(self.devices), ram) | {"cpu": ram, "disk": disk}
        for n, (name, device) in enumerate(zip(pool_names(self.devices), self.devices)):
            if device.is_cuda:
                held = self.loaded[n].held_bytes(cuda=True) if self.loaded else 0
                found[name] = int(MARGIN * (device.free_bytes() + device.workspace_bytes + held))
        if self.transport is not None:
            found["disk"] += self.transport.disk_bytes()
        return found

    def baseline(self) -> int:
        """Bytes of RAM that this process holds besides the weights: libraries, prompts, other models. At least as many
        as at the start, since some of the weights may not be resident (swapped, or never touched)."""
        held = sum(weights.held_bytes(cuda=False) for weights in self.loaded)
        return max(self._at_start, memory.held() - held if self.loaded else memory.baseline())

    def run(
        self,
        job: ExecutionPlan,
        rows: Iterable[Sequence],
        sink: LogitsSink,
        observer: Observer,
        window: int,
        is_sound: bool = False,
    ) -> dict:
        """Run all rows; returns the report of the job.

        Args:
            window: the most rows that are read ahead.
            is_sound: as of a `JobSpec`.

        Raises:
            UserError: weights cannot be read, or hold NaN; RAM cannot be pinned; the disk is full or cannot be read;
                CUDA is out of memory; the model gives NaN for all of several prompts.
        """
        with self.guard():
            return self._run(job, rows, sink, observer, window, is_sound)

    def open(self, job: ExecutionPlan, count: int) -> Streams:
        """Open `count` streams, which are one block of the job, with empty caches. No others may be open. Raises
        UserError as `run`."""
        with self.guard():
            self._load_weights(job)
            self.streams = Streams(Stores(self.model, job, self.loaded, is_stream=True), count)
        return self.streams

    def end_streams(self, why: str) -> None:
        """Free the caches of open streams. `why`: for the error that later calls of theirs raise."""
        if self.streams is not None:
            self.streams.end(why)
            self.streams = None

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Defer signals, and after an exception free everything: threads, weights and files. Whoever keeps the
        exception, as an interactive session does, keeps none of them alive."""
        try:
            with interrupts.deferred():
                yield
        except BaseException as e:
            traceback.clear_frames(e.__traceback__)
            self.close("an error or an interrupt ended it")
            if isinstance(e, torch.OutOfMemoryError):
                raise UserError(
                    "CUDA is out of memory, though the plan fits: give a smaller `gpu_mem` if other programs use the "
                    f"GPU; if not, its memory is too fragmented to use: give smaller batches; {e}"
                ) from None
            raise

    def _run(
        self,
        job: ExecutionPlan,
        rows: Iterable[Sequence],
        sink: LogitsSink,
        observer: Observer,
        window: int,
        is_sound: bool,
    ) -> dict:
        self._load_weights(job)
        stores = Stores(self.model, job, self.loaded)
        scheduler = scheduler_of(stores, rows, window)
        meter = Meter(stores.parts[-1].transport)
        walk = Walk(stores, sink, observer, meter)
        observer.on_begin()
        meter.start()
        failed: list[Sequence] = []  # held back while no row has succeeded: the model may be at fault
        while (pass_ := scheduler.next()) is not None:
            observer.on_pass(pass_.rows)
            walk.run(pass_)
            meter.end_pass(pass_)
            ended = [s for s in pass_.rows if s.finish_reason is not None]
            is_sound = is_sound or any(s.finish_reason != "error" or s.tokens for s in pass_.rows)
            if not is_sound:
                for weights in self.loaded if not failed else ():
                    weights.check_finite()
                failed += ended
                if len(failed) >= MANY_FAILED:
                    break
            elif ended:
                observer.on_finished([*failed, *ended])
                failed.clear()
        if len(failed) > 1:
            raise UserError(NAN_EVERYWHERE)
        if failed:
            observer.on_finished(failed)
        stores.drain()
        meter.stop()
        report = report_of(stores, meter)
        stores.close()
        return report

    def _load_weights(self, job: ExecutionPlan) -> None:
        """Load the weights, unless they are already placed as the job wants them."""
        placement = job.placement
        placed = (placement.weights, placement.sliced, placement.spans, job.policy.overlap, job.forms)
        if placed == self._placed:
            return
        self.close()
        first, *others = self.devices
        self.transport = Transport(first, self.offload_root, job.policy.overlap)
        transports = [self.transport, *map(self.transport.beside, others)]
        for transport, span in zip(transports, placement.spans, strict=True):
            weights = WeightStore(
                transport,
                self.model.dtype,
                units_of(of_span(span, job.layers)),
                job.forms,
                placement.weights,
                self.model.source,
                self.progress,
                placement.sliced if span is placement.spans[-1] else None,
            )
            self.loaded.append(weights)
        self._placed = placed

    def close(self, why: str = "its model was closed") -> None:
        """Free memory, threads and files; the next `run` loads the weights again."""
        if self.transport is not None:
            self.transport.close()
        self.end_streams(why)
        self.transport = None
        self.loaded = []
        self._placed = None
        for device in self.devices:
            device.unpin()
            device.release_cached()


def scheduler_of(stores: Stores, rows: Iterable[Sequence], window: int) -> Scheduler:
    """The scheduler of a job."""
    job = stores.job
    spec = stores.model.spec
    ropes = {spec.at(layer).rope for layer in range(spec.layers)} - {None}
    alike = min(map(unchanged, ropes), default=inf)

    def shareable(s: Sequence) -> int:
        """Not the last tokens, since logits and voters need the end of the prompt itself; nothing where RoPE rotates a
        long text differently from its beginning."""
        if len(s.prompt) > alike:
            return 0
        return max(0, min(s.wanted, len(s.prompt) - max(1, job.rule.voters), job.shared_tokens))

    return Scheduler(
        rows,
        stores.sizes,
        stores.limits,
        stores.slots,
        shareable,
        ahead=job.rule.voters,
        window=window,
        least=job.least_free,
    )
