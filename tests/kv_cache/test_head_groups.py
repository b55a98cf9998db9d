"""Heads of a layer with different numbers of slots: each drops what it would drop alone."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams, UserError
from h2o_flexgen.formats.forms import cache_format
from h2o_flexgen.kv_cache import make_rule, rule_for
from h2o_flexgen.kv_cache.head_groups import HeadGroups
from h2o_flexgen.kv_cache.rule import Rows
from h2o_flexgen.models.spec import Rope

pytest_plugins = ["command_tools"]

BY_HEAD = ((4, 9), (9, 4), (12, 12), (4, 6), (8, 8), (5, 12))
LENGTHS = [30, 11, 24, 5]
GEN = 14
POLICIES = {
    "resident": Policy(4, 1),
    "places_taken_again": Policy(1, 2),
    "cache_in_ram": Policy(1, 2, (100, 0, 0, 100, 100, 0)),
    "cache_on_disk": Policy(2, 2, (100, 0, 0, 0, 100, 0)),
    "attention_in_ram": Policy(2, 2, (100, 0, 0, 100, 100, 0), cpu_cache_compute=True),
    "all_on_disk": Policy(2, 1, (0, 0, 0, 0, 0, 0), overlap=False),
}


def slots_of(model) -> tuple[tuple[int, ...], ...]:
    """Slots of each head, by layer."""
    oracle = model.oracle
    return tuple((each * 2)[:heads] for each, heads in zip(BY_HEAD, oracle.kv_heads_of))


def budget_of(model, rule: str) -> KVBudget:
    return KVBudget(hh_size=4, recent_size=4, rule=rule, by_head=slots_of(model))


@pytest.mark.parametrize("rule, cache", [("h2o", None), ("smoothed", "int8"), ("voted:window=4:pool=3", None)])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_tokens_are_those_of_the_oracle_on_every_tier(tiny, policy, rule, cache):
    model = tiny("llama")
    recents = tuple(tuple(round(n / 2) for n in layer) for layer in slots_of(model))
    heavies = tuple(tuple(n - r for n, r in zip(*each)) for each in zip(slots_of(model), recents))
    assert any(len({*layer}) > 1 for layer in slots_of(model))
    prompts = model.clear_cut_prompts(LENGTHS, GEN, [(heavies, recents, rule, cache)])
    arguments = dict(device="cpu", dtype="float32", compress_cache=cache, progress=False)
    with LLM(str(model.folder), policy, budget_of(model, rule), **arguments) as llm:
        found = llm.generate(prompts, SamplingParams(max_tokens=GEN, ignore_eos=True))
    expected = model.references(prompts, GEN, heavies, recents, rule, cache)
    assert [o.outputs[0].token_ids for o in found] == [trace.tokens for trace in expected]


@pytest.mark.parametrize("rule", ["h2o", "smoothed", "voted", "decayed", "mean:first=2"])
@pytest.mark.parametrize("cache", [None, "int8"])
@pytest.mark.parametrize("rolls", [False, True], ids=["fixed_positions", "rolling_positions"])
def test_groups_of_heads_with_as_many_slots_are_one_cache(rule, cache, rolls):
    """Bit by bit: a prompt, steps, and more text behind what is cached."""
    torch.manual_seed(0)
    B, KV, D = 2, 3, 16
    rope = Rope("default", 1e4, D, 64) if rolls else None
    one = make_rule(rule, 5, 4)
    one = type(one)(**{**vars(one), "groups": 2, "rope": rope})
    groups = HeadGroups((((0, 2), one), ((1,), one)))
    spec = type("Sizes", (), dict(kv_heads=KV, head_dim=D))
    form = cache_format(cache, torch.float32, D)
    caches = []
    for each in (one, groups):
        layout = each.layout(spec, form, B, 20, 20)
        kv = torch.zeros(layout.kv_bytes, dtype=torch.uint8)
        caches.append(layout.view(kv, torch.zeros(layout.meta_bytes, dtype=torch.uint8)))
        each.clear(caches[-1])

    def qkv(tokens: int) -> list[torch.Tensor]:
        return [torch.randn(B, heads, tokens, D) for heads in (2 * KV, KV, KV)]

    def same(found: list[torch.Tensor]) -> None:
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)

    lengths = torch.tensor([20, 13])
    inputs = qkv(20)
    same([each.prefill(cache, *inputs, Rows.prompts(lengths))[:, :, :13] for each, cache in zip((one, groups), caches)])
    for _ in range(6):
        step = qkv(1)
        found = [each.decode(cache, *step, Rows.steps(lengths, lengths)) for each, cache in zip((one, groups), caches)]
        same([context for context, _ in found])
        assert torch.equal(found[0][1], found[1][1])
        lengths = lengths + 1
    more = qkv(4)
    rows = Rows(lengths, torch.full((B,), 4), lengths + 4)
    contexts = []
    for each, cache in zip((one, groups), caches):
        past = each.past(cache, lengths, lengths, torch.float32)
        context, text = each.read(*more, rows, past, form)
        each.keep(cache, text)
        contexts.append(context)
    same(contexts)
    for part, heads in zip(caches[1].parts, caches[1].heads):
        assert torch.equal(caches[0].k[0][:, list(heads)], part.k[0])
        assert torch.equal(caches[0].position[:, list(heads)], part.position)


def test_slots_of_another_model_are_refused(tiny):
    spec = tiny("llama").oracle.model.config
    budget = KVBudget(hh_size=4, recent_size=4, by_head=((4, 4, 4),) * spec.num_hidden_layers)
    with LLM(str(tiny("llama").folder), kv_budget=budget, device="cpu", progress=False) as llm:
        with pytest.raises(UserError, match="is for a model of 3 KV heads a layer, not 2"):
            llm.generate([[5] * 40], SamplingParams(max_tokens=4))


def test_rules_that_need_equal_heads_get_their_mean(tiny):
    with LLM(str(tiny("llama").folder), device="cpu", progress=False) as llm:
        rule = rule_for(budget_of(tiny("llama"), "random"), 30, 14, llm.spec)
    assert rule.in_layer(0).slots == (4 + 9) // 2
