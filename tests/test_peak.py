"""Memory of jobs: their peak against the plan, what the process held before, and what is left afterwards."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref

import numpy as np
import pytest
from command_tools import FP32, ON_DISK, ON_GPU, end, environment, percent, start, wide

from h2o_flexgen import LLM, Policy, SamplingParams
from h2o_flexgen.engine import runner, step
from h2o_flexgen.machine.device import CpuDevice

pytest_plugins = ["command_tools"]

#: so large that weights, cache and workspaces outweigh the interpreter
LARGE = wide(1024, vocab_size=30000, num_hidden_layers=4, num_attention_heads=16, max_position_embeddings=128)


#: with grouped-query attention, a gated MLP and a vocabulary head that is half of all weights
LLAMA = dict(
    model_type="llama",
    vocab_size=40000,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=4,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)


INT8 = "--compress-weight int8 --compress-cache int8 --compute int8"
INT4 = "--compress-weight int4 --compress-cache int4"
CASES = [
    (LARGE, ON_DISK, "h2o", INT8),
    (LLAMA, ON_GPU, "vatp:first=4", ""),
    (LLAMA, ON_DISK, "h2o", INT4),
]


@pytest.mark.parametrize("config, placement, rule, formats", CASES, ids=["int8", "ram", "disk"])
def test_the_peak_stays_near_the_plan(tmp_path, config, placement, rule, formats):
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ("--model", tmp_path, "--path", "_DUMMY_", "--hh-ratio", 0.2, "--kv-rule", rule)
    report = tmp_path / "report.json"
    # two blocks: all that the plan counts is in use at once only from the second on
    job = (*model, *FP32, "--prompt-len", 64, "--gen-len", 3, "--num-prompts", 12)
    where = ("--gpu-batch-size", 4, "--num-gpu-batches", 2, "--offload-dir", tmp_path / "offload")
    where += percent(placement)
    code, _, err = end(start(*job, *where, *formats.split(), "--report", report), timeout=300)
    assert code == 0, err
    found = json.loads(report.read_text())
    peak = found["peak_memory_bytes"]
    planned = found["planned_memory_bytes"]
    ratio = (peak["gpu"] + peak["cpu"]) / (planned["gpu"] + planned["cpu"])
    print(ratio)
    assert 0.9 < ratio < 1.01
    assert 0.99 * planned["disk"] <= peak["disk"] <= planned["disk"]


#: under a limit; prints whether the head was read in slices, and peak and plan of RAM
LIMITED = """
import json, sys
from h2o_flexgen import LLM, Policy, SamplingParams
from h2o_flexgen.machine import memory
how = dict(path="_DUMMY_", device="cpu", dtype="float32", progress=False, mem=int(sys.argv[2]))
with LLM(sys.argv[1], Policy(4, 2, (0,) * 6), **how) as llm:
    llm.generate([list(range(1, 33))] * 8, SamplingParams(max_tokens=3))
    is_sliced, plan = llm.choice.placement.sliced is not None, llm.choice.plan
    print(json.dumps([is_sliced, memory.peak_resident(), plan.needed("ram")]))
"""


def test_a_limit_that_the_head_exceeds_is_kept_by_reading_it_in_slices(tmp_path):
    limit = 600 << 20
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 2}))
    argv = [sys.executable, "-c", LIMITED, str(tmp_path), str(limit)]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    is_sliced, peak, planned = json.loads(done.stdout)
    print(peak / planned)
    assert is_sliced and planned <= limit
    assert planned - (64 << 20) < peak < 1.01 * planned  # 48 MiB are planned for libraries


#: streams that outgrow their caches; prints peak and plan of RAM and disk
SESSION = """
import json, sys
from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams
from h2o_flexgen.machine import memory
how = dict(path="_DUMMY_", device="cpu", dtype="float32", progress=False)
with LLM(sys.argv[1], Policy(2, 2, tuple(map(int, sys.argv[2:]))), KVBudget.from_size(200), **how) as llm:
    session = llm.session(count=4, chunk=96)
    for _ in range(2):
        session.generate([list(range(1, 200))] * 4, SamplingParams(max_tokens=4))
    plan, disk = session.choice.plan, llm.runner.transport.disk_bytes()
    print(json.dumps([memory.peak_resident(), plan.needed("ram"), disk, plan.needed("disk")]))
"""


def test_the_peak_of_a_session_stays_near_its_plan(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 1024}))
    argv = [sys.executable, "-c", SESSION, str(tmp_path), *ON_DISK]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    peak, planned, peak_disk, planned_disk = json.loads(done.stdout)
    print(peak / planned)
    assert 0.9 * planned < peak < 1.05 * planned
    assert 0.99 * planned_disk <= peak_disk <= planned_disk


def test_what_the_process_holds_already_is_in_the_plan(model):
    """Prompts, another model: whatever it holds when a job is planned, with the job's own weights counted once."""

    def planned(llm):
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
        return llm.choice.plan.needed("gpu")

    with LLM(str(model), device="cpu", dtype="float32", progress=False) as llm:
        first = planned(llm)
        assert abs(planned(llm) - first) < 16 << 20
        other = np.ones(256 << 20, np.uint8)
        assert 192 << 20 < planned(llm) - first < 272 << 20  # 48 MiB are planned for libraries
        del other
        assert abs(planned(llm) - first) < 16 << 20


def test_an_exception_that_is_kept_holds_no_weights(model):
    weights = []

    def stop(output):
        if llm.runner.weights is not None:  # called once more after the interrupt
            weights.append(weakref.ref(llm.runner.weights))
        raise KeyboardInterrupt

    with LLM(str(model), device="cpu", dtype="float32", progress=False) as llm:
        with pytest.raises(KeyboardInterrupt) as raised:
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), on_output=stop)
        assert llm.runner.weights is None
        gc.collect()
        assert weights[0]() is None
        assert raised.value is not None  # and with it the traceback


def test_the_stores_of_a_job_go_with_it_and_not_when_python_looks_for_cycles(model, monkeypatch):
    used = []

    def walk(stores, *args):
        used.append(weakref.ref(stores))
        return step.Walk(stores, *args)

    monkeypatch.setattr(runner, "Walk", walk)
    with LLM(str(model), device="cpu", dtype="float32", progress=False) as llm:
        gc.collect()
        gc.disable()
        try:
            llm.generate([[5, 6, 7], [8]], SamplingParams(max_tokens=3))
            assert [stores() for stores in used] == [None]
        finally:
            gc.enable()


@pytest.mark.parametrize("seconds, over_plan, micro_batches", [(0, 0, 3), (0, float("inf"), 0), (float("inf"), 0, 0)])
def test_prefill_trims_the_heap_at_its_end_and_while_it_holds_more_than_planned(
    model, monkeypatch, seconds, over_plan, micro_batches
):
    trimmed = []
    monkeypatch.setattr(step, "TRIM_SECONDS", seconds)
    monkeypatch.setattr(step, "TRIM_OVER_PLAN", over_plan)
    monkeypatch.setattr(CpuDevice, "release_gaps", lambda self: trimmed.append(self))
    policy = Policy(gpu_batch_size=3, num_gpu_batches=1, prefill_tokens=4)
    with LLM(str(model), device="cpu", dtype="float32", progress=False, policy=policy) as llm:
        llm.generate([[5, 6, 7]] * 3, SamplingParams(max_tokens=2))
        layers = 1 + llm.spec.layers
    assert len(trimmed) == 1 + micro_batches * layers
