"""Masks must match real dropping to the last token: the tokens kept, and every log-probability."""

from __future__ import annotations

import json
from itertools import cycle

import pytest
import torch
import zoo
from analysis_tools import resident

from h2o_flexgen import LLM, KVBudget, Policy
from h2o_flexgen.analysis.simulation import masked_logprobs, simulate
from h2o_flexgen.kv_cache import RULES, make_rule, rule_for
from h2o_flexgen.kv_cache.fixed_rule import FixedRule
from h2o_flexgen.planning.workload import Workload

#: one query head per KV head and several, RoPE for whole heads and for parts
MODELS = ("opt", "llama", "llama_groups_of_3_wide_heads_linear", "gpt_neox")
#: room for the tokens that any rule protects by default
HEAVY = 22
RECENT = 4
PROMPT = 33
LENGTH = 60


@pytest.fixture
def dropping(monkeypatch):
    """dropping(model, texts, rule, heavy, recent) -> the engine's log-probabilities (B, M), and for each decode step
    and layer the positions in the cache (B, KV, slots), including the newest token's and the next to be evicted."""

    def run(model, texts, rule, heavy=HEAVY, recent=RECENT):
        positions = []
        decode = FixedRule.decode

        def recorded(self, cache, *args):
            result = decode(self, cache, *args)
            positions.append(cache.position.clone())
            return result

        with monkeypatch.context() as patch:
            patch.setattr(FixedRule, "decode", recorded)
            budget = KVBudget.from_size(heavy, recent, rule)
            policy = Policy(gpu_batch_size=len(texts))
            with LLM(str(model.folder), policy, budget, device="cpu", dtype="float32", progress=False) as llm:
                scores = llm.score(texts, PROMPT)
        return torch.tensor([score.token_logprobs for score in scores]), positions

    return run


def rule_of(model, text, heavy=3, recent=4, count=2):
    """The engine's rule for windows of LENGTH tokens."""
    workload = Workload((PROMPT,) * count, LENGTH - PROMPT)
    return rule_for(KVBudget.from_size(heavy, recent, text), workload.longest, workload.gen_len, model.spec)


@pytest.mark.parametrize("rule, name", list(zip(RULES, cycle(MODELS))))
def test_masks_give_what_dropping_gives(tiny, dropping, name, rule):
    texts = tiny(name).prompts([LENGTH] * 2)
    model = resident(tiny(name))
    logprobs, positions = dropping(tiny(name), texts, rule)
    run = simulate(model, torch.tensor(texts), PROMPT, rule_of(model, rule, HEAVY, RECENT))
    assert run.logprobs == pytest.approx(logprobs, abs=1e-4)
    layers = model.spec.layers
    assert run.kept.shape == (layers, 2, model.spec.kv_heads, LENGTH - PROMPT, LENGTH)
    for n, held in enumerate(positions):
        step, layer = divmod(n, layers)
        for b, h in torch.cartesian_prod(torch.arange(2), torch.arange(model.spec.kv_heads)).tolist():
            kept = set(run.kept[layer, b, h, step].nonzero()[:, 0].tolist())
            assert kept | {PROMPT + step} == set(held[b, h].tolist()) - {-1}


def test_masks_know_the_slots_of_each_layer(tiny, dropping, tmp_path):
    losses = {"budgets": [0.05, 0.1, 0.3, 0.5], "losses": [[0.1, 0.05, 0.02, 0], [8, 4, 1, 0]]}
    (tmp_path / "layers.json").write_text(json.dumps(losses))
    texts = tiny("llama").prompts([LENGTH] * 2)
    rule = f"smoothed:layers={tmp_path / 'layers.json'}"
    model = resident(tiny("llama"))
    logprobs, _ = dropping(tiny("llama"), texts, rule, 4, 5)
    run = simulate(model, torch.tensor(texts), PROMPT, rule_of(model, rule, 4, 5))
    few, many = run.kept.sum(-1).flatten(1).amax(1).tolist()
    assert many > few and run.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_the_kept_tokens_are_the_oracles(tiny):
    (text,) = tiny("llama").prompts([LENGTH])
    trace = tiny("llama").oracle.generate(text[:PROMPT], LENGTH - PROMPT, 3, 4, "h2o", forced=text[PROMPT:])
    run = simulate(resident(tiny("llama")), torch.tensor([text]), PROMPT, make_rule("h2o", 3, 4))
    assert run.logprobs[0].tolist() == pytest.approx(trace.logprobs, abs=1e-4)
    found = run.kept[:, 0].permute(2, 0, 1, 3)
    for step, layers in enumerate(trace.kept):
        for layer, heads in enumerate(layers):
            assert [set(head.nonzero()[:, 0].tolist()) for head in found[step, layer]] == heads


@pytest.mark.parametrize("name", MODELS)
def test_one_pass_with_the_same_masks_gives_the_same(tiny, name):
    model = resident(tiny(name))
    ids = torch.tensor(tiny(name).prompts([LENGTH] * 2))
    run = simulate(model, ids, PROMPT, make_rule("h2o", 3, 4))
    for b in range(2):
        found = masked_logprobs(model, ids[b], PROMPT, run.kept[:, b])
        assert found == pytest.approx(run.logprobs[b], abs=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_budget_for_all_tokens_and_an_empty_mask_give_the_full_cache(tiny, name):
    model = resident(tiny(name))
    (text,) = tiny(name).prompts([LENGTH])
    with LLM(str(tiny(name).folder), Policy(), device="cpu", dtype="float32", progress=False) as llm:
        full = llm.score([text], PROMPT)[0].token_logprobs
    run = simulate(model, torch.tensor([text]), PROMPT, make_rule("h2o", LENGTH, 1))
    assert run.logprobs[0].tolist() == pytest.approx(full, abs=1e-4)
    assert run.kept.sum(-1).flatten().unique().tolist() == list(range(PROMPT, LENGTH))
    everything = torch.ones(model.spec.layers, model.spec.kv_heads, 1, LENGTH, dtype=torch.bool)
    found = masked_logprobs(model, torch.tensor(text), PROMPT, everything)
    assert found.tolist() == pytest.approx(full, abs=1e-4)


def test_a_masked_token_has_no_effect(tiny):
    """Behind the prompt a masked token can be replaced by any other."""
    model = resident(tiny("one_layer"))
    (text,) = tiny("one_layer").prompts([LENGTH])
    seen = torch.ones(1, model.spec.kv_heads, 1, LENGTH, dtype=torch.bool)
    seen[..., 5] = False
    other = [*text[:5], (text[5] + 1) % zoo.CONFIGS["one_layer"]["vocab_size"], *text[6:]]
    a, b = (masked_logprobs(model, torch.tensor(ids), PROMPT, seen) for ids in (text, other))
    assert a[1:] == pytest.approx(b[1:], abs=1e-5)  # the first is predicted by the prompt's last token, which sees it
    assert abs(float(a[0] - b[0])) > 1e-3
