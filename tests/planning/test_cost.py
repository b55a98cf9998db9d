"""The cost model against figures worked out by hand, published ones, and properties that must hold."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import T4, laptop, percents, planner_of, search

from h2o_flexgen.formats.forms import compressed
from h2o_flexgen.kv_cache import rule_for
from h2o_flexgen.machine.profile import Link, interpolate
from h2o_flexgen.models.registry import family, named_spec
from h2o_flexgen.models.spec import of_layers
from h2o_flexgen.planning.layer_cost import LayerCost, Part
from h2o_flexgen.planning.memory import Resources, plan_policy
from h2o_flexgen.planning.planner import Planner
from h2o_flexgen.planning.search import Constraints
from h2o_flexgen.planning.shapes import ModelData
from h2o_flexgen.planning.traffic import Offloaded, weights_beside
from h2o_flexgen.planning.workload import Batch, Workload
from h2o_flexgen.policy import KVBudget, Policy

#: OPT-1.3B: hidden size, layers, vocabulary
E = 2048
L = 24
V = 50272
ALL_GPU = (100, 0, 100, 0, 100, 0)
NO_LIMITS = Resources(dict.fromkeys(("gpu", "cpu", "disk", "ram"), 1 << 50))
few = settings(max_examples=15)


def time(policy: Policy, profile=None, **job):
    return search(profile or laptop(), **job).candidate(policy).prediction


def test_a_decode_step_by_hand():
    """OPT-1.3B, 8 sequences on the device: matmuls, attention over 129 slots, the head, dispatch."""
    profile = laptop()
    p = time(Policy(8, 1, ALL_GPU), prompts=8, prompt_len=128, gen_len=2)
    rate = interpolate(profile.matmul["streamed"][2048, 2048], 8)
    matmuls = 2 * 12 * E * E * 8 / rate + profile.step_seconds
    attention = 8 * 129 * 2 * E * 2 / 2e10
    head = 2 * V * E * 8 / rate
    assert p.decode_seconds == pytest.approx(L * (matmuls + attention) + head)


def test_layers_that_differ_cost_the_sum_of_their_kinds():
    """Half of the layers see all, half a window of 64 tokens."""
    sees_all = named_spec("Qwen/Qwen2.5-0.5B")
    slides = replace(sees_all, window=64)
    batches = (Batch(8, 256),) * 2
    part = Part(cache=Offloaded(3, 5), layers=sees_all.layers)
    policy = Policy(8, 2, ALL_GPU)

    def costed(spec, budget=None):
        rule = rule_for(budget, 256, 128, spec)
        shapes = ModelData.of(spec, "float32", "float32", False).shapes(rule, Workload((256,) * 16, 128))
        layers = LayerCost(laptop(), shapes, 128)
        each = [layers.prefill(policy, batches, part), layers.decode(policy, batches, part)]
        return [shapes.kv_bytes, *(x for flows in each for x in (flows.compute, *flows.total))]

    for budget in (None, KVBudget.from_size(50, 50)):
        kinds = [costed(spec, budget) for spec in (sees_all, slides)]
        assert costed(of_layers([sees_all, slides] * (sees_all.layers // 2)), budget) == pytest.approx(
            [sum(pair) / 2 for pair in zip(*kinds)]
        )
        assert kinds[0][:2] > kinds[1][:2], "bytes of the cache"
    assert costed(slides)[0] == 64 * costed(replace(sees_all, layers=1))[0] * sees_all.layers // (256 + 127)


@few
@given(st.integers(0, 100))
def test_only_resident_weights_compute_at_the_packed_rate(percent):
    """The head is a table whose rows are looked up, and so is never packed."""
    free = {name: Link(1e15) for name in laptop().links}
    slow, fast = ({(2048, 2048): {1: rate}} for rate in (1e11, 2e11))
    profile = laptop(links=free, matmul={"streamed": slow, "resident": fast}, step_seconds=0.0)
    s = search(profile, prompts=8, prompt_len=128, gen_len=2)
    policy = Policy(8, 1, (percent, 0, 100, 0, 100, 0))
    placement, _ = plan_policy(policy, s.shapes, s.workload, NO_LIMITS)
    resident = sum(
        prod(shape)
        for layer in s.shapes.streamed[1:-1]
        for name, shape in layer.items()
        if len(shape) > 1 and placement.weights[name] == "gpu"
    )
    matmuls = 2 * 8 * (resident / 2e11 + (L * 12 * E * E - resident + V * E) / 1e11)
    rest = L * 8 * 129 * 2 * E * 2 / 2e10
    assert s.candidate(policy).prediction.decode_seconds == pytest.approx(matmuls + rest, rel=0.01)


@pytest.mark.parametrize(
    "kind, in_blocks, rate, unpacked", [("int8", False, 8e11, 0), ("int4", False, 4e11, 1), ("int4", True, 5e11, 0)]
)
def test_int8_matmuls_cost_their_own_rate_plus_unpacking(kind, in_blocks, rate, unpacked):
    int8 = {"int8": {(2048, 2048): {1: 4e11}}, "int8 resident": {(2048, 2048): {1: 8e11}}}
    int8 |= {"int4": {(2048, 2048): {1: 5e11}}}
    profile = laptop(
        matmul=laptop().matmul | int8, unpack={"int4": 1e10}, decode={"int4": 1e9, "int8": 1e9}, step_seconds=0.0
    )
    spec = named_spec("facebook/opt-1.3b")
    shapes = [layer.shapes for layer in family(spec.model_type).tensors(spec)]
    operands = {"int8": "int8", "int4": "int4" if in_blocks else "int8"}
    model = ModelData.of(spec, "bfloat16", "bfloat16", False, True, compressed(kind, shapes), operands, decodes=False)
    planner = Planner({None: model}, Constraints(), profile)
    found = planner.choose(Workload((128,) * 8, 2), NO_LIMITS, Policy(8, 1, ALL_GPU), None).prediction
    layer = 12 * E * E
    matmuls = 2 * 8 * (L * layer / rate + V * E / 4e11) + unpacked * L * layer / 1e10
    assert found.decode_seconds == pytest.approx(matmuls + L * 8 * 129 * 2 * E * 2 / 2e10, rel=0.01)


def test_weights_on_disk_cost_their_bytes_over_the_disks_rate():
    profile = laptop(links={**laptop().links, "disk_to_cpu": Link(1e8)})
    p = time(Policy(4, 1, (0, 0, 100, 0, 100, 0)), profile, prompts=4, gen_len=5)
    nbytes = 2 * (24 * 12 * 2048**2 + 50272 * 2048)
    assert p.decode_seconds == pytest.approx(4 * nbytes / 1e8, rel=0.001)
    assert p.bound_by == "disk"


def test_a_job_costs_the_sum_of_its_blocks():
    p = time(Policy(8, 2, ALL_GPU), prompts=40)
    whole = time(Policy(8, 2, ALL_GPU), prompts=16)
    rest = time(Policy(8, 2, ALL_GPU), prompts=8)
    assert p.job_seconds == pytest.approx(2 * whole.block_seconds + rest.block_seconds)
    assert p.block_seconds == pytest.approx(whole.block_seconds)


@pytest.mark.parametrize("blocks", [1, 32, 33, 63, 64, 65, 100])
def test_a_sample_of_equal_blocks_stands_for_all(blocks):
    rest = time(Policy(2, 1, ALL_GPU), prompts=1)
    p = time(Policy(2, 1, ALL_GPU), prompts=2 * blocks + 1)
    assert p.job_seconds == pytest.approx(blocks * p.block_seconds + rest.block_seconds)


@given(st.lists(st.sampled_from([0, 1, 5]), min_size=4, max_size=12))
def test_streamed_weights_are_fetched_beside_compute(disk):
    """All of them in a pass, and never more beside a layer than a staging buffer holds."""
    fetched = weights_beside([Offloaded(0, d) for d in disk])
    assert sum(c.disk for c in fetched) == pytest.approx(sum(disk))
    assert max(c.disk for c in fetched) <= max(disk)


def test_equal_layers_are_fetched_one_ahead():
    """The first layer's weights are fetched beside the head."""
    assert [c.disk for c in weights_beside([Offloaded(0, 4.0)] * 5)] == [4] * 5


