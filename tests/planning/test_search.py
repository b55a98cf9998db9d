"""The search: it picks what no policy of the grid beats, and its pick fits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import T4, laptop, percents, search

from h2o_flexgen.errors import PlanError, UserError
from h2o_flexgen.formats import GGUF
from h2o_flexgen.kv_cache import rule_for
from h2o_flexgen.models.registry import family, named_spec
from h2o_flexgen.planning.budget import BudgetChoice, BudgetPoint, budget_choices, largest_free
from h2o_flexgen.planning.cost import batches_of
from h2o_flexgen.planning.memory import Resources, plan_policy
from h2o_flexgen.planning.relaxation import Fractions, Move, Relaxation, RelaxedPlacement, fewest_seconds
from h2o_flexgen.planning.search import Constraints, Search
from h2o_flexgen.planning.shapes import ModelData
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.policy import GIB, KINDS, TIERS, KVBudget, Policy

few = settings(max_examples=5)
#: resident matrices are packed here, which doubles the rate of their matmuls
PACKING = laptop(
    matmul={"streamed": {(2048, 2048): {1: 1e10, 128: 4e11}}, "resident": {(2048, 2048): {1: 1e10, 128: 8e11}}}
)
jobs = st.fixed_dictionaries(
    {
        "profile": st.sampled_from([laptop(), PACKING, T4]),
        "prompts": st.sampled_from([1, 7, 24, 60]),
        "hh_ratio": st.sampled_from([None, 0.2]),
        "gpu": st.sampled_from([1.5, 3, 12]),
        "gen_len": st.sampled_from([1, 2, 64]),
    }
)


@few
@given(jobs)
def test_skipping_batch_sizes_loses_nothing(job):
    """The pruned enumeration against one that places every pair of batch sizes."""
    s = search(**job)
    whole = min(filter(None, map(s.placed, s.unplaced())), key=s.score)
    assert s.best().prediction.job_seconds <= whole.prediction.job_seconds * (1 + 1e-6)


@few
@given(jobs)
def test_the_pick_fits_and_beats_a_grid_of_placements(job):
    s = search(**job)
    found = s.best()
    found.plan.check()
    share = (0, 50, 100)
    policy = found.policy
    for w in share:
        for c in share:
            for rest in (0, 1) if job["profile"].device == "cuda" else (0,):
                percent = (w, rest * (100 - w), c, rest * (100 - c), 100, 0)
                other = s.candidate(
                    Policy(policy.gpu_batch_size, policy.num_gpu_batches, percent, True, policy.cpu_cache_compute)
                )
                if not other.plan.missing():
                    assert found.prediction.job_seconds <= other.prediction.job_seconds * 1.01, percent


@few
@given(jobs, st.sampled_from([(1, 1), (4, 2), (8, 3)]))
def test_the_linear_program_is_a_lower_bound(job, pair):
    """No placement takes fewer seconds than the bound, or than the linear program allows."""
    s = search(**job)
    percents = [(100, 0, 100, 0, 100, 0), (50, 0, 100, 0, 100, 0), (0, 0, 0, 0, 0, 0), (0, 0, 50, 0, 100, 0)]
    if s.shapes.cuda:
        percents += [(0, 100, 0, 100, 0, 100), (30, 70, 20, 70, 0, 50), (0, 50, 100, 0, 100, 0)]
    for percent, on_cpu in product(percents, (False, True)[: 1 + s.shapes.cuda]):
        c = s.candidate(Policy(*pair, percent, cpu_cache_compute=on_cpu))
        if c.plan.missing():
            continue
        seconds = s.score(c)[1] * (1 + 1e-6)
        assert s.relaxation.lower_bound(c.policy) <= seconds
        assert s.relaxation.solve(c.policy, s.resources.limits, seconds) is not None


@few
@given(jobs, st.sampled_from([(1, 1), (4, 2), (8, 3)]), percents(10))
def test_the_relaxation_counts_no_more_bytes_than_the_plan(job, pair, percent):
    """At the point of the relaxation that a placement of whole tensors and KV blocks stands for."""
    s = search(**job)
    policy = Policy(*pair, percent if s.shapes.cuda else (percent[0], 0, percent[2], 0, percent[4], 0))
    placement, plan = plan_policy(policy, s.shapes, s.workload, s.resources)
    weights = {name: s.shapes.nbytes(name) for layer in s.shapes.streamed for name, shape in layer.items() if shape[1:]}
    sizes = [size for size, _ in batches_of(policy, s.workload.prompt_lens[: policy.block_size])]
    x = RelaxedPlacement(
        fractions((placement.weights[name], nbytes) for name, nbytes in weights.items()),
        fractions((tier, sizes[batch]) for (_, batch), tier in placement.cache.items()),
        fractions(zip(placement.activations, sizes)),
    )
    holds_head = all(placement.weights[name] == "gpu" for name in s.shapes.streamed[-1])
    for tier, nbytes in s.relaxation.memory(policy, x, holds_head).items():
        assert nbytes <= plan.needed(tier) + len(plan.items), tier  # items are rounded down


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "mixtral-8x7b", "qwen2-57b-a14b", "gemma-4-26b-a4b"])
def test_mixtures_of_experts_stage_a_group_of_experts(model):
    """Not a layer, which may be larger than all RAM."""
    s = search(laptop(), model, prompts=64, prompt_len=32, gpu=8)
    policy = Policy(64, 1, (0, 0, 100, 0, 100, 0))
    x = RelaxedPlacement(Fractions(0, 0, 1), Fractions(1, 0, 0), Fractions(1, 0, 0))
    needed = s.candidate(policy).plan.needed("ram")
    assert s.relaxation.memory(policy, x, 0)["ram"] <= needed < 8 * GIB
    assert s.relaxation.lower_bound(policy) < math.inf


def fractions(sizes: Iterable[tuple[str, int]]) -> Fractions:
    """The fraction on each tier, from (tier, size) of each part."""
    found = dict.fromkeys(TIERS, 0)
    for tier, size in sizes:
        found[tier] += size
    return Fractions(*(found[tier] / sum(found.values()) for tier in TIERS))


moves = st.lists(
    st.builds(Move, st.sampled_from(KINDS), st.sampled_from(TIERS[1:]), st.floats(-9, 9), st.floats(0, 9)),
    unique_by=lambda move: (move.kind, move.tier),
)


@given(moves, st.lists(st.floats(0, 1), min_size=6, max_size=6))
def test_no_mix_of_moves_frees_bytes_in_fewer_seconds(moves, parts):
    """A mix moves part of each kind to each tier, at most all of it."""
    total = {kind: sum(part for move, part in zip(moves, parts) if move.kind == kind) for kind in KINDS}
    parts = [part / max(1, total[move.kind]) for move, part in zip(moves, parts)]
    freed = sum(part * move.freed for part, move in zip(parts, moves))
    seconds = sum(part * move.seconds for part, move in zip(parts, moves))
    assert fewest_seconds(freed - 1e-9, moves) <= seconds + 1e-9


@pytest.mark.parametrize("profile", [laptop(), T4])
def test_few_pairs_reach_the_solver(profile, monkeypatch):
    """The bound is near the program's own, which takes many times as long."""
    s = search(profile=profile, prompts=200, gpu=3, hh_ratio=0.2, gen_len=64)
    solved = []
    solve = Relaxation.solve
    monkeypatch.setattr(Relaxation, "solve", lambda self, *args: solved.append(args[0]) or solve(self, *args))
    s.best()
    assert len(set(solved)) < len(list(s.unplaced())) / 4


