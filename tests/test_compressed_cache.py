"""A cache in 8 or 4 bits: the tokens of an oracle that rounds the same numbers, wherever the cache lies."""

from __future__ import annotations

import json

import pytest
import torch
import zoo
from cli_tools import FP32, ON_DISK, write_prompts

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams, UserError
from h2o_flexgen.kv_cache import RULES
from h2o_flexgen.policy import given_policy

pytest_plugins = ["cli_tools"]

KINDS = ["int8", "int4"]
LENGTHS, MAX_TOKENS, SLOTS = [5, 9, 1, 6], 8, (3, 2)
PLACES = {
    "gpu": dict(percent=(100, 0, 100, 0, 100, 0)),
    "cpu": dict(percent=(0, 100, 0, 100, 0, 100)),
    "disk": dict(percent=(0, 0, 0, 0, 0, 0), prefill_tokens=10),
    "mixed": dict(percent=(30, 40, 30, 40, 30, 40)),
    "mixed_in_turn": dict(percent=(100, 0, 40, 30, 100, 0), overlap=False),
    "cpu_attention": dict(percent=(100, 0, 0, 50, 100, 0), cpu_cache_compute=True),
}
#: sizes of the first model of each family, so that 4 divides their heads
SIZES = dict.fromkeys(zoo.FIRST.values(), {}) | {"opt": dict(num_hidden_layers=2)}
SIZES |= {"llama": dict(head_dim=8), "qwen2": dict(hidden_size=32)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """model(name) -> the tiny model of that name with heads of 8."""
    made = {}

    def get(name: str = "llama") -> zoo.Tiny:
        if name not in made:
            made[name] = zoo.build(name, tmp_path_factory.mktemp(name), **SIZES[name])
        return made[name]

    return get


def opened(tiny, kind, budget=None, dtype="float32", **policy) -> LLM:
    policy = Policy(**dict(gpu_batch_size=2, num_gpu_batches=2) | policy)
    return LLM(str(tiny.folder), policy, budget, device="cpu", dtype=dtype, compress_cache=kind, progress=False)


def tokens(llm, prompts, max_tokens=MAX_TOKENS) -> list[list[int]]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SIZES)
def test_every_family_gives_the_tokens_of_the_oracle(model, name, kind):
    """With a full cache and with H2O, in RAM and on disk."""
    tiny, places = model(name), ("gpu", "disk")
    for budget in ((None, None, "h2o", kind), (*SLOTS, "h2o", kind)):
        prompts = tiny.clear_cut_prompts(LENGTHS, MAX_TOKENS, [budget])
        expected = [t.tokens for t in tiny.references(prompts, MAX_TOKENS, *budget)]
        for place in places:
            slots = budget[0] and KVBudget.from_size(*SLOTS)
            with opened(tiny, kind, slots, **PLACES[place]) as llm:
                assert tokens(llm, prompts) == expected


@pytest.mark.parametrize("place", PLACES)
def test_the_tokens_do_not_depend_on_the_placement(model, place):
    tiny = model()
    for kind in KINDS:
        for budget in ((None, None, "h2o", kind), (*SLOTS, "smoothed", kind)):
            prompts = tiny.clear_cut_prompts(LENGTHS, MAX_TOKENS, [budget])
            expected = [t.tokens for t in tiny.references(prompts, MAX_TOKENS, *budget)]
            slots = budget[0] and KVBudget.from_size(*SLOTS, "smoothed")
            with opened(tiny, kind, slots, **PLACES[place]) as llm:
                assert tokens(llm, prompts) == expected


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_keeps_what_it_keeps_of_floats(model, rule):
    """Through the whole engine, in RAM and on disk, and with positions that roll."""
    tiny, found = model(), []
    prompts = tiny.prompts([30, 7, 19])
    budgets = [KVBudget.from_size(6, 6, f"{rule}:first=0")]
    if RULES[rule].growth == "fixed":
        budgets.append(KVBudget(hh_size=6, recent_size=6, rule=f"{rule}:first=0", position_rolling=True))
    for budget in budgets:
        found = []
        for place in ("gpu", "disk"):
            with opened(tiny, "int4", budget, **PLACES[place]) as llm:
                found.append(tokens(llm, prompts, 12))
        with opened(tiny, None, budget) as llm:
            dense = tokens(llm, prompts, 12)
        assert found[0] == found[1]
        assert [row[0] for row in found[0]] == [row[0] for row in dense]  # a prompt is attended to as it is
        assert found[0] != dense


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_in_16_bits_the_placement_does_not_matter_either(model, kind, dtype):
    prompts, found = model().prompts(LENGTHS), []
    for place in PLACES.values():
        with opened(model(), kind, dtype=dtype, **place) as llm:
            found.append(tokens(llm, prompts))
    assert found == found[:1] * len(found)
