"""Batches of rows through the class for Ray Data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from command_tools import read_rows, write_rows

from h2o_flexgen import KVBudget, SamplingParams, UserError
from h2o_flexgen.jobs.input import read_rows as input_rows
from h2o_flexgen.jobs.job import Job
from h2o_flexgen.jobs.ray_data import ADDED, H2OFlexGen, rows_of
from h2o_flexgen.llm import LLM

pytest_plugins = ["command_tools"]

FP32 = {"device": "cpu", "dtype": "float32", "progress": False}
ROWS = [
    {"custom_id": f"row {n}", "prompt": f"text {n}", "temperature": 0.8 * (n % 2), "max_tokens": 3 + n % 3}
    for n in range(7)
]


def batch_of(rows: list[dict]) -> dict[str, np.ndarray]:
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


@pytest.fixture
def expected(texts, tmp_path) -> list[dict]:
    """What a job gives."""
    with LLM(str(texts), **FP32) as llm, Job(str(tmp_path / "out.jsonl")) as job:
        job.run(llm, input_rows(str(write_rows(tmp_path / "in.jsonl", ROWS))), SamplingParams())
    return read_rows(tmp_path / "out.jsonl")


def test_a_row_gets_the_text_of_a_job_in_any_batch(texts, expected):
    stage = H2OFlexGen(model=str(texts), **FP32)
    for size in (7, 3, 1):
        found = []
        for begin in range(0, 7, size):
            out = stage(batch_of(ROWS[begin : begin + size]))
            assert [*out] == [*ROWS[0], *ADDED]
            found += zip(out["custom_id"], out["generated_text"], out["generated_tokens"])
        assert found == [(row["custom_id"], row["text"], row["token_ids"]) for row in expected]
    assert stage({"prompt": np.array([])}) == {}


def test_rows_are_prepared_and_finished_and_fail_alone(texts):
    def preprocess(row: dict) -> dict:
        return {"prompt": row["question"].strip(), "max_tokens": 2}

    def postprocess(row: dict) -> dict:
        return {"answer": row["generated_text"], "why": row["error"]}

    stage = H2OFlexGen(preprocess, postprocess, {"temperature": 0.5}, model=str(texts), **FP32)
    out = stage({"question": [" who?", None, "why? " * 60, "how?"]})
    assert [answer is None for answer in out["answer"]] == [False, True, True, False]
    assert out["why"][0] is None and out["why"][1] == "preprocess: KeyError: 'question'"
    assert "positions" in out["why"][2]


def test_requests_and_answers_are_for_jobs(texts):
    stage = H2OFlexGen(model=str(texts), **FP32)
    out = stage({"prompt": ["a", "b"], "answers": [["x", "y"], None]})
    assert "for jobs" in out["error"][0] and out["error"][1] is None


def test_a_kv_budget_must_not_depend_on_the_batch(texts):
    ratio = KVBudget.from_ratio(0.2)
    for budget in (ratio, "auto"):
        with pytest.raises(UserError, match="would differ from batch to batch"):
            H2OFlexGen(model=str(texts), kv_budget=budget, **FP32)
    with pytest.raises(UserError, match="may differ from batch to batch"):
        H2OFlexGen(model=str(texts), compress_cache="auto", **FP32)
    stage = H2OFlexGen(model=str(texts), kv_budget=ratio, longest_prompt=50, **FP32)
    assert stage.llm.kv_budget == replace(KVBudget.from_size(10, 10), by_head=())


def test_ray_data_reads_and_writes(texts, expected, tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    pytest.importorskip("ray")
    import ray
    import ray.data

    monkeypatch.setenv("H2O_FLEXGEN_HOME", str(tmp_path / "home"))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        dataset = ray.data.read_json(str(tmp_path / "in.jsonl"))
        options = {"model": str(texts), **FP32}
        dataset = dataset.map_batches(H2OFlexGen, fn_constructor_kwargs=options, concurrency=1, batch_size=4)
        dataset.write_parquet(str(tmp_path / "out"))
        found = ray.data.read_parquet(str(tmp_path / "out")).take_all()
    finally:
        ray.shutdown()
    texts = {row["custom_id"]: row["generated_text"] for row in found}
    assert texts == {row["custom_id"]: row["text"] for row in expected}


def test_nulls_among_numbers_are_nulls():
    columns = {
        "max_tokens": np.array([64, np.nan]),
        "temperature": np.array([0.5, np.nan]),
        "score": np.array([np.inf, np.nan]),
        "vector": np.array([[1.0, np.nan], [2.0, 3.0]]),
        "ids": [[1, 2], [3]],
    }
    first, second = rows_of(columns)
    assert (first["max_tokens"], first["temperature"], first["score"]) == (64, 0.5, np.inf)
    assert type(first["max_tokens"]) is int
    assert second == {"vector": [2.0, 3.0], "ids": [3]}
