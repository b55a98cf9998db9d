"""In fp32 the tokens are those of transformers (full cache) and of the oracle (H2O), wherever the bytes are."""

from __future__ import annotations

import pytest
import zoo

from h2o_flexgen import LLM, Policy, SamplingParams
from h2o_flexgen.kv_cache import FullCache
from h2o_flexgen.kv_cache import full as full_cache
from h2o_flexgen.kv_cache.fixed_rule import FixedRule
from h2o_flexgen.models.registry import read_spec
from h2o_flexgen.storage.wal import wal_rows

LENGTHS = [5, 17, 9, 21, 1, 12, 3]
BUDGET = (4, 4)


def assert_same(outputs, references, atol=2e-4):
    for n, (output, reference) in enumerate(zip(outputs, references, strict=True)):
        assert output.token_ids == reference.tokens, f"prompt {n}"
        assert output.finish_reason == "length"
        assert output.logprobs == pytest.approx(reference.logprobs, abs=atol), f"prompt {n}"


PLACEMENTS = {
    "ram": dict(percent=(100, 0, 100, 0, 100, 0), gpu_batch_size=3, num_gpu_batches=2),
    "disk": dict(percent=(0, 0, 0, 0, 0, 0), gpu_batch_size=2, num_gpu_batches=2, prefill_tokens=30),
}


#: the first two variants of each family, all whose RoPE depends on the length of the text, and those with a sliding
#: window. The layers of every variant are compared with transformers' in `models/test_maths.py`
VARIANTS = [name for variants in zoo.VARIANTS.values() for name in [*variants][:2]] + zoo.BY_LENGTH + zoo.WINDOWS


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_are_those_of_transformers_and_of_the_oracle(tiny, run, name):
    """With a full cache in RAM, and with H2O on disk."""
    model = tiny(name)
    prompts = model.clear_cut_prompts(LENGTHS[:5], 14, [(None, None), BUDGET])
    full = model.references(prompts, 14)
    kept = model.references(prompts, 14, *BUDGET)
    outputs = run(model, prompts, 14, **PLACEMENTS["ram"])
    assert [o.token_ids for o in outputs] == [model.transformers(p, 14)[0] for p in prompts]
    assert_same(outputs, full)
    assert all(count > 0 for r in kept for layer in r.evicted for count in layer)
    assert any(r.tokens != f.tokens for r, f in zip(kept, full))
    assert_same(run(model, prompts, 14, BUDGET, **PLACEMENTS["disk"]), kept)


# wherever the bytes are

POLICIES = {
    "all_gpu_one_by_one": dict(percent=(100, 0, 100, 0, 100, 0), gpu_batch_size=1, num_gpu_batches=2),
    "all_cpu": dict(percent=(0, 100, 0, 100, 0, 100), gpu_batch_size=3, num_gpu_batches=2),
    "all_cpu_attention_on_cpu": dict(
        percent=(0, 100, 0, 100, 0, 100), gpu_batch_size=3, num_gpu_batches=2, cpu_cache_compute=True
    ),
    "all_disk_micro": dict(percent=(0, 0, 0, 0, 0, 0), gpu_batch_size=5, num_gpu_batches=2, prefill_tokens=10),
    "thirds_attention_on_cpu": dict(
        percent=(33, 33, 33, 33, 33, 33), gpu_batch_size=2, num_gpu_batches=4, cpu_cache_compute=True
    ),
    "thirds_micro": dict(percent=(33, 33, 33, 33, 33, 33), gpu_batch_size=4, num_gpu_batches=2, prefill_tokens=25),
    "weights_cpu_disk": dict(percent=(0, 50, 100, 0, 100, 0), gpu_batch_size=4, num_gpu_batches=2),
    "cache_gpu_disk": dict(percent=(100, 0, 50, 0, 100, 0), gpu_batch_size=2, num_gpu_batches=4),
    "cache_cpu_disk_attention_on_cpu": dict(
        percent=(100, 0, 0, 50, 100, 0), gpu_batch_size=3, num_gpu_batches=3, cpu_cache_compute=True
    ),
    "activations_mixed": dict(percent=(100, 0, 100, 0, 34, 33), gpu_batch_size=1, num_gpu_batches=5),
    "everything_mixed": dict(percent=(20, 70, 10, 60, 50, 10), gpu_batch_size=3, num_gpu_batches=3, prefill_tokens=40),
}
LONG = 20


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr(full_cache, "SEGMENT", 6)


