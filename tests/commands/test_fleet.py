"""`plan --workers` says what several workers would do, and what it would cost."""

from __future__ import annotations

import json

import pytest
from command_tools import wide, write_model
from machines import laptop

from h2o_flexgen.commands.main import main

JOB = ("--num-prompts", 1000, "--prompt-len", 20, "--gen-len", 10)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("deep") / "model", config=wide(256, num_hidden_layers=12))


@pytest.fixture
def slow(tmp_path):
    """The file of a profile with half the rates of a matmul."""
    data = json.loads(laptop().to_json())
    data["matmul"] = halved(data["matmul"])
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(data | {"machine": {"cpu": "a slow one"}}))
    return path


def halved(rates):
    if isinstance(rates, dict):
        return {key: halved(rate) for key, rate in rates.items()}
    return [halved(rate) for rate in rates] if isinstance(rates, list) else rates / 2


@pytest.fixture
def fast(tmp_path):
    path = tmp_path / "fast.json"
    path.write_text(json.dumps(json.loads(laptop().to_json()) | {"machine": {"cpu": "a fast one"}}))
    return path


@pytest.fixture
def planned(capfd, model, fast):
    """Run the command: (exit code, its JSON, stderr)."""

    def run(*argv) -> tuple[int, dict, str]:
        capfd.readouterr()
        code = main(["plan", str(model), "--hardware", str(fast), "--json", *map(str, (*JOB, *argv))])
        out, err = capfd.readouterr()
        return code, json.loads(out) if out else {}, err

    return run


def test_rates_add_up_and_rows_go_to_whoever_is_free(planned, slow):
    found = planned("--workers", 3, "--workers", f"2:{slow}", "--price", 2, "--price", 0.5)[1]["workers"]
    fast, other = found["shares"]
    assert [share["machine"] for share in found["shares"]] == ["a fast one", "a slow one"]
    assert fast["rows_per_s"] > other["rows_per_s"]
    assert found["rows_per_s"] == pytest.approx(3 * fast["rows_per_s"] + 2 * other["rows_per_s"])
    assert found["rows"] == 1000
    assert found["seconds"] == pytest.approx(1000 / found["rows_per_s"])
    assert found["cost"] == pytest.approx((3 * 2 + 2 * 0.5) * found["seconds"] / 3600)
    assert found["cost_per_million"] == pytest.approx(found["cost"] * 100)  # of 10,000 output tokens


def test_one_worker_does_what_the_plan_says(planned):
    result = planned("--workers", 1)[1]
    assert result["workers"]["rows"] == 1000
    assert "cost" not in result["workers"]
    assert result["workers"]["shares"][0]["bound_by"] == result["bound_by"]


def test_it_is_said_in_words(capfd, model, fast):
    argv = ["plan", str(model), "--hardware", str(fast), "--workers", "4", "--price", "1.5", *map(str, JOB)]
    assert main(argv) == 0
    out = capfd.readouterr().out
    assert "workers    4 with a fast one: " in out
    assert "together   " in out and " (h:mm:ss) for 1000 rows" in out
    assert " per million output tokens" in out


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--price", 1), "--price is for a plan with --workers"),
        (("--workers", 1, "--price", 1, "--price", 2), "--price is given 2 times, --workers 1 times"),
        (("--workers", 0), "--workers: must be 1 or more"),
        (("--workers", "x"), "--workers: invalid kind value: 'x'"),
        (("--workers", "2:/missing.json"), "missing.json"),
    ],
)
def test_bad_input(planned, argv, message):
    code, _, err = planned(*argv)
    assert code == 2
    assert message in err and err.count("\n") == 1