@pytest.mark.parametrize(
    "job",
    [
        dict(prompts=128, prompt_len=32, gen_len=32, gpu=1.2),
        dict(prompts=192, prompt_len=64, gen_len=256, gpu=1.6, hh_ratio=0.5),  # its cache would take all that is left
    ],
    ids=["full", "h2o"],
)
def test_the_head_goes_to_the_device_where_that_makes_room(job):
    """Staging buffers for weights are as large as the largest layer that streams; in OPT-1.3B that is the head, which
    is read in slices only for blocks of up to 128 rows."""
    s = search(laptop(), model="facebook/opt-1.3b", **job)
    found = s.best()
    assert found.policy.percent[0] >= 8
    size, batches, percent = found.policy.gpu_batch_size, found.policy.num_gpu_batches, found.policy.percent
    assert s.candidate(Policy(size, batches, (0, 0, *percent[2:]))).prediction.bound_by == "disk"
    for weights in (0, 4, 8, 12, 16):
        for cache in range(0, 101, 4):
            other = s.candidate(Policy(size, batches, (weights, 0, cache, 0, *percent[4:])))
            if not other.plan.missing():
                assert found.prediction.job_seconds <= other.prediction.job_seconds * 1.005, (weights, cache)


def test_a_head_in_slices_leaves_room_for_a_large_block():
    """LLaMA-3.2-1B in Q8_0 under 1 GiB: buffers for its head, or the head itself, would take half of the room."""
    spec = named_spec("meta-llama/Llama-3.2-1B")
    shapes = [layer.shapes for layer in family("llama").tensors(spec)]
    formats = {name: GGUF["Q8_0"] for layer in shapes for name, shape in layer.items() if len(shape) > 1}
    model = ModelData.of(spec, "bfloat16", "bfloat16", False, True, formats, {"Q8_0": "int8"})
    workload = Workload((128,) * 128, 128)
    resources = Resources.of(laptop(), {"gpu": GIB, "cpu": None, "disk": None})
    rule = rule_for(KVBudget.from_ratio(0.2), workload.longest, workload.gen_len, spec)
    found = Search(laptop(), model.shapes(rule, workload), workload, resources, Constraints()).best()
    assert found.policy.gpu_batch_size >= 64
    buffers = next(nbytes for _, label, nbytes in found.plan.items if label == "weight staging buffers")
    assert buffers < model.stored_bytes("model.embed_tokens.weight")


