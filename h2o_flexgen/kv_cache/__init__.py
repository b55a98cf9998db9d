"""What of a sequence's keys and values is kept: one rule a file, and their registry."""

from __future__ import annotations

from h2o_flexgen.errors import UserError
from h2o_flexgen.kv_cache.full import FullCache, NoCache
from h2o_flexgen.kv_cache.heavy_hitter import HeavyHitterCache
from h2o_flexgen.kv_cache.layout import KVLayout
from h2o_flexgen.kv_cache.rule import CacheRule, FixedRule
from h2o_flexgen.policy import KVBudget
from h2o_flexgen.sizes import Workload

__all__ = ["RULES", "CacheRule", "FullCache", "HeavyHitterCache", "KVLayout", "NoCache", "check_rule", "rule_for"]

#: every rule by its name
RULES = {rule.name: rule for rule in (FullCache, HeavyHitterCache)}


def check_rule(name: str) -> None:
    """Raises UserError unless a KV budget may name this rule."""
    known = [name for name, rule in RULES.items() if issubclass(rule, FixedRule)]
    if name not in known:
        raise UserError(f"unknown `kv_rule` {name!r}; known: {', '.join(known)}")


def rule_for(budget: KVBudget | None, workload: Workload, positions: int) -> CacheRule:
    """The rule of a KV budget, None for a full cache; slots beyond the model's `positions` could never be filled.

    Raises:
        UserError: the budget names a rule that is not known, or comes to no slot at all.
    """
    if budget is not None:
        check_rule(budget.rule)
    if workload.gen_len == 1:
        return NoCache()
    if budget is None:
        return FullCache()
    return RULES[budget.rule](*(min(slots, positions) for slots in budget.slots(workload.longest)))
