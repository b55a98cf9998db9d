"""The planner: what it chooses without a search, and when it measures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import T4, laptop, plan_of, planner_of

from h2o_flexgen.engine_args import EngineArgs
from h2o_flexgen.errors import PlanError, UserError
from h2o_flexgen.kv_cache import FullCache
from h2o_flexgen.planning.budget import largest_free
from h2o_flexgen.planning.memory import Resources, decode_rows
from h2o_flexgen.planning.planner import Planner, choose
from h2o_flexgen.planning.search import Search
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.policy import GIB, TIERS, KVBudget, Policy

MODEL, JOB = "opt-1.3b", Workload((128,) * 40, 16)
RESIDENT = (100, 0, 100, 0, 100, 0)


def resources(profile=None, **gib) -> Resources:
    """The memory of a profile's machine, capped to these GiB by tier."""
    caps = {tier: int(gib[tier] * GIB) if tier in gib else None for tier in TIERS}
    return Resources.of(profile or laptop(), caps)


def unmeasured(**constraints) -> tuple[Planner, list]:
    """A planner for an unmeasured machine, and a list that grows by one each time it is measured."""
    planner, times = planner_of(laptop(), MODEL, **constraints), []
    return Planner(planner.models, planner.constraints, measure=lambda: times.append(1) or laptop()), times


def test_a_job_that_fits_is_resident_and_nothing_is_measured():
    planner, measured = unmeasured()
    choice = planner.choose(JOB, resources())
    assert choice.policy == Policy(40, 1, RESIDENT) and not choice.plan.missing()
    assert choice.prediction is None and not measured


def test_a_job_that_fits_with_small_micro_batches_is_resident_too():
    planner, measured = unmeasured()
    small = Policy(40, 1, RESIDENT, prefill_tokens=512)
    needed = plan_of(planner, small, FullCache(), JOB, resources())[1].needed("gpu")
    assert planner.choose(JOB, resources(gpu=(needed + 1000) / GIB)).policy == small and not measured


def test_half_as_many_rows_are_resident_where_all_do_not_fit():
    many = replace(JOB, prompt_lens=(128,) * 400)
    planner, measured = unmeasured()
    assert planner.choose(many, resources()).policy == Policy(128, 1, RESIDENT)
    needed = plan_of(planner, Policy(64, 1, RESIDENT), FullCache(), many, resources())[1].needed("gpu")
    assert planner.choose(many, resources(gpu=(needed + 1000) / GIB)).policy == Policy(64, 1, RESIDENT) and not measured


@pytest.mark.parametrize("given, limits", [({}, {"gpu": 2}), ({"max_latency": 1e6}, {}), ({"resident": False}, {})])
def test_a_job_that_does_not_fit_or_may_be_faster_is_searched_and_measured_once(given, limits):
    planner, measured = unmeasured(**given)
    for _ in range(2):
        choice = planner.choose(JOB, resources(**limits))
    assert measured == [1]
    choice.plan.check()
    found = Search(
        laptop(), planner.model.shapes(choice.rule, JOB), JOB, resources(**limits), planner.constraints
    ).best()
    assert choice.policy == found.policy
    assert choice.prediction == found.prediction and choice.plan == found.plan


def test_on_cuda_more_prompts_than_a_batch_are_searched_for_larger_blocks():
    many = replace(JOB, prompt_lens=(128,) * 400)
    assert planner_of(T4, MODEL).choose(JOB, resources(T4)).policy.gpu_batch_size == 40
    assert planner_of(T4, MODEL).choose(many, resources(T4)).policy.block_size > 64


def test_a_given_policy_is_taken_whether_it_fits_or_not():
    planner, measured = unmeasured()
    choice = planner.choose(JOB, resources(gpu=0.5), Policy(8, 2, RESIDENT), KVBudget.from_ratio(0.2))
    assert choice.policy == Policy(8, 2, RESIDENT) and choice.rule.budget == 50 and not measured
    with pytest.raises(PlanError, match="RAM is too small"):
        choice.plan.check()


def test_given_sizes_are_kept_by_resident_and_by_searched_policies():
    for limits in ({}, {"gpu": 1.5}):
        policy = planner_of(laptop(), MODEL, gpu_batch_size=5, overlap=False).choose(JOB, resources(**limits)).policy
        assert policy.gpu_batch_size == 5 and not policy.overlap


def test_an_automatic_budget_is_the_largest_that_is_free():
    few = replace(JOB, prompt_lens=(128,) * 12)
    choice = planner_of(laptop(), "opt-6.7b").choose(few, resources(gpu=6), kv_budget="auto")
    chosen = largest_free(choice.curve)
    assert len(choice.curve) > 5 and choice.curve[0].ratio == 0.1
    slots = choice.rule.budget or sum(choice.rule.segments(JOB.longest, JOB.gen_len))
    assert slots == chosen.slots
    assert (choice.policy.gpu_batch_size, choice.policy.num_gpu_batches) == (
        chosen.gpu_batch_size,
        chosen.num_gpu_batches,
    )
    assert choice.prediction.tokens_per_s == chosen.tokens_per_s


def test_candidates_that_do_not_fit_are_skipped():
    planner = planner_of(laptop(), MODEL)
    too_large, *_ = planner.candidates(JOB, resources(gpu=0.3), kv_budget="auto")
    fitting, *_ = planner.candidates(JOB, resources(), kv_budget="auto")
    assert len(choose([too_large, fitting], planner.profile).curve) == 1
    with pytest.raises(PlanError, match="not even 1 x 1 sequences"):
        choose([too_large], planner.profile)


def test_a_single_block_counts_the_prompts_it_holds():
    policy = Policy(8, 2, RESIDENT)
    block, job = (
        plan_of(planner_of(laptop(), MODEL, one_block=one), policy, FullCache(), JOB, resources())[1]
        for one in (True, False)
    )
    outputs = JOB.output_bytes - Workload((128,) * 16, 16).output_bytes
    # rows that come later may join the matmuls of a decode step
    rows = [decode_rows([8, 8], Workload((128,) * count, 16), 1) for count in (40, 16)]
    joining = (rows[0] - rows[1]) * 2048 * 2
    assert job.needed("gpu") - block.needed("gpu") == outputs + joining


def test_a_cap_that_nothing_would_use_is_refused():
    with pytest.raises(UserError, match="`cpu_mem` does nothing here"):
        EngineArgs(cpu_mem=GIB).check_caps(cuda=False)
    EngineArgs(cpu_mem=GIB).check_caps(cuda=True)
    EngineArgs(policy=Policy(), cpu_mem=GIB).check_caps(cuda=False)
