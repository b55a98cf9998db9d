"""The stores that hold a job's data, and the transfers that start ahead of the step that needs them."""

from __future__ import annotations

from h2o_flexgen.compression import cache_format
from h2o_flexgen.engine.batch import Batch
from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.engine.schedule import Step, ZigZag
from h2o_flexgen.kv_cache import KVLayout
from h2o_flexgen.offload.activations import ActivationStore
from h2o_flexgen.offload.kv_store import Key, KVStore
from h2o_flexgen.offload.transport import Transport
from h2o_flexgen.offload.weights import WeightStore
from h2o_flexgen.sizes import batch_sizes, micro_tokens


class Stores:
    """The stores of a running job. `weights` outlive it, caches and activations do not.

    Args:
        job: a `planning.planner.Choice`.

    Raises:
        UserError: the disk is full, or RAM that cannot be pinned.
    """

    def __init__(self, model: LoadedModel, job, weights: WeightStore, transport: Transport):
        self.model, self.job, self.weights = model, job, weights
        self.transport, self.device = transport, transport.device
        self._pinned = self.device.pinned_count()
        longest = job.workload.longest
        sizes = batch_sizes(len(job.workload.prompt_lens), job.policy)
        token = model.spec.hidden * model.dtype.itemsize
        self.rules = [job.rule.in_layer(layer) for layer in range(model.spec.layers)]
        self._layouts = self.layouts([(size, longest) for size in sizes])
        micro_bytes = micro_tokens(job.policy.prefill_tokens, longest, sizes[0]) * token
        transport.io.large_prefetches = "disk" not in job.placement.cache.values()
        self.caches = KVStore(transport, self._layouts, job.placement.cache, job.policy.cpu_cache_compute)
        batch_bytes = [size * longest * token for size in sizes]
        self.activations = ActivationStore(transport, job.placement.activations, batch_bytes, micro_bytes)

    def layouts(self, batches: list[tuple[int, int]]) -> dict[Key, KVLayout]:
        """The KV blocks of batches, (sequences, tokens of the longest prompt) of each."""
        form = cache_format(self.job.compress_cache, self.model.dtype, self.model.spec.head_dim)
        return self.job.rule.layouts(self.model.spec, form, batches, self.job.workload.gen_len)

    def clear_caches(self) -> None:
        """Begin with caches that hold nothing, for streams."""
        self.caches.begin_block(self._layouts)
        for layer, k in self.job.placement.cache:
            self.rules[layer].clear(self.caches.blank(layer, k))
            self.caches.store_all(layer, k, self.job.workload.longest)
        self.caches.drain()

    def close(self) -> None:
        """Give back all but the weights."""
        for store in (self.caches, self.activations):
            if store.file is not None:
                store.file.close()  # and so free its space
        self.device.unpin(self._pinned)


class Prefetcher:
    """Starts the transfers of one block ahead of compute: weights, KV blocks, hidden states.

    Args:
        is_last: no block follows, so that no weights are fetched at its end.
    """

    def __init__(self, stores: Stores, schedule: ZigZag, batches: dict[int, Batch], is_last: bool):
        self.stores, self.schedule, self.batches, self.is_last = stores, schedule, batches, is_last
        self.last = schedule.num_layers - 1
        blocks = [(j, k) for j in range(1, self.last) for k in batches if stores.caches.streams(j - 1, k)]
        self._steps = schedule.cache_steps(blocks, 0 if any(b.is_stream for b in batches.values()) else 1)
        self._next_step = next(self._steps, None)  # whose KV block is fetched next

    def weights(self, i: int, j: int) -> None:
        """Those from layer j on, as far as the two staging buffers reach."""
        groups = self.stores.weights.groups
        left = [[layer for layer in group if layer >= j] for group in groups if group[-1] >= j]
        at_end = self.is_last and i + 1 == self.schedule.num_tokens
        for group in (left + ([] if at_end else groups))[:2]:
            for layer in group:
                self.stores.weights.prefetch(layer)

    def caches(self, step: Step) -> None:
        """The KV blocks of this step and of those that follow, while staging buffers are free."""
        while self._next_step is not None:
            i, j, k = self._next_step
            needed = self._next_step >= step and k in self.schedule.batches
            if needed and not self.stores.caches.prefetch(j - 1, k, self.held(j, k, i)):
                return
            self._next_step = next(self._steps, None)

    def hidden(self, j: int, k: int, m: int) -> None:
        """What prefill needs after micro-batch m of batch k in layer j, if it has been stored already."""
        following = [n for n in self.batches if n > k]
        if m + 1 < len(self.batches[k].micro):
            self.stores.activations.prefetch(k, m + 1)
        elif following:
            self.stores.activations.prefetch(following[0], 0)
        elif j < self.last:
            self.stores.activations.prefetch(next(iter(self.batches)), 0)

    def held(self, j: int, k: int, i: int) -> int:
        """Slots of a batch's cache in layer j that are in use before token step i."""
        return self.stores.rules[j - 1].held(self.batches[k].longest, i)

    def finish(self, k: int) -> None:
        """A batch leaves the schedule: fetch nothing more for it."""
        self.schedule.finish(k)
        for layer in range(self.last - 1):
            self.stores.caches.drop(layer, k)
