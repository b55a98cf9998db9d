"""Copies run beside kernels, as a profiler's trace shows, and a CUDA machine can be measured for the search."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from h2o_flexgen import LLM, Policy, SamplingParams
from h2o_flexgen.commands.main import main

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def traced(overlap: bool, folder) -> dict[str, float]:
    """Busy times of the second of two jobs with weights and cache in RAM, by its trace."""
    policy = Policy(32, 2, percent=(0, 100, 0, 100, 100, 0), overlap=overlap)
    prompts = [[5 + n] * 128 for n in range(64)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM("facebook/opt-1.3b", policy, device="cuda", path="_DUMMY_", progress=False) as llm:
        llm.generate(prompts, params)  # loads, warms up
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            outputs = llm.generate(prompts, params)
    assert all(math.isfinite(x) for o in outputs for x in o.outputs[0].logprobs)
    profiler.export_chrome_trace(str(folder / "trace.json"))
    return busy(json.loads((folder / "trace.json").read_text())["traceEvents"])


def busy(events: list[dict]) -> dict[str, float]:
    """Busy times (ms) of kernels and of copies between host and device, and of both at once."""
    spans: dict[str, list[tuple[float, float]]] = {"kernel": [], "gpu_memcpy": []}
    for event in events:
        within = event.get("cat") == "gpu_memcpy" and not any(way in event["name"] for way in ("HtoD", "DtoH"))
        if event.get("ph") == "X" and event.get("cat") in spans and not within:
            spans[event["cat"]].append((event["ts"], event["ts"] + event.get("dur", 0)))
    kernels, copies = map(length, spans.values())
    return {"kernels": kernels, "copies": copies, "both": kernels + copies - length(sum(spans.values(), []))}


def length(spans: list[tuple[float, float]]) -> float:
    """Milliseconds of the union of intervals in microseconds."""
    total = 0.0
    reached = -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total / 1e3


def test_the_overlap_of_copies_and_kernels_is_read_from_a_trace():
    def event(kind: str, begin: float, end: float, name: str = "") -> dict:
        return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin}

    copies = [event("gpu_memcpy", 0, 4000, "Memcpy HtoD"), event("gpu_memcpy", 3000, 5000, "Memcpy DtoH")]
    others = [event("gpu_memcpy", 0, 99000, "Memcpy DtoD"), event("cpu_op", 0, 99000)]
    assert busy([*copies, *others, event("kernel", 4000, 12000)]) == {"kernels": 8, "copies": 5, "both": 1}


@pytest.mark.gpu
@needs_cuda
def test_with_overlap_copies_run_beside_kernels(tmp_path):
    on = traced(True, tmp_path)
    off = traced(False, tmp_path)
    # at best the shorter of the two is hidden completely
    assert on["both"] > 0.5 * min(on["kernels"], on["copies"])
    assert on["both"] > off["both"]


@pytest.mark.gpu
@needs_cuda
def test_a_cuda_machine_can_be_measured(tmp_path):
    assert main(["hardware", "--device", "cuda", "-o", str(tmp_path / "profile.json")]) == 0
    found = json.loads((tmp_path / "profile.json").read_text())
    assert found["device"] == "cuda" and found["memory"]["gpu"] > 0