BUDGETS = {"full": None, "h2o": BUDGET}


def assert_tokens_of_the_oracle(model, run, policy: str, cache: str, overlap: bool) -> None:
    budget = BUDGETS[cache]
    prompts = model.clear_cut_prompts(LENGTHS, LONG, [(None, None), BUDGET])
    outputs = run(model, prompts, LONG, budget, overlap=overlap, **POLICIES[policy])
    assert_same(outputs, model.references(prompts, LONG, *(budget or ())))


@pytest.mark.parametrize("cache, overlap", [("full", False), ("h2o", True)])
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_do_not_depend_on_the_policy(tiny, run, policy, cache, overlap):
    assert_tokens_of_the_oracle(tiny("opt"), run, policy, cache, overlap)


FAMILIES = [*zoo.FIRST.values(), "llama_groups_of_3_wide_heads_linear", "llama_groups_of_8_dynamic"]
FOUR = [
    ("thirds_attention_on_cpu", "full", True),
    ("all_disk_micro", "h2o", True),
    ("cache_gpu_disk", "h2o", False),
    ("everything_mixed", "full", False),
]


@pytest.mark.parametrize("n, name", [*enumerate(FAMILIES)])
def test_every_family_under_one_of_four_policies(tiny, run, n, name):
    assert_tokens_of_the_oracle(tiny(name), run, *FOUR[n % len(FOUR)])


@pytest.fixture(scope="module")
def large_head(tmp_path_factory) -> zoo.Tiny:
    """Its vocabulary head takes as many bytes as several layers."""
    return zoo.build("llama", tmp_path_factory.mktemp("large_head"), vocab_size=3000, num_hidden_layers=7)


@pytest.mark.parametrize(
    "percent, budget, overlap",
    [((0, 0, 100, 0, 100, 0), None, True), ((0, 100, 0, 0, 0, 0), BUDGET, True), ((0, 30, 0, 50, 50, 0), None, False)],
    ids=str,
)
def test_layers_share_a_staging_buffer_beside_a_large_head(large_head, percent, overlap, budget):
    prompts = large_head.clear_cut_prompts(LENGTHS, 8, [(None, None), BUDGET])
    kv_budget = zoo.sized(*budget) if budget else None
    policy = Policy(2, 2, percent, overlap)
    with LLM(str(large_head.folder), policy, kv_budget, device="cpu", dtype="float32", progress=False) as llm:
        for _ in range(2):  # the second job begins with what the first one has left in the buffers
            outputs = llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
            assert_same([o.outputs[0] for o in outputs], large_head.references(prompts, 8, *(budget or ())))
        groups = llm.runner.weights.groups
    assert [layer for group in groups for layer in group] == sorted(layer for group in groups for layer in group)
    assert max(map(len, groups)) > 1


def test_the_long_outputs_compact_blocks_on_disk_several_times():
    assert len(FullCache().segments(max(LENGTHS), LONG)) >= 5
    assert (LONG - 1) // (wal_rows([sum(BUDGET) + 1]) + 1) >= 3


# budgets at their edges


EDGES = [(0, 6), (6, 0), (1, 0), (0, 1), (1, 1), (1, 7), (10, 11), (10, 12), (20, 20), (20, 21), (0, 60), (60, 0)]


@pytest.mark.parametrize("n, budget", [*enumerate(EDGES)], ids=str)
def test_budgets_at_their_edges(tiny, run, n, budget):
    """Models and placements alternate."""
    model = tiny(["one_layer", "llama_groups_of_3_wide_heads_linear", "gpt_neox"][n % 3])
    prompts = model.clear_cut_prompts(LENGTHS, 20, [budget])
    outputs = run(model, prompts, 20, budget, **PLACEMENTS[["ram", "disk"][n % 2]])
    assert_same(outputs, model.references(prompts, 20, *budget))


