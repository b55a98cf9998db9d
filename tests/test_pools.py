"""One model on several devices, here pools of RAM: the tokens of one device, and bytes on each as planned."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from command_tools import FP32, TINY, wide, write_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machines import T4, planner_of, policies

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams, UserError
from h2o_flexgen.commands import main
from h2o_flexgen.engine import prefixes, runner
from h2o_flexgen.engine_args import EngineArgs
from h2o_flexgen.errors import PlanError
from h2o_flexgen.jobs.ray import RayLLM
from h2o_flexgen.kv_cache import full as full_cache
from h2o_flexgen.machine import memory
from h2o_flexgen.machine.device import CpuDevice, CudaDevice, check_devices
from h2o_flexgen.planning.memory import Resources
from h2o_flexgen.planning.placement import divide
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.policy import GIB, MIB

OPTIONS = dict(dtype="float32", progress=False)
#: some share a beginning, and there are more of them than places
LENGTHS = [5, 17, 9, 30, 12, 22, 7, 3]
OUTPUTS = [12, 5, 9, 1, 3, 7, 10, 12]
few = settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Makes growing caches grow often, and a few shared tokens worth a node."""
    monkeypatch.setattr(full_cache, "SEGMENT", 4)
    monkeypatch.setattr(prefixes, "LEAST_SAVED", 4)
    monkeypatch.setattr(prefixes, "LEAST_TOKENS", 1)


def tokens(model, device: str, **options) -> list[list[int]]:
    begin, *prompts = model.prompts([9, *LENGTHS])
    prompts = [begin + prompt if n % 3 else prompt for n, prompt in enumerate(prompts)]
    params = [SamplingParams(max_tokens=most, ignore_eos=True) for most in OUTPUTS]
    with LLM(str(model.folder), device=device, **OPTIONS, **options) as llm:
        found = [llm.generate(prompts, params) for _ in range(2)]  # the second begins with what the first left
        assert llm.report["device"] == device
        assert llm.report["shared_tokens"] > 0
    return [[output.outputs[0].token_ids for output in outputs] for outputs in found]


@pytest.mark.parametrize("name, devices", [("opt", 3), ("qwen3_moe", 2), ("gemma3_text", 2)])
@few
@given(
    policy=policies([0, 30, 100], [0, 30, 100], most=(4, 3), tokens=[10, 40, 2048]),
    budget=st.sampled_from([None, KVBudget.from_size(4, 4)]),
)
def test_pools_give_the_tokens_of_one(tiny, name, devices, policy, budget):
    """Rows enter and leave, some behind a shared prefix; weights, caches and hidden states on all tiers."""
    model = tiny(name)
    options = dict(policy=Policy(**policy), kv_budget=budget)
    assert tokens(model, ",".join(["cpu"] * devices), **options) == tokens(model, "cpu", **options)


@pytest.mark.parametrize("percent", [(100, 0, 100, 0, 100, 0), (0, 0, 30, 30, 0, 0)])
def test_streams_scores_and_embeddings_do_not_depend_on_pools(tiny, percent):
    model = tiny("opt")
    texts = model.prompts([20, 11])
    found = []
    for device in ("cpu", "cpu,cpu"):
        with LLM(str(model.folder), Policy(2, 1, percent), device=device, **OPTIONS) as llm:
            with llm.session(KVBudget.from_size(4, 4), count=2, position_rolling=False, chunk=6) as session:
                logprobs = session.feed(texts)
                outputs = session.generate([[7], [8, 9]], SamplingParams(max_tokens=5, ignore_eos=True))
            scores = [score.token_logprobs for score in llm.score(texts, prompt_len=4)]
            answers = [[s.logprob for s in each.scores] for each in llm.score_answers(texts, [[5], [6, 7]])]
            embeddings = [output.embedding.tolist() for output in llm.embed(texts)]
            found.append((logprobs, [output.token_ids for output in outputs], scores, answers, embeddings))
    assert found[0] == found[1]


# placement


