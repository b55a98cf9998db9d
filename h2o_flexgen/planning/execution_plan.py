"""What the planner decides and the engine runs: plain data."""

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
    """A policy for a workload, with all that follows from it: what the engine runs.

    Attributes:
        rule: the cache rule of `kv_budget`.
        compress_cache, compress_weight: as for `LLM`, and not "auto".
        decoding: how quantised matrices are decoded when they are loaded, as the device has room for all of them in the
            form that matmuls read; None where they stay as they are stored.
        plan: the bytes it needs. A policy that was given may need more than there is (`plan.check`).
        prediction: what it costs; None while this machine has not been measured.
        shared_tokens: the most that prompts share, so that what they share has room.
        least_free: places that are free before rows enter while others run.
        predict: lengths of outputs -> what it would cost with them.
        curve: where the KV budget or the format is "auto" the trade of slots and bits for throughput; else empty.
    """

    workload: Workload
    policy: Policy
    kv_budget: KVBudget | None
    rule: CacheRule
    placement: Placement
    plan: MemoryPlan
    prediction: Prediction | None
    compress_cache: str | None = None
    compress_weight: str | None = None
    decoding: Decoding | None = None
    shared_tokens: int = 0
    least_free: int = 1
    predict: Callable[..., Prediction] | None = None
    curve: list[BudgetPoint] = field(default_factory=list)