def test_layers_share_a_staging_buffer_as_large_as_the_head():
    weights = [Offloaded(), *[Offloaded(0, 2.0)] * 4, Offloaded(0, 6.0)]
    assert [c.disk for c in weights_beside(weights)] == [3, 2 / 3, 2 / 3, 2 / 3, 6, 3]


def test_a_head_in_slices_moves_as_many_bytes_as_one_that_is_staged():
    s = search(laptop(), model="meta-llama/Llama-3.2-1B")
    policy = Policy(64, 1, (0, 0, 100, 0, 100, 0))
    placement, _ = plan_policy(policy, s.shapes, s.workload, NO_LIMITS)
    sliced = replace(placement, sliced=s.shapes.head)
    seconds = [dict(s.cost.predict(policy, p, s.workload.prompt_lens).busy)["disk"] for p in (placement, sliced)]
    assert seconds[0] == pytest.approx(seconds[1])


def test_a_streamed_layer_is_fetched_while_resident_ones_compute():
    weights = [Offloaded(), Offloaded(0, 6.0), Offloaded(), Offloaded(), Offloaded(0, 2.0), Offloaded()]
    assert [c.disk for c in weights_beside(weights)] == [2, 2 / 3, 2 / 3, 2 / 3, 2, 2]


def test_a_link_that_compute_slows_down_costs_more():
    links = {**laptop().links, "cpu_to_disk": Link(1e8, 0, 0.5)}
    slow = laptop(links=links)
    fast = laptop(links={**links, "cpu_to_disk": Link(1e8)})
    policy = Policy(16, 4, (100, 0, 0, 0, 100, 0))
    assert time(policy, slow).prefill_seconds > time(policy, fast).prefill_seconds


