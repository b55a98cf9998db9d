"""The decision of the planner, which the engine runs: plain data below both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from h2o_flexgen.formats.forms import Form
from h2o_flexgen.kv_cache import CacheRule
from h2o_flexgen.models.spec import Layer
from h2o_flexgen.planning.budget import BudgetPoint
from h2o_flexgen.planning.cost import Prediction
from h2o_flexgen.planning.memory import MemoryPlan
from h2o_flexgen.planning.placement import Placement
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.policy import KVBudget, Policy


@dataclass(frozen=True)
class ExecutionPlan:
    """A policy for a workload, and everything that follows from it.

    Attributes:
        workload: what the policy was planned for.
        kv_budget: None for the full cache; never "auto".
        rule: the cache rule of `kv_budget`.
        placement: the tier of every tensor and KV block.
        layers: the tensors of each layer in these forms, where the head may be a copy.
        forms: of every tensor by name. If the device has room for all weights as matmuls read them, quantised matrices
            are decoded when they are loaded.
        plan: the bytes needed on each tier. A policy that the user gave may need more than there is (`plan.check`).
        prediction: seconds of each phase; None while this machine has not been measured.
        compress_cache, compress_weight: as for `LLM`, but never "auto".
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
    layers: list[Layer]
    forms: dict[str, Form]
    plan: MemoryPlan
    prediction: Prediction | None = None
    compress_cache: str | None = None
    compress_weight: str | None = None
    shared_tokens: int = 0
    least_free: int = 1
    predict: Callable[..., Prediction] | None = None
    curve: list[BudgetPoint] = field(default_factory=list)

    def devices(self) -> list[dict]:
        """What each of several devices holds, as plain data; nothing for a single one."""
        return [
            {"device": name, "first_layer": span.start, "layers": len(span), "planned_bytes": self.plan.needed(name)}
            for name, span in zip(self.plan.pools, self.placement.spans)
        ]
