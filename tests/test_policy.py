"""Policy, KVBudget and MemoryPlan: plain data that refuses nonsense and says what is wrong."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen import KVBudget, Policy, UserError
from h2o_flexgen.errors import PlanError
from h2o_flexgen.planning.memory import MemoryPlan
from h2o_flexgen.policy import GIB, gib, given_policy


@st.composite
def policies(draw):
    percent = []
    for _ in range(3):
        gpu = draw(st.integers(0, 100))
        percent += [gpu, draw(st.integers(0, 100 - gpu))]
    return Policy(
        draw(st.integers(1, 999)),
        draw(st.integers(1, 99)),
        tuple(percent),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(1, 9999)),
    )


@given(policy=policies())
def test_a_policy_survives_json(policy):
    assert Policy.from_dict(json.loads(policy.to_json())) == policy
    assert Policy.from_dict({"policy": json.loads(policy.to_json()), "tokens_per_s": 3.5}) == policy


@given(policy=policies())
def test_fractions_are_what_the_percentages_say(policy):
    for n, what in enumerate(("weights", "cache", "activations")):
        gpu, cpu, disk = policy.fractions(what)
        assert (gpu, cpu) == (policy.percent[2 * n] / 100, policy.percent[2 * n + 1] / 100)
        assert sum((gpu, cpu, disk)) == pytest.approx(1) and 0 <= disk <= 1
        if policy.percent[2 * n] + policy.percent[2 * n + 1] == 100:
            assert disk == pytest.approx(0, abs=1e-12)


def test_a_policy_is_read_from_a_file(tmp_path):
    policy = Policy(7, 3, (10, 20, 30, 40, 50, 50), False, True, 99)
    (tmp_path / "p.json").write_text(policy.to_json())
    assert given_policy(tmp_path / "p.json") == (policy, None, None, None, "exact")
    (tmp_path / "searched.json").write_text(json.dumps({"policy": json.loads(policy.to_json())}))
    assert given_policy(str(tmp_path / "searched.json")) == (policy, None, None, None, "exact")


@pytest.mark.parametrize(
    "changes",
    [
        dict(gpu_batch_size=0),
        dict(num_gpu_batches=0),
        dict(prefill_tokens=0),
        dict(gpu_batch_size=-4),
        dict(gpu_batch_size=2.5),
        dict(percent=(100, 0, 100, 0)),
        dict(percent=(100, 0, 100, 0, 100, 0, 0)),
        dict(percent=(60, 50, 100, 0, 100, 0)),
        dict(percent=(100, 0, 100, 1, 100, 0)),
        dict(percent=(100, 0, 100, 0, -1, 0)),
        dict(percent=(100, 0, 100, 0, 0, 101)),
        dict(percent=(float("nan"), 0, 100, 0, 100, 0)),
    ],
    ids=str,
)
def test_an_impossible_policy_is_refused(changes):
    with pytest.raises(UserError):
        Policy(**changes)


# the KV budget


@given(longest=st.integers(1, 4096), hh=st.floats(0, 1), recent=st.none() | st.floats(0, 1))
def test_a_ratio_is_of_the_longest_prompt_and_at_least_one_slot(longest, hh, recent):
    budget = KVBudget.from_ratio(hh, recent)
    recent = hh if recent is None else recent
    expected = tuple(max(1, int(r * longest)) if r > 0 else 0 for r in (hh, recent))
    if expected == (0, 0):
        with pytest.raises(UserError, match="empty"):
            budget.slots(longest)
    else:
        assert budget.slots(longest) == expected


@given(longest=st.integers(1, 4096), heavy=st.integers(0, 99), recent=st.integers(1, 99))
def test_a_size_is_a_size_whatever_the_prompts(longest, heavy, recent):
    assert KVBudget.from_size(heavy, recent).slots(longest) == (heavy, recent)
    assert KVBudget(hh_ratio=0.5, recent_ratio=0.5, hh_size=heavy, recent_size=recent).slots(longest) == (heavy, recent)


def test_the_recent_window_follows_the_heavy_hitters_unless_it_is_given():
    assert KVBudget.from_size(7).slots(100) == (7, 7)
    assert KVBudget(recent_size=7).slots(100) == (0, 7)  # a local window
    assert KVBudget(hh_ratio=0.2).slots(100) == (20, 20)
    assert KVBudget(hh_ratio=0.2, recent_size=5).slots(100) == (20, 5)
    assert KVBudget(hh_size=3, recent_ratio=0.5).slots(100) == (3, 50)
    assert KVBudget.from_ratio(0, 0.2).slots(100) == (0, 20)


@pytest.mark.parametrize(
    "values",
    [
        dict(),
        dict(hh_ratio=-0.1),
        dict(hh_ratio=1.1),
        dict(recent_ratio=2),
        dict(hh_ratio=float("nan")),
        dict(hh_size=-1),
        dict(hh_size=1.5),
        dict(recent_size=-3),
        dict(hh_size=float("nan")),
        dict(hh_size=float("inf")),
    ],
    ids=str,
)
def test_an_impossible_budget_is_refused(values):
    with pytest.raises(UserError):
        KVBudget(**values)


@pytest.mark.parametrize("rule", [None, 3, ["h2o"]])
def test_the_rule_of_a_budget_is_a_name(rule):
    with pytest.raises(UserError, match="is a name"):
        KVBudget.from_size(4, rule=rule)


def test_a_budget_without_a_rule_is_h2o_in_policy_files(tmp_path):
    """Files written while H2O was the only rule name none."""
    (tmp_path / "p.json").write_text(json.dumps({"policy": {}, "kv_budget": {"heavy": 5, "recent": 3}}))
    assert given_policy(tmp_path / "p.json")[1] == KVBudget(hh_size=5, recent_size=3, rule="h2o")


# the plan's verdict


@given(
    needs=st.lists(st.tuples(st.sampled_from(["gpu", "cpu", "disk"]), st.integers(0, 99)), max_size=9),
    gpu=st.integers(0, 200),
    cpu=st.integers(0, 200),
    disk=st.integers(0, 200),
    shared=st.booleans(),
)
def test_a_plan_fits_exactly_when_every_tier_fits(needs, gpu, cpu, disk, shared):
    plan = MemoryPlan(limits={"gpu": gpu, "cpu": cpu, "disk": disk}, shared=shared)
    if shared:
        plan.limits["ram"] = min(gpu, cpu)
    for n, (tier, nbytes) in enumerate(needs):
        plan.add(tier, f"item {n}", nbytes)
    sums = {t: sum(b for tier, b in needs if tier == t) for t in ("gpu", "cpu", "disk")}
    fits = all(sums[t] <= plan.limits[t] for t in sums)
    if shared:
        fits = fits and sums["gpu"] + sums["cpu"] <= plan.limits["ram"]
    if fits:
        plan.check()
        return
    with pytest.raises(PlanError) as error:
        plan.check()
    message = str(error.value)
    short = plan.missing()
    for tier in ("ram",) if "ram" in short else short:
        assert ("RAM" if tier == "ram" else f"the {tier} tier") in message
        assert f"({plan.needed(tier)} bytes)" in message and f"({plan.limits[tier]} bytes)" in message
    assert "\n" not in message
    assert any(f"item {n}" in message for n in range(len(needs)))


@pytest.mark.parametrize("tier", ["gpu", "cpu", "disk"])
def test_the_error_names_the_tier_the_bytes_and_what_to_change(tier):
    plan = MemoryPlan(limits={"gpu": GIB, "cpu": GIB, "disk": GIB})
    plan.add(tier, "small", GIB // 4)
    plan.add(tier, "KV cache", 3 * GIB)
    with pytest.raises(PlanError) as error:
        plan.check()
    message = str(error.value)
    assert f"the {tier} tier" in message and "3.25 GiB" in message and "1.00 GiB" in message
    assert "KV cache" in message and "small" not in message.split("most goes to")[1]
    assert message.rsplit(": ", 1)[1], "says what to change"


def test_gib_reads_well_at_both_ends():
    assert gib(GIB) == "1.00 GiB"
    assert gib(1 << 20) == "1.00 MiB"