def test_prompts_of_different_lengths_cost_less_than_the_longest():
    def job(lens):
        choice = planner_of(laptop(), "opt-1.3b").choose(Workload(lens, 16), NO_LIMITS, Policy(4, 1, ALL_GPU))
        return choice.prediction.job_seconds

    assert job((512,) * 4 + (64,) * 12) < 0.6 * job((512,) * 16)


policies = st.builds(Policy, st.sampled_from([1, 4, 16]), st.integers(1, 4), percents(20))


@few
@given(policies, st.sampled_from([laptop(), T4]), st.sampled_from([None, 0.2]))
def test_overlap_is_never_slower(policy, profile, ratio):
    """Where transfers take no time from compute."""
    free = replace(profile, links={name: Link(link.bytes_per_s) for name, link in profile.links.items()})
    s = search(free, hh_ratio=ratio)
    beside = s.candidate(policy).prediction.job_seconds
    in_turn = s.candidate(replace(policy, overlap=False)).prediction.job_seconds
    assert beside <= in_turn * (1 + 1e-9)


@few
@given(policies, st.sampled_from([laptop(), T4]))
def test_nothing_is_faster_than_everything_on_the_device(policy, profile):
    s = search(profile)
    assert s.candidate(replace(policy, percent=ALL_GPU)).prediction.job_seconds <= (
        s.candidate(policy).prediction.job_seconds * (1 + 1e-9)
    )


@few
@given(policies, st.sampled_from([laptop(), T4]))
def test_a_budget_never_makes_decoding_slower(policy, profile):
    def step(ratio):
        return search(profile, hh_ratio=ratio, prompt_len=1024).candidate(policy).prediction.decode_seconds

    assert step(0.1) <= step(None) * (1 + 1e-9)


#: tokens/s as published for a T4: FlexGen's paper and H2O's (docs/benchmarks/search_papers.json has all rows)
@pytest.mark.parametrize(
    "model, prompt, gen, ratio, policy, published",
    [
        ("opt-30b", 512, 32, None, Policy(48, 3, (20, 80, 0, 100, 0, 100), True, True), 7.32),
        ("opt-175b", 512, 32, None, Policy(32, 8, (0, 50, 0, 0, 0, 100)), 0.69),
        ("opt-175b", 1024, 32, None, Policy(12, 12, (0, 50, 0, 0, 0, 100)), 0.35),
        ("opt-30b", 512, 512, 0.2, Policy(52, 8, (0, 100, 0, 100, 0, 100), True, True), 18.83),
        ("opt-30b", 512, 1024, 0.3, Policy(44, 6, (0, 100, 0, 100, 0, 100), True, True), 13.82),
    ],
)
def test_published_throughputs_are_predicted_within_a_quarter(model, prompt, gen, ratio, policy, published):
    workload = Workload((prompt,) * policy.block_size, gen)
    budget = None if ratio is None else KVBudget.from_ratio(ratio)
    choice = planner_of(T4, model, dummy=False).choose(workload, NO_LIMITS, policy, budget)
    predicted = choice.prediction.block_tokens_per_s
    assert published / 1.25 < predicted < published * 1.25