@given(
    sizes=st.lists(st.integers(1, 20), min_size=3, max_size=9),
    rooms=st.lists(st.integers(5, 50), min_size=1, max_size=3),
)
def test_layers_fill_the_fullest_device_as_little_as_possible(sizes, rooms):
    def fill(cuts: tuple[int, ...]) -> float:
        ends = [0, *cuts, len(sizes)]
        return max(sum(sizes[begin:end]) / room for begin, end, room in zip(ends, ends[1:], rooms))

    spans = divide(sizes, rooms)
    assert [layer for span in spans for layer in span] == list(range(len(sizes)))
    assert all(spans)
    least = min(map(fill, combinations(range(1, len(sizes)), len(rooms) - 1)))
    assert fill(tuple(span.start for span in spans[1:])) == pytest.approx(least)


def gpus(*gib: float) -> Resources:
    profile = replace(
        T4, memory={f"cuda:{n}": int(each * GIB) for n, each in enumerate(gib)} | {"cpu": 64 * GIB, "disk": 0}
    )
    return Resources.of(profile, {"gpu": None, "cpu": None, "disk": None})


def test_a_gpu_with_twice_the_memory_gets_twice_the_layers():
    planner = planner_of(T4, "facebook/opt-6.7b", dummy=False)
    choice = planner.choose(Workload((128,) * 16, 16), gpus(20, 10), Policy(16))
    assert [len(span) for span in choice.placement.spans] == [22, 10]
    assert not choice.plan.missing()


def test_a_model_too_large_for_one_gpu_lies_on_two_before_it_lies_in_ram():
    planner = planner_of(T4, "facebook/opt-6.7b", dummy=False)
    workload = Workload((128,) * 16, 16)
    assert planner.choose(workload, gpus(8)).policy.percent[0] < 70
    two = planner.choose(workload, gpus(8, 8))
    assert two.policy.percent == (100, 0, 100, 0, 100, 0)
    alone = planner.choose(workload, gpus(16))
    assert two.plan.needed("gpu") >= alone.plan.needed("gpu")
    assert two.plan.totals().keys() == {"cuda:0", "cuda:1", "cpu", "disk"}
    assert two.plan.needed("cuda:0") == pytest.approx(two.plan.needed("cuda:1"), rel=0.1)


def test_a_searched_policy_fits_each_gpu():
    planner = planner_of(T4, "facebook/opt-13b", dummy=False)
    choice = planner.choose(Workload((128,) * 64, 16), gpus(8, 4))
    assert 20 < choice.policy.percent[0] < 60
    assert all(choice.plan.needed(name) <= limit for name, limit in choice.plan.pools.items())
    # more than twice as many, since buffers take as much of each
    assert len(choice.placement.spans[0]) > 2 * len(choice.placement.spans[1])


# bytes


@pytest.mark.parametrize("percent", [(100, 0, 100, 0, 100, 0), (40, 20, 40, 40, 100, 0)])
def test_each_pool_holds_what_is_planned_for_it(tmp_path, monkeypatch, percent):
    """Weights and their buffers, KV blocks and theirs; a tied matrix is in both pools."""
    made = []
    monkeypatch.setattr(runner, "Stores", lambda *args: made.append(Stores(*args)) or made[-1])
    folder = write_model(tmp_path / "model", config=wide(64, num_hidden_layers=4))
    with LLM(str(folder), Policy(2, 2, percent), device="cpu,cpu", **OPTIONS) as llm:
        llm.generate([[5, 6, 7]] * 4, SamplingParams(max_tokens=4))
        plan = llm.choice.plan
        weights = [store.held_bytes(cuda=False) for store in llm.runner.loaded]
        report = llm.report
    (stores,) = made
    for name, held, part in zip(plan.pools, weights, stores.parts):
        items = {label: n for pool, label, n in plan.items if pool == name}
        buffers = ("weights", "weight staging buffers", "weight conversion for one layer")
        in_ram = sum(tensor.nbytes for key, tensor in part.weights.resident.items() if part.weights.tiers[key] == "cpu")
        assert held - in_ram == sum(items.get(label, 0) for label in buffers)
        blocks = [block for block in part.caches.blocks.values() if block.tier == "gpu"]
        assert sum(block.kv.nbytes + block.meta.nbytes for block in blocks) == items.get("KV cache", 0)
        staging = sum(buffer.nbytes for buffer in part.caches._staging.buffers)
        assert staging == items.get("KV staging buffers", 0)
    assert [each["planned_bytes"] for each in report["devices"]] == [plan.needed(name) for name in plan.pools]
    assert report["planned_memory_bytes"]["gpu"] == sum(each["planned_bytes"] for each in report["devices"])
    assert {each["first_layer"] for each in report["devices"]} == {0, report["devices"][0]["layers"]}


