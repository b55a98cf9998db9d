"""Every rule in the registry: its oracle's tokens through the whole engine, plans and searches, names and options."""

from __future__ import annotations

from itertools import combinations
from math import log

import oracle
import pytest
import torch
import zoo
from command_tools import SHORT
from machines import T4, laptop, planner_of

from h2o_flexgen import KVBudget, UserError
from h2o_flexgen.kv_cache import RULES, make_rule, smoothed
from h2o_flexgen.kv_cache import full as full_cache
from h2o_flexgen.planning.memory import Resources
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.policy import TIERS

pytest_plugins = ["command_tools"]

LENGTHS = [5, 14, 9, 1]
MAX_TOKENS = 10
SLOTS = (4, 4)
PLACEMENTS = {
    "ram": dict(percent=(100, 0, 100, 0, 100, 0), gpu_batch_size=3, num_gpu_batches=2),
    "disk": dict(percent=(0, 0, 0, 0, 0, 0), gpu_batch_size=2, num_gpu_batches=3, prefill_tokens=30),
    "mixed": dict(percent=(50, 0, 0, 50, 100, 0), gpu_batch_size=2, num_gpu_batches=3, cpu_cache_compute=True),
}
#: (model, placement, options): with one and with several query heads per KV head, on every tier, with protected tokens
#: at both ends of the prompt and with none but the window
CASES = [
    ("opt", "ram", "first=0"),
    ("opt", "disk", "first=1:last=1"),
    ("llama_groups_of_3_wide_heads_linear", "mixed", "first=1:last=1"),
]


def assert_tokens_of_the_oracle(run, model: zoo.Tiny, rule: str, placement: str) -> None:
    """On ragged batches."""
    prompts = model.clear_cut_prompts(LENGTHS, MAX_TOKENS, [(*SLOTS, rule)])
    outputs = run(model, prompts, MAX_TOKENS, (*SLOTS, rule), **PLACEMENTS[placement])
    for output, trace in zip(outputs, model.references(prompts, MAX_TOKENS, *SLOTS, rule), strict=True):
        assert output.token_ids == trace.tokens
        assert output.logprobs == pytest.approx(trace.logprobs, abs=1e-4)


@pytest.mark.parametrize("name, placement, options", CASES)
@pytest.mark.parametrize("rule", RULES)
def test_tokens_are_those_of_the_oracle(tiny, run, monkeypatch, rule, name, placement, options):
    monkeypatch.setattr(full_cache, "SEGMENT", 4)  # a cache that grows is compacted several times
    assert_tokens_of_the_oracle(run, tiny(name), rule + oracle.IN_SHORT.get(rule, "") + f":{options}", placement)


@pytest.mark.parametrize("rule", ["decayed:decay=0.7", "snapkv:window=4:pool=3:pooling=avg"])
def test_tokens_with_options_of_one_rule_are_those_of_the_oracle(tiny, run, rule):
    assert_tokens_of_the_oracle(run, tiny("opt"), rule, "mixed")


def test_no_two_rules_keep_the_same_tokens(tiny):
    """So that the tests above would notice a mix-up."""
    model = tiny()
    (prompt,) = model.prompts([50])
    kept = {name: model.reference(prompt, 10, 24, 4, name).kept for name in RULES}
    for one, other in combinations(RULES, 2):
        assert kept[one] != kept[other], (one, other)


def test_every_rule_has_an_oracle_and_a_docstring():
    assert oracle.RULES.keys() == RULES.keys()
    assert all("Keeps" in rule.__doc__ for rule in RULES.values())


