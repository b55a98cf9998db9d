"""What of a sequence's keys and values is kept: the full cache, and the heavy hitters of H2O."""

from __future__ import annotations

from h2o_flexgen.kv_cache.full import FullCache, NoCache
from h2o_flexgen.kv_cache.heavy_hitter import HeavyHitterCache
from h2o_flexgen.kv_cache.layout import KVLayout
from h2o_flexgen.kv_cache.rule import CacheRule
from h2o_flexgen.policy import KVBudget
from h2o_flexgen.sizes import Workload

__all__ = ["RULES", "CacheRule", "FullCache", "HeavyHitterCache", "KVLayout", "NoCache", "rule_for"]

#: every rule by its name
RULES = {rule.name: rule for rule in (FullCache, HeavyHitterCache)}


def rule_for(budget: KVBudget | None, workload: Workload, positions: int) -> CacheRule:
    """The rule of a KV budget, None for a full cache; slots beyond the model's `positions` could never be filled."""
    if workload.gen_len == 1:
        return NoCache()
    if budget is None:
        return FullCache()
    return HeavyHitterCache(*(min(slots, positions) for slots in budget.slots(workload.longest)))
