"""Everything that needs a CUDA machine, in one command of under nine minutes that installs nothing.

python scripts/gpu_check.py [--quick] [--section NAME ...] [--out FILE]

Sections, each written to the JSON as soon as it is there, each run to its end in processes with time limits, so that
a failure costs its own result only:

links    bandwidth of the bus from and to pinned memory, of device memory, rate of matrix products
overlap  from a profiler's trace: how much of the copies' time runs beside kernels, with overlap on and off
tests    tests/gpu through pytest
bench    OPT-6.7B with random weights under a 16 GB cap, 512 + 32 tokens, full cache against H2O; then a few layers as
         wide as OPT-30B's under a cap they do not fit. Each run to its end, never extrapolated
matrix   only if asked for, it takes as long as all others: OPT-6.7B 512 + 32 in 16 GB by scripts/bench_throughput.py,
         one run of ours (needs the package pulp) and of every peer that is installed (Accelerate, DeepSpeed,
         FlexGen), these with a published batch: looking for the best one takes longer
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from bench_common import RESULTS, ROOT, write_json

SECTIONS = ("links", "overlap", "tests", "bench")
EXTRA = ("matrix",)
#: seconds in all, and the most of them that a section may take beside others
TOTAL = 515
LIMITS = {"links": 60, "overlap": 100, "tests": 240, "bench": 330, "matrix": 515}
QUICK = {"links": 40, "overlap": 60, "tests": 90, "bench": 80, "matrix": 240}
GB = 10**9


class Results:
    """The JSON file, written anew after every addition."""

    def __init__(self, path: Path):
        self.path = path
        self.data: dict = {}

    def set(self, *keys_and_value) -> None:
        *keys, last, value = keys_and_value
        target = self.data
        for key in keys:
            target = target.setdefault(key, {})
        target[last] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.data)


def machine() -> dict:
    import torch

    from h2o_flexgen.offload.memory import ram_available

    gpu = torch.cuda.get_device_properties(0)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    cores = len(os.sched_getaffinity(0))
    gpu_gib, ram_gib = round(gpu.total_memory / 2**30), round(ram / 2**30)
    return {
        "words": f"one {gpu.name} ({gpu_gib} GiB), {cores} cores of {cpu}, {ram_gib} GiB RAM",
        "gpu": gpu.name,
        "gpu_bytes": gpu.total_memory,
        "processor": cpu,
        "cores": cores,
        "ram_bytes": ram,
        "ram_available_bytes": ram_available(),  # some virtual machines get theirs only as they use it
        "huge_pages": huge.read_text().strip() if huge.exists() else None,
        "kernel": platform.release(),
    }


def versions() -> dict:
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "transformers", "numpy", "safetensors", "pytest", "hypothesis"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


# processes


def run(argv: list[str], limit: float) -> tuple[int | None, str, float]:
    """(exit code, or None if the limit ended it; what it printed; seconds)."""
    start = time.perf_counter()
    env = os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    env.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))  # or the tests' conftest makes it one
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            argv, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=max(1.0, limit))
        except BaseException as e:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(e, subprocess.TimeoutExpired):
                raise
            code = None
        output.seek(0)
        return code, output.read(), time.perf_counter() - start


def work(task: str, arguments: dict, limit: float) -> dict:
    """Run a worker of this file; its result, or what went wrong."""
    if limit < 5:
        return {"skipped": "no time left"}
    with tempfile.TemporaryDirectory(prefix="h2o_flexgen-check-") as folder:
        result = Path(folder) / "result.json"
        argv = [sys.executable, __file__, "--worker", task, json.dumps(arguments), str(result)]
        code, output, seconds = run(argv, limit)
        found = json.loads(result.read_text()) if result.exists() else {}
        if code != 0:
            why = f"ended by its limit of {limit:.0f} s" if code is None else f"exit code {code}"
            found |= {"error": why, "output_tail": output[-3000:]}
    return found | {"process_seconds": round(seconds, 1)}


# links


def worker_links(arguments: dict) -> dict:
    import torch

    from h2o_flexgen.offload.device import Device

    device = Device("cuda")
    device.start(None)
    nbytes = arguments["mib"] << 20

    def seconds(work, repeat: int = 5) -> float:
        work()
        times = []
        for _ in range(repeat):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return sorted(times)[repeat // 2]

    begin = time.perf_counter()
    host = [device.host_buffer(nbytes) for _ in range(2)]
    register = (time.perf_counter() - begin) / 2
    there = [device.buffer(nbytes) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            there[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host[1].copy_(there[1], non_blocking=True)

    plain = torch.ones(nbytes // 4, dtype=torch.uint8)
    found = {
        "bytes": nbytes,
        "pinning_gb_per_s": nbytes / register / GB,
        "host_to_device_gb_per_s": nbytes / seconds(lambda: there[0].copy_(host[0], non_blocking=True)) / GB,
        "device_to_host_gb_per_s": nbytes / seconds(lambda: host[1].copy_(there[1], non_blocking=True)) / GB,
        "both_ways_each_gb_per_s": nbytes / seconds(both) / GB,
        "pageable_host_to_device_gb_per_s": plain.nbytes / seconds(lambda: there[0][: plain.nbytes].copy_(plain)) / GB,
        "device_memory_copy_gb_per_s": 2 * nbytes / seconds(lambda: there[0].copy_(there[1])) / GB,
        "ram_copy_gb_per_s": nbytes / seconds(lambda: host[0].copy_(host[1]), 3) / GB,
    }
    size = 8192
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
        found[f"matmul_{str(dtype).removeprefix('torch.')}_tflops"] = (
            2 * size**3 / seconds(partial(torch.matmul, a, b)) / 1e12
        )
    q = torch.randn(2048, 1, 128, device="cuda", dtype=torch.float16)
    k = torch.randn(2048, 544, 128, device="cuda", dtype=torch.float16)
    found["decode_attention_gb_per_s"] = k.nbytes / seconds(lambda: torch.bmm(q, k.transpose(1, 2))) / GB
    device.unpin()
    return {key: round(value, 3) for key, value in found.items()}


# overlap


def merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out


def length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in intervals)


def common(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    """The length that two merged lists share."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def read_trace(events: list[dict]) -> dict:
    """Busy times (ms) of kernels and copies, and how much of the copies' time kernels ran too."""
    kinds: dict[str, list[tuple[float, float]]] = {"kernels": [], "to_device": [], "to_host": []}
    moved = {"to_device": 0, "to_host": 0}
    for event in events:
        if event.get("ph") != "X":
            continue
        span = (event["ts"], event["ts"] + event.get("dur", 0))
        if event.get("cat") == "kernel":
            kinds["kernels"].append(span)
        elif event.get("cat") == "gpu_memcpy":
            name = event["name"]
            kind = "to_device" if "HtoD" in name else "to_host" if "DtoH" in name else None
            if kind is not None:
                kinds[kind].append(span)
                moved[kind] += event.get("args", {}).get("bytes", 0)
    kernels = merged(kinds["kernels"])
    copies = merged(kinds["to_device"] + kinds["to_host"])
    if not kernels or not copies:
        return {"error": "the trace holds no kernels or no copies", "kernels": len(kernels), "copies": len(copies)}
    shared = common(copies, kernels)
    every = merged(copies + kernels)
    found = {
        "wall_ms": (every[-1][1] - every[0][0]) / 1e3,
        "kernels_busy_ms": length(kernels) / 1e3,
        "copies_busy_ms": length(copies) / 1e3,
        "idle_ms": (every[-1][1] - every[0][0] - length(every)) / 1e3,
        "copies_beside_kernels_ms": shared / 1e3,
        "fraction_of_copy_time_beside_kernels": shared / length(copies),
        "fraction_of_kernel_time_beside_copies": shared / length(kernels),
        # the shorter of the two can at best be hidden whole
        "hidden_of_what_could_be": shared / min(length(copies), length(kernels)),
        "launches": len(kinds["kernels"]),
    }
    for kind in moved:
        spans = merged(kinds[kind])
        found[f"{kind}_busy_ms"] = length(spans) / 1e3
        found[f"{kind}_gb_per_s"] = moved[kind] / (length(spans) / 1e6) / GB if spans else 0.0
        found[f"{kind}_beside_kernels_ms"] = common(spans, kernels) / 1e3
    return {key: round(value, 4) for key, value in found.items()}


