"""The stores that hold a job's data, and the transfers that start ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from h2o_flexgen.engine.batch import ChunkLimits
from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.engine.scheduler import Pass
from h2o_flexgen.formats.forms import cache_format
from h2o_flexgen.kernels.experts import Routing
from h2o_flexgen.machine.device import device_names
from h2o_flexgen.models.spec import Layer, ModelSpec, units_of
from h2o_flexgen.planning import workload
from h2o_flexgen.planning.execution_plan import ExecutionPlan
from h2o_flexgen.planning.placement import of_span
from h2o_flexgen.planning.workload import batch_sizes, group_rows, micro_tokens, read_share
from h2o_flexgen.storage.activations import ActivationStore
from h2o_flexgen.storage.kv_store import KVStore
from h2o_flexgen.storage.weights import WeightStore


class Use(NamedTuple):
    """A use of a KV block; uses sort in the order in which they happen."""

    passes: int  # from now; 0 is the current pass
    layer: int
    batch: int


class Part:
    """The part of a model that lies on one device, with the stores of a job there.

    Args:
        layers: of the device, the embedding before the first decoder layer and the head behind the last.
        micro_bytes: as for `ActivationStore`.

    Attributes:
        span: its decoder layers.
    """

    def __init__(
        self,
        job: ExecutionPlan,
        span: range,
        layers: list[Layer],
        weights: WeightStore,
        layouts: dict,
        batch_bytes: list[int],
        micro_bytes: int,
    ):
        self.span = span
        self.layers = layers
        self.weights = weights
        self.transport = weights.transport
        self.device = weights.device
        self._pinned = self.device.pinned_count()
        placement = job.placement
        self.caches = KVStore(self.transport, layouts, placement.cache_of(span), job.policy.cpu_cache_compute)
        self.activations = ActivationStore(self.transport, placement.activations, batch_bytes, micro_bytes)

    def close(self) -> None:
        """Free everything but the weights."""
        for store in (self.caches, self.activations):
            if store.file is not None:
                store.file.close()  # which frees its space
        self.device.unpin(self._pinned)


class Stores:
    """The stores of a running job. `weights`, those on each device, outlive it; caches and activations do not.

    Args:
        is_stream: rows stay, and each prompt continues the text that its cache holds.

    Attributes:
        parts: of the model, in the order in which a pass goes through them.

    Raises:
        UserError: the disk is full, or RAM cannot be pinned.
    """

    def __init__(
        self,
        model: LoadedModel,
        job: ExecutionPlan,
        weights: list[WeightStore],
        is_stream: bool = False,
    ):
        self.model = model
        self.job = job
        longest = job.workload.longest
        sizes = batch_sizes(len(job.workload.prompt_lens), job.policy)
        token = model.spec.state_width * model.dtype.itemsize
        self.rules = [job.rule.in_layer(layer) for layer in range(model.spec.layers)]
        self.has_cache = is_stream or job.workload.gen_len > 1
        self.is_stream = is_stream
        self.sizes = sizes
        self.limits = ChunkLimits(job.policy.prefill_tokens, group_rows(model.spec), workload.GROUP_ROWS)
        self.form = partial(cache_format, job.compress_cache, model.dtype)
        layouts = job.rule.layouts(model.spec, self.form, [(size, longest) for size in sizes], job.workload.gen_len)
        micro_bytes = micro_tokens(job.policy.prefill_tokens, longest, sizes[0]) * token
        weights[0].transport.io.large_prefetches = "disk" not in job.placement.cache.values()
        batch_bytes = [size * longest * token for size in sizes]
        self.parts = [
            Part(job, span, of_span(span, model.layers), each, layouts, batch_bytes, micro_bytes)
            for span, each in zip(job.placement.spans, weights, strict=True)
        ]

    @property
    def device(self) -> str:
        """The names of all devices."""
        return device_names([part.device for part in self.parts])

    def open(self, k: int, longest: int, gen_len: int) -> None:
        """Lay out the caches of an empty batch for prompts of up to `longest` tokens, and outputs of `gen_len`."""
        size = (self.sizes[k], longest)
        found = self.job.rule.layouts(self.model.spec, self.form, [size], gen_len)
        for part in self.parts:
            part.caches.begin({(layer, k): found[layer, 0] for layer in part.span})

    def slots(self, prompt_len: int, gen_len: int) -> tuple[int, ...]:
        """The slots that a row needs, in each kind of layer."""
        return tuple(sum(rule.segments(prompt_len, gen_len)) for rule in dict.fromkeys(self.rules))

    def clear_caches(self) -> None:
        """Start with empty caches, for streams."""
        for k in range(len(self.sizes)):
            self.open(k, self.job.workload.longest, self.job.workload.gen_len)
        for part in self.parts:
            for layer, k in part.caches.blocks:
                self.rules[layer].clear(part.caches.blank(layer, k))
                part.caches.store_all(layer, k, self.job.workload.longest)
        self.drain()

    def drain(self) -> None:
        """Wait for all transfers of caches and raise what failed."""
        for part in self.parts:
            part.caches.drain()

    def close(self) -> None:
        """Free everything but the weights."""
        for part in self.parts:
            part.close()


class Prefetcher:
    """Starts transfers to one device ahead of compute: weights, KV blocks, hidden states."""

    def __init__(self, part: Part, spec: ModelSpec, has_cache: bool):
        self.part = part
        self.spec = spec
        self.has_cache = has_cache
        self._units = units_of(part.layers)
        self._uses: deque[Use] = deque()  # of KV blocks that must be staged

    def begin(self, pass_: Pass, cached_len: Callable[[int, int], int]) -> None:
        """Begin the next pass, and prefetch its first KV blocks and weights. `cached_len`: slots of a KV block, by
        layer and batch, that are in use after it."""
        self.pass_ = pass_
        self._cached_lens = cached_len
        self._homes = [chunk.home for chunk in pass_.chunks]
        self._reads_few = read_share(self.spec, sum(chunk.size for chunk in pass_.chunks)) < 1
        self._uses.clear()
        if self.has_cache:
            self._begin_caches()
        self.weights(0, ())

    def _begin_caches(self) -> None:
        pass_ = self.pass_
        caches = self.part.caches
        batches = pass_.batches
        # rows that are not known to end are needed again
        running = [] if pass_.is_last else [k for k, batch in batches.items() if not batch.will_end]
        new = [k for k, batch in batches.items() if batch.opens is not None]
        layers = self.part.span
        self._uses += [Use(0, j, k) for j in layers for k in batches if caches.is_staged(j, k, is_new=k in new)]
        usable = {(use.layer, use.batch) for use in takewhile(self._is_loading, self._uses)}
        for key, block in caches.blocks.items():
            if block.loading is not None and key not in usable:  # its buffer is for those that are needed first
                caches.drop(*key)
        self._uses += [Use(1, j, k) for j in layers for k in running if caches.is_staged(j, k)]
        self.caches(-1, 0)  # from the beginning

    def _is_loading(self, use: Use) -> bool:
        """Whether a KV block of this pass was prefetched during the previous one."""
        block = self.part.caches.blocks[use.layer, use.batch]
        return self.pass_.batches[use.batch].opens is None and block.loading is not None

    def weights(self, stage: int, routed: Collection[Routing]) -> None:
        """Those from a stage on, as far as the two staging buffers reach; a head in slices needs none of them. Where
        only some experts are read, those of a layer that is not `routed` yet, and what comes after them, must wait."""
        groups = self.part.weights.groups
        last = len(self._units) - 1
        is_sliced = not groups or groups[-1][-1] != last
        if is_sliced and stage == last - 1:  # before the layers of the next pass, which are needed later
            self.part.weights.prefetch(last)
        left = [group for group in groups if group[-1] >= stage]
        following = [] if self.pass_.is_last else groups
        for n, group in enumerate([*left, *following][:2]):
            for number in group:
                if number >= stage or n >= len(left):
                    if self._reads_few and self._units[number].experts and not self._is_routed(number, stage, routed):
                        return
                    self.part.weights.prefetch(number, self.wanted(number, routed))

    def _is_routed(self, number: int, stage: int, routed: Collection[Routing]) -> bool:
        """Whether the tokens are known that go through the experts of unit `number`: those of the current layer's."""
        between = self._units[stage : number + 1]
        return bool(routed) and bool(between) and all(unit.experts for unit in between)

    def wanted(self, number: int, routed: Collection[Routing]) -> set[int] | None:
        """Of a unit of experts those that some token goes through, counted from its first one; None: all are read."""
        experts = self._units[number].experts
        if not experts or not self._reads_few:
            return None
        return {expert - experts.start for routing in routed for expert in routing.experts if expert in experts}

    def caches(self, j: int, k: int) -> None:
        """The KV blocks after that of layer j and batch k, which has been used, while staging buffers are free."""
        used = Use(0, j, k)
        while self._uses:
            if self._uses[0] > used and not self._prefetched(self._uses[0], used):
                return
            self._uses.popleft()

    def _prefetched(self, use: Use, used: Use) -> bool:
        """Whether the transfer for a use has begun, after `used`."""
        if use.passes and use > used._replace(passes=use.passes):  # this pass still needs the block
            return False
        if not use.passes and self.pass_.batches[use.batch].opens is not None:  # it will need a staging buffer
            return False
        if not use.passes and self._is_loading(use):
            return True
        cached_len = self._cached_lens(use.layer, use.batch) + use.passes
        return self.part.caches.prefetch(use.layer, use.batch, cached_len)

    def hidden(self, n: int, is_head: bool) -> None:
        """The hidden states that are needed after those of chunk n, if they have been stored already; after those of
        the last chunk the first ones of the next stage, unless this is the head."""
        homes = [home for home in self._homes[n + 1 :] if home] or [home for home in self._homes if home]
        if homes and (not is_head or any(self._homes[n + 1 :])):
            self.part.activations.prefetch(homes[0].batch, homes[0].number)
