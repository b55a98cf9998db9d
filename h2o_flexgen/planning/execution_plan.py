"""The decision of the planner, which the engine runs: plain data below both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from h2o_flexgen.kv_cache import CacheRule
from h2o_flexgen.planning.budget import BudgetPoint
from h2o_flexgen.planning.cost import Prediction
from h2o_flexgen.planning.memory import MemoryPlan
from h2o_flexgen.planning.placement import Placement
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.policy import KVBudget, Policy
from h2o_flexgen.storage.decoded import Decoding


@dataclass(frozen=True)
class ExecutionPlan:
    """A policy for a workload, and everything that follows from it.

    Attributes:
        workload: what the policy was planned for.
        kv_budget: None for the full cache; never "auto".
        rule: the cache rule of `kv_budget`.
        placement: the tier of every tensor and KV block.
        plan: the bytes needed on each tier. A policy that the user gave may need more than there is (`plan.check`).
        prediction: seconds of each phase; None while this machine has not been measured.
        compress_cache, compress_weight: as for `LLM`, but never "auto".
        decoding: how quantised matrices are decoded while they are loaded, if the device has room for all of them in
            the form that matmuls read; None if they stay as stored.
        shared_tokens: tokens of a prefix shared by prompts for which the plan has room.
        least_free: free places that the scheduler waits for before rows enter beside running ones.
        predict: output lengths, and the fraction of prompt tokens that were shared -> the prediction; None without one.
        curve: every KV budget and format that was tried for an "auto", with its throughput; else empty.
    """

    workload: Workload
    policy: Policy
    kv_budget: KVBudget | None
    rule: CacheRule
    placement: Placement
    plan: MemoryPlan
    prediction: Prediction | None = None
    compress_cache: str | None = None
    compress_weight: str | None = None
    decoding: Decoding | None = None
    shared_tokens: int = 0
    least_free: int = 1
    predict: Callable[..., Prediction] | None = None
    curve: list[BudgetPoint] = field(default_factory=list)