def worker_overlap(arguments: dict) -> dict:
    """Profile prefill and the decode steps of one job, after one that warms up."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from h2o_flexgen.engine.runner import Engine
    from h2o_flexgen.policy import Policy

    with profile(activities=[ProfilerActivity.CUDA]):  # the first trace of a process may lack its first kernels
        torch.ones(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    found: dict = {}
    profiler = None
    lap, begin_block = Engine._lap, Engine.run

    def stop(phase: str) -> None:
        nonlocal profiler
        if profiler is None:
            return
        profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            found[phase] = read_trace(json.loads(path.read_text())["traceEvents"])
        profiler = None

    def begin() -> None:
        nonlocal profiler
        profiler = profile(activities=[ProfilerActivity.CUDA])
        profiler.start()

    def profiled_run(engine, *args, **kwargs):
        begin()
        return begin_block(engine, *args, **kwargs)

    def profiled_lap(engine, phase, start):
        out = lap(engine, phase, start)
        stop(phase)
        if phase == "prefill":
            begin()
            return time.perf_counter()
        return out

    policy = Policy(**arguments["policy"])
    with make_llm(arguments, policy) as llm:
        prompts, params = make_prompts(arguments, policy)
        llm.generate(prompts, params)
        found["unprofiled"] = summary(llm)
        Engine.run, Engine._lap = profiled_run, profiled_lap
        llm.generate(prompts, params)
    return found


# bench


def make_llm(arguments: dict, policy):
    from h2o_flexgen.llm import LLM
    from h2o_flexgen.policy import KVBudget

    ratio = arguments.get("hh_ratio")
    return LLM(
        arguments["model"],
        policy,
        None if ratio is None else KVBudget.from_ratio(ratio),
        device="cuda",
        path="_DUMMY_",
        offload_dir=os.path.join(tempfile.gettempdir(), "h2o_flexgen-check-offload"),
        gpu_mem=arguments.get("gpu_mem"),
        progress=False,
    )


def make_prompts(arguments: dict, policy):
    import random

    from h2o_flexgen.engine.sampling import SamplingParams

    rng = random.Random(0)
    count = policy.block_size
    prompts = [[rng.randrange(4, 50000) for _ in range(arguments["prompt_len"])] for _ in range(count)]
    return prompts, SamplingParams(max_tokens=arguments["gen_len"], ignore_eos=True)


def summary(llm) -> dict:
    import torch

    report = llm.report
    keys = "policy kv_budget workload prefill decode total bytes_moved stall_seconds".split()
    keys += ["peak_memory_bytes", "planned_memory_bytes"]
    return {key: report[key] for key in keys} | {
        "dtype": report["dtype"],
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def worker_bench(arguments: dict) -> dict:
    """The first of the batch sizes that fits, run to its end."""
    import math

    from h2o_flexgen.errors import UserError
    from h2o_flexgen.policy import Policy

    if "layers" in arguments:
        arguments["model"] = few_layers(arguments["model"], arguments["layers"])
    refused = []
    for size in arguments["gpu_batch_sizes"]:
        policy = Policy(size, **arguments["policy"])
        begin = time.perf_counter()
        with make_llm(arguments, policy) as llm:
            prompts, params = make_prompts(arguments, policy)
            try:
                outputs = llm.generate(prompts, params)
            except UserError as e:  # no room in the plan, or on the card
                refused.append({"gpu_batch_size": size, "why": str(e)})
                continue
            seconds = time.perf_counter() - begin
            finite = all(math.isfinite(x) for o in outputs for c in o.outputs for x in c.logprobs)
            whole = all(o.outputs and len(o.outputs[0].token_ids) == params.max_tokens for o in outputs)
            return summary(llm) | {
                "finite": finite,
                "complete": whole,
                "seconds_with_loading": round(seconds, 1),
                "refused": refused,
                "plan": llm.plan.describe().splitlines(),
            }
    return {"error": "no batch size fits", "refused": refused}


def few_layers(model: str, layers: int) -> str:
    """A folder with the configuration of a named size, but for its number of layers."""
    from dataclasses import asdict

    from h2o_flexgen.models.config import OPTConfig

    config = asdict(OPTConfig.named(model)) | {"num_hidden_layers": layers, "model_type": "opt"}
    folder = Path(tempfile.mkdtemp(prefix="h2o_flexgen-check-config-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def bench_runs(quick: bool) -> dict[str, dict]:
    """name -> arguments and the limit of one run; what matters most comes first."""
    on_gpu, cache_away = dict(percent=(100, 0, 100, 0, 100, 0)), dict(percent=(100, 0, 0, 100, 0, 100))
    if quick:
        base = dict(model="facebook/opt-1.3b", gpu_mem=4 * GB, prompt_len=512, gen_len=16, limit=35)
        return {
            "1.3b full": base | dict(gpu_batch_sizes=[8, 4, 2], policy=on_gpu),
            "1.3b h2o": base | dict(gpu_batch_sizes=[32, 16, 8], policy=on_gpu, hh_ratio=0.1),
        }
    base = dict(model="facebook/opt-6.7b", gpu_mem=16 * GB, prompt_len=512, gen_len=32, limit=75)
    away = dict(percent=(20, 80, 0, 100, 0, 100), num_gpu_batches=2)
    wide = base | dict(model="facebook/opt-30b", layers=10, gpu_mem=8 * GB, gen_len=8, policy=away, limit=60)
    return {
        "6.7b full, all on gpu": base | dict(gpu_batch_sizes=[6, 5, 4, 3, 2, 1], policy=on_gpu),
        "6.7b h2o 0.1, all on gpu": base | dict(gpu_batch_sizes=[32, 24, 16, 12, 8, 4], policy=on_gpu, hh_ratio=0.1),
        "6.7b full, cache on cpu": base | dict(gpu_batch_sizes=[24, 16, 8, 4, 2], policy=cache_away),
        "6.7b h2o 0.1, cache on cpu": base | dict(gpu_batch_sizes=[64, 48, 32, 16], policy=cache_away, hh_ratio=0.1),
        "10 layers as wide as 30b, h2o 0.1, offloaded": wide | dict(gpu_batch_sizes=[48, 32, 16], hh_ratio=0.1),
        "10 layers as wide as 30b, full, offloaded": wide | dict(gpu_batch_sizes=[48, 32, 16, 8]),
    }


# sections


def section_links(results: Results, quick: bool, left) -> None:
    results.set("links", work("links", {"mib": 256 if quick else 1024}, left()))


def section_overlap(results: Results, quick: bool, left) -> None:
    base = dict(model="facebook/opt-1.3b", prompt_len=128 if quick else 256, gen_len=4 if quick else 6)
    for overlap in (True, False):
        policy = dict(gpu_batch_size=32, num_gpu_batches=2, percent=(0, 100, 0, 100, 100, 0), overlap=overlap)
        name = "on" if overlap else "off"
        results.set("overlap", name, work("overlap", base | {"policy": policy}, left() / (2 if overlap else 1)))
    on, off = (results.data["overlap"][name].get("unprofiled", {}) for name in ("on", "off"))
    if on and off:
        for phase in ("prefill", "decode"):
            results.set("overlap", f"{phase}_speedup", round(off[phase]["seconds"] / on[phase]["seconds"], 3))


def section_bench(results: Results, quick: bool, left) -> None:
    for name, arguments in bench_runs(quick).items():
        found = work("bench", arguments, min(arguments["limit"], left()))
        results.set("bench", name, found)
        if "total" in found:
            print(f"  {name}: {found['total']['tokens_per_s']:.1f} tokens/s", flush=True)


def section_matrix(results: Results, quick: bool, left) -> None:
    name, path = "cuda 6.7b 512+32", RESULTS / "quick_throughput_cuda_6.7b_512_32.json"
    path.unlink(missing_ok=True)
    argv = [sys.executable, "scripts/bench_throughput.py", "--row", name, "--quick", "--seconds", str(left() - 15)]
    code, output, _ = run(argv, left())  # 3: its time was over
    found = json.loads(path.read_text()) if path.exists() else {"runs": []}
    done = [r["system"] for r in found["runs"] if "failed" not in r]
    if code not in (0, 3) or not {"ours, full cache", "ours, H2O"} <= set(done):
        found["error"] = f"exit code {code}; systems that ended: {done}"
    results.set("matrix", name, found | {"exit_code": code, "output_tail": output[-3000:]})


def section_tests(results: Results, quick: bool, left) -> None:
    try:
        import pytest  # noqa: F401
    except ImportError:
        results.set("tests", {"skipped": "pytest is not installed"})
        return
    options = ["-v", "--tb=short", "-p", "no:cacheprovider", "-rfE", "--maxfail=40", "--durations=10"]
    # a test that hangs shows where
    options += ["-o", "addopts=--import-mode=importlib", "-o", "faulthandler_timeout=50"]
    try:
        import hypothesis  # noqa: F401
    except ImportError:
        options += ["--confcutdir", "tests/gpu"]
    if quick:
        options += ["-k", "lane or pinned or waits or ahead or (under_every_policy and (all or thirds))"]
    limit = left()
    files = [f"tests/gpu/test_cuda_{name}.py" for name in ("lanes", "parity", "memory")]
    code, output, seconds = run([sys.executable, "-m", "pytest", *files, *options], limit)
    outcomes = re.findall(r"^(tests/gpu/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", output, re.M)
    counts: dict[str, int] = {}
    for _, outcome in outcomes:
        counts[outcome.lower()] = counts.get(outcome.lower(), 0) + 1
    results.set(
        "tests",
        {
            "exit_code": code,
            "ended_by_limit": code is None,
            "limit_seconds": round(limit),
            "seconds": round(seconds, 1),
            "counts": counts,
            "failures": [name for name, outcome in outcomes if outcome in ("FAILED", "ERROR")],
            "summary": re.findall(r"^(?:FAILED|ERROR) .*", output, re.M)[-60:],
            "output_tail": "" if code == 0 else output[-20000:],
            "slowest": re.findall(r"^\d+\.\d+s (?:call|setup) .*", output, re.M)[:10],
        },
    )
    if code not in (0, 1):
        results.set("tests", "error", f"not all tests ran: {'no time left' if code is None else f'exit code {code}'}")
    print(f"  {counts}", flush=True)


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        task, arguments, path = sys.argv[2:5]
        Path(path).write_text(json.dumps(globals()[f"worker_{task}"](json.loads(arguments))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="smaller models and a part of the tests (the matrix stays what it is): about 4 minutes",
    )
    parser.add_argument(
        "--section", action="append", choices=SECTIONS + EXTRA, help="only this one (may be given again)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_check.json")
    parser.add_argument("--seconds", type=float, default=TOTAL, help="for everything together")
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("gpu_check: this python has no torch", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("gpu_check: no CUDA device here, nothing to check", file=sys.stderr)
        return 2
    results = Results(args.out)
    start = time.monotonic()
    results.set("command", shlex.join(["python", "scripts/gpu_check.py", *sys.argv[1:]]))
    results.set("date", datetime.now(timezone.utc).isoformat(timespec="seconds"))
    results.set("machine", machine())
    results.set("versions", versions())
    limits = QUICK if args.quick else LIMITS
    if len(args.section or SECTIONS) == 1:  # has all the time there is
        limits = dict.fromkeys(limits, args.seconds)
    for name in args.section or SECTIONS:
        begin = time.monotonic()

        def left(begin=begin, name=name) -> float:
            now = time.monotonic()
            return min(begin + limits[name], start + args.seconds) - now

        print(f"{name} ...", flush=True)
        try:
            globals()[f"section_{name}"](results, args.quick, left)
        except Exception:
            results.set(name, "error", traceback.format_exc()[-3000:])
        results.set("seconds", name, round(time.monotonic() - begin, 1))
    print(f"wrote {results.path} after {time.monotonic() - start:.0f} s")
    ran = {name: results.data.get(name, {}) for name in SECTIONS + EXTRA}
    failed = any(part in json.dumps(ran) for part in ('"error": ', '"skipped": "', "FAILED"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
