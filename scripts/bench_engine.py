"""Speed of the engine, each section compared in one run: alternating, medians.

    ram    OPT-1.3B in RAM: transformers' generate, our full cache, our H2O cache; prompts of 512 and 1024 tokens
    gemm   the matmuls of a decode step, streamed and packed, against F.linear on the same shapes
    disk   OPT-6.7B with weights on disk under an 8 GiB memory cgroup: a decode step against reading alone and
           computing alone, for a block that is I/O bound, one that is balanced and one that is compute bound
    families    the same for OPT-1.3B and Llama-3.2-1B, whose weights take about as many bytes
    stop       from a signal to the end of a job that waits for the disk
    opt-30b-searched, opt-6.7b-8gib, llama-3.1-8b-8gib    whole runs of the command line, the last two in an 8 GiB
           memory cgroup

Results go to docs/benchmarks/.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from bench import common  # noqa: E402
from bench.checkpoint import write_checkpoint  # noqa: E402
from bench.job import Job  # noqa: E402
from bench.rates import disk_rate, matmul_rate  # noqa: E402
from bench.systems.ours import policy_text  # noqa: E402
from bench.systems.transformers import load, time_generate  # noqa: E402
from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams  # noqa: E402
from h2o_flexgen.kernels.exact import can_pack, pack  # noqa: E402
from h2o_flexgen.models import opt  # noqa: E402
from h2o_flexgen.models.registry import family, named_config, named_spec  # noqa: E402

CAP = 8 * common.GIB


def bench_ram(rounds: int) -> None:
    """transformers' implementations of attention are best at different phases: the fused one is timed in prefill (and 7
    decode steps), the eager one in decode too."""
    batch, gen_len = 32, 64
    times: dict[tuple[int, str], list[dict]] = {}
    with common.scratch() as folder:
        model = str(write_checkpoint(named_config("facebook/opt-1.3b"), folder / "checkpoint", "bfloat16"))
        job = Job("transformers", model, str(folder), "bfloat16", "cpu", 512, gen_len, batch)
        theirs = load(job)
        with LLM(model, Policy(batch, 1), dtype="bfloat16", offload_dir=folder, progress=False) as llm:

            def ours(budget, prompts) -> tuple[float, float]:
                llm.kv_budget = budget
                llm.generate(prompts, SamplingParams(max_tokens=gen_len, ignore_eos=True))
                return llm.report["prefill"]["seconds"], llm.report["decode"]["seconds"] / (gen_len - 1)

            def peer(attention: str, tokens: int, prompts) -> tuple[float, float]:
                theirs.set_attn_implementation(attention)
                with torch.inference_mode():
                    took = time_generate(theirs, prompts, tokens)
                return took["prefill"], took["decode"] / (tokens - 1)

            for _ in range(rounds):
                for prompt_len in (512, 1024):
                    systems = {
                        "ours, full cache": partial(ours, None),
                        "ours, H2O 0.1": partial(ours, KVBudget.from_ratio(0.1)),
                    }
                    if prompt_len == 512:
                        systems["transformers, eager"] = partial(peer, "eager", gen_len)
                        systems["transformers, sdpa"] = partial(peer, "sdpa", 8)
                    for name, run in systems.items():
                        took = run(common.random_prompts(batch, prompt_len))
                        times.setdefault((prompt_len, name), []).append(took)
                        print(prompt_len, name, took, flush=True)
    rows = []
    for (prompt_len, name), taken in times.items():
        phases = {}
        for phase, seconds in zip(("prefill_seconds", "decode_step_seconds"), zip(*taken)):
            phases[phase] = {"median": median(seconds), "min": min(seconds), "max": max(seconds)}
        rows.append({"prompt_len": prompt_len, "system": name, "rounds": len(taken), **phases})
    workload = {"model": "OPT-1.3B shape, random weights, bf16", "batch": batch, "gen_len": gen_len}
    common.save("engine_ram", {"workload": workload, "rows": rows})


def bench_gemm(rounds: int) -> None:
    """A decoder layer without its attention, its matrices as they stream in and packed as those that stay in RAM,
    against the six matmuls in it; weights are never the same twice running, so that all read them from memory."""

    def matmuls(config, w: dict, hidden, wide) -> None:
        for short in ("q", "k", "v", "out", "up"):
            F.linear(hidden, w[f"{short}.weight"], w[f"{short}.bias"])
        F.linear(wide, w["down.weight"], w["down.bias"])

    def layer(config, w: dict, hidden, wide) -> None:
        opt.block(config, w, hidden, None, lambda q, k, v: q)

    rows = []
    for name, count in (("facebook/opt-1.3b", 24), ("facebook/opt-6.7b", 8)):
        config = named_spec(name)
        shapes = {short: shape for short, (_, shape) in opt.tensors(config)[1].streamed.items()}
        layers = [{s: torch.randn(shape).mul_(0.02).bfloat16() for s, shape in shapes.items()} for _ in range(count)]
        systems = {"F.linear": (matmuls, layers), "ours": (layer, layers)}
        if can_pack(torch.bfloat16):
            packed = [{s: pack(t) if t.dim() == 2 else t for s, t in w.items()} for w in layers]
            systems["ours, packed"] = (layer, packed)
        for batch in (8, 32, 128):
            hidden, wide = (torch.randn(batch, n).bfloat16() for n in (config.hidden, config.inner))
            times: dict[str, list[float]] = {which: [] for which in systems}
            with torch.inference_mode():
                for _ in range(4 * rounds + 1):  # the first warms up
                    for which, (run, weights) in systems.items():
                        start = time.perf_counter()
                        for w in weights:
                            run(config, w, hidden, wide)
                        times[which].append((time.perf_counter() - start) / count)
            flops = 2 * batch * sum(w.numel() for w in layers[0].values() if w.dim() == 2)
            rates = {which: flops / median(t[1:]) / 1e12 for which, t in times.items()}
            rows.append({"model": name, "batch": batch, "tflops": rates, "passes": 4 * rounds})
            print(rows[-1], flush=True)
    common.save("engine_gemm", {"dtype": "bfloat16", "rows": rows})


#: sizes of blocks: batch size, number of batches
BLOCKS = {"I/O bound": (16, 1), "balanced": (64, 2), "compute bound": (64, 4)}


def bench_disk(rounds: int) -> None:
    """Weights on disk under a cap that is too small for them."""
    name = "facebook/opt-6.7b"
    with common.scratch() as folder:
        model = write_checkpoint(named_config(name), folder / "checkpoint", "bfloat16")
        measured = {
            kind: [disk_step(model, name, size, folder, CAP) for _ in range(rounds)] for kind, size in BLOCKS.items()
        }
    blocks = [{"block": kind, "policy": "{} x {}".format(*BLOCKS[kind]), **medians(s)} for kind, s in measured.items()]
    workload = {"model": f"{name} shape, random weights, bf16", "percent": [0, 0, 100, 0, 100, 0], "prompt": 4}
    common.save("engine_disk", {"cap_gib": CAP / common.GIB, "workload": workload, "blocks": blocks})


def bench_families(rounds: int) -> None:
    """Models of two families and about as many bytes, in turns."""
    measured: dict[tuple[str, str], list[dict]] = {}
    with common.scratch() as folder:
        names = ("facebook/opt-1.3b", "meta-llama/Llama-3.2-1B")
        configs = {name: named_config(name) for name in names}
        models = {name: write_checkpoint(c, folder / c["model_type"], "bfloat16") for name, c in configs.items()}
        for _ in range(rounds):
            for kind in ("I/O bound", "balanced"):
                for name, model in models.items():
                    measured.setdefault((name, kind), []).append(disk_step(model, name, BLOCKS[kind], folder, None))
    rows = [
        {"model": name, "block": kind, "policy": "{} x {}".format(*BLOCKS[kind]), **medians(steps)}
        for (name, kind), steps in measured.items()
    ]
    common.save("engine_families", {"dtype": "bfloat16", "rows": rows})


def disk_step(model: Path, name: str, block: tuple[int, int], folder: Path, cap: int | None) -> dict:
    """A decode step with all weights on disk, and its floor. A step's seconds and bytes come from two jobs of different
    length: what they share cancels out."""
    size, batches = block
    short, long = 2, 6
    prompts = [json.dumps({"prompt_token_ids": ids}) for ids in common.random_prompts(size * batches, 4)]
    (folder / "prompts.jsonl").write_text("\n".join(prompts))
    options = f"--model {model} --dtype bfloat16 --percent 0 0 100 0 100 0 --ignore-eos --gpu-batch-size {size} "
    options += f"--num-gpu-batches {batches} --input-file {folder / 'prompts.jsonl'} --gen-len"
    jobs = [common.run_flex_opt([*options.split(), str(n)], folder, cap) for n in (short, long)]
    if failed := [job["failed"] for job in jobs if "failed" in job]:
        sys.exit(f"error: a run ended with {failed[0]}")
    begin, end = jobs
    moved = (end["bytes_moved"]["disk_to_cpu"] - begin["bytes_moved"]["disk_to_cpu"]) / (long - short)
    flops = 2 * size * batches * (moved / 2)  # two bytes a parameter, all of them streamed
    spec = named_spec(name)
    shapes = [s for _, s in family(spec.model_type).tensors(spec)[1].streamed.values() if len(s) == 2]
    shard = max(model.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    found = {
        "read": moved / disk_rate(shard),
        "compute": flops / matmul_rate(shapes, torch.bfloat16, min(128, size * batches)),
        "step": (end["decode"]["seconds"] - begin["decode"]["seconds"]) / (long - short),
    }
    peak, planned = (sum(end[f"{k}_memory_bytes"][t] for t in ("gpu", "cpu")) for k in ("peak", "planned"))
    found["over_floor"] = found["step"] / max(found["read"], found["compute"])
    found["peak_over_plan"] = peak / planned
    print(name, block, json.dumps(found), flush=True)
    return found


def medians(steps: list[dict]) -> dict:
    """Of what `disk_step` found in several rounds."""
    middle = {key: median(step[key] for step in steps) for key in steps[0]}
    seconds = {key: middle[key] for key in ("read", "compute", "step")}
    kept = {"seconds": seconds, "step_over_floor": middle["over_floor"], "peak_over_plan": middle["peak_over_plan"]}
    return kept | {"rounds": len(steps)}


def bench_stop(rounds: int) -> None:
    """From a signal to the end of the process, in decode steps that wait for the disk."""
    model, block = "facebook/opt-1.3b", (64, 2)
    options = f"--model {model} --path _DUMMY_ --dtype bfloat16 --percent 0 0 0 0 0 0 --ignore-eos --prompt-len 8 "
    options += f"--gen-len 64 --gpu-batch-size {block[0]} --num-gpu-batches {block[1]}"
    seconds = []
    with common.scratch() as folder:
        argv = [sys.executable, "-m", "h2o_flexgen.flex_opt", *options.split(), "--offload-dir", str(folder)]
        for n in range(2 * rounds):
            job = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, bufsize=0)
            while links_to_disk(job.pid) < 3:  # weights, cache and hidden states are placed: the job runs
                time.sleep(0.1)
            time.sleep(25 + 1.7 * n)  # into decode
            begin = time.perf_counter()
            job.send_signal(signal.SIGTERM)
            job.communicate()
            seconds.append(time.perf_counter() - begin)
            print(job.returncode, seconds[-1], flush=True)
    found = {"median": median(seconds), "max": max(seconds), "stops": len(seconds)}
    workload = {"model": f"{model} shape, random weights, bf16", "percent": [0] * 6, "block": "{} x {}".format(*block)}
    common.save("engine_stop", {"workload": workload, "rows": [found]})


def links_to_disk(pid: int) -> int:
    """Files without a name that a process holds: what it has offloaded."""
    return sum(os.readlink(link).endswith("(deleted)") for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists())


RUNS = {
    "opt-30b-searched": ("--model facebook/opt-30b --path _DUMMY_ --hh-ratio 0.2 --prompt-len 64 --gen-len 4", None),
    "opt-6.7b-8gib": (
        "--model facebook/opt-6.7b --path _DUMMY_ --percent 0 0 100 0 100 0 --hh-ratio 0.2 "
        "--gpu-batch-size 32 --num-gpu-batches 2 --prompt-len 64 --gen-len 8",
        CAP,
    ),
    "llama-3.1-8b-8gib": (
        "--model llama-3.1-8b --path _DUMMY_ --hh-ratio 0.2 --num-prompts 64 --prompt-len 64 --gen-len 16",
        CAP,
    ),
}


def bench_run(name: str, rounds: int) -> None:
    """One run of the command line to its end."""
    options, cap = RUNS[name]
    with common.scratch() as folder:
        report = common.run_flex_opt(options.split(), folder, cap)
    if "failed" in report:
        sys.exit(f"error: the run ended with {report['failed']}")
    kept = {key: report[key] for key in ("workload", "dtype", "prefill", "decode", "predicted") if key in report}
    ram = {k: sum(report[f"{k}_memory_bytes"][t] for t in ("gpu", "cpu")) / common.GIB for k in ("peak", "planned")}
    memory = {f"{k}_ram_gib": gib for k, gib in ram.items()}
    memory["disk_gib"] = report["peak_memory_bytes"]["disk"] / common.GIB
    flex_opt = {"flex_opt": f"python -m h2o_flexgen.flex_opt {options}", "policy": policy_text(report["policy"])}
    common.save(name, ({"cap_gib": cap / common.GIB} if cap else {}) | flex_opt | kept | memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = {"ram": bench_ram, "gemm": bench_gemm, "disk": bench_disk, "families": bench_families}
    sections |= {"stop": bench_stop}
    sections |= {name: partial(bench_run, name) for name in RUNS}
    parser.add_argument("section", choices=list(sections))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    sections[args.section](args.rounds)


if __name__ == "__main__":
    main()
