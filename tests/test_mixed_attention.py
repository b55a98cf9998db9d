"""Layers that differ in scale, soft cap, window, sinks, RoPE, KV heads and head size give the tokens of the oracle."""

from __future__ import annotations

import mixed_model
import pytest
import torch
from mixed_model import WINDOWS
from oracle import IN_SHORT
from stream_oracle import StreamOracle
from zoo import sized

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams
from h2o_flexgen.engine import prefixes
from h2o_flexgen.formats import KVFormat
from h2o_flexgen.kv_cache import RULES, rule_for
from h2o_flexgen.kv_cache import full as full_cache
from h2o_flexgen.models import llama
from h2o_flexgen.models.registry import read_spec
from h2o_flexgen.profiling import calibration
from h2o_flexgen.profiling.layer_model import LayerModel

OPTIONS = dict(device="cpu", dtype="float32", progress=False)
LENGTHS = [5, 17, 9, 21, 1, 12, 3]
MOST = 14
#: smaller and larger than the windows of 5 and 9
BUDGETS = [(None, None), (2, 3, "h2o"), (4, 4), (9, 9, "h2o:first=1")]
POLICIES = {
    "ram": dict(percent=(100, 0, 100, 0, 100, 0), gpu_batch_size=3, num_gpu_batches=2),
    "cpu tier": dict(percent=(0, 100, 0, 100, 0, 100), gpu_batch_size=3, cpu_cache_compute=True),
    "disk": dict(percent=(0, 0, 0, 0, 0, 0), gpu_batch_size=2, num_gpu_batches=2, prefill_tokens=30),
    "thirds": dict(percent=(33, 33, 33, 33, 33, 33), gpu_batch_size=4, num_gpu_batches=2, overlap=False),
}


@pytest.fixture(scope="module")
def in_place():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama, "spec", mixed_model.spec)
        patch.setattr(llama, "tensors", mixed_model.tensors)
        patch.setattr(full_cache, "SEGMENT", 4)
        patch.setattr(prefixes, "LEAST_SAVED", 4)
        patch.setattr(prefixes, "LEAST_TOKENS", 1)
        yield


@pytest.fixture(scope="module")
def model(in_place, tmp_path_factory):
    return mixed_model.build(tmp_path_factory.mktemp("mixed"))


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_the_oracle(model, run, policy):
    """More rows than places, some with a shared beginning."""
    prompts = model.clear_cut_prompts(LENGTHS, MOST, BUDGETS)
    (begin,) = model.prompts([11], seed=7)
    prompts += model.clear_cut_prompts([6, 9, 3, 2], MOST, BUDGETS, tuple(begin))
    for budget in BUDGETS:
        given = None if budget[0] is None else sized(*budget)
        outputs = run(model, prompts, MOST, given, **POLICIES[policy])
        for output, reference in zip(outputs, model.references(prompts, MOST, *budget), strict=True):
            assert output.token_ids == reference.tokens
            assert output.logprobs == pytest.approx(reference.logprobs, abs=2e-4)


@pytest.mark.parametrize("n, name", [*enumerate(RULES)])
def test_every_rule(model, run, n, name):
    options = {"snapkv": ":window=2", "vatp": ":first=1", "sinks": ":first=1", **IN_SHORT}
    rule = name + options.get(name, "")
    budget = (4, 4, rule)
    prompts = model.clear_cut_prompts(LENGTHS[:4], MOST, [budget])
    outputs = run(model, prompts, MOST, sized(*budget), **[*POLICIES.values()][n % len(POLICIES)])
    assert [o.token_ids for o in outputs] == [r.tokens for r in model.references(prompts, MOST, *budget)]


