"""What the engine must know of a job, and the stores that hold the job's data."""

from __future__ import annotations

from dataclasses import dataclass

from h2o_flexgen.kv_cache import CacheRule
from h2o_flexgen.offload.activations import ActivationStore
from h2o_flexgen.offload.kv_store import KVStore
from h2o_flexgen.offload.weights import WeightStore
from h2o_flexgen.policy import TIERS, Policy
from h2o_flexgen.sizes import Workload


@dataclass(frozen=True)
class Job:
    """What to run, and on which tiers.

    Attributes:
        weights, cache, activations: the tier of each tensor by name, of each KV block by (layer, batch), and of each
            batch's hidden states, as `planning.placement` spreads them.
        planned: bytes of each tier that the plan counts; predicted: times by the cost model, for the report.
        ram: bytes that this process may hold; above them prefill gives gaps in the heap back within a layer too.
    """

    rule: CacheRule
    policy: Policy
    weights: dict[str, str]
    cache: dict[tuple[int, int], str]
    activations: list[str]
    workload: Workload
    planned: dict[str, int]
    predicted: dict[str, float | str] | None = None
    ram: float = float("inf")

    @classmethod
    def of(cls, choice, workload: Workload) -> Job:
        """What a `planning.planner.Choice` comes to for the engine."""
        placed, plan = choice.placement, choice.plan
        return cls(
            choice.rule,
            choice.policy,
            placed.weights,
            placed.cache,
            placed.activations,
            workload,
            planned={tier: plan.needed(tier) for tier in TIERS},
            predicted=None if choice.prediction is None else choice.prediction.of_job(),
            ram=plan.ram,
        )


@dataclass
class Stores:
    """The stores of a job. Whoever needs one looks it up in this object: an exception that is kept keeps the objects of
    its traceback too, but not the stores that were taken out of it."""

    weights: WeightStore | None = None
    caches: KVStore | None = None
    activations: ActivationStore | None = None