def test_with_h2o_the_block_is_larger():
    job = {"profile": laptop(), "model": "facebook/opt-6.7b", "prompts": 100, "prompt_len": 512, "gpu": 8, "disk": 20}
    full, evicting = search(**job).best(), search(**job, hh_ratio=0.1).best()
    assert evicting.policy.block_size > full.policy.block_size
    assert evicting.prediction.tokens_per_s > full.prediction.tokens_per_s


def test_micro_batches_of_prefill_are_small_where_memory_is_tight():
    job = dict(model="meta-llama/Llama-3.2-1B", prompts=64, gen_len=128, hh_ratio=0.2)
    assert search(laptop(), **job, gpu=12).best().policy.prefill_tokens == 2048
    tight = search(laptop(), **job, gpu=1.6).best()
    assert tight.policy.prefill_tokens == 512
    large = search(laptop(), **job, gpu=1.6, prefill_tokens=2048).best()
    assert tight.prediction.tokens_per_s > large.prediction.tokens_per_s


@pytest.mark.parametrize("prompt_len, found", [(16, {2048}), (128, {2048, 512}), (3000, {2048})])
def test_micro_batches_of_the_same_size_are_tried_once(prompt_len, found):
    sizes = search(laptop(), model="meta-llama/Llama-3.2-1B", prompts=8, prompt_len=prompt_len).unplaced()
    assert {policy.prefill_tokens for policy in sizes if policy.gpu_batch_size == 8} == found


def test_given_batch_sizes_are_kept():
    given = dict(gpu_batch_size=6, num_gpu_batches=3, cpu_cache_compute=False, prefill_tokens=300)
    policy = search(T4, gpu=12, **given).best().policy
    assert {name: getattr(policy, name) for name in given} == given


def test_without_cuda_nothing_goes_to_the_cpu_tier():
    policy = search(laptop(), model="facebook/opt-13b", gpu=6).best().policy
    assert policy.percent[1::2] == (0, 0, 0)


def test_a_latency_limit_is_kept():
    free = search(laptop(), prompts=200).best()
    limit = free.prediction.block_seconds / 3
    found = search(laptop(), prompts=200, max_latency=limit).best()
    assert found.prediction.block_seconds <= limit
    assert found.policy.block_size < free.policy.block_size


def test_an_unreachable_latency_is_refused_with_the_fastest_block():
    with pytest.raises(UserError, match=r"no policy finishes a block within 0.001 s: the fastest found takes \d"):
        search(laptop(), max_latency=0.001).best()


def test_a_latency_that_only_a_mixed_placement_reaches():
    job = {"profile": T4, "model": "facebook/opt-30b", "prompts": 1}
    fastest = search(**job, gpu_batch_size=1, num_gpu_batches=1).best().prediction.block_seconds
    found = search(**job, max_latency=1.001 * fastest).best()
    assert found.prediction.block_seconds <= 1.001 * fastest
    with pytest.raises(UserError, match=rf"the fastest found takes {fastest:.1f} s"):
        search(**job, max_latency=0.9 * fastest).best()


