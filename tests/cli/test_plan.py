"""`plan` shows what `generate` will run, from a config alone."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest
from cli_tools import TINY, wide, write_model
from machines import KERNELS, laptop

from h2o_flexgen.commands import generate, plan
from h2o_flexgen.kernels.int8 import may_tile
from h2o_flexgen.kernels.rates import ROWS
from h2o_flexgen.machine import memory
from h2o_flexgen.policy import GIB

pytest_plugins = ["cli_tools"]


@pytest.fixture
def planned(capfd):
    """Run the command: (exit code, stdout, stderr)."""

    def run(*argv) -> tuple[int, str, str]:
        capfd.readouterr()
        code = plan.main([str(a) for a in argv])
        return code, *capfd.readouterr()

    return run


@pytest.fixture(autouse=True)
def held(monkeypatch):
    """The process holds the same whenever it is asked."""
    nbytes = memory.resident()
    monkeypatch.setattr(memory, "resident", lambda: nbytes)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("deep") / "model", config=wide(256, num_hidden_layers=12))


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--num-prompts", 70, "--hh-size", 2),
        ("--gpu-batch-size", 2, "--num-gpu-batches", 2, "--no-overlap"),
        ("--num-prompts", 6, "--max-latency", 1000),
        ("--num-prompts", 8, "--hh-ratio", "auto"),
        ("--num-prompts", 8, "--percent", 0, 0, 100, 0, 100, 0),
        ("--path", "_DUMMY_", "--percent", 0, 0, 0, 0, 0, 0),
    ],
    ids=lambda options: " ".join(map(str, options)) or "resident",
)
def test_it_is_what_generate_runs(planned, cli, deep, tmp_path, options):
    report, root = tmp_path / "report.json", tmp_path / "offload"
    job = (*options, "--prompt-len", 12, "--gen-len", 3, "--offload-dir", root)
    code, out, err = planned(deep, *job, "--json")
    assert code == 0, err
    code, _, err = cli("--model", deep, *job, "--report", report)
    assert code == 0, err
    assert_same(json.loads(out), json.loads(report.read_text()))


def test_so_it_is_where_weights_must_stream(planned, cli, deep, tmp_path):
    report = tmp_path / "report.json"
    job = ("--prompt-len", 12, "--gen-len", 3, "--num-prompts", 2, "--offload-dir", tmp_path / "offload")
    needed = json.loads(planned(deep, *job, "--json")[1])["memory_bytes"]["gpu"]["needed"]
    job += ("--gpu-mem", (needed - 6_000_000) / GIB)
    code, out, err = planned(deep, *job, "--json")
    assert code == 0, err
    assert json.loads(out)["policy"]["percent"][0] < 100
    code, _, err = cli("--model", deep, *job, "--report", report)
    assert code == 0, err
    assert_same(json.loads(out), json.loads(report.read_text()))


def assert_same(result: dict, report: dict) -> None:
    for key in ("policy", "kv_budget"):
        assert result[key] == report[key]
    assert {tier: m["needed"] for tier, m in result["memory_bytes"].items()} == report["planned_memory_bytes"]


def test_the_command_it_prints_is_that_job(planned, cli, deep, tmp_path):
    job = ("--prompt-len", 12, "--gen-len", 3, "--path", "_DUMMY_", "--hh-size", 2, "--offload-dir", tmp_path / "o")
    result = json.loads(planned(deep, *job, "--json")[1])
    words = shlex.split(result["command"])
    assert words[:2] == ["h2o-flexgen", "generate"]
    report = tmp_path / "report.json"
    code, _, err = cli(*words[2:], "--report", report)
    assert code == 0, err
    assert_same(result, json.loads(report.read_text()))


def test_it_reads_no_weights(planned, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"torch_dtype": "float16"}))
    code, out, err = planned(tmp_path, "--prompt-len", 10, "--gen-len", 4, "--num-prompts", 3, "--hh-size", 2)
    assert code == 0, err
    assert "opt, 0 M parameters in 3 layers, 4 heads on 4 of K and V, context 64" in out
    assert "in float16" in out and "2 heavy + 2 recent slots (smoothed)" in out and "3 prompts of up to 10" in out
    assert "run it     h2o-flexgen generate --model" in out


@pytest.mark.parametrize("name", ["opt-125m", "facebook/opt-125m", "llama-3.1-8b"])
def test_a_built_in_name_needs_no_network(planned, name, tmp_path):
    profile = tmp_path / "laptop.json"
    profile.write_text(laptop().to_json())
    code, out, err = planned(name, "--hardware", profile, "--json")
    assert code == 0, err
    model = json.loads(out)["model"]
    assert model["parameters"] > 100e6 and model["weight_bytes"] == 2 * model["parameters"]


def test_what_matmuls_hold_is_that_of_the_machine_asked_about(planned, tmp_path):
    """Kernels in int8 need room of their own, and the fastest here may not be the fastest there."""
    needed = {}
    for name in ("native", "tiled"):
        rates = KERNELS.linear | {"int8": {"native": dict.fromkeys(ROWS, 1e10), name: dict.fromkeys(ROWS, 1e12)}}
        profile = tmp_path / f"{name}.json"
        profile.write_text(laptop(kernels=replace(KERNELS, linear=rates)).to_json())
        job = ("--hardware", profile, "--compress-weight", "int8", "--compute", "int8", "--gpu-batch-size", 64)
        code, out, err = planned("opt-1.3b", *job, "--num-prompts", 64, "--json")
        assert code == 0, err
        needed[name] = json.loads(out)["memory_bytes"]["gpu"]["needed"]
    assert may_tile((2048, 2048)) == (needed["tiled"] < needed["native"])


def test_bytes_of_a_sequences_cache(planned, deep):
    """2 of K and V x 12 layers x 256 wide x 2 bytes a slot; the last of 32 tokens is never attended to."""
    result = json.loads(planned(deep, "--prompt-len", 10, "--gen-len", 22, "--hh-size", 3, "--json")[1])
    nbytes = result["model"]["kv_bytes_per_sequence"]
    assert nbytes["full"] == 2 * 12 * 256 * 2 * 31
    assert 2 * 12 * 256 * 2 * 6 < nbytes["job"] < 2 * 12 * 256 * 2 * 9


@pytest.mark.parametrize(
    "options, message",
    [
        (("./nowhere",), "./nowhere: no such folder"),
        (("opt-125m", "--gpu-mem", 0.01), "raise --gpu-mem if you gave it"),
        (("opt-125m", "--prompt-len", 4096), "longer than the model's 2048 positions"),
        (("opt-125m", "--input-file", "x"), "unknown option --input-file"),
    ],
)
def test_what_cannot_be_planned(planned, options, message):
    code, _, err = planned(*options)
    assert code == 2 and err.startswith("error: ") and message in err


def test_generate_and_plan_take_the_same_options():
    """But for those of prompts' texts and outputs, and a policy file."""
    ours, theirs = ({*p.make_parser()._option_string_actions} for p in (plan, generate))
    assert ours - theirs == {"-o", "--output", "--json"}
    assert {"--gpu-mem", "--percent", "--hh-ratio", "--path", "--hardware"} <= ours & theirs