@pytest.mark.parametrize("heavy, recent", [(1, 0), (1, 1), (8, 3), (7, 16)])
@pytest.mark.parametrize("name", ["strided", "strided_h2o", "fixed", "fixed_h2o"])
def test_a_lattice_fits_into_its_slots_and_only_gets_coarser(name, heavy, recent):
    for first, last in {(0, 0), (heavy // 3, heavy // 3), (heavy, 0)}:
        rule = oracle.make_rule(f"{name}:first={first}:last={last}", heavy, recent)
        before = set()
        for n in range(1, 150):
            columns = rule.columns(n)
            assert len(columns) <= heavy - first - last
            assert {j for j in columns if j < n - 1 - recent} <= before
            before = columns | set(range(max(0, n - recent), n))


@pytest.mark.parametrize("heavy, recent", [(1, 1), (7, 16), (400, 33)])
@pytest.mark.parametrize("name", ["strided", "strided_h2o", "fixed", "fixed_h2o"])
def test_the_columns_of_long_texts_are_those_of_the_oracle(name, heavy, recent):
    rule = make_rule(name, heavy, recent)
    expected = oracle.make_rule(name, heavy, recent)
    if rule.share == 0:
        return
    for n in [*range(1, 60), 1000, 4095, 4096, 4097, (1 << 23) - 1]:
        position = torch.arange(max(0, n - recent - 5000), max(0, n - recent), dtype=torch.int32)
        found = rule.on_lattice(position, torch.tensor(n, dtype=torch.int32))
        assert set(position[found].tolist()) == expected.columns(n) & set(position.tolist()), n


@pytest.mark.parametrize("decay", [0.5, 0.9995, 0.99999])
def test_sums_of_fading_observations_are_those_of_the_formula(decay):
    age = torch.randint(1, 400_000, (3, 2, 9999), dtype=torch.int32)
    assert torch.equal(smoothed._faded(age, decay), torch.expm1(age * log(decay)) / (decay - 1))


# plans and searches


@pytest.mark.parametrize("profile", [laptop(), T4], ids=["cpu", "cuda"])
def test_a_rule_is_planned_and_searched(profile):
    job = Workload((512,) * 64, 256)
    limits = Resources.of(profile, dict.fromkeys(TIERS))

    def choose(budget):
        planner = planner_of(profile, "facebook/opt-6.7b", resident=False, gpu_batch_size=16, num_gpu_batches=4)
        choice = planner.choose(job, limits, kv_budget=budget)
        choice.plan.check()
        return choice, planner.model.shapes(choice.rule, job).kv.slots

    full, all_slots = choose(None)
    for name, rule in RULES.items():
        found, slots = choose(KVBudget.from_ratio(0.1, rule=name))
        assert found.rule.to_dict() == {"heavy": 51, "recent": 51, "rule": name}
        assert found.prediction.job_seconds < full.prediction.job_seconds, name
        # the kept tokens of the prompt, and one more or, in a growing cache, the output without its last token
        assert slots == 102 + (255 if rule.growth == "append" else 1) < all_slots, name


# names and options


@pytest.mark.parametrize(
    "text, label",
    [
        ("h2o:first=2", "h2o:first=2"),
        ("fixed_h2o", "fixed_h2o"),
        ("mean:last=3:first=2", "mean:first=2:last=3"),
        ("sinks:first=4", "sinks"),
        ("vatp:first=0", "vatp:first=0"),
        ("decayed:decay=0.950", "decayed"),
        ("decayed:decay=.5:last=1", "decayed:last=1:decay=0.5"),
        ("snapkv:pooling=avg:window=16", "snapkv:window=16:pooling=avg"),
    ],
)
def test_a_label_names_the_options_that_are_not_defaults(text, label):
    rule = make_rule(text, 100, 100)
    assert rule.label == label and make_rule(label, 100, 100) == rule


@pytest.mark.parametrize(
    "text, says",
    [
        ("best", "unknown `kv_rule` 'best'; known: h2o, smoothed, "),
        ("", "unknown `kv_rule` ''; known: "),
        ("H2O", "unknown `kv_rule` 'H2O'"),
        ("h2o:sinks=4", "cannot take the option 'sinks=4'; known: first=0, last=0"),
        ("h2o:", "cannot take the option ''; known: "),
        ("h2o:first", "cannot take the option 'first'"),
        ("h2o:first=four", "cannot take the option 'first=four'"),
        ("h2o:first=1.5", "cannot take the option 'first=1.5'"),
        ("h2o:heavy=3", "cannot take the option 'heavy=3'"),
        ("h2o:first=-1", "first and last must be 0 or more"),
        ("decayed:decay=x", "known: first=0, last=0, layers=, decay=0.95"),
        ("decayed:decay=0", "decay must lie in (0, 1]"),
        ("decayed:decay=1.01", "decay must lie in (0, 1]"),
        ("decayed:decay=nan", "decay must lie in (0, 1]"),
        ("snapkv:window=0", "window must be 1 or more"),
        ("snapkv:pool=4", "pool must be odd, 1 or more"),
        ("snapkv:pool=-1", "pool must be odd, 1 or more"),
        ("snapkv:pooling=sum", "pooling must be max or avg"),
        (
            "mean:first=70:last=31",
            "protects 70 + 31 tokens, but the KV budget has only 100 slots besides the recent",
        ),
        ("heavy:first=200:last=1", "protects 200 + 1 tokens, but the KV budget has only 200 slots"),
    ],
)
def test_a_bad_name_or_option_is_one_line_that_says_what_to_do(text, says):
    with pytest.raises(UserError) as error:
        make_rule(text, 100, 100)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_the_same_on_the_command_line(refused, model):
    def said(rule, *budget):
        return refused("--model", model, *SHORT, *budget, "--kv-rule", rule)

    assert "unknown --kv-rule 'best'; known: h2o, smoothed" in said("best", "--hh-ratio", 0.2)
    assert "--kv-rule vatp protects 20 + 0 tokens, but the KV budget has only 4 slots" in said("vatp", "--hh-size", 4)
