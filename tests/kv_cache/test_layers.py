"""Different numbers of slots in different layers: the same total, and the tokens of the oracle."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from analysis_tools import resident
from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams, UserError
from h2o_flexgen.analysis.calibration import Probe, Watched
from h2o_flexgen.analysis.simulation import MaskedCache
from h2o_flexgen.commands.budget import check_model
from h2o_flexgen.commands.main import main
from h2o_flexgen.kernels.attention import PLAIN, Softmax
from h2o_flexgen.kv_cache import FullCache, check_rule, make_rule, rule_for
from h2o_flexgen.kv_cache.layers import LayerLosses
from h2o_flexgen.kv_cache.rule import LayerAttention
from h2o_flexgen.models.registry import named_spec
from h2o_flexgen.models.spec import ModelSpec, Rope

pytest_plugins = ["command_tools"]

BUDGETS = [0.05, 0.1, 0.2, 0.5]
STEEP = [8.0, 4.0, 1.0, 0.0]
FLAT = [0.1, 0.05, 0.02, 0.0]


@given(
    losses=st.lists(st.lists(st.floats(0, 9), min_size=4, max_size=4), min_size=1, max_size=9),
    heavy=st.integers(50, 250),
    recent=st.integers(0, 250),
)
def test_all_layers_together_use_the_slots_of_the_budget(losses, heavy, recent):
    slots = LayerLosses(tuple(BUDGETS), tuple(map(tuple, losses))).slots(heavy, recent, 1000)
    total = sum(h + r for h, r in slots)
    assert abs(total - len(losses) * (heavy + recent)) <= 1
    assert all(h >= 0 and r >= 0 and h + r >= 1 for h, r in slots)


def test_the_layer_with_the_steepest_loss_gets_most_slots():
    few, many = LayerLosses(tuple(BUDGETS), (tuple(FLAT), tuple(STEEP))).slots(75, 75, 1000)
    assert sum(few) + sum(many) == 300 and sum(many) > 2 * sum(few)
    assert many[0] == pytest.approx(many[1], abs=1)


@pytest.mark.parametrize("slots", [20, 300])
def test_a_budget_outside_the_measured_range_is_refused(slots):
    known = LayerLosses(tuple(BUDGETS), (tuple(FLAT), tuple(STEEP)))
    with pytest.raises(UserError, match="budgets of 5.0% to 50.0% of a text"):
        known.slots(slots, slots, 1000)


def test_calibration_keeps_what_the_rule_keeps(tiny):
    """For any weights of queries. Masks stand in for dropping."""
    model = resident(tiny())
    length = 96
    ids = torch.tensor(tiny().prompts([length] * 2))
    for text in ("h2o", "decayed:decay=0.5", "snapkv:window=4", "smoothed:decay=0.9"):
        budget = KVBudget.from_size(8, 8, text)
        rule = rule_for(budget, 64, length - 64, model.spec)
        cache = MaskedCache(rule, length)
        attention = Watched()
        positions = torch.arange(length).expand(ids.shape)
        hidden = model.embed(ids, positions)
        model.block(0, hidden, positions, attention)
        q, k, v = attention.seen
        cache.prefill(*(x[:, :, :64] for x in (q, k, v)))
        (kept,) = Probe(model, 64, [rule], hidden)._kept(q, k, v)
        assert torch.equal(kept, cache.kept[:, :, :64]), text


@pytest.mark.parametrize("name, percent", [("smoothed", (100, 0, 100, 0, 100, 0)), ("h2o", (0, 0, 0, 0, 0, 0))])
def test_tokens_are_those_of_the_oracle_with_the_slots_of_each_layer(tiny, tmp_path, name, percent):
    model = tiny()
    path = tmp_path / "layers.json"
    layers = model.oracle.layers
    path.write_text(json.dumps({"budgets": BUDGETS, "losses": [FLAT, STEEP, FLAT, STEEP][:layers]}))
    budget = KVBudget.from_size(4, 4, f"{name}:layers={path}")
    slots = LayerLosses.from_file(str(path)).slots(4, 4, 30 + 12)
    assert len({*slots}) > 1
    each = tuple(zip(*slots))
    prompts = model.clear_cut_prompts([30, 11], 12, [(*each, name)])
    policy = Policy(gpu_batch_size=1, num_gpu_batches=2, percent=percent)
    with LLM(str(model.folder), policy, budget, device="cpu", dtype="float32", progress=False) as llm:
        found = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
        assert llm.report["kv_budget"]["layers"] == [h + r for h, r in slots]
    expected = model.references(prompts, 12, *each, name)
    assert [o.outputs[0].token_ids for o in found] == [trace.tokens for trace in expected]


def test_with_rolling_positions_the_largest_layer_leaves_room(tmp_path):
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"budgets": BUDGETS, "losses": [FLAT, STEEP]}))
    sizes = dict(layers=2, hidden=8, inner=8, vocab=8, heads=1, kv_heads=1, head_dim=8, positions=64, activation="silu")
    spec = ModelSpec("llama", **sizes, rope=Rope("default", 1e4, 8, 64))
    budget = KVBudget(hh_size=20, recent_size=20, rule=f"h2o:layers={path}", position_rolling=True)
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
    known = LayerLosses.from_file(str(path))
    assert known.losses and min(map(min, known.losses)) > -1e-6
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
    for each in (rule, replace(rule, heavy=1, recent=1, by_layer=((heavy, recent),) * 3)):
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
