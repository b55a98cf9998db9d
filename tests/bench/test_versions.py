"""The comparison of versions: lengths of rows, counted work, pairs that take turns."""

from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean

import pytest

import h2o_flexgen.llm
from bench import common, lot, tables, versions
from bench.versions import WORKLOADS, Workload
from h2o_flexgen import Policy
from h2o_flexgen.engine.sampling import Sampler

pytest_plugins = ["command_tools"]


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(common, "commit", lambda *_: "0" * 12)
    monkeypatch.setattr(h2o_flexgen.llm, "Sampler", Sampler)  # restored after jobs that replace it


def job(model, tmp_path, **changes) -> dict:
    policy = Policy(gpu_batch_size=4, num_gpu_batches=2, percent=[100, 0, 100, 0, 100, 0])
    asked = dict(model=str(model), rows=11, prompt_len=6, shared=4, most=9, draw="geometric", seed=3)
    asked |= dict(policy=asdict(policy), dtype="float32", compute="exact", scratch=str(tmp_path))
    return asked | changes


def test_lengths_depend_on_seed_and_row_alone():
    lengths = [lot.output_length("geometric", 0, row, 48) for row in range(4000)]
    assert lengths == [lot.output_length("geometric", 0, row, 48) for row in range(4000)]
    assert lengths != [lot.output_length("geometric", 1, row, 48) for row in range(4000)]
    assert min(lengths) == 1 and max(lengths) == 48 and 11 < mean(lengths) < 12.5
    uniform = [lot.output_length("uniform", 0, row, 24) for row in range(4000)]
    assert set(uniform) == set(range(1, 25))
    assert lot.output_length(None, 0, 5, 12) == 12


def test_prompts_share_a_prefix():
    prompts = lot.random_prompts(5, 12, 8, seed=1)
    assert {len(p) for p in prompts} == {12} and len({tuple(p[:8]) for p in prompts}) == 1
    assert len({tuple(p[8:]) for p in prompts}) == 5
    assert prompts == lot.random_prompts(5, 12, 8, seed=1) != lot.random_prompts(5, 12, 8, seed=2)


@pytest.mark.parametrize("draw", ["geometric", "uniform", None])
def test_rows_end_at_drawn_lengths_and_row_steps_are_counted(talker, tmp_path, monkeypatch, draw):
    monkeypatch.setattr(lot, "TOKENS", range(4, 60))
    found = lot.run(job(talker, tmp_path, draw=draw))
    lengths = [lot.output_length(draw, 3, row, 9) for row in range(11)]
    assert found["lengths"] == lengths and found["tokens"] == sum(lengths)
    running = sum(lengths) - 11  # the first token of each comes from its prompt
    assert found["running_share"] * found["row_steps"] == pytest.approx(running)
    assert found["row_steps"] >= running
    assert Path(found["package"]) == common.ROOT / "h2o_flexgen"
    assert 0 < found["peak_over_plan"] and found["moved_gb"] >= 0 and found["dtype"] == "float32"


def test_a_run_of_another_version_or_with_other_lengths_is_refused():
    workload = replace(WORKLOADS["equal"], rows=2)
    found = {"package": "/a/h2o_flexgen", "lengths": [12, 12]}
    versions.check(found, workload, 0, Path("/a"))
    with pytest.raises(AssertionError, match="/a/h2o_flexgen ran"):
        versions.check(found, workload, 0, Path("/b"))
    with pytest.raises(AssertionError, match="did not end"):
        versions.check(found | {"lengths": [12, 11]}, workload, 0, Path("/a"))


class Fake:
    """A runner whose older version takes twice as long, on a machine that slows down."""

    folders = {"old": Path("old"), "new": Path("new")}
    compute = "exact"
    dtype = "auto"
    file = versions.FILE

    def __init__(self):
        self.asked = []

    def run(self, side: str, workload: Workload, tier: str, seed: int = 0) -> dict:
        self.asked.append((side, workload.rows, seed, self.dtype))
        seconds = (1 + seed) * (2.0 if side == "old" else 1.0)
        figures = dict.fromkeys(versions.FIGURES.split(), seconds) | {"running_share": 0.5}
        report = {"total": {"row_steps": 7}} if side == "new" else {}
        return figures | {"dtype": "bfloat16" if side == "new" else "float32", "digest": "x", "report": report}


def test_versions_take_turns_and_the_median_ratio_counts():
    runner = Fake()
    found = versions.compare(runner, "geometric", WORKLOADS["geometric"], "ram", 3)
    rest = runner.asked[2:]
    assert runner.asked[:2] == [("new", 48, 0, "auto"), ("old", 48, 0, "bfloat16")]
    assert [side for side, *_ in rest] == ["old", "new", "new", "old", "old", "new"]
    assert [seed for _, _, seed, _ in rest] == [0, 0, 1, 1, 2, 2] and {rows for _, rows, *_ in rest} == {384}
    assert found["ratios"] == [2.0, 2.0, 2.0] and found["ratio"] == 2.0 and found["same_tokens"]
    assert found["old"]["seconds"] == 4.0 and found["new"]["seconds"] == 2.0
    assert found["new"]["reported"] == {"row_steps": 7} and found["old"]["reported"] == {}
    stored = common.load_result(versions.FILE)["rows"]
    assert [(row["workload"], row["where"], row["pairs"]) for row in stored] == [("geometric", "RAM", 3)]


def test_one_version_alone_stores_nothing():
    runner = Fake()
    runner.folders = {"new": Path("new")}
    assert "ratio" not in versions.compare(runner, "equal", WORKLOADS["equal"], "ram", 1)
    assert common.load_result(versions.FILE) == {}


def test_the_table_has_a_line_for_each_workload_and_place():
    for name, tier in (("shared", "disk"), ("geometric", "disk"), ("geometric", "ram")):
        versions.compare(Fake(), name, WORKLOADS[name], tier, 1)
    rows = tables.against_older(common.load_result(versions.FILE))
    lines = tables.columns(rows, tables.VERSIONS.columns).splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == ["RAM", "disk, 1.25 GiB cap", "disk, 1.25 GiB cap"]
    assert " | 2.0 -> 1.0 | 2.00x (2.00 to 2.00) | " in lines[0] and " | 50% -> 50% | " in lines[0]
    assert lines[0].endswith(" | 48 x 1, 100 0 100 0 100 0, bfloat16, exact matmuls |")
