"""The command `stream`: turns that are answered one after the other, and texts that are only read."""

from __future__ import annotations

import json

import pytest
from command_tools import FP32, write_model, write_rows
from zoo import CONFIGS

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams
from h2o_flexgen.commands import stream
from h2o_flexgen.commands.main import main

pytest_plugins = ["command_tools"]

OPT = ("--no-position-rolling", "--hh-size", 8)


@pytest.fixture
def streamed(capfd, tmp_path, monkeypatch):
    """Run the command: (exit code, stdout, stderr)."""
    monkeypatch.setenv("H2O_FLEXGEN_HOME", str(tmp_path / "home"))

    def run(*argv) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(["stream", *map(str, (*FP32, *argv))])
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def rolls(texts, tmp_path):
    """A tiny LLaMA with a tokenizer."""
    config = {"model_type": "llama", **CONFIGS["llama_no_groups_tied"], "vocab_size": 300}
    config |= {"max_position_embeddings": 64}
    folder = write_model(tmp_path / "rolls", config=config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((texts / name).read_bytes())
    return folder


def test_turns_are_answered_one_after_the_other(streamed, talker, tmp_path):
    rows = write_rows(tmp_path / "in.jsonl", [{"turns": ["What is a list?", "And a tuple?"]}, "", {"prompt": "Why?"}])
    report = tmp_path / "report.json"
    options = ("--model", talker, *OPT, "--gen-len", 5, "--report", report)
    code, out, err = streamed("--input-file", rows, *options)
    assert code == 0, err
    questions = ["What is a list?", "And a tuple?", "Why?"]
    with LLM(str(talker), Policy(), device="cpu", dtype="float32", progress=False) as llm:
        with llm.session(KVBudget.from_size(8, rule="smoothed"), position_rolling=False) as session:
            answers = [session.chat(question, SamplingParams(max_tokens=5)) for question in questions]
            tokens = session.lengths()
    for question, answer in zip(questions, answers):
        assert f"USER: {question}\n\nASSISTANT: {answer}\n" in out
    assert f"3 turns, {tokens} tokens" in out
    found = json.loads(report.read_text())
    assert [row["turn"] for row in found["turns"]] == [1, 2, 3] and found["turns"][-1]["tokens"] == tokens
    assert found["kv_budget"] == {"heavy": 8, "recent": 8, "rule": "smoothed"}


def test_a_text_is_read_past_the_models_positions(streamed, rolls, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "WINDOW", 100)
    text = tmp_path / "text.txt"
    report = tmp_path / "report.json"
    text.write_text("A text that is longer than all positions of the model. " * 20)
    code, out, err = streamed("--model", rolls, "--plain", text, "--hh-size", 10, "--report", report)
    assert code == 0, err
    found = json.loads(report.read_text())
    assert found["kv_budget"] == {"heavy": 10, "recent": 10, "rule": "smoothed", "position_rolling": True}
    assert found["chunk"] == 64 - 20
    ends = [row["tokens"] for row in found["windows"]]
    assert ends[:2] == [100, 200] and ends[-1] > 3 * 64
    assert sum(row["scored"] for row in found["windows"]) == ends[-1] - 1
    assert f"perplexity {found['perplexity']:.3f}" in out
    part = ("--begin", 100, "--tokens", 50)
    code, out, err = streamed("--model", rolls, "--plain", text, "--hh-size", 10, *part, "--report", report)
    assert code == 0 and json.loads(report.read_text())["windows"][0]["tokens"] == 50


def test_a_full_cache_ends_with_the_models_positions(streamed, rolls, tmp_path):
    """Earlier answers are on stdout and in the report."""
    rows = write_rows(tmp_path / "in.jsonl", [{"turns": ["a", "b", "c", "d", "e"]}])
    report = tmp_path / "report.json"
    options = ("--full", "--gen-len", 8, "--report", report)
    code, out, err = streamed("--model", rolls, "--input-file", rows, *options)
    assert code == 2
    assert "more than the model's 64 positions: a session with --position-rolling and a KV budget has no limit" in err
    done = json.loads(report.read_text())["turns"]
    assert "KV cache: full\n" in out and json.loads(report.read_text())["kv_budget"] is None
    assert 0 < len(done) < 5 and out.count("--- turn") == len(done) + 1
    code, *_ = streamed("--model", rolls, "--input-file", rows, "--gen-len", 8, "--hh-size", 10)
    assert code == 0


@pytest.mark.parametrize(
    "argv, message",
    [
        ((), "give one of --input-file, with turns, and --plain"),
        (("--input-file", "a", "--plain", "b"), "give one of --input-file"),
        (("--input-file", "missing"), "cannot read --input-file missing: No such file"),
        (("--plain", "missing"), "cannot read --plain missing: No such file"),
        (("--input-file", "{turns}", "--begin", "5"), "--begin and --tokens are for --plain"),
        (("--plain", "{turns}", "--begin", "5000"), "tokens, too few for --begin 5000"),
        (("--plain", "{turns}", "--tokens", "5000"), "tokens, too few for --begin 0 --tokens 5000"),
        (("--input-file", "{turns}", "--full", "--hh-size", "5"), "--full keeps all tokens"),
        (("--input-file", "{turns}", "--kv-rule", "best"), "unknown --kv-rule 'best'; known: h2o"),
        (("--input-file", "{turns}", "--hh-size", "40"), "80 slots leave no room for new tokens"),
        (("--input-file", "{turns}", "--full", "--position-rolling"), "--position-rolling needs a KV budget"),
        (("--input-file", "{turns}", "--report", "{turns}"), "name the same file"),
        (
            ("--plain", "{turns}", "--gpu-batch-size", "2", "--prefill-tokens", "9"),
            "leave --gpu-batch-size and --prefill-t",
        ),
        (("--input-file", "{bad}"), "line 2: not JSON of the form"),
        (("--input-file", "{empty}"), "holds no turns"),
    ],
)
def test_bad_options(streamed, rolls, tmp_path, argv, message):
    files = {"turns": [{"turns": ["a"]}], "bad": [{"prompt": "a"}, {"turns": "a"}], "empty": [""]}
    names = {name: write_rows(tmp_path / name, rows) for name, rows in files.items()}
    code, out, err = streamed("--model", rolls, *(word.format(**names) for word in argv))
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    assert message in err


def test_positions_of_opt_cannot_roll(streamed, talker, tmp_path):
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    code, _, err = streamed("--model", talker, "--input-file", rows)
    assert code == 2 and "--position-rolling needs RoPE: opt's positions are in its embeddings" in err
