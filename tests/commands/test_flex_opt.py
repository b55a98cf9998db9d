"""`generate`: what it prints, and the report that others script against."""

from __future__ import annotations

import json

import pytest
from command_tools import FP32, ON_CPU, ON_DISK, ON_GPU, percent, read_rows, wide, write_model, write_rows

from h2o_flexgen.commands.generate import rate
from h2o_flexgen.machine import memory
from h2o_flexgen.policy import GIB, Policy

pytest_plugins = ["command_tools"]


MOVED = {"disk_to_cpu": int, "cpu_to_gpu": int, "gpu_to_cpu": int, "cpu_to_disk": int}
#: the contract of `--report`
REPORT = {
    "model": str,
    "device": str,
    "dtype": str,
    "workload": {"num_prompts": int, "prompt_len": int, "gen_len": int},
    "policy": dict,
    "kv_budget": {"heavy": int, "recent": int, "rule": str},
    "prefill": {"seconds": float, "tokens_per_s": float, "bytes_moved": MOVED},
    "decode": {"seconds": float, "tokens_per_s": float, "bytes_moved": MOVED},
    "total": {"seconds": float, "generated_tokens": int, "tokens_per_s": float},
    "peak_memory_bytes": {"gpu": int, "cpu": int, "disk": int},
    "planned_memory_bytes": {"gpu": int, "cpu": int, "disk": int},
    "bytes_moved": MOVED,
    "computed_tokens": int,
    "shared_tokens": int,
    "row_steps": int,
    "stall_seconds": {"weights": float, "cache": float},
}


def assert_shape(value, shape, where: str = "report") -> None:
    if isinstance(shape, dict):
        assert list(value) == list(shape), where
        for key in shape:
            assert_shape(value[key], shape[key], f"{where}.{key}")
    else:
        assert type(value) is shape, f"{where} is {value!r}"


@pytest.mark.parametrize("tier, budget", [(ON_GPU, True), (ON_CPU, False), (ON_DISK, True)], ids=["gpu", "cpu", "disk"])
def test_the_report_has_exactly_the_fields_of_the_contract(cli, model, tmp_path, tier, budget):
    report = tmp_path / "report.json"
    where = (*percent(tier), "--offload-dir", tmp_path / "offload", "--report", report, "--gpu-batch-size", 2)
    where += ("--num-gpu-batches", 2)  # the second has one sequence
    options = ("--hh-size", 3, "--recent-size", 2) if budget else ()
    job = ("--model", model, *FP32, "--prompt-len", 10, "--gen-len", 5, "--num-prompts", 3, "--ignore-eos")
    code, out, err = cli(*job, *where, *options)
    assert code == 0, err
    found = json.loads(report.read_text())
    assert_shape(found, REPORT if budget else REPORT | {"kv_budget": type(None)})
    assert found["model"] == str(model) and found["device"] == "cpu" and found["dtype"] == "float32"
    assert found["workload"] == {"num_prompts": 3, "prompt_len": 10, "gen_len": 5}
    assert Policy.from_dict(found["policy"]) == Policy(2, 2, tuple(map(float, tier)))
    assert found["kv_budget"] == ({"heavy": 3, "recent": 2, "rule": "voted"} if budget else None)
    total = found["total"]
    assert total["generated_tokens"] == 15
    assert total["seconds"] == pytest.approx(found["prefill"]["seconds"] + found["decode"]["seconds"])
    assert total["tokens_per_s"] == pytest.approx(15 / total["seconds"])
    assert found["prefill"]["tokens_per_s"] == pytest.approx(30 / found["prefill"]["seconds"])
    assert found["decode"]["tokens_per_s"] == pytest.approx(12 / found["decode"]["seconds"])
    moved = found["bytes_moved"]
    for link, nbytes in moved.items():
        assert nbytes == sum(found[phase]["bytes_moved"][link] for phase in ("prefill", "decode"))
    assert (moved["disk_to_cpu"] > 0) == (moved["cpu_to_disk"] > 0) == (tier == ON_DISK)
    assert (moved["cpu_to_gpu"] > 0) == (tier != ON_GPU)
    assert (found["planned_memory_bytes"]["disk"] > 0) == (tier == ON_DISK)
    assert found["peak_memory_bytes"]["disk"] <= found["planned_memory_bytes"]["disk"]


def test_the_human_readable_report_says_the_same(cli, model, tmp_path):
    report = tmp_path / "report.json"
    job = ("--model", model, *FP32, "--prompt-len", 10, "--gen-len", 5, "--num-prompts", 3, "--ignore-eos")
    code, out, _ = cli(*job, *percent(ON_DISK), "--report", report, "--hh-ratio", 0.2)
    assert code == 0
    found = json.loads(report.read_text())
    assert str(model) in out and "float32 on cpu" in out
    assert "3 prompts of up to 10 tokens, 5 tokens each" in out
    assert "2 heavy + 2 recent" in out
    assert "3 x 1, in RAM 0 % of weights, 0 % of cache, 0 % of activations, overlap on" in out
    assert f"15 tokens, {rate(found['total']['tokens_per_s'])} tokens/s" in out
    for phase in ("prefill", "decode"):
        assert f"{found[phase]['seconds']:.2f} s, {rate(found[phase]['tokens_per_s'])} tokens/s" in out
    assert "disk to RAM" in out and "RAM peak" in out and "gpu" not in out
    assert all(len(line) < 140 and line == line.rstrip() and "\r" not in line for line in out.splitlines())


