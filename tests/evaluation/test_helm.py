"""HELM's runs end with a model of ours, whose requests are one job. Skipped where HELM is not installed."""

from __future__ import annotations

import json
import re

import pytest
from command_tools import TINY, read_rows, write_model
from machines import ROOT

helm = pytest.importorskip("h2o_flexgen.evaluation.helm", reason="needs crfm-helm", exc_type=ImportError)

from helm.benchmark.run import build_parser, helm_run  # noqa: E402
from helm.common.request import Request  # noqa: E402

from h2o_flexgen import SamplingParams, UserError  # noqa: E402
from h2o_flexgen.llm import LLM  # noqa: E402

pytest_plugins = ["command_tools"]

RUNNER = "h2o_flexgen.evaluation.helm.JobRunner"
TEXT = (ROOT / "docs" / "helm.md").read_text()


@pytest.fixture
def client(talker):
    found = helm.JobClient(str(talker), device="cpu", dtype="float32")
    yield found
    found.close()


@pytest.fixture
def run(texts, tmp_path, monkeypatch):
    """Run entries of HELM with a tiny model, by the files of the document; returns the folder of the suite."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", config=TINY | {"vocab_size": 300, "max_position_embeddings": 1024})
    for path in texts.glob("tokenizer*"):
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "prod_env").mkdir()
    for name, content in re.findall(r"```yaml\n# (\S+)\n(.*?)```", TEXT, re.DOTALL):
        content = content.replace("model: facebook/opt-6.7b", f"model: {tmp_path / 'model'}")
        content = content.replace("length: 2048", "length: 1024")
        (tmp_path / name).write_text(content.replace("hh_ratio: 0.1", "hh_ratio: 0.5\n        dtype: float32"))

    def helm_run_of(*entries: str, count: int = 4):
        argv = ["--runner-class-name", RUNNER, "--suite", "s", "-m", str(count), "--exit-on-error", "--run-entries"]
        helm_run(build_parser().parse_args([*argv, *entries]))
        return tmp_path / "benchmark_output" / "runs" / "s"

    return helm_run_of


@pytest.mark.parametrize("scenario", ["simple_mcqa", "simple_classification"])
def test_a_run_ends_with_results_and_once_more_without_computing(run, tmp_path, monkeypatch, scenario):
    suite = run(f"{scenario}:model=h2o_flexgen/opt-6.7b")
    (folder,) = [path for path in suite.iterdir() if path.name.startswith(scenario)]
    states = json.loads((folder / "scenario_state.json").read_text())["request_states"]
    (output,) = [path for path in (tmp_path / "prod_env" / "h2o_flexgen").glob("*.jsonl") if ".in." not in path.name]
    rows = read_rows(output)
    assert len(rows) == len(states) == 4
    for row, state in zip(rows, states):
        (completion,) = state["result"]["completions"]
        assert completion["text"] == row["text"] and completion["finish_reason"] == {"reason": row["finish_reason"]}
    names = {stat["name"]["name"] for stat in json.loads((folder / "stats.json").read_text())}
    assert "exact_match" in names
    monkeypatch.setattr(LLM, "run", None)
    run(f"{scenario}:model=h2o_flexgen/opt-6.7b")
    assert json.loads((folder / "scenario_state.json").read_text())["request_states"] == states


def request(**changes) -> Request:
    return Request(**{"prompt": "Hello", "temperature": 0.0, "max_tokens": 5} | changes)


def test_results_are_those_of_the_engine(client, tmp_path):
    stop = ["e", "a", "o"]
    asked = [request(), request(temperature=1.0, num_completions=3), request(stop_sequences=stop), request(prompt="a")]
    found = client.results(asked, tmp_path)
    assert [len(result.completions) for result in found] == [1, 3, 1, 1] and all(result.success for result in found)
    greedy = client.llm.generate(["Hello"], SamplingParams(max_tokens=5))[0].outputs[0]
    completion = found[0].completions[0]
    assert completion.text == greedy.text
    assert [token.logprob for token in completion.tokens] == pytest.approx(greedy.logprobs[: len(completion.tokens)])
    assert completion.logprob == pytest.approx(sum(token.logprob for token in completion.tokens))
    assert len({completion.text for completion in found[1].completions}) > 1
    stopped = found[2].completions[0]
    assert not set(stop) & set(stopped.text)


def test_requests_that_a_job_cannot_run_are_refused(client, tmp_path):
    for bad in ({"echo_prompt": True}, {"embedding": True}):
        with pytest.raises(UserError, match=f"request 1: {next(iter(bad))} is not supported"):
            client.results([request(), request(**bad)], tmp_path)
    with pytest.raises(UserError, match="1280 positions"):
        client.results([request(), request(prompt="word " * 2000)], tmp_path)
    with pytest.raises(UserError, match=RUNNER):
        client.make_request(request())
    with pytest.raises(UserError, match="unknown in the args of client_spec: hh_rate"):
        helm.JobClient(hh_rate=0.2)


def test_chats_go_through_the_template(client, tmp_path):
    (found,) = client.results([request(prompt="", messages=[{"role": "user", "content": "Hello"}])], tmp_path)
    (row,) = [row for path in tmp_path.glob("*.in.jsonl") for row in read_rows(path)]
    assert row["messages"] and "prompt" not in row and found.success


def test_commands_of_the_document_name_options_of_helm():
    for line in re.findall(r"^helm-run (.*)$", TEXT, re.MULTILINE):
        args = build_parser().parse_args(line.split())
        assert args.runner_class_name == RUNNER
