"""Policy and KV budget "auto" in LLM and its command, and options that contradict a given policy."""

from __future__ import annotations

import json

import pytest
from command_tools import FP32, TINY, tiny_state, write_model, write_prompts
from machines import ROOT, laptop, plan_of

from h2o_flexgen import LLM, KVBudget, SamplingParams
from h2o_flexgen.errors import UserError
from h2o_flexgen.kv_cache import FullCache
from h2o_flexgen.machine import memory
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.policy import Policy

pytest_plugins = ["command_tools"]


T4_FILE = ROOT / "policies" / "hardware" / "t4-16gb.json"


@pytest.fixture
def hardware(tmp_path):
    path = tmp_path / "laptop.json"
    path.write_text(laptop(dtype="float32").to_json())
    return path


def test_auto_with_little_memory_gives_the_same_tokens(hardware, tmp_path, monkeypatch):
    folder = write_model(
        tmp_path / "deep", config=(config := {**TINY, "num_hidden_layers": 12}), state=tiny_state(config)
    )
    prompts = [[5 + n, 6, 7, 8, 9] for n in range(12)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(str(folder), Policy(12), device="cpu", dtype="float32", progress=False) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
        assert "predicted" not in llm.report
    held = memory.resident()
    monkeypatch.setattr(memory, "resident", lambda: held)  # the cap is near what is needed
    options = dict(device="cpu", dtype="float32", hardware=hardware, progress=False)
    with LLM(str(folder), **options) as llm:
        _, plan = plan_of(llm.planner, Policy(12), FullCache(), Workload((5,) * 12, 8), llm.resources())
    with LLM(str(folder), gpu_mem=plan.needed("gpu") - 200_000, **options) as llm:
        outputs = llm.generate(prompts, params)
        assert [o.outputs[0].token_ids for o in outputs] == expected
        assert llm.report["predicted"]["tokens_per_s"] > 0
        assert (
            llm.report["policy"]["percent"] != (100, 0, 100, 0, 100, 0) or llm.report["policy"]["gpu_batch_size"] < 12
        )


def test_auto_on_enough_memory_measures_nothing(model, monkeypatch):
    monkeypatch.setattr("h2o_flexgen.engine_args.load_or_measure", lambda *a: pytest.fail("measured"))
    with LLM(str(model), device="cpu", dtype="float32", progress=False) as llm:
        llm.generate([[5, 6, 7]] * 3, SamplingParams(max_tokens=4))
    assert llm.report["policy"]["percent"] == (100, 0, 100, 0, 100, 0)


def test_a_machine_that_was_measured_predicts_what_is_resident_too(model, monkeypatch):
    monkeypatch.setattr("h2o_flexgen.engine_args.kept_profile", lambda *a: laptop())
    with LLM(str(model), device="cpu", dtype="float32", progress=False) as llm:
        llm.generate([[5, 6, 7]] * 3, SamplingParams(max_tokens=4))
    assert llm.report["policy"]["percent"] == (100, 0, 100, 0, 100, 0)
    assert llm.report["predicted"]["tokens_per_s"] > 0


def test_auto_budget_through_the_command(cli, hardware, model, tmp_path):
    source = write_prompts(tmp_path / "in.jsonl", [[5, 6, 7, 8, 9, 10, 11, 12]] * 6)
    report = tmp_path / "report.json"
    options = ("--input-file", source, "--hh-ratio", "auto", "--hardware", hardware, "--report", report)
    code, out, err = cli("--model", model, *FP32, "--gen-len", 6, *options)
    assert code == 0, err
    assert "hh-ratio" in err
    assert "predicted" in out
    assert json.loads(report.read_text())["predicted"]["tokens_per_s"] > 0


def test_a_profile_that_cannot_be_read_ends_the_job(refused, model):
    assert "cannot read the hardware profile" in refused("--model", model, "--hardware", "/nowhere/x.json")


def test_a_profile_of_another_device_or_type_ends_the_job(refused, model, tmp_path):
    job = ("--model", model, "--device", "cpu", "--dtype", "float32", "--hardware")
    assert "was measured in float16 on cuda, but this job computes in float32 on cpu" in refused(*job, T4_FILE)


def test_a_latency_limit_contradicts_percentages(refused, model):
    line = refused("--model", model, "--max-latency", 3, "--percent", 100, 0, 100, 0, 100, 0)
    assert "--percent contradicts --max-latency" in line


def test_a_searched_policy_brings_its_budget(cli, model, tmp_path):
    file, report = tmp_path / "policy.json", tmp_path / "report.json"
    policy = {"gpu_batch_size": 2, "num_gpu_batches": 1}
    file.write_text(json.dumps({"policy": policy, "kv_budget": {"heavy": 5, "recent": 3, "rule": "mean"}}))
    job = (
        "--model",
        model,
        "--policy",
        file,
        "--prompt-len",
        20,
        "--gen-len",
        3,
        "--num-prompts",
        2,
        "--report",
        report,
    )
    for more, wanted in (((), (5, 3)), (("--hh-size", 2, "--recent-size", 4), (2, 4))):
        code, _, err = cli(*job, *more)
        assert code == 0, err
        budget = json.loads(report.read_text())["kv_budget"]
        assert (budget["heavy"], budget["recent"]) == wanted
    assert LLM(str(model), str(file)).kv_budget == KVBudget.from_size(5, 3, "mean")
    for bad in ({"heavy": 5}, [5, 3], {"heavy": -1, "recent": 3}, {"heavy": "5", "recent": 3}):
        file.write_text(json.dumps({"policy": policy, "kv_budget": bad}))
        with pytest.raises(UserError):
            LLM(str(model), str(file))


@pytest.mark.parametrize(
    "option",
    [
        {"max_latency": 5},
        {"gpu_batch_size": 2},
        {"num_gpu_batches": 2},
        {"cpu_cache_compute": True},
        {"prefill_tokens": 512},
    ],
)
def test_options_that_a_given_policy_would_ignore_are_refused(model, option):
    with pytest.raises(UserError, match="a policy has its own"):
        LLM(str(model), Policy(2), **option)


def test_bad_arguments_are_refused(model):
    with pytest.raises(UserError, match="max_latency"):
        LLM(str(model), max_latency=-1)
    with pytest.raises(UserError, match='"auto"'):
        LLM(str(model), kv_budget="most")
