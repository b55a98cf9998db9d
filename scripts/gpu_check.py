"""Everything that needs a CUDA machine, in one command of under nine minutes that installs nothing.

python scripts/gpu_check.py [--quick] [--section NAME ...] [--out FILE]

Sections, each written to the JSON as soon as it is there, each in processes with time limits, so that a failure costs
its own result only:

links    this machine's hardware profile: links, matmuls, attention
overlap  one job with overlap on and off; from a profiler's trace, how much of the copies' time runs beside kernels
tests    tests/gpu through pytest
bench    OPT-6.7B with random weights under a 16 GB cap, 512 + 32 tokens, full cache against H2O; then a few layers as
         wide as OPT-30B's under a cap they do not fit. Each run to its end, never extrapolated
matrix   only if asked for, it takes as long as all others: OPT-6.7B 512 + 32 in 16 GB by bench/run.py, one run of ours
         and of every peer that is installed (Accelerate, DeepSpeed, FlexGen)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import common  # noqa: E402

SECTIONS, EXTRA = ("links", "overlap", "tests", "bench"), ("matrix",)
#: seconds in all, and the most of them that a section may take beside others
TOTAL = 515
LIMITS = {"links": 100, "overlap": 90, "tests": 240, "bench": 330, "matrix": 515}
QUICK = {"links": 60, "overlap": 50, "tests": 90, "bench": 80, "matrix": 240}
GB = 10**9


def run(argv: list[str], limit: float) -> tuple[int | None, str]:
    """Exit code (None if the limit ended it), and what it printed."""
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
        return code, output.read()


def work(task: str, arguments: dict, limit: float) -> dict:
    """Run a worker of this file; its result, or what went wrong."""
    if limit < 5:
        return {"error": "no time left"}
    with tempfile.TemporaryDirectory(prefix="h2o_flexgen-check-") as folder:
        result = Path(folder) / "result.json"
        code, output = run([sys.executable, __file__, "--worker", task, json.dumps(arguments), str(result)], limit)
        found = json.loads(result.read_text()) if result.exists() else {}
    return found if code == 0 else found | failure(code, output)


def failure(code: int | None, output: str) -> dict:
    return {"error": "ended by its limit" if code is None else f"exit code {code}", "output_tail": output[-3000:]}


# workers


def make_llm(arguments: dict, policy):
    from h2o_flexgen import LLM, KVBudget

    ratio = arguments.get("hh_ratio")
    return LLM(
        arguments["model"],
        policy,
        None if ratio is None else KVBudget.from_ratio(ratio),
        device="cuda",
        path="_DUMMY_",
        offload_dir=tempfile.gettempdir(),
        gpu_mem=arguments.get("gpu_mem"),
        progress=False,
    )


def generate(llm, arguments: dict, policy) -> dict:
    """The report of one job, and whether every output is whole."""
    import torch

    from h2o_flexgen import SamplingParams

    prompts = common.random_prompts(policy.block_size, arguments["prompt_len"])
    outputs = llm.generate(prompts, SamplingParams(max_tokens=arguments["gen_len"], ignore_eos=True))
    whole = all(o.outputs and len(o.outputs[0].token_ids) == arguments["gen_len"] for o in outputs)
    finite = all(math.isfinite(x) for o in outputs for c in o.outputs for x in c.logprobs)
    return llm.report | {"finite": finite and whole, "reserved_bytes": torch.cuda.max_memory_reserved()}


def worker_overlap(arguments: dict) -> dict:
    """One job as it is, then the same under a profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from h2o_flexgen import Policy

    with profile(activities=[ProfilerActivity.CUDA]):  # the first trace of a process may lack its first kernels
        torch.ones(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    policy = Policy(**arguments["policy"])
    with make_llm(arguments, policy) as llm, tempfile.TemporaryDirectory() as folder:
        generate(llm, arguments, policy)  # loads, warms up
        report = generate(llm, arguments, policy)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            generate(llm, arguments, policy)
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return {"report": report, "trace": read_trace(json.loads(path.read_text())["traceEvents"])}


def read_trace(events: list[dict]) -> dict:
    """Busy times (ms) of kernels and copies, and how much of the copies' time kernels ran too."""
    spans: dict[str, list[tuple[float, float]]] = {"kernel": [], "gpu_memcpy": []}
    for event in events:
        copies_within = event.get("cat") == "gpu_memcpy" and not re.search("HtoD|DtoH", event["name"])
        if event.get("ph") == "X" and event.get("cat") in spans and not copies_within:
            spans[event["cat"]].append((event["ts"], event["ts"] + event.get("dur", 0)))
    kernels, copies, both = (
        length(s) for s in (spans["kernel"], spans["gpu_memcpy"], spans["kernel"] + spans["gpu_memcpy"])
    )
    if not kernels or not copies:
        return {"error": "the trace holds no kernels or no copies"}
    shared = kernels + copies - both
    return {
        "kernels_busy_ms": kernels / 1e3,
        "copies_busy_ms": copies / 1e3,
        "copies_beside_kernels_ms": shared / 1e3,
        # the shorter of the two can at best be hidden whole
        "hidden_of_what_could_be": shared / min(kernels, copies),
    }


def length(spans: list[tuple[float, float]]) -> float:
    """Of the union of intervals."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def worker_bench(arguments: dict) -> dict:
    """The first of the batch sizes that fits, run to its end."""
    from h2o_flexgen import Policy
    from h2o_flexgen.errors import UserError

    refused = []
    with tempfile.TemporaryDirectory() as folder:
        if "layers" in arguments:
            arguments["model"] = few_layers(arguments["model"], arguments["layers"], Path(folder))
        for size in arguments["gpu_batch_sizes"]:
            policy = Policy(size, **arguments["policy"])
            with make_llm(arguments, policy) as llm:
                try:
                    return generate(llm, arguments, policy) | {"refused": refused}
                except UserError as e:  # no room in the plan, or on the GPU
                    refused.append({"gpu_batch_size": size, "why": str(e)})
    return {"error": "no batch size fits", "refused": refused}


def few_layers(model: str, layers: int, folder: Path) -> str:
    """A folder with the configuration of a named size, but for its number of layers."""
    from h2o_flexgen.models.registry import named_config

    config = named_config(model) | {"num_hidden_layers": layers}
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


# sections: each takes what is known of it so far, and `left`, which says how many seconds there are


def section_links(found: dict, quick: bool, left) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        code, output = run([sys.executable, "-m", common.PROFILER, "--device", "cuda", "-o", str(path)], left())
        found |= json.loads(path.read_text()) if code == 0 else failure(code, output)


def section_overlap(found: dict, quick: bool, left) -> None:
    base = dict(model="facebook/opt-1.3b", prompt_len=128 if quick else 256, gen_len=4 if quick else 6)
    for name, overlap in (("on", True), ("off", False)):
        policy = dict(gpu_batch_size=32, num_gpu_batches=2, percent=(0, 100, 0, 100, 100, 0), overlap=overlap)
        found[name] = work("overlap", base | {"policy": policy}, left() / (2 if overlap else 1))
    if all("report" in found[name] for name in ("on", "off")):
        for phase in ("prefill", "decode"):
            on, off = (found[name]["report"][phase]["seconds"] for name in ("on", "off"))
            found[f"{phase}_speedup"] = off / on


def section_tests(found: dict, quick: bool, left) -> None:
    if importlib.util.find_spec("pytest") is None:
        found["error"] = "pytest is not installed"
        return
    options = ["-v", "--tb=short", "-p", "no:cacheprovider", "-rfE", "--maxfail=40", "--durations=10"]
    # a line for each test; one that hangs shows where
    options += ["-o", "addopts=--import-mode=importlib", "-o", "faulthandler_timeout=50"]
    if importlib.util.find_spec("hypothesis") is None:
        options += ["--confcutdir", "tests/gpu"]
    if quick:
        options += ["-k", "queue or pinned or waits or ahead or (under_every_policy and (all or thirds))"]
    code, output = run([sys.executable, "-m", "pytest", "tests/gpu", *options], left())
    outcomes = re.findall(r"^tests/gpu/\S+::.+? (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", output, re.M)
    found["counts"] = {outcome.lower(): outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    found["slowest"] = re.findall(r"^\d+\.\d+s (?:call|setup) .*", output, re.M)[:10]
    if code != 0:
        found |= failure(code, output) | {"failures": re.findall(r"^(?:FAILED|ERROR) .*", output, re.M)[-60:]}


def section_bench(found: dict, quick: bool, left) -> None:
    for name, arguments in bench_runs(quick).items():
        found[name] = work("bench", arguments, min(arguments["limit"], left()))
        print(f"  {name}: {found[name].get('total') or found[name].get('error')}", flush=True)


def section_matrix(found: dict, quick: bool, left) -> None:
    argv = [sys.executable, "-m", "bench.run", "--row", "cuda 6.7b 512+32", "--quick"]
    for name, package in (("Accelerate", "accelerate"), ("ZeRO-Inference", "deepspeed"), ("FlexGen", "flexgen")):
        argv += ["--system", name] if importlib.util.find_spec(package) else []
    code, output = run([*argv, "--system", "ours, full cache", "--system", "ours, H2O"], left())
    found |= common.stored("quick_throughput_cuda_6.7b_512_32") | ({} if code == 0 else failure(code, output))


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        task, arguments, path = sys.argv[2:5]
        Path(path).write_text(json.dumps(globals()[f"worker_{task}"](json.loads(arguments))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller models and a part of the tests: about 4 minutes")
    parser.add_argument("--section", action="append", choices=SECTIONS + EXTRA, help="only this one (may be repeated)")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "gpu_check.json")
    parser.add_argument("--seconds", type=float, default=TOTAL, help="for everything together")
    args = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        sys.exit("gpu_check: this python has no torch")
    import torch

    if not torch.cuda.is_available():
        print("gpu_check: no CUDA device here, nothing to check", file=sys.stderr)
        return 2
    results, start = common.origin(), time.monotonic()
    limits = QUICK if args.quick else LIMITS
    if len(args.section or SECTIONS) == 1:  # has all the time there is
        limits = dict.fromkeys(limits, args.seconds)
    for name in args.section or SECTIONS:
        begin = time.monotonic()

        def left(begin=begin, name=name) -> float:
            return min(begin + limits[name], start + args.seconds) - time.monotonic()

        print(f"{name} ...", flush=True)
        found = results[name] = {}
        try:
            globals()[f"section_{name}"](found, args.quick, left)
        except Exception:
            found["error"] = traceback.format_exc()[-3000:]
        found["section_seconds"] = round(time.monotonic() - begin, 1)
        args.out.write_text(common.to_json(results) + "\n")
    print(f"wrote {args.out} after {time.monotonic() - start:.0f} s")
    return int('"error": ' in json.dumps(results))


if __name__ == "__main__":
    sys.exit(main())
