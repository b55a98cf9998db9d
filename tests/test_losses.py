"""A budget is chosen by its measured loss."""

from __future__ import annotations

import json

import pytest

from h2o_flexgen import KVBudget, Losses, UserError

FULL = {"rule": "full", "slots": None, "rise": 0.0, "kv_bytes": 1000}


def row(rule: str, ratio: float, rise: float, kv_bytes: int) -> dict:
    half = ratio / 2
    return {
        "rule": rule,
        "slots": int(100 * ratio),
        "hh_ratio": half,
        "recent_ratio": half,
        "rise": rise,
        "kv_bytes": kv_bytes,
    }


ROWS = [
    FULL,
    row("h2o", 0.2, 0.3, 100),
    row("h2o", 0.4, 0.1, 200),
    row("h2o", 0.8, 0.02, 400),
    row("mean", 0.4, 0.05, 201),
    row("mean", 0.8, 0.02, 399),
]


def result(rows: list = ROWS, model: str = "some-model", **workload) -> dict:
    return {
        "workload": {"model": model, "prompt_len": 100, "gen_len": 100, "hh_share": 0.5} | workload,
        "rows": rows,
    }


@pytest.fixture
def file(tmp_path):
    """Write a result: its path."""

    def write(*args, **kwargs):
        path = tmp_path / "quality.json"
        path.write_text(json.dumps(result(*args, **kwargs)))
        return path

    return write


@pytest.mark.parametrize(
    "max_loss, rule, ratio",
    [(0.5, "h2o", 0.2), (0.3, "h2o", 0.2), (0.29, "h2o", 0.4), (0.05, "mean", 0.4), (0.02, "mean", 0.8)],
)
def test_the_cheapest_budget_within_the_limit_is_chosen(file, max_loss, rule, ratio):
    found = Losses.from_file(file(), max_loss).cheapest()
    assert found.kv_budget == KVBudget.from_ratio(ratio / 2, ratio / 2, rule)


def test_a_limit_that_no_budget_meets_is_refused(file):
    with pytest.raises(UserError, match=r"costs at most 0.01, the best is h2o with 0.4 heavy \+ 0.4 recent .*\+2.0%"):
        Losses.from_file(file(), 0.01).cheapest()


def test_the_loss_is_interpolated_between_measured_budgets(file):
    losses = Losses.from_file(file())
    at = [losses.at("h2o", ratio) for ratio in (0.2, 0.3, 0.4, 1.4, 2.0, 5.0)]
    assert at == pytest.approx([0.3, 0.2, 0.1, 0.01, 0, 0])
    assert losses.at("h2o", 0.19) is None
    assert losses.allows(None)
    strict = Losses.from_file(file(), 0.1)
    assert strict.allows(0.1) and not strict.allows(0.11) and not strict.allows(None)
    with pytest.raises(UserError, match="no budget of rule sinks"):
        losses.at("sinks", 0.4)
    with pytest.raises(UserError, match="half heavy"):
        Losses.from_file(file(hh_share=0.25)).at("h2o", 0.4)


def test_budgets_of_more_heavy_slots_than_prompt_tokens_are_left_out(file):
    assert len(Losses.from_file(file([*ROWS, row("h2o", 2.2, 0.0, 900)])).settings) == 5


@pytest.mark.parametrize("max_loss, hint", [(2.0, "for 2 % give 0.02"), (-0.1, "not -0.1"), (float("nan"), "not nan")])
def test_a_limit_out_of_range_is_refused(file, max_loss, hint):
    with pytest.raises(UserError, match=f"`max_loss` must lie in .0, 1., {hint}|{hint}"):
        Losses.from_file(file(), max_loss)


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", '{"workload": {}, "rows": []}', json.dumps(result([{"rule": "h2o", "slots": 3}]))],
    ids=["list", "empty", "no workload", "no rise"],
)
def test_a_file_of_another_kind_is_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UserError, match="holds no perplexities of KV budgets"):
        Losses.from_file(path)


def test_a_missing_file_or_one_that_is_not_json_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read `quality`"):
        Losses.from_file(tmp_path / "nowhere.json")
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        Losses.from_file(tmp_path / "a.json")


def test_values_of_another_type_are_refused(file):
    for broken in ({"hh_ratio": "a"}, {"rise": None}, {"kv_bytes": "many"}):
        with pytest.raises(UserError, match="holds no perplexities"):
            Losses.from_file(file([ROWS[1] | broken]))
