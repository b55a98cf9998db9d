"""Different numbers of slots in different layers: the same total, and the tokens of the oracle."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from analysis_tools import resident
from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams, UserError
from h2o_flexgen.analysis.simulation import MaskedCache
from h2o_flexgen.commands.budget import check_model
from h2o_flexgen.commands.main import main
from h2o_flexgen.kernels.attention import PLAIN, Softmax
from h2o_flexgen.kv_cache import FullCache, check_rule, make_rule, rule_for
from h2o_flexgen.kv_cache.layers import HeadLosses
from h2o_flexgen.kv_cache.rule import LayerAttention
from h2o_flexgen.models.registry import named_spec
from h2o_flexgen.models.spec import ModelSpec, Rope
from h2o_flexgen.profiling.calibration import Probe, Watched

pytest_plugins = ["command_tools"]

BUDGETS = [0.05, 0.1, 0.2, 0.5]  # fractions of a text
STEEP = [8.0, 4.0, 1.0, 0.0]
FLAT = [0.1, 0.05, 0.02, 0.0]


def known_losses(losses: list[list[float]]) -> HeadLosses:
    """One curve for each layer."""
    return HeadLosses.from_dict({"budgets": BUDGETS, "losses": losses})


#: losses of the heads of a few layers
LAYERS = st.lists(
    st.lists(st.lists(st.floats(0, 9), min_size=4, max_size=4), min_size=5, max_size=5), min_size=1, max_size=4
)


@given(losses=LAYERS, mean=st.integers(50, 500))
def test_all_heads_together_have_at_most_the_slots_of_the_budget_in_three_sizes_a_layer(losses, mean):
    known = HeadLosses.from_dict({"budgets": BUDGETS, "losses": losses})
    slots = known.slots(mean, 1000, [None] * len(losses))
    assert [*map(len, slots)] == [5] * len(losses)
    assert all(len({*layer}) <= 3 and {*layer} <= {50, 100, 200, 500} for layer in slots)
    assert sum(map(sum, slots)) <= 5 * len(losses) * mean


def test_the_head_with_the_steepest_loss_gets_most_slots():
    assert known_losses([FLAT, STEEP]).slots(150, 1000, [None, None]) == ((100,), (200,))
    by_head = HeadLosses.from_dict({"budgets": BUDGETS, "losses": [[FLAT, STEEP], [STEEP, FLAT]]})
    assert by_head.slots(150, 1000, [None, None]) == ((100, 200), (200, 100))


@pytest.mark.parametrize("curve", [[9.0, 3.0, 1.0, 0.5], [-1.0, -2.0, -5.0, -8.0], [0.0] * 4])
def test_many_heads_that_lose_the_same(curve):
    known = HeadLosses.from_dict({"budgets": BUDGETS, "losses": [[curve] * 32] * 32})
    slots = known.slots(160, 1000, [None] * 32)
    total = sum(map(sum, slots))
    assert total > 32 * 32 * 150 if curve[-1] else total == 32 * 32 * 50


def test_budgets_that_are_the_same_slots_are_one_size():
    grid = HeadLosses((0.025, 0.05, 0.1, 0.5), (((4.0, 3.0, 2.0, 0.0),), ((9.0, 5.0, 1.0, 0.0),)))
    assert sum(n for (n,) in grid.slots(6, 30, [None, None])) <= 12


@pytest.mark.parametrize("losses", [[[]], [[], [1, 0]], [1, 0], [[[1, 0], [1]]], {}])
def test_losses_of_another_form_are_refused(losses):
    with pytest.raises((KeyError, TypeError, ValueError)):
        HeadLosses.from_dict({"budgets": [0.1, 0.2], "losses": losses})


@pytest.mark.parametrize("length", ["abc", [64], -5, 0, 64.5, True])
def test_the_length_of_measured_texts_is_a_number(length):
    with pytest.raises(ValueError):
        HeadLosses.from_dict({"budgets": [0.1, 0.2], "losses": [[1, 0]], "text_len": length})


def test_files_of_earlier_versions_have_a_length():
    data = {"budgets": BUDGETS, "losses": [FLAT, STEEP], "window": 1024}
    assert HeadLosses.from_dict(data).text_len == 1024


def test_losses_of_another_number_of_layers_are_refused():
    with pytest.raises(UserError, match="of a model of 2 layers, not 3"):
        known_losses([FLAT, STEEP]).slots(150, 1000, [None] * 3)


@pytest.mark.parametrize("by_head", ["abc", (5, 5), ((1.5,),), ((0, 5),), ((True,),), ((),), ([5],), ((None,),)])
def test_slots_of_heads_are_whole_numbers(by_head):
    with pytest.raises(UserError, match="slots of each KV head"):
        KVBudget(hh_size=4, by_head=by_head)


@given(
    losses=st.lists(st.lists(st.floats(0, 9), min_size=4, max_size=4), min_size=1, max_size=4),
    mean=st.sampled_from([60, 100, 150, 220, 400]),
    in_one_layer=st.booleans(),
)
def test_no_other_slots_have_a_smaller_loss(losses, mean, in_one_layer):
    """Against all allocations, apart from the last slots, which may be too few for a step."""
    falling = [sorted(curve, reverse=True) for curve in losses]
    sizes = dict(zip([50, 100, 200, 500], zip(*falling)))
    loss = lambda slots: sum(sizes[n][head] for head, n in enumerate(slots))
    layers = [falling] if in_one_layer else [[curve] for curve in falling]
    known = HeadLosses.from_dict({"budgets": BUDGETS, "losses": layers})
    found = [n for layer in known.slots(mean, 1000, [None] * len(layers)) for n in layer]
    most = 3 if in_one_layer else 4
    fewer = [each for each in product(sizes, repeat=len(losses)) if sum(each) <= sum(found) and len({*each}) <= most]
    gaps = max(max(curve) - min(curve) for curve in falling)
    assert loss(found) <= min(map(loss, fewer)) + gaps


@given(
    losses=st.lists(st.lists(st.floats(0, 9), min_size=4, max_size=4), min_size=3, max_size=9),
    windows=st.lists(st.sampled_from([None, 1, 2, 64, 300, 5000]), min_size=9, max_size=9),
    mean=st.integers(50, 500),
    measured=st.sampled_from([None, 250, 4000]),
)
def test_a_window_takes_no_more_slots_than_it_has_tokens(losses, windows, mean, measured):
    windows = windows[: len(losses)]
    known = replace(known_losses(losses), text_len=measured)
    slots = [n for (n,) in known.slots(mean, 1000, windows)]
    held = [1000 if window is None else max(1, window - 1) for window in windows]
    assert sum(slots) <= sum(min(mean, most) for most in held)
    assert all(1 <= n <= most for n, most in zip(slots, held))


def test_what_a_window_cannot_hold_goes_to_other_layers():
    """In texts as long as measured, and four times as long."""
    curve = (9.0, 5.0, 1.0, 0.0)
    known = HeadLosses((0.05, 0.1, 0.25, 0.5), ((curve,), (curve,)), text_len=1000)
    assert known.slots(250, 1000, [None, 101]) == ((250,), (100,))
    assert known.slots(1000, 4000, [None, 1001]) == ((1000,), (500,))


@pytest.mark.parametrize("slots", [40, 600])
def test_a_budget_outside_the_measured_range_is_refused(slots):
    with pytest.raises(UserError, match="budgets of 5.0% to 50.0% of a text"):
        known_losses([FLAT, STEEP]).slots(slots, 1000, [None, None])


def test_calibration_keeps_what_the_rule_keeps(tiny):
    """For any weights of queries. Masks stand in for dropping."""
    model = resident(tiny())
    length = 96
    ids = torch.tensor(tiny().prompts([length] * 2))
    for text in ("h2o", "decayed:decay=0.5", "snapkv:window=4", "smoothed:decay=0.9"):
        budget = KVBudget.from_size(8, 8, text)
        rule = rule_for(budget, 64, length - 64, model.spec)
        cache = MaskedCache(rule, length)
        attention = Watched(PLAIN)
        positions = torch.arange(length).expand(ids.shape)
        hidden = model.embed(ids, positions)
        model.block(0, hidden, positions, attention)
        softmax, q, k, v = attention.seen
        cache.prefill(*(x[:, :, :64] for x in (q, k, v)))
        (kept,) = Probe(model, 64, [rule], length)._kept([rule], q, k, v, softmax)
        assert torch.equal(kept, cache.kept[:, :, :64]), text


@pytest.mark.parametrize("name, percent", [("smoothed", (100, 0, 100, 0, 100, 0)), ("h2o", (0, 0, 0, 0, 0, 0))])
def test_tokens_are_those_of_the_oracle_with_the_slots_of_each_layer(tiny, tmp_path, name, percent):
    model = tiny()
    path = tmp_path / "layers.json"
    layers = model.oracle.layers
    path.write_text(json.dumps({"budgets": [0.05, 0.1, 0.3, 0.5], "losses": [FLAT, STEEP, FLAT, STEEP][:layers]}))
    budget = KVBudget.from_size(6, 6, f"{name}:layers={path}")
    slots = [n for (n,) in HeadLosses.from_file(str(path)).slots(12, 5 * 12, [None] * layers)]
    assert len({*slots}) > 1
    recents = tuple(round(n * 6 / 12) for n in slots)
    each = (tuple(n - recent for n, recent in zip(slots, recents)), recents)
    prompts = model.clear_cut_prompts([30, 11], 12, [(*each, name)])
    policy = Policy(gpu_batch_size=1, num_gpu_batches=2, percent=percent)
    with LLM(str(model.folder), policy, budget, device="cpu", dtype="float32", progress=False) as llm:
        found = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
        assert llm.report["kv_budget"]["layers"] == slots
    expected = model.references(prompts, 12, *each, name)
    assert [o.outputs[0].token_ids for o in found] == [trace.tokens for trace in expected]


def test_with_rolling_positions_the_largest_layer_leaves_room():
    sizes = dict(layers=2, hidden=8, inner=8, vocab=8, heads=1, kv_heads=1, head_dim=8, positions=64, activation="silu")
    spec = ModelSpec("llama", **sizes, rope=Rope("default", 1e4, 8, 64))
    budget = KVBudget(hh_size=24, recent_size=24, rule="h2o", position_rolling=True, by_head=((16,), (80,)))
    with pytest.raises(UserError, match="slots leave no room"):
        rule_for(budget, 100, 60, spec)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"budgets": [0.1, 0.2], "losses": [[1, NaN]]}',
        '{"budgets": [0.2, 0.1], "losses": [[1, 0]]}',
        '{"budgets": [0.1], "losses": [[1]]}',
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, text):
    path = tmp_path / "layers.json"
    path.write_text(text)
    with pytest.raises(UserError, match="kv_rule"):
        check_rule(f"h2o:layers={path}")


@pytest.mark.parametrize(
    "measured, says",
    [
        (dict(model="m", rule="mean:first=4"), ""),
        (dict(model="other"), "warning: the layers of --kv-rule are of other, this job is of m\n"),
        (dict(model="m", rule="h2o"), "warning: the layers of --kv-rule are of h2o, this job has mean\n"),
    ],
    ids=["the_same", "another_model", "another_rule"],
)
def test_a_file_of_another_model_or_rule_is_a_warning(tmp_path, capsys, measured, says):
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"budgets": BUDGETS, "losses": [FLAT, STEEP]} | measured))
    check_model(None, f"mean:layers={path}", "m", "")
    assert capsys.readouterr().err == says


def test_calibrate_writes_a_file_that_rules_can_read(texts, tmp_path, capsys):
    text = tmp_path / "text.txt"
    path = tmp_path / "layers.json"
    text.write_text("to be or not to be, that is the question. " * 200)
    options = [str(text), "--model", str(texts), "--windows", "1", "--window", "64", "--output", str(path)]
    assert main(["calibrate", *options]) == 0
    assert main(["calibrate", *options[:-1], str(tmp_path / "b.json"), "--kv-rule", f"h2o:layers={path}"]) == 2
    known = HeadLosses.from_file(str(path))
    assert known.losses and min(x for layer in known.losses for curve in layer for x in curve) >= 0
    assert known.model == str(texts)
    assert main(["calibrate", *options[:-1], str(tmp_path / "c.json"), "--kv-rule", "vatp"]) == 2
    assert "take a larger --window than 64" in capsys.readouterr().err


@pytest.mark.parametrize(
    "window, heavy, recent, expected",
    [(100, 50, 50, (49, 50)), (101, 50, 50, (50, 50)), (9, 90, 10, (7, 1)), (9, 100, 0, (8, 0)), (2, 9, 9, (0, 1))],
)
def test_a_layer_has_at_most_the_slots_beside_a_new_token_in_its_window(window, heavy, recent, expected):
    """In the budget's proportion, and one of the last tokens at least; by-layer slots are cut too."""
    slides = LayerAttention(Softmax(window=window), 1, None)
    sees_all = LayerAttention(PLAIN, 1, None)
    rule = replace(make_rule("h2o", heavy, recent), attention=(sees_all, slides, slides))
    for each in (rule, replace(rule, by_head=((heavy + recent,),) * 3)):
        first, second, third = map(each.in_layer, range(3))
        assert (first.heavy, first.recent) == (heavy, recent)
        assert (second.heavy, second.recent) == expected and second.softmax.window == window
        assert len({first, second, third}) == 2


def test_only_windows_that_texts_outgrow_change_a_growing_cache():
    spec = replace(named_spec("Qwen/Qwen2.5-0.5B"), window=32)
    assert rule_for(None, 20, 13, spec) == FullCache()
    rule = rule_for(None, 20, 14, spec).in_layer(0)
    assert rule.growth == "fixed" and rule.segments(20, 14) == (32,)
    assert rule_for(None, 33, 1, spec).in_layer(0).softmax.window == 32
