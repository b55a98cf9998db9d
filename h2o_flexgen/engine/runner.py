"""The engine: owns weights and transport, and runs jobs block by block."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from h2o_flexgen import interrupts
from h2o_flexgen.engine.batch import Sequence, make_batches
from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.engine.observer import Observer
from h2o_flexgen.engine.report import Meter, Report
from h2o_flexgen.engine.step import BlockRun, LogitsSink
from h2o_flexgen.engine.stores import Stores
from h2o_flexgen.engine.streams import Streams
from h2o_flexgen.errors import UserError
from h2o_flexgen.offload import memory
from h2o_flexgen.offload.decoded import Decoded
from h2o_flexgen.offload.device import Device
from h2o_flexgen.offload.transport import Transport
from h2o_flexgen.offload.weights import WeightStore
from h2o_flexgen.policy import MARGIN


class Runner:
    """Runs jobs of one model, one at a time. Weights stay from one job to the next that places them alike.

    Args:
        offload_root: folder for the files of what is offloaded to disk.
        gpu_mem: the most bytes of device memory, with CUDA.
        progress: show bars on stderr while weights load.
    """

    def __init__(self, model: LoadedModel, device: Device, offload_root: Path, gpu_mem: int | None, progress: bool):
        self.model = model
        self.device = device
        self.offload_root = offload_root
        self.progress = progress
        self.transport: Transport | None = None
        self.weights: WeightStore | None = None
        self.streams: Streams | None = None
        self._placed = None  # the tiers of the weights, whether there is overlap, and how they were decoded
        if device.is_cuda:
            device.start(gpu_mem)
        memory.hold_heap()
        self._at_start = memory.baseline()

    def available(self) -> dict[str, int]:
        """Bytes that may be planned for on each tier, for a job that takes over what this one's weights hold."""
        ram = int(MARGIN * memory.ram_in_all())
        disk = int(MARGIN * memory.disk_free(self.offload_root)) + self.model.source.copy_bytes
        found = {"gpu": ram, "cpu": ram, "disk": disk}
        if self.device.is_cuda:
            held = 0 if self.weights is None else self.weights.held_bytes(cuda=True)
            found["gpu"] = int(MARGIN * (self.device.free_bytes() + self.device.workspace_bytes + held))
        if self.transport is not None:
            found["disk"] += self.transport.disk_bytes()
        return found

    def baseline(self) -> int:
        """Bytes of RAM that this process holds besides the weights: libraries, prompts, other models. Not less than at
        the start, since some of the weights may not be resident (swapped, or never touched)."""
        now = memory.baseline() if self.weights is None else memory.held() - self.weights.held_bytes(cuda=False)
        return max(self._at_start, now)

    def run(self, job, sequences: list[Sequence], sink: LogitsSink, observer: Observer) -> Report:
        """Take all sequences through the job in their order, block by block; returns its report.

        Args:
            job: a `planning.planner.Choice`, which says what to run and where everything goes.

        Raises:
            UserError: weights that cannot be read, or hold NaN; RAM that cannot be pinned; the disk is full or cannot
                be read; CUDA is out of memory; the model gives NaN for every prompt.
        """
        with self.guard():
            return self._run(job, sequences, sink, observer)

    def open(self, job, count: int) -> Streams:
        """Empty caches of `count` streams, which are one block of the job. No others may be open.

        Raises:
            UserError: as `run`.
        """
        with self.guard():
            self._load_weights(job)
            self.streams = Streams(Stores(self.model, job, self.weights, self.transport), count)
        return self.streams

    def end_streams(self, why: str) -> None:
        """Give the caches of open streams back. `why`: for the message that who uses them gets."""
        if self.streams is not None:
            self.streams.end(why)
            self.streams = None

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Inside, signals wait. After an exception nothing is left: no threads, no weights, no files; who keeps the
        exception, as an interactive session does, keeps none of them either."""
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

    def _run(self, job, sequences: list[Sequence], sink: LogitsSink, observer: Observer) -> Report:
        size = job.policy.block_size
        blocks = [sequences[at : at + size] for at in range(0, len(sequences), size)]
        self._load_weights(job)
        stores = Stores(self.model, job, self.weights, self.transport)
        meter = Meter(self.transport)
        observer.on_begin()
        for n, block in enumerate(blocks):
            observer.on_block(n, len(blocks), block)
            batches = make_batches(block, job.policy.gpu_batch_size, job.policy.prefill_tokens)
            stores.caches.begin_block(stores.layouts([(len(b.sequences), b.longest) for b in batches]))
            run = BlockRun(stores, dict(enumerate(batches)), job.workload.gen_len, sink, observer, n + 1 == len(blocks))
            run.run(meter)
            if n == 0 and all(s.finish_reason == "error" for s in block):
                self.weights.check_finite()
            if all(s.finish_reason == "error" for s in sequences):
                raise UserError(
                    "the model gives NaN for every prompt: its hidden states overflow (use `dtype` bfloat16 or "
                    "float32), or the checkpoint is broken"
                )
            observer.on_block_end(block)
        report = Report.of(stores, sequences, meter)
        stores.close()
        return report

    def _load_weights(self, job) -> None:
        """Unless those that are loaded are placed as the job wants them."""
        placed = (job.placement.weights, job.policy.overlap, job.decoding)
        if placed == self._placed:
            return
        self.close()
        self.transport = Transport(self.device, self.offload_root, job.policy.overlap)
        layers = self.model.layers
        source = self.model.source
        if job.decoding is not None:
            layers = job.decoding.layers
            source = Decoded(source, job.decoding.formats)
        gathered = {short: tensor for layer in layers for short, tensor in layer.gathered.items()}
        streamed = [layer.streamed for layer in layers]
        self.weights = WeightStore(
            self.transport,
            self.model.dtype,
            streamed,
            gathered,
            job.placement.weights,
            source,
            self.progress,
            self.model.compute,
            self.model.in_blocks,
        )
        self._placed = placed

    def close(self, why: str = "its model was closed") -> None:
        """Give memory, threads and files back; the next `run` starts anew."""
        if self.transport is not None:
            self.transport.close()
        self.end_streams(why)
        self.transport = self.weights = self._placed = None
        self.device.unpin()
        self.device.release_cached()