def test_texts_are_on_stdout_unless_there_is_an_output_file(cli, texts, tmp_path):
    job = ("--model", texts, *FP32, "--prompt-len", 12, "--gen-len", 5, "--num-prompts", 2)
    code, out, _ = cli(*job)
    assert code == 0 and out.count("and the model goes on") == 2
    assert "\033" not in out  # no colours without a terminal
    code, out, _ = cli(*job, "--output-file", tmp_path / "o")
    assert code == 0 and "prompt 0" not in out and out.startswith("model")


def test_texts_end_before_a_stop_string(cli, texts, tmp_path):
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt": "def f(x):"}, {"prompt": "class A"}])
    out = tmp_path / "out.jsonl"
    job = ("--model", texts, *FP32, "--gen-len", 12, "--ignore-eos", "--input-file", rows, "--output-file", out)
    assert cli(*job)[0] == 0
    whole = [row["text"] for row in read_rows(out)]
    stop = [text[4:6] for text in whole]
    code, _, err = cli(*job, "--restart", "--stop", stop[0], "--stop", stop[1])
    assert code == 0, err
    for row, text in zip(read_rows(out), whole):
        assert row["finish_reason"] == "stop"
        assert row["text"] == text[: min(text.find(s) for s in stop if s in text)]


def test_invalid_stop_strings(refused, model, texts):
    assert "not empty" in refused("--model", texts, "--stop", "")
    assert "--stop needs a tokenizer" in refused("--model", model, "--stop", "a", early=False)


def test_verbose_shows_policy_and_plan(cli, model):
    code, _, err = cli("--model", model, *FP32, "--gen-len", 3, "--prompt-len", 5, "--verbose")
    assert code == 0
    assert '"gpu_batch_size": 4' in err and "memory plan" in err and "KV cache" in err


def test_help_lists_every_option_of_the_contract(cli, capfd):
    with pytest.raises(SystemExit) as done:
        cli("--help")
    assert done.value.code == 0
    out = capfd.readouterr().out
    for option in (
        "model path prompt-len gen-len gpu-batch-size num-gpu-batches percent policy hh-ratio recent-ratio hh-size "
        "recent-size device dtype offload-dir overlap no-overlap mem gpu-mem cpu-mem disk-mem cpu-cache-compute "
        "input-file output-file ignore-eos stop temperature top-k top-p seed report verbose restart retry-errors "
        "prefill-tokens"
    ).split():
        assert f"--{option}" in out


def test_a_policy_file_of_the_search_is_read(cli, model, tmp_path):
    policy = Policy(3, 2, (50.0, 25.0, 0.0, 50.0, 0.0, 0.0), False, True, 64)
    path = tmp_path / "policy.json"
    report = tmp_path / "report.json"
    for text in (policy.to_json(), json.dumps({"command": "search", "policy": json.loads(policy.to_json())})):
        path.write_text(text)
        job = ("--model", model, "--policy", path, "--prompt-len", 6, "--gen-len", 3, "--report", report)
        code, out, err = cli(*job, "--offload-dir", tmp_path / "offload")
        assert code == 0, err
        found = json.loads(report.read_text())
        assert Policy.from_dict(found["policy"]) == policy
        assert found["workload"]["num_prompts"] == 6
        placed = "in RAM 75 % of weights, 50 % of cache, 0 % of activations"
        assert f"3 x 2, {placed}, overlap off, attention on the CPU, prefill by 64 tokens" in out


def test_auto_stays_on_the_device_when_it_fits_and_spills_when_it_does_not(cli, tmp_path, monkeypatch):
    held = memory.resident()
    monkeypatch.setattr(memory, "resident", lambda: held)  # the cap is near what is needed
    folder = write_model(tmp_path / "wide", config=wide(256, num_hidden_layers=4))
    report = tmp_path / "report.json"
    job = ("--model", folder, *FP32, "--prompt-len", 8, "--gen-len", 3, "--num-prompts", 2, "--report", report)
    assert cli(*job, "--policy", "auto")[0] == 0
    whole = json.loads(report.read_text())
    assert whole["policy"]["percent"] == [100, 0, 100, 0, 100, 0]
    needed = whole["planned_memory_bytes"]["gpu"]
    resident = 4 * 12 * 256 * 256 * 4  # about the bytes of the layers
    code, _, err = cli(*job, "--gpu-mem", (needed - resident // 3) / GIB, "--offload-dir", tmp_path / "offload")
    assert code == 0, err
    spilled = json.loads(report.read_text())
    assert spilled["policy"]["percent"][0] < 100
    assert spilled["planned_memory_bytes"]["gpu"] <= needed - resident // 3
    assert spilled["bytes_moved"]["disk_to_cpu"] > 0