Stores = runner.Stores


def test_a_model_too_large_for_one_pool_runs_on_two_without_streaming(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(wide(768, num_hidden_layers=8)))
    options = dict(path="_DUMMY_", num_gpu_batches=1, gpu_batch_size=2, **OPTIONS)
    prompts = [[5, 6, 7]] * 2
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM(str(tmp_path), device="cpu", **options) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    weights = 8 * 12 * 768 * 768 * 4
    caps = [memory.baseline() + int(0.75 * weights), int(0.75 * weights)]
    with LLM(str(tmp_path), device="cpu", gpu_mem=caps[0], **options) as llm:
        llm.generate(prompts, params)
        assert llm.report["policy"]["percent"][0] < 100
    with LLM(str(tmp_path), device="cpu,cpu", gpu_mem=caps, **options) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == wanted
        assert llm.report["policy"]["percent"] == (100, 0, 100, 0, 100, 0)
        assert llm.report["bytes_moved"]["disk_to_cpu"] == 0
        assert [len(span) for span in llm.choice.placement.spans] == [4, 4]
    with pytest.raises(PlanError, match=r"cpu:1 is too small: needs .* most goes to weights"):
        with LLM(str(tmp_path), Policy(2), device="cpu,cpu", gpu_mem=[10 * GIB, MIB], **options_of(options)) as llm:
            llm.generate(prompts, params)


def options_of(options: dict) -> dict:
    """Without what a policy has of its own."""
    return {name: value for name, value in options.items() if "batch" not in name}


# the commands


def test_commands_show_each_device(tmp_path, capsys):
    folder = write_model(tmp_path / "model")
    job = ["--model", str(folder), *FP32[2:], "--device", "cpu,cpu", "--gpu-mem", "9,8", "--num-prompts", "2"]
    job += ["--prompt-len", "6", "--gen-len", "3", "--percent", "100", "0", "100", "0", "100", "0"]
    assert main.main(["plan", *job, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert [each["device"] for each in planned["devices"]] == ["cpu:0", "cpu:1"]
    assert sum(each["layers"] for each in planned["devices"]) == TINY["num_hidden_layers"]
    assert "--device cpu,cpu" in planned["command"] and "--gpu-mem 9,8" in planned["command"]
    assert main.main(["generate", *job, "--verbose", "--report", str(tmp_path / "report.json")]) == 0
    shown = capsys.readouterr()
    assert "cpu:0" in shown.out + shown.err and "cpu:1" in shown.out + shown.err
    assert len(json.loads((tmp_path / "report.json").read_text())["devices"]) == 2


def test_devices_that_cannot_be_used(tmp_path):
    first, second, again = (CudaDevice(torch.device("cuda", n)) for n in (0, 1, 0))
    check_devices([first, second])
    with pytest.raises(UserError, match="cuda:0 is given twice"):
        check_devices([first, second, again])
    with pytest.raises(UserError, match="GPUs alone, or the CPU alone"):
        check_devices([first, CpuDevice(torch.device("cpu"))])
    folder = str(write_model(tmp_path / "model"))
    for device, what in (("cpu,tpu", "unknown device 'tpu'"), ("cpu,", "unknown device ''")):
        with pytest.raises(UserError, match=what):
            LLM(folder, device=device, **OPTIONS)
    with pytest.raises(UserError, match="4 devices for a model with 3 layers"):
        with LLM(folder, device="cpu,cpu,cpu,cpu", **OPTIONS) as llm:
            llm.generate([[5]])
    with pytest.raises(UserError, match="`gpu_mem` has 3 numbers, `device` 2"):
        EngineArgs(device="cpu,cpu", gpu_mem=[1, 2, 3])
    with pytest.raises(UserError, match="one device each"):
        RayLLM(None, model=folder, device="cpu,cpu")
    assert EngineArgs(device="cpu,cpu", gpu_mem=5).caps["gpu"] == [5, 5]
