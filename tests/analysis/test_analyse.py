"""The command `analyse`: results of a tiny model as text, JSON and plot, and what it refuses before it runs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from command_tools import TINY, last_line, write_model
from safetensors.torch import load_file, save_file

from h2o_flexgen.analysis import plot
from h2o_flexgen.commands.main import main
from h2o_flexgen.machine import memory
from h2o_flexgen.utils.texts import builtin_text

pytest_plugins = ["command_tools"]

SHORT = ("--prompt-len", 30, "--gen-len", 20, "--windows", 2, "--hh-size", 3)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(builtin_text()[:2000])
    return path


@pytest.fixture
def analysed(capfd):
    """Run the command: (exit code, stdout, stderr)."""

    def run(*argv) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(["analyse", *map(str, argv)])
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def refused(analysed, monkeypatch):
    """Run the command, which must refuse before it loads a model; returns the message."""

    def run(*argv, model_is_found: bool = False) -> str:
        if not model_is_found:
            monkeypatch.setattr("h2o_flexgen.profiling.layer_model.WeightStore", None)
        code, out, err = analysed(*argv)
        assert (code, out) == (2, "") and "Traceback" not in err
        assert err == last_line(err) + "\n" and err.startswith("error: ")
        return err.removeprefix("error: ")

    return run


@pytest.fixture(scope="module")
def result(texts, text, tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("result") / "analysis.json"
    assert main(["analyse", str(text), "--model", str(texts), *map(str, SHORT), "--output", str(path)]) == 0
    return json.loads(path.read_text())


def test_it_prints_what_it_writes(analysed, texts, text, tmp_path, result):
    path = tmp_path / "analysis.json"
    code, out, err = analysed(text, "--model", texts, *SHORT, "--output", path)
    assert code == 0, err
    assert json.loads(path.read_text()) | {"command": ""} == result | {"command": ""}
    assert f"sparsity   {result['sparsity']['mean']:.1%}" in out
    assert "KV cache   3 heavy + 3 recent slots (h2o)" in out
    for row in result["loss"]:
        (line,) = [line for line in out.splitlines() if line.split()[:-2] == row["cache"].split()]
        assert float(line.split()[-2]) == pytest.approx(row["perplexity"], rel=1e-3)


def test_the_result_is_complete(result):
    assert result["text"] == "text.txt" and result["kv_budget"] == {"heavy": 3, "recent": 3, "rule": "h2o"}
    layers = TINY["num_hidden_layers"]
    assert len(result["sparsity"]["by_layer"]) == len(result["overlap"]["by_layer"]) == layers
    assert len(result["ranks"]["share_by_layer"]) == len(result["neurons"]["frequency_by_layer"]) == layers
    assert len(result["ranks"]["rank"]) == len(result["ranks"]["share"]) > 10
    assert len(result["words"]["score"]) == len(result["words"]["co_occurrences"]) > 10
    assert result["neurons"]["is_active"] == "relu > 0"


def test_another_rule_and_budget(analysed, texts, text, tmp_path):
    path = tmp_path / "analysis.json"
    options = ("--prompt-len", 30, "--gen-len", 5, "--windows", 1, "--hh-ratio", 0.2, "--recent-ratio", 0.1)
    code, _, err = analysed(text, "--model", texts, *options, "--kv-rule", "mean:first=1", "--output", path)
    assert code == 0, err
    assert json.loads(path.read_text())["kv_budget"] == {"heavy": 6, "recent": 3, "rule": "mean:first=1"}


def test_the_plot_is_a_png(result, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "analysis.png"
    plot.draw(result, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused(refused, monkeypatch, texts, text, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in refused(text, "--model", texts, *SHORT, "--plot", tmp_path / "x.png")


def test_files_that_cannot_be_read_or_written(refused, texts, text, tmp_path):
    model = ("--model", texts, *SHORT)
    assert "cannot read" in refused(tmp_path / "none.txt", *model)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not a text in UTF-8" in refused(binary, *model)
    assert "does not exist" in refused(text, *model, "--output", tmp_path / "none" / "x.json")
    assert "--plot" in refused(text, *model, "--plot", tmp_path)
    both = tmp_path / "both"
    assert "name the same file" in refused(text, *model, "--output", both, "--plot", both)
    assert "name the same file" in refused(text, *model, "--output", text)


@pytest.mark.parametrize(
    "options, message",
    [
        (("--kv-rule", "best"), "unknown --kv-rule 'best'; known: h2o"),
        (("--kv-rule", "h2o:first=9"), "protects 9 + 0 tokens"),
        (("--hh-size", "16"), "16 slots for heavy hitters are not between 1 and half of the prompt's 30 tokens"),
        (("--hh-size", "0", "--recent-size", "4"), "0 slots for heavy hitters"),
        (("--hh-ratio", "1.5"), "--hh-ratio must lie in [0, 1]"),
        (("--gen-len", "1"), "--gen-len must be 2 or more"),
        (("--gen-len", "40"), "is longer than the model's 64 positions"),
        (("--windows", "0"), "--windows"),
        (("--dtype", "int8"), "--dtype"),
        (("--model", "/no/such/model"), "no such folder"),
    ],
)
def test_options(refused, texts, text, options, message):
    assert message in refused(text, "--model", texts, *SHORT, *options)


def test_a_text_that_is_too_short(refused, texts, text):
    message = refused(text, "--model", texts, *SHORT, "--windows", 1000)
    assert "too few for 1000 windows of 50" in message and "--prompt-len or --gen-len" in message


def test_a_model_without_a_tokenizer(refused, text, tmp_path):
    assert "no tokenizer" in refused(text, "--model", write_model(tmp_path / "model"), *SHORT)


def test_attention_of_another_kind(refused, text, tmp_path):
    folder = write_model(tmp_path / "model", config=TINY | {"sliding_window": 49})
    assert "a sliding window shorter than the text" in refused(text, "--model", folder, *SHORT)
    options = ["calibrate", text, "--model", folder, "--window", 64, "--output", tmp_path / "losses.json"]
    assert main(list(map(str, options))) == 2
    folder = write_model(tmp_path / "model", config=TINY | {"sliding_window": 50})
    assert "no tokenizer" in refused(text, "--model", folder, *SHORT)


def test_a_model_that_does_not_fit_into_ram(refused, monkeypatch, texts, text):
    message = refused(text, "--model", "llama-2-70b", *SHORT)
    assert "of RAM, of which 256.9" in message and "take a smaller model" in message
    monkeypatch.setattr(memory, "ram_available", lambda: 1 << 16)
    assert "fewer --windows" in refused(text, "--model", texts, *SHORT)


def test_broken_weights_are_refused(refused, texts, text, tmp_path):
    folder = Path(shutil.copytree(texts, tmp_path / "model"))
    state = load_file(folder / "model.safetensors")
    next(iter(state.values())).fill_(torch.nan)
    save_file(state, folder / "model.safetensors")
    assert "NaN" in refused(text, "--model", folder, *SHORT, model_is_found=True)
