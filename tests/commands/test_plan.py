"""`plan` shows what `generate` will run, from a config alone."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace

import pytest
from command_tools import TINY, wide, write_model
from machines import KERNELS, T4, laptop

from bench.common import RESULTS
from h2o_flexgen.commands import generate, plan
from h2o_flexgen.commands.main import main
from h2o_flexgen.commands.suggestions import MEASURED
from h2o_flexgen.kernels.int8 import may_tile
from h2o_flexgen.kernels.rates import ROWS
from h2o_flexgen.machine import memory
from h2o_flexgen.planning.memory import Resources
from h2o_flexgen.policy import DEFAULT_RULE, GIB

pytest_plugins = ["command_tools"]


@pytest.fixture
def planned(capfd):
    """Run the command: (exit code, stdout, stderr)."""

    def run(*argv) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(["plan", *map(str, argv)])
        return code, *capfd.readouterr()

    return run


@pytest.fixture(autouse=True)
def held(monkeypatch):
    """The process holds the same memory at every call."""
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
    report = tmp_path / "report.json"
    job = (*options, "--prompt-len", 12, "--gen-len", 3, "--offload-dir", tmp_path / "offload")
    code, out, err = planned(deep, *job, "--json")
    assert code == 0, err
    code, _, err = cli("--model", deep, *job, "--report", report)
    assert code == 0, err
    assert_same(json.loads(out), json.loads(report.read_text()))


def test_it_is_what_generate_runs_when_weights_must_stream(planned, cli, deep, tmp_path):
    report = tmp_path / "report.json"
    job = ("--prompt-len", 12, "--gen-len", 3, "--num-prompts", 2, "--offload-dir", tmp_path / "offload")
    needed = json.loads(planned(deep, *job, "--json")[1])["memory_bytes"]["gpu"]["needed"]
    job += ("--mem", (needed - 6_000_000) / GIB)
    code, out, err = planned(deep, *job, "--json")
    assert code == 0, err
    assert json.loads(out)["policy"]["percent"][0] < 100
    code, _, err = cli("--model", deep, *job, "--report", report)
    assert code == 0, err
    assert_same(json.loads(out), json.loads(report.read_text()))


def test_a_limit_on_ram_speaks_of_ram_and_disk(planned, deep, tmp_path):
    profile = tmp_path / "laptop.json"
    profile.write_text(laptop().to_json())
    job = (deep, "--prompt-len", 12, "--gen-len", 3, "--num-prompts", 2, "--hardware", profile)
    code, out, err = planned(*job, "--mem", 1.5)
    assert code == 0, err
    assert re.search(r"^RAM +\S+ .iB of 1.50 GiB$", out, re.M) and re.search(r"^disk  ", out, re.M)
    assert "all in RAM, overlap on" in out
    assert "gpu" not in out.split("run it")[0] and "percent" not in out.split("run it")[0] and "--mem 1.5" in out


@pytest.mark.parametrize(
    "profile, limits", [(laptop(), {"gpu": 4, "cpu": 8, "ram": 8}), (T4, {"gpu": 4, "cpu": 8})], ids=["cpu", "cuda"]
)
def test_the_tighter_of_two_limits_wins(profile, limits):
    """With 8 GiB of RAM, 4 of the tier gpu and 9 of the tier cpu."""
    caps = {"gpu": 4 * GIB, "cpu": 9 * GIB, "disk": None, "ram": 8 * GIB}
    found = Resources.of(profile, caps).limits
    assert {tier: found[tier] / GIB for tier in limits} == limits


def test_suggestions_are_what_plan_predicts_with_them(planned, tmp_path):
    rates = {"streamed": {1: 1e10, 32: 3e11, 128: 8e11}, "int8": {1: 3e10, 32: 9e11, 128: 2e12}}
    profile = tmp_path / "laptop.json"
    profile.write_text(laptop(matmul={kind: {(2048, 2048): each} for kind, each in rates.items()}).to_json())
    job = ("opt-1.3b", "--hardware", profile, "--num-prompts", 16, "--prompt-len", 256)
    code, out, err = planned(*job, "--json")
    assert code == 0, err
    found = json.loads(out)
    suggestions = found["suggestions"]
    assert 1 < len(suggestions) <= 4
    assert all(a["gain"] >= b["gain"] >= 1.05 for a, b in zip(suggestions, suggestions[1:]))
    for each in suggestions:
        changed = json.loads(planned(*job, *each["options"].split(), "--json")[1])["predicted"]["tokens_per_s"]
        assert each["tokens_per_s"] == pytest.approx(changed)
        assert each["gain"] == pytest.approx(changed / found["predicted"]["tokens_per_s"])
    code, out, err = planned(*job)
    lines = out.split("\nrun it ")[1].splitlines()[2:]
    assert [line.split()[0] for line in lines] == [f"{each['gain']:.2f}x" for each in suggestions]
    assert "--compress-weight int8 --compute int8  +1.4 %" in out


def test_measured_losses_are_those_of_the_result_files():
    def rise(file: str, **setting) -> float:
        rows = json.loads((RESULTS / f"{file}.json").read_text())["rows"]
        return next(row["rise"] for row in rows if setting.items() <= row.items())

    plain = {"compress_weight": None, "compute": "exact", "slots": None, "compress_cache": None}
    for change, (least, most) in MEASURED.items():
        words = change.replace("--", "").replace("-", "_").split()
        setting = dict(zip(words[::2], words[1::2]))
        if "hh_ratio" in setting:
            rows = json.loads((RESULTS / "texts_smollm2.json").read_text())["rows"]
            rises = next(row for row in rows if (row["rule"], row["slots"]) == (DEFAULT_RULE, 204))["texts"].values()
            assert (least, most) == pytest.approx((min(rises), max(rises)), abs=5e-4)
        else:
            assert least == most == pytest.approx(rise("format_losses", **plain | setting), abs=5e-4)


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
    assert "opt, 0 M parameters in 3 layers, 4 query heads, 4 KV heads, context 64" in out
    assert "in float16" in out and "2 heavy + 2 recent slots (voted)" in out and "3 prompts of up to 10" in out
    assert "run it     h2o-flexgen generate --model" in out


@pytest.mark.parametrize("name", ["opt-125m", "facebook/opt-125m", "llama-3.1-8b"])
def test_a_built_in_name_needs_no_network(planned, name, tmp_path):
    profile = tmp_path / "laptop.json"
    profile.write_text(laptop().to_json())
    code, out, err = planned(name, "--hardware", profile, "--json")
    assert code == 0, err
    model = json.loads(out)["model"]
    assert model["parameters"] > 100e6 and model["weight_bytes"] == 2 * model["parameters"]


def test_matmul_workspace_is_counted_for_the_machine_asked_about(planned, tmp_path):
    """int8 kernels differ in their workspace, and the fastest here may not be the fastest there."""
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
        (("opt-125m", "--gpu-mem", 0.01), "raise --mem (or --gpu-mem) if you gave it"),
        (("opt-125m", "--prompt-len", 4096), "longer than the model's 2048 positions"),
        (("opt-125m", "--input-file", "x"), "unknown option --input-file"),
    ],
)
def test_what_cannot_be_planned(planned, options, message):
    code, _, err = planned(*options)
    assert code == 2 and err.startswith("error: ") and message in err


def test_generate_and_plan_take_the_same_options():
    """Except for the prompts' texts, the outputs and policy files."""
    ours, theirs = ({*p.make_parser("x")._option_string_actions} for p in (plan, generate))
    assert ours - theirs == {"-o", "--output", "--json", "--price"}
    assert {"--gpu-mem", "--percent", "--hh-ratio", "--path", "--hardware"} <= ours & theirs
