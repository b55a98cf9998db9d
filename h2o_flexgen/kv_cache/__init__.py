"""Which keys and values of a sequence are kept: one rule per file, and their registry."""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.errors import UserError
from h2o_flexgen.kernels.attention import PLAIN
from h2o_flexgen.kv_cache.budget_rule import BudgetRule
from h2o_flexgen.kv_cache.decayed import DecayedCache
from h2o_flexgen.kv_cache.full import FullCache, NoCache
from h2o_flexgen.kv_cache.heavy_hitter import HeavyHitterCache, HeavyOnlyCache
from h2o_flexgen.kv_cache.layers import ByHead, HeadLosses
from h2o_flexgen.kv_cache.layout import KVLayout
from h2o_flexgen.kv_cache.mean import MeanAttentionCache
from h2o_flexgen.kv_cache.random import RandomCache
from h2o_flexgen.kv_cache.recent import RecentCache, SinkCache
from h2o_flexgen.kv_cache.rule import CacheRule, LayerAttention
from h2o_flexgen.kv_cache.smoothed import SmoothedCache
from h2o_flexgen.kv_cache.snapkv import SnapKVCache
from h2o_flexgen.kv_cache.sparse_transformer import (
    FixedColumnsCache,
    FixedColumnsHeavyHitterCache,
    StridedCache,
    StridedHeavyHitterCache,
)
from h2o_flexgen.kv_cache.value_norm import ValueNormCache
from h2o_flexgen.kv_cache.voted import VotedCache
from h2o_flexgen.models.spec import ModelSpec
from h2o_flexgen.policy import KVBudget

__all__ = ["RULES", "CacheRule", "FullCache", "HeavyHitterCache", "KVLayout", "NoCache", "SnapKVCache"]
__all__ += ["ValueNormCache", "check_rule", "head_losses", "make_rule", "rule_for"]

#: the rules that a KV budget may name
_BUDGET_RULES = (
    HeavyHitterCache,
    SmoothedCache,
    MeanAttentionCache,
    VotedCache,
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


def option_layers(text: str) -> str:
    """The option `layers` of a rule. Raises UserError as `make_rule`, for any number of slots."""
    return make_rule(text, _PLENTY, _PLENTY).layers


def head_losses(text: str) -> HeadLosses | None:
    """The file that the option `layers` of a rule names, read; None if it names none. Raises UserError as
    `make_rule`, for any number of slots, or if the file cannot be used."""
    layers = option_layers(text)
    return HeadLosses.from_file(layers) if names_file(layers) else None


def check_rule(text: str) -> None:
    """Raises UserError, as `head_losses`, for a rule that no KV budget may name."""
    head_losses(text)


def rule_for(budget: KVBudget | None, prompt_len: int, gen_len: int, spec: ModelSpec) -> CacheRule:
    """The rule for a job with a KV budget; None stands for a full cache.

    Args:
        prompt_len: tokens of the job's longest prompt; gen_len: the most tokens of an output.

    Raises:
        UserError: as `make_rule`; or the budget amounts to no slot, a layer gets too few, positions cannot roll, or the
            slots leave no position for new tokens.
    """
    if budget is None:
        found = _with_attention(FullCache(), spec, prompt_len + gen_len - 1)
        return NoCache(attention=found.attention) if gen_len == 1 else found
    # slots beyond the model's positions could never be filled
    heavy, recent = (min(slots, spec.positions) for slots in budget.slots(prompt_len))
    rule = make_rule(budget.rule, heavy, recent)
    if budget.position_rolling and rule.growth != "fixed":
        raise UserError(f"`position_rolling`: the `kv_rule` {budget.rule} keeps every generated token")
    rule = _with_attention(rule, spec, prompt_len + gen_len - 1, budget.position_rolling)
    rule = replace(rule, by_head=_by_head(budget, rule, budget.text_len(prompt_len, gen_len), spec))
    try:
        rules = [rule.in_layer(layer) for layer in range(spec.layers)]
    except UserError as e:
        who = "`kv_rule`: `layers` gives a layer" if rule.by_head else "the model's sliding window leaves a layer"
        raise UserError(f"{who} too few slots: {e}") from None
    if budget.position_rolling:
        largest = max(each.slots for each in rules)
        if largest >= spec.positions:
            room = f"leave no room for new tokens in the model's {spec.positions} positions"
            raise UserError(f"`position_rolling`: {largest} slots {room}: give fewer")
    return NoCache(attention=rule.attention) if gen_len == 1 else rule


def names_file(layers: str) -> bool:
    """Whether the option `layers` of a rule is a file."""
    return layers not in ("", "none")


def _by_head(budget: KVBudget, rule: BudgetRule, length: int, spec: ModelSpec) -> ByHead:
    """The slots of each KV head for texts of up to `length` tokens; empty if all have the same. Raises UserError if the
    budget or its file is of a model of another shape."""
    found = budget.by_head
    if found is None:
        found = ()
        if names_file(rule.layers):
            found = HeadLosses.from_file(rule.layers).slots(rule.slots, length, spec.windows)
    if found and len(found) != spec.layers:
        who = rule.layers or "the KV budget"
        raise UserError(
            f"`kv_rule`: {who} is for a model of {len(found)} layers, not {spec.layers}: "
            "a policy file with slots of KV heads is for one model"
        )
    return tuple(_of_layer(slots, rule, spec.at(layer)) for layer, slots in enumerate(found))


def _of_layer(slots: tuple[int, ...], rule: BudgetRule, spec: ModelSpec) -> tuple[int, ...]:
    """The slots of each head of a layer. Raises UserError if they are of another number of heads."""
    heads = spec.kv_heads
    if len(slots) not in (1, heads):
        who = rule.layers or "the KV budget"
        raise UserError(f"`kv_rule`: {who} is for a model of {len(slots)} KV heads a layer, not {heads}")
    if rule.needs_equal_heads:
        slots = (sum(slots) // len(slots),)
    return tuple(min(n, spec.positions) for n in slots) * (heads // len(slots))


def _with_attention(rule: CacheRule, spec: ModelSpec, tokens: int, rolling: bool = False) -> CacheRule:
    """The rule for the attention of a model's layers. `tokens`: of the longest text; where caches grow with it, a
    window that holds all of it is left out. Raises UserError if positions cannot roll."""
    layers = [LayerAttention.of(spec.at(layer), rolling) for layer in range(spec.layers)]
    if rule.growth == "append":
        layers = [each._replace(softmax=each.softmax.within(tokens)) for each in layers]
    first = layers[0]
    own = () if set(layers) == {first} and first.softmax == PLAIN else tuple(layers)
    if isinstance(rule, BudgetRule):
        rule = replace(rule, groups=first.groups, rope=first.rope)
    return replace(rule, attention=own)