# lengths at their edges


@pytest.mark.parametrize(
    "name, placement, budget",
    [("opt", "disk", BUDGET), ("llama", "ram", None), ("llama_groups_of_8_dynamic", "disk", BUDGET)],
)
def test_outputs_of_all_lengths_share_a_block(tiny, name, placement, budget):
    """The prompts of the shortest outputs fill the model's positions, so that the block goes on beyond them."""
    model = tiny(name)
    most = read_spec(model.folder).positions
    lengths = (most - 2, 5, most - 5, 17, 1, 3, 9)
    outputs = (2, 30, 5, 1, 40, 30, 12)
    prompts = [model.clear_cut_prompts([n], m, [budget or (None, None)])[0] for n, m in zip(lengths, outputs)]
    params = [SamplingParams(max_tokens=m, ignore_eos=True) for m in outputs]
    kv_budget = budget and zoo.sized(*budget)
    options = dict(device="cpu", dtype="float32", progress=False)
    with LLM(str(model.folder), Policy(**{**PLACEMENTS[placement], "gpu_batch_size": 4}), kv_budget, **options) as llm:
        found = [o.outputs[0] for o in llm.generate(prompts, params)]
    assert_same(found, [model.reference(p, m, *(budget or ())) for p, m in zip(prompts, outputs)])


@pytest.mark.parametrize("n, name", [*enumerate(zoo.BY_LENGTH)])
def test_rope_by_length_does_not_see_the_neighbours(tiny, run, n, name):
    """Texts that end before, at and after the trained length, alone and beside a long one that begins after it."""
    model = tiny(name)
    budget = (None, BUDGET)[n % 2]
    trained = 16
    lengths = [trained - 9, trained - 2, trained - 1, trained, trained + 1, 2 * trained]
    prompts = model.clear_cut_prompts(lengths, 8, [budget or (None, None)])
    together = run(model, prompts, 8, budget, gpu_batch_size=len(prompts))
    alone = run(model, prompts, 8, budget, gpu_batch_size=1)
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert_same(together, model.references(prompts, 8, *(budget or ())))


# what is kept, not only what is said


@pytest.mark.parametrize(
    "name, placement, budget",
    [
        ("opt", "ram", (4, 4)),
        ("llama_groups_of_3_wide_heads_linear", "disk", (7, 2)),
        ("gpt_neox", "disk", (5, 0)),
    ],
)
def test_the_cache_holds_the_positions_of_the_oracle(tiny, run, monkeypatch, name, placement, budget):
    """Per layer, sequence and KV head."""
    model = tiny(name)
    prompts = model.clear_cut_prompts(LENGTHS, 24, [budget])
    order = sorted(prompts, key=len, reverse=True)
    references = [model.reference(p, 24, *budget) for p in order]
    layers = model.hf.config.num_hidden_layers
    seen = []
    decode = FixedRule.decode

    def spy(self, cache, q, k, v, rows, sinks):
        result = decode(self, cache, q, k, v, rows, sinks)
        seen.append((int((rows.length - rows.prompt)[0]) + 1, cache.position.tolist()))
        return result

    monkeypatch.setattr(FixedRule, "decode", spy)
    run(model, prompts, 24, budget, percent=PLACEMENTS[placement]["percent"], gpu_batch_size=len(prompts))
    assert len(seen) == 23 * layers
    for call, (step, position) in enumerate(seen):
        layer = call % layers
        for b, prompt in enumerate(order):
            new = len(prompt) + step - 1
            assert len(position[b]) == model.oracle.kv_heads
            for h, cached in enumerate(position[b]):
                # the token that goes stays until the next one takes its slot
                expected = references[b].kept[step - 1][layer][h] | {new}
                assert sorted(p for p in cached if p >= 0) == sorted(expected), (step, layer, b, h)