@pytest.mark.parametrize("policy", POLICIES)
def test_slots_by_head(model, policy):
    """In both layers with a window some heads get more slots than it has tokens."""
    by_head = ((3, 8), (6,), (12, 5), (4, 8, 8, 4))
    recents = tuple(tuple(round(n / 2) for n in layer) for layer in by_head)
    heavies = tuple(tuple(n - r for n, r in zip(*each)) for each in zip(by_head, recents))
    prompts = model.clear_cut_prompts(LENGTHS[:4], MOST, [(heavies, recents, "h2o")])
    budget = KVBudget(hh_size=4, recent_size=4, rule="h2o", by_head=by_head)
    with LLM(str(model.folder), Policy(**POLICIES[policy]), budget, **OPTIONS) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=MOST, ignore_eos=True))
    expected = model.references(prompts, MOST, heavies, recents, "h2o")
    assert [o.outputs[0].token_ids for o in outputs] == [r.tokens for r in expected]


def test_heads_lose_nothing_with_all_tokens_of_a_window(model):
    """Nor does any head with all tokens of a text: what calibration computes is the model's own attention."""
    with LLM(str(model.folder), **OPTIONS) as llm:
        layers = LayerModel(llm.model, progress=False)
    losses = calibration.measure(layers, torch.tensor(model.prompts([64, 64])), "h2o", progress=False)
    sizes = [int(part * 64) for part in losses.budgets]
    for window, heads in zip(WINDOWS, losses.losses):
        for curve in heads:
            held = [loss for size, loss in zip(sizes, curve) if window and size >= window]
            assert held == pytest.approx([0] * len(held), abs=1e-9)
            assert curve[0] > 1e-6


@pytest.mark.parametrize("budget", [(None, None, "h2o"), (4, 4, "h2o")])
@pytest.mark.parametrize("compressed", ["int8", "int4"])
def test_caches_in_fewer_bits(model, compressed, budget):
    given = (*budget, compressed)
    prompts = model.clear_cut_prompts([7, 3, 5], 8, [given])
    kv_budget = None if budget[0] is None else sized(*budget)
    with LLM(str(model.folder), Policy(**POLICIES["disk"]), kv_budget, **OPTIONS, compress_cache=compressed) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == [r.tokens for r in model.references(prompts, 8, *given)]


@pytest.mark.parametrize("rolling", [False, True])
def test_streams(model, rolling):
    turns = [(30, 5), (1, 9), (20, 3)]
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for _, count in turns]
    for seed in range(100):
        stream = StreamOracle(model.oracle, 5, 6, "h2o", rolling)
        texts = model.prompts([n for n, _ in turns], seed)
        expected = []
        for text, (_, count) in zip(texts, turns):
            stream.feed([*(expected[-1][-1:] if expected else []), *text], 16)
            expected.append(stream.generate(count))
        if stream.margin > 2e-3 and stream.slack > 1e-5:
            break
    else:
        raise AssertionError("no clear stream")
    budget = KVBudget.from_size(5, 6, "h2o")
    with LLM(str(model.folder), Policy(gpu_batch_size=4), budget, device="cpu", dtype="float32", progress=False) as llm:
        with llm.session(chunk=16, position_rolling=rolling) as session:
            found = [session.generate(text, each).token_ids for text, each in zip(texts, params)]
    assert found == expected


@pytest.mark.parametrize("budget, wide", [(None, 31), (KVBudget.from_size(4, 4), 9), (KVBudget.from_size(30, 30), 31)])
def test_each_layer_has_the_slots_of_its_kind(model, budget, wide):
    """For prompts of 20 tokens and outputs of 12: a layer with a window has no more slots than the window."""
    spec = read_spec(model.folder)
    dense = lambda head_dim: KVFormat.dense(torch.float32)
    layouts = rule_for(budget, 20, 12, spec).layouts(spec, dense, [(3, 20)], 12)
    sizes = [layouts[layer, 0] for layer in range(spec.layers)]
    assert [x.slots for x in sizes] == [min(5, wide), wide, min(9, wide), wide]
    assert [x.heads for x in sizes] == mixed_model.KV_HEADS
    assert [x.head_dim for x in sizes] == mixed_model.HEAD_DIMS
