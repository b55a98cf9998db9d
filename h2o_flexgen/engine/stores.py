"""What the engine must know of a job, and the stores that hold the job's data."""

from __future__ import annotations

from dataclasses import dataclass

from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.kv_cache import CacheRule, KVLayout
from h2o_flexgen.offload.activations import ActivationStore
from h2o_flexgen.offload.kv_store import KVStore
from h2o_flexgen.offload.transport import Transport
from h2o_flexgen.offload.weights import WeightStore
from h2o_flexgen.policy import Policy
from h2o_flexgen.sizes import Workload, batch_sizes, micro_tokens


@dataclass(frozen=True)
class Job:
    """What to run, and on which tiers.

    Attributes:
        weights, cache, activations: the tier of each tensor by name, of each KV block by (layer, batch), and of each
            batch's hidden states, as `planning.placement` spreads them.
        planned: bytes of each tier that the plan counts; predicted: times by the cost model, for the report.
        ram: bytes that this process may hold; above them prefill gives gaps in the heap back within a layer too.
    """

    workload: Workload
    rule: CacheRule
    policy: Policy
    weights: dict[str, str]
    cache: dict[tuple[int, int], str]
    activations: list[str]
    planned: dict[str, int]
    ram: float
    predicted: dict[str, float | str] | None = None


class Stores:
    """The stores of a running job. `weights` outlive it, caches and activations do not.

    Raises:
        UserError: the disk is full, or RAM that cannot be pinned.
    """

    def __init__(self, model: LoadedModel, job: Job, weights: WeightStore, transport: Transport):
        self.model, self.job, self.weights = model, job, weights
        self.transport, self.device = transport, transport.device
        self._pinned = self.device.pinned_count()
        longest = job.workload.longest
        sizes = batch_sizes(len(job.workload.prompt_lens), job.policy)
        token = model.spec.hidden * model.dtype.itemsize
        layouts = [self.layout(size, longest) for size in sizes]
        micro_bytes = micro_tokens(job.policy, longest, sizes[0]) * token
        transport.io.large_prefetches = "disk" not in job.cache.values()
        self.caches = KVStore(transport, layouts, job.cache, job.policy.cpu_cache_compute)
        batch_bytes = [size * longest * token for size in sizes]
        self.activations = ActivationStore(transport, job.activations, batch_bytes, micro_bytes)

    def layout(self, batch: int, longest: int) -> KVLayout:
        """The KV blocks of so many sequences, whose prompts have up to `longest` tokens."""
        return self.job.rule.layout(self.model.spec, self.model.dtype, batch, longest, self.job.workload.gen_len)

    def close(self) -> None:
        """Give back all but the weights."""
        for store in (self.caches, self.activations):
            if store.file is not None:
                store.file.close()
                store.file.path.unlink(missing_ok=True)
        self.device.unpin(self._pinned)
