"""How full a block is from pass to pass, and the cost of jobs whose rows take each other's places."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import laptop, planner_of

from h2o_flexgen.planning.memory import Resources
from h2o_flexgen.planning.occupancy import expected, stretches
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.policy import TIERS, Policy

NO_LIMITS = Resources(dict.fromkeys((*TIERS, "ram"), 1 << 50))


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60), places=st.integers(1, 12))
def test_every_row_enters_once_and_decodes_all_but_its_first_token(lengths, places):
    found = stretches(lengths, places)
    assert sum(passes * entering for passes, _, entering in found) == pytest.approx(len(lengths))
    assert sum(passes * decoding for passes, decoding, _ in found) == pytest.approx(sum(lengths) - len(lengths))
    assert all(decoding + entering <= places + 1e-9 for _, decoding, entering in found)
    assert sum(passes for passes, _, _ in found) >= max(lengths)


@given(places=st.integers(1, 8), blocks=st.integers(1, 4), length=st.integers(2, 9))
def test_rows_of_one_length_run_block_by_block(places, blocks, length):
    first, rest = stretches([length] * places * blocks, places)
    assert first == (blocks, 0, places) and rest == (blocks * (length - 1), places, 0)


@pytest.mark.parametrize("mean", [1.0, 5.0, 40.0])
def test_expected_lengths_have_the_given_mean(mean):
    lengths = expected(2000, 10**6, mean)
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.25) and min(lengths) >= 1
    assert set(expected(7, 30, None)) == set(expected(7, 30, 30)) == {30}
    assert max(expected(2000, 30, 20)) == 30


def predicted(workload: Workload):
    return planner_of(laptop(), "opt-1.3b").choose(workload, NO_LIMITS, Policy(8, 2), None)


def test_outputs_that_end_early_shorten_a_job_but_cost_more_per_token():
    work = Workload((128,) * 64, 64)
    whole = predicted(work).prediction
    early = predicted(replace(work, mean_len=16)).prediction
    assert 0.25 * whole.job_seconds < early.job_seconds < 0.6 * whole.job_seconds
    assert early.tokens_per_s < whole.tokens_per_s


def test_a_plan_can_be_costed_again_with_the_actual_lengths():
    choice = predicted(Workload((128,) * 64, 64, mean_len=16))
    same = choice.predict([64] * 64)
    whole = predicted(Workload((128,) * 64, 64)).prediction
    assert same.job_seconds == pytest.approx(whole.job_seconds, rel=0.01)


def test_rows_enter_together_where_few_tokens_are_slow():
    """Short prompts join the matmuls of a decode step and need not wait for others."""
    short, long = (predicted(Workload((n,) * 64, 32)) for n in (64, 200))
    assert short.least_free == 1 <= long.least_free <= 4


def test_shared_prefixes_cost_no_compute():
    work = Workload((512,) * 16, 2)
    alone, shared = (predicted(each).prediction for each in (work, replace(work, shared=512 * 12, path=400)))
    assert shared.job_prefill_seconds < 0.5 * alone.job_prefill_seconds