def test_all_tiers_that_are_short_are_named():
    with pytest.raises(PlanError) as error:
        search(T4, model="facebook/opt-175b", cpu=1, disk=1).best()
    short = re.findall(r"the (\w+) tier is too small: .*?\((\d+) bytes\), .*?\((\d+) bytes\)", str(error.value))
    assert [tier for tier, *_ in short] == ["cpu", "disk"]
    assert all(int(needed) > int(limit) for _, needed, limit in short)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_bottleneck_is_a_resource(overlap):
    found = search(T4, model="facebook/opt-30b", prompts=1, gpu_batch_size=1, num_gpu_batches=1, overlap=overlap).best()
    assert found.prediction.bound_by == "cpu to gpu"  # though compute is what these copies hold up
    larger = search(T4, model="facebook/opt-6.7b", prompts=512, overlap=overlap).best()
    assert larger.prediction.bound_by == "compute"


@pytest.mark.parametrize(
    "job, tier",
    [
        ({"profile": laptop(), "model": "facebook/opt-30b", "gpu": 4, "disk": 10}, "disk"),
        ({"profile": laptop(), "gpu": 0.3}, "RAM"),
        ({"profile": T4, "model": "facebook/opt-175b", "gpu": 0.2}, "gpu"),
        ({"profile": T4, "model": "facebook/opt-175b", "cpu": 20, "disk": 30}, "disk"),
    ],
)
def test_a_job_that_cannot_fit_names_the_tier_and_the_bytes(job, tier):
    with pytest.raises(PlanError) as error:
        search(**job).best()
    found = re.search(
        r"(\w+)(?: tier)? is too small: needs .*\((\d+) bytes\), there are .*\((\d+) bytes\)", str(error.value)
    )
    assert found, error.value
    assert found[1] == tier
    assert int(found[2]) > int(found[3])


# the KV budget


def point(ratio, speed):
    return BudgetPoint(ratio, 10, 1, 1, speed)


@pytest.mark.parametrize(
    "speeds, chosen",
    [
        ([100, 98, 97.5, 90, 80], 2),
        ([100, 96, 98, 90, 80], 2),
        ([100, 90, 80, 70, 60], 0),
        ([100, 100, 100, 100, 99], 4),
        ([100], 0),
    ],
)
def test_the_largest_budget_within_three_percent_of_the_floor(speeds, chosen):
    curve = [point(n, speed) for n, speed in enumerate(speeds)]
    assert largest_free(curve) == curve[chosen]


def test_a_budget_that_costs_too_much_is_not_taken():
    curve = [replace(point(n, speed), allowed=n > 1) for n, speed in enumerate([100, 99, 60, 59, 30])]
    assert largest_free(curve) == curve[3]


def test_budgets_go_from_the_floor_to_the_full_cache():
    choices = budget_choices(0.2, 100, 132)
    assert choices[0] == BudgetChoice(KVBudget.from_ratio(0.2), 0.2, 0.4)
    assert choices[-1] == BudgetChoice(None, None, None)
    ratios = [choice.ratio for choice in choices[:-1]]
    assert ratios == sorted(set(ratios))
    with pytest.raises(UserError, match="min_hh_ratio"):
        budget_choices(0.7, 100, 132)


@pytest.mark.parametrize("longest, total", [(64, 1088), (512, 544), (1, 2), (1000, 1001)])
def test_budgets_reach_up_to_the_full_cache(longest, total):
    slots = [sum(choice.kv_budget.slots(longest)) for choice in budget_choices(0.1, longest, total)[:-1]]
    assert slots == sorted(slots)
    assert all(n < total for n in slots[1:])
    assert longest < 10 or slots[-1] > total / 3


def test_where_everything_that_fits_loses_too_much_that_is_the_error():
    with pytest.raises(UserError, match="nothing that fits into memory is known to lose at most `max_loss`"):
        largest_free([replace(point(0.1, 1.0), allowed=False)])


@given(st.integers(1, 2000), st.integers(2, 400), st.integers(1, 4000), st.floats(0.01, 1))
def test_the_sized_budget_is_nearly_the_largest_that_is_free(knee, longest, gen_len, slope):
    """Throughput that falls beyond a knee: the budget found is free, and one a third larger would not be."""
    total = longest + gen_len

    def speed(slots):
        return 100 - max(0, slots - knee) * slope

    curve = []
    for budget, ratio, _ in budget_choices(0.1, longest, total):
        slots = total if budget is None else sum(budget.slots(longest))
        curve.append(BudgetPoint(ratio, slots, 1, 1, speed(slots)))
    slots = largest_free(curve).slots
    assert [p.slots for p in curve] == sorted(p.slots for p in curve)
    least = 0.97 * curve[0].tokens_per_s
    assert speed(slots) >= least
    larger = [p.slots for p in curve if p.slots > slots]
    assert all(speed(n) < least for n in larger)
    assert not larger or min(larger) <= 1.3 * slots + 4
