"""Which keys and values of a sequence are kept: one rule per file, and their registry."""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.errors import UserError
from h2o_flexgen.kv_cache.budget_rule import BudgetRule
from h2o_flexgen.kv_cache.decayed import DecayedCache
from h2o_flexgen.kv_cache.full import FullCache, NoCache
from h2o_flexgen.kv_cache.heavy_hitter import HeavyHitterCache, HeavyOnlyCache
from h2o_flexgen.kv_cache.layers import LayerLosses
from h2o_flexgen.kv_cache.layout import KVLayout
from h2o_flexgen.kv_cache.mean import MeanAttentionCache
from h2o_flexgen.kv_cache.random import RandomCache
from h2o_flexgen.kv_cache.recent import RecentCache, SinkCache
from h2o_flexgen.kv_cache.rule import CacheRule
from h2o_flexgen.kv_cache.smoothed import SmoothedCache
from h2o_flexgen.kv_cache.snapkv import SnapKVCache
from h2o_flexgen.kv_cache.sparse_transformer import (
    FixedColumnsCache,
    FixedColumnsHeavyHitterCache,
    StridedCache,
    StridedHeavyHitterCache,
)
from h2o_flexgen.kv_cache.value_norm import ValueNormCache
from h2o_flexgen.models.rope import rollable
from h2o_flexgen.models.spec import ModelSpec
from h2o_flexgen.policy import KVBudget

__all__ = ["RULES", "CacheRule", "FullCache", "HeavyHitterCache", "KVLayout", "NoCache", "SnapKVCache"]
__all__ += ["ValueNormCache", "check_rule", "layer_losses", "make_rule", "rule_for"]

#: the rules that a KV budget may name
_BUDGET_RULES = (
    HeavyHitterCache,
    SmoothedCache,
    MeanAttentionCache,
    DecayedCache,
    ValueNormCache,
    HeavyOnlyCache,
    SnapKVCache,
    RecentCache,
    SinkCache,
    StridedCache,
    StridedHeavyHitterCache,
    FixedColumnsCache,
    FixedColumnsHeavyHitterCache,
    RandomCache,
)
#: enough slots for the options of any rule
_PLENTY = 1 << 30
#: by name
RULES: dict[str, type[BudgetRule]] = {rule.name: rule for rule in _BUDGET_RULES}


def make_rule(text: str, heavy: int, recent: int) -> BudgetRule:
    """The rule that a KV budget names, as "name" or "name:option=value:option=value". Raises UserError for an unknown
    name or option, an invalid value, or too few slots for the options."""
    name, *given = text.split(":")
    if name not in RULES:
        raise UserError(f"unknown `kv_rule` {name!r}; known: {', '.join(RULES)}")
    known = RULES[name].options()
    options = {}
    for each in given:
        option, _, value = each.partition("=")
        try:
            options[option] = type(known[option])(value)
        except (KeyError, ValueError):
            defaults = ", ".join(f"{option}={value}" for option, value in known.items())
            raise UserError(f"`kv_rule` {name}: cannot take the option {each!r}; known: {defaults}") from None
    return RULES[name](heavy, recent, **options)


def layer_losses(text: str) -> LayerLosses | None:
    """The file that the option `layers` of a rule names, read; None without that option. Raises UserError as
    `make_rule`, for any number of slots, or if the file cannot be used."""
    rule = make_rule(text, _PLENTY, _PLENTY)
    return LayerLosses.from_file(rule.layers) if rule.layers else None


def check_rule(text: str) -> None:
    """Raises UserError, as `layer_losses`, for a rule that no KV budget may name."""
    layer_losses(text)


def rule_for(budget: KVBudget | None, prompt_len: int, gen_len: int, spec: ModelSpec) -> CacheRule:
    """The rule for a job with a KV budget; None stands for a full cache.

    Args:
        prompt_len: tokens of the job's longest prompt; gen_len: the most tokens of an output.

    Raises:
        UserError: as `make_rule`; or the budget amounts to no slot, a layer gets too few, positions cannot roll, or the
            slots leave no position for new tokens.
    """
    if budget is None:
        return NoCache() if gen_len == 1 else FullCache()
    # slots beyond the model's positions could never be filled
    heavy, recent = (min(slots, spec.positions) for slots in budget.slots(prompt_len))
    rule = replace(make_rule(budget.rule, heavy, recent), groups=spec.groups)
    if rule.layers:
        known = LayerLosses.from_file(rule.layers)
        if len(known.losses) != spec.layers:
            raise UserError(f"`kv_rule`: {rule.layers} is for a model of {len(known.losses)} layers, not {spec.layers}")
        rule = replace(rule, by_layer=known.slots(rule.heavy, rule.recent, prompt_len + gen_len))
    try:
        largest = max(rule.in_layer(layer).slots for layer in range(spec.layers))
    except UserError as e:
        raise UserError(f"{rule.layers} gives a layer too few slots: {e}") from None
    if budget.position_rolling:
        if rule.growth != "fixed":
            raise UserError(f"`position_rolling`: the `kv_rule` {budget.rule} keeps every generated token")
        if largest >= spec.context:
            room = f"leave no room for new tokens in the model's {spec.context} positions"
            raise UserError(f"`position_rolling`: {largest} slots {room}: give fewer")
        rule = replace(rule, rope=rollable(spec))
    return NoCache() if gen_len == 1 else rule
