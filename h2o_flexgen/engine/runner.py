"""The engine: owns device, transfer queues, disk I/O, offload folder and stores, and runs jobs block by block."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from h2o_flexgen import interrupts
from h2o_flexgen.engine.batch import Sequence, make_batches
from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.engine.observer import Observer
from h2o_flexgen.engine.prefetch import Prefetcher
from h2o_flexgen.engine.report import Meter, Report
from h2o_flexgen.engine.schedule import Step, ZigZag
from h2o_flexgen.engine.step import LayerSteps, LogitsSink
from h2o_flexgen.engine.stores import Job, Stores
from h2o_flexgen.errors import UserError
from h2o_flexgen.offload import memory
from h2o_flexgen.offload.activations import ActivationStore
from h2o_flexgen.offload.device import Device
from h2o_flexgen.offload.disk import DiskIO, File, OffloadFolder
from h2o_flexgen.offload.kv_store import KVStore
from h2o_flexgen.offload.queues import TransferQueue
from h2o_flexgen.offload.weights import WeightStore
from h2o_flexgen.policy import MARGIN
from h2o_flexgen.sizes import KV_BUFFERS, batch_sizes, micro_tokens

#: threads of each transfer queue
WORKERS = {"weights": 1, "cache": KV_BUFFERS, "activations": 1, "store": 1}


class Runner:
    """Runs jobs of one model, one at a time. Weights stay from one job to the next that places them alike.

    `run` takes a whole job: `begin`, `run_block` for each of its blocks, `end`. `close` gives everything back.

    Args:
        offload_root: folder for the files of what is offloaded to disk.
        gpu_mem: the most bytes of device memory, with CUDA.
        direct_reads: read weights past the page cache (docs/benchmarks/disk.json).
        progress: show bars on stderr while weights load.
    """

    def __init__(
        self,
        model: LoadedModel,
        device: Device,
        offload_root: Path,
        gpu_mem: int | None = None,
        direct_reads: bool = True,
        progress: bool = True,
    ):
        self.model, self.device, self.dtype = model, device, model.dtype
        self.offload_root, self.direct_reads, self.progress = offload_root, direct_reads, progress
        self.stores = Stores()
        self.folder: OffloadFolder | None = None
        self._io: DiskIO | None = None
        self._queues: dict[str, TransferQueue] = {}
        self._tiers: dict[str, str] | None = None  # of the weights that are loaded
        if device.is_cuda:
            device.start(gpu_mem)
        memory.hold_heap()
        self._at_start = memory.baseline()

    # resources

    def available(self) -> dict[str, int]:
        """Bytes that may be planned for on each tier, for a job that takes over what this one's weights hold."""
        ram, weights = int(MARGIN * memory.ram_in_all()), self.stores.weights
        found = {"gpu": ram, "cpu": ram, "disk": int(MARGIN * memory.disk_free(self.offload_root))}
        if self.device.is_cuda:
            held = 0 if weights is None else weights.held_bytes(cuda=True)
            found["gpu"] = int(MARGIN * (self.device.free_bytes() + self.device.workspace_bytes + held))
        if weights is not None:
            found["disk"] += self._disk_bytes()
        return found

    def baseline(self) -> int:
        """Bytes of RAM that this process holds besides the weights: libraries, prompts, other models. Not less than at
        the start, since some of the weights may not be resident (swapped, or never touched)."""
        weights = self.stores.weights
        now = memory.baseline() if weights is None else memory.held() - weights.held_bytes(cuda=False)
        return max(self._at_start, now)

    # a job

    def run(self, job: Job, sequences: list[Sequence], sink: LogitsSink, observer: Observer) -> Report:
        """Take all sequences, the longest first, through the job, block by block; returns its report.

        After an exception nothing is left: no threads, no weights, no offload folder.

        Raises:
            UserError: as `begin`, a broken checkpoint, or the disk is full or cannot be read.
        """
        size = job.policy.block_size
        blocks = [sequences[at : at + size] for at in range(0, len(sequences), size)]
        block: list[Sequence] = []
        try:
            with interrupts.deferred():
                self.begin(job)
                observer.on_begin()
                for n, block in enumerate(blocks):
                    observer.on_block(n, len(blocks), block)
                    self.run_block(block, sink, observer, is_last=n + 1 == len(blocks))
                    if n == 0 and all(s.finish_reason == "error" for s in block):
                        self._explain_broken(whole_job=len(blocks) == 1)
                    observer.on_block_end(block)
                report = Report.of(self.model, job, sequences, self.meter, self.device, self._disk_bytes())
        except BaseException as e:
            try:
                if not isinstance(e, Exception):
                    observer.on_interrupt(block)
            finally:
                self.close()
                # who keeps the exception, as an interactive session does, must not keep weights and cache
                if not isinstance(e, Exception) or isinstance(e, UserError):
                    traceback.clear_frames(e.__traceback__)
            raise
        self.end()
        return report

    def begin(self, job: Job) -> None:
        """Load the weights, or keep those that are loaded, and make the stores of the job.

        Raises:
            UserError: the disk is full, weights that cannot be read, or RAM that cannot be pinned.
        """
        self.job = job
        self._open_queues(job.policy.overlap)
        self._load_weights()
        self._pinned = self.device.pinned_count()
        self._make_stores()
        self.meter = Meter(self._count_moved)

    @torch.inference_mode()
    def run_block(self, sequences: list[Sequence], sink: LogitsSink, observer: Observer, is_last: bool = True) -> None:
        """Take a block through prefill and decode; `sink` gets the logits, the sequences hold the result.

        Args:
            sequences: as many as the policy's block at most, the longest first.
            is_last: no block follows, so that no weights need be fetched at the end.
        """
        policy = self.job.policy
        batches = make_batches(sequences, policy.gpu_batch_size, policy.prefill_tokens)
        self.stores.caches.begin_block([self._layout(len(b.sequences), b.longest) for b in batches])
        schedule = ZigZag(self.job.workload.gen_len, len(self.model.layers), len(batches))
        prefetch = Prefetcher(self.stores, schedule, batches, is_last)
        steps = LayerSteps(self.model, self.device, self.job, self.stores, batches, prefetch, sink)
        self.device.synchronize()
        self.meter.start()
        for i, j, active in schedule.layers():
            interrupts.check()
            if (i, j) == (1, 0):
                self.device.synchronize()
                self.meter.stop("prefill")
            prefetch.weights(i, j)
            before = sum(len(s.tokens) for s in sequences)
            self._run_layer(i, j, active, steps, observer)
            observer.on_progress(i, j, sum(len(s.tokens) for s in sequences) - before)
        self.stores.caches.drain()
        self.stores.activations.drain()
        if not steps.all_finite:
            self.stores.caches.wipe()
        self.device.synchronize()
        self.meter.stop("prefill" if i == 0 else "decode")
        if is_last:
            self.stores.weights.drop_prefetched()

    def end(self) -> None:
        """The job is done. Cache and activations go; the weights stay for the next job."""
        for store in (self.stores.caches, self.stores.activations):
            if store.file is not None:
                store.file.close()  # and so free its space
        self.stores.caches = self.stores.activations = None
        self.device.unpin(self._pinned)

    def close(self) -> None:
        """Give memory, threads and the offload folder back; the next `begin` starts anew."""
        for queue in self._queues.values():
            queue.close()
        if self._io is not None:
            self._io.close()
        self.stores.weights = self.stores.caches = self.stores.activations = None
        self._tiers = self._io = None
        self._queues = {}
        self.device.unpin()
        self.device.release_cached()
        if self.folder is not None:
            self.folder.close()
            self.folder = None

    # parts of a block

    def _run_layer(self, i: int, j: int, active: list[int], steps: LayerSteps, observer: Observer) -> None:
        w = self.stores.weights.get(j)
        for group in [[k] for k in active] if i == 0 else steps.groups(active):
            observer.on_step(i, j, group)
            if i == 0:
                steps.prefill(Step(i, j, *group), w)
            else:
                steps.decode(i, j, group, w)
            if j == steps.last:
                self._retire(group, steps, observer)
        del w
        self.stores.weights.release(j)
        if i == 0 and (j == steps.last or steps.gaps_are_due):
            steps.release_gaps()

    def _retire(self, group: list[int], steps: LayerSteps, observer: Observer) -> None:
        """Batches whose sequences have all finished leave the schedule."""
        for k in group:
            batch = steps.batches[k]
            if all(s.finish_reason is not None for s in batch.sequences):
                steps.prefetch.finish(k)
                with torch.inference_mode(False):  # the mode is the engine's, not the observer's
                    observer.on_finished(batch.sequences)

    def _explain_broken(self, whole_job: bool) -> None:
        """Raises UserError where the logits of all sequences of the first block are NaN: the checkpoint is broken, or
        the dtype too narrow. If the block is not the whole job, a few bad prompts must not stop the others."""
        name = self.stores.weights.find_broken()
        if name is not None:
            raise UserError(f"the weights {name!r} hold NaN or infinite numbers: the checkpoint is broken")
        if whole_job and self.dtype == torch.float16:
            raise UserError("the hidden states overflow in float16: use `dtype` bfloat16 or float32")
        if whole_job:
            raise UserError("the model gives NaN for every prompt: the checkpoint is broken")

    # stores

    def _count_moved(self) -> dict[str, int]:
        """Bytes between tiers, since the weights were loaded and the disk was opened."""
        weights, caches, activations = self.stores.weights, self.stores.caches, self.stores.activations
        return {
            "disk_to_cpu": self._io.read_bytes,
            "cpu_to_gpu": weights.cpu_to_gpu_bytes + caches.cpu_to_gpu_bytes + activations.cpu_to_gpu_bytes,
            "gpu_to_cpu": caches.gpu_to_cpu_bytes + activations.gpu_to_cpu_bytes,
            "cpu_to_disk": self._io.written_bytes,
        }

    def _disk_bytes(self) -> int:
        return self.folder.size() if self.folder is not None else 0

    def _open_queues(self, overlap: bool) -> None:
        if self._queues and self._queues["weights"].overlap != overlap:
            self.close()
        if self._io is None:
            self._io = DiskIO()
            self._queues = {name: TransferQueue(self.device, name, overlap, n) for name, n in WORKERS.items()}

    def _make_file(self, name: str, nbytes: int) -> File:
        if self.folder is None:
            self.folder = OffloadFolder(self.offload_root)
        return self.folder.file(name, nbytes)

    def _load_weights(self) -> None:
        if self.stores.weights is not None and self._tiers == self.job.weights:
            return
        if self.stores.weights is not None:
            self.close()
            self._open_queues(self.job.policy.overlap)
        layers = self.model.layers
        self.stores.weights = WeightStore(
            self.device,
            self.dtype,
            [layer.streamed for layer in layers],
            {short: tensor for layer in layers for short, tensor in layer.gathered.items()},
            self.job.weights,
            self.model.source,
            self._io,
            self._queues["weights"],
            self._make_file,
            self.direct_reads,
            self.progress,
        )
        self._tiers = dict(self.job.weights)

    def _layout(self, batch: int, prompt_len: int):
        return self.job.rule.layout(self.model.spec, self.dtype, batch, prompt_len, self.job.workload.gen_len)

    def _make_stores(self) -> None:
        job, longest = self.job, self.job.workload.longest
        sizes = batch_sizes(len(job.workload.prompt_lens), job.policy)
        self._io.large_prefetches = "disk" not in job.cache.values()
        self.stores.caches = KVStore(
            self.device,
            [self._layout(size, longest) for size in sizes],
            job.cache,
            self._io,
            self._queues["cache"],
            self._queues["store"],
            self._make_file,
            job.policy.cpu_cache_compute,
        )
        token = self.model.spec.hidden * self.dtype.itemsize
        self.stores.activations = ActivationStore(
            self.device,
            job.activations,
            [size * longest * token for size in sizes],
            micro_tokens(job.policy, longest, sizes[0]) * token,
            self._io,
            self._queues["activations"],
            self._queues["store"],
            self._make_file,
        )
