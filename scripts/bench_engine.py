"""Speed of the engine, each section compared in one run: alternating, medians, ratios.

    ram    OPT-1.3B in RAM: transformers' generate, our full cache, our H2O cache; prompts of 512 and 1024 tokens
    gemm   the matrix products of a decode step, batches of 8 to 128, against F.linear on the same shapes
    disk   OPT-6.7B with weights on disk under an 8 GiB memory cgroup: a decode step against reading alone and
           computing alone, for a block that is I/O bound, one that is balanced and one that is compute bound
    reads  buffered reads against O_DIRECT, alone and beside compute
    opt-30b-searched, opt-6.7b-8gib    whole runs of the command line; the latter in an 8 GiB memory cgroup

Results go to docs/benchmarks/.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from functools import partial
from statistics import median

import bench_common as common
from bench_common import MemoryCap

GIB = 1 << 30


def quiet_llm(model: str, **kwargs):
    from h2o_flexgen.llm import DUMMY, LLM

    return LLM(model, path=DUMMY, progress=False, **kwargs)


# ram


def transformers_model(source, config):
    """The same random weights in transformers, on the CPU in bf16."""
    import torch
    import transformers

    from h2o_flexgen.offload.disk import DiskIO

    hf = transformers.OPTConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        ffn_dim=config.ffn_dim,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        word_embed_proj_dim=config.word_embed_proj_dim,
    )
    with torch.device("meta"):
        model = transformers.OPTForCausalLM(hf)
    model = model.to(torch.bfloat16).to_empty(device="cpu").eval()
    model.tie_weights()
    io = DiskIO()
    for name, parameter in model.named_parameters():
        if name != "lm_head.weight":
            source.read(name.removeprefix("model."), parameter.data, io)
    io.close()
    return model


def run_transformers(model, attention: str, prompts, gen_len: int) -> dict:
    import torch

    model.set_attn_implementation(attention)
    with torch.inference_mode():
        return common.time_generate(model, prompts, gen_len)


def time_ours(llm, budget, prompts, gen_len: int) -> dict:
    from h2o_flexgen import SamplingParams

    llm.kv_budget = budget
    llm.generate(prompts, SamplingParams(max_tokens=gen_len))
    gc.collect()
    return {
        "prefill": llm.report["prefill"]["seconds"],
        "decode": llm.report["decode"]["seconds"],
        "peak": llm.report["peak_memory_bytes"],
        "planned": llm.report["planned_memory_bytes"],
    }


def bench_ram(args) -> None:
    """Rounds over all prompt lengths and systems, added to those that the file has from this machine: a benchmark that
    is stopped goes on with the run that was next. transformers' implementations of attention are best at different
    phases: the fused one is timed in prefill (and 7 decode steps), the eager one in decode too; each phase is held
    against the better of the two."""
    from h2o_flexgen import KVBudget, Policy

    batch, gen_len = 32, args.gen_len or 64
    llm = quiet_llm("facebook/opt-1.3b", policy=Policy(batch, 1), dtype="bfloat16")
    ours = {
        "ours, full cache": partial(time_ours, llm, None),
        "ours, H2O 0.1": partial(time_ours, llm, KVBudget.from_ratio(0.1)),
    }
    model = transformers_model(llm.source, llm.config) if 512 in args.prompt_lens else None
    peers = {
        "transformers, eager": (partial(run_transformers, model, "eager"), gen_len),
        "transformers, sdpa": (partial(run_transformers, model, "sdpa"), 8),
    }
    runs: dict[tuple[int, str], list[dict]] = {
        (row["prompt_len"], row["system"]): row["runs"] for row in common.kept("engine_ram").get("rows", [])
    }
    for done in range(args.rounds):
        for prompt_len in args.prompt_lens:
            prompts = common.random_prompts(batch, prompt_len)
            systems = {name: (run, gen_len) for name, run in ours.items()}
            for name, (run, tokens) in (systems | (peers if prompt_len == 512 else {})).items():
                if len(runs.setdefault((prompt_len, name), [])) > done:
                    continue
                times = run(prompts, tokens)
                times |= {"decode_step": times["decode"] / (tokens - 1), "commit": common.commit()}
                runs[prompt_len, name].append(times)
                print(prompt_len, name, json.dumps(times), flush=True)
                save_ram(runs, batch, gen_len)


def save_ram(runs: dict, batch: int, gen_len: int) -> None:
    rows = [
        {
            "prompt_len": prompt_len,
            "system": name,
            "prefill_seconds": median([t["prefill"] for t in times]),
            "decode_step_seconds": median([t["decode_step"] for t in times]),
            "rounds": len(times),
            "runs": times,
        }
        for (prompt_len, name), times in runs.items()
    ]
    ratios = {}
    for prompt_len in sorted({row["prompt_len"] for row in rows}):
        by = {row["system"]: row for row in rows if row["prompt_len"] == prompt_len}
        full, evicting = by.get("ours, full cache"), by.get("ours, H2O 0.1")
        if full is None or evicting is None:
            continue
        peers = [row for name, row in by.items() if "transformers" in name]
        step = "decode_step_seconds"
        ratios[f"decode, H2O over our full cache, prompt {prompt_len}"] = full[step] / evicting[step]
        for phase, key in (("prefill", "prefill_seconds"), ("decode", step)) if peers else ():
            best = min(peers, key=lambda row: row[key])
            ratios[f"{phase}, our full cache over {best['system']}, prompt {prompt_len}"] = best[key] / full[key]
    workload = {"model": "OPT-1.3B shape, random weights, bf16", "batch": batch, "gen_len": gen_len}
    common.save("engine_ram", {"workload": workload, "ratios": ratios, "rows": rows})
    print(json.dumps(ratios, indent=1), flush=True)


# gemm


def bench_gemm(args) -> None:
    """A decoder layer without its attention, its matrices as they stream in and packed as those that stay in RAM,
    against the six products in it; weights are never the same twice running, so that all read them from memory."""
    import torch
    import torch.nn.functional as F

    from h2o_flexgen.kernels.linear import can_pack, pack
    from h2o_flexgen.models import opt
    from h2o_flexgen.models.config import OPTConfig

    def run_products(config, w: dict, hidden, wide) -> None:
        for short in ("q", "k", "v", "out", "fc1"):
            F.linear(hidden, w[f"{short}.weight"], w[f"{short}.bias"])
        F.linear(wide, w["fc2.weight"], w["fc2.bias"])

    def run_layer(config, w: dict, hidden, wide) -> None:
        opt.decoder_layer(config, w, hidden, lambda q, k, v: q)

    rows = []
    for name, count in (("facebook/opt-1.3b", 24), ("facebook/opt-6.7b", 8)):
        config = OPTConfig.named(name)
        specs = opt.layers(config)[1].streamed
        layers = [
            {s: torch.randn(shape).mul_(0.02).bfloat16() for s, (_, shape) in specs.items()} for _ in range(count)
        ]
        systems = {"F.linear": (run_products, layers), "ours": (run_layer, layers)}
        if can_pack():
            packed = [{s: pack(t) if t.dim() == 2 else t for s, t in w.items()} for w in layers]
            systems["ours, packed"] = (run_layer, packed)
        for batch in (8, 32, 128):
            hidden, wide = (torch.randn(batch, 1, n).bfloat16() for n in (config.hidden_size, config.ffn_dim))
            times = {which: [] for which in systems}
            with torch.inference_mode():
                for _ in range(4 * args.rounds + 1):
                    for which, (run, weights) in systems.items():
                        start = time.perf_counter()
                        for w in weights:
                            run(config, w, hidden, wide)
                        times[which].append((time.perf_counter() - start) / count)
            seconds = {which: median(t[1:]) for which, t in times.items()}
            flops = 2 * batch * sum(w.numel() for w in layers[0].values() if w.dim() == 2)
            rows.append(
                {
                    "model": name,
                    "batch": batch,
                    "seconds_per_layer": seconds,
                    "tflops": {which: flops / s / 1e12 for which, s in seconds.items()},
                    "ratio": {which: seconds["F.linear"] / s for which, s in seconds.items()},
                    "runs": times,
                }
            )
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "runs"}), flush=True)
    common.save("engine_gemm", {"dtype": "bfloat16", "rows": rows})


# disk


class Probe:
    """Times every token step of a running engine."""

    def __init__(self):
        self.steps: list[float] = []
        self._last = 0.0
        self._restore = common.before_token_steps(self.mark)

    def mark(self, i: int) -> None:
        now = time.perf_counter()
        if i >= 2:
            self.steps.append(now - self._last)
        self._last = now

    def close(self) -> None:
        self._restore()


def decode_steps(llm, batch: int, batches: int, steps: int) -> list[float]:
    """Seconds of each decode step but the last (whose end is the job's)."""
    from h2o_flexgen import Policy, SamplingParams

    llm.policy = Policy(batch, batches, (0, 0, 100, 0, 100, 0))
    probe = Probe()
    try:
        llm.generate(common.random_prompts(batch * batches, 4), SamplingParams(max_tokens=steps + 2))
    finally:
        probe.close()
    return probe.steps


def read_alone(llm) -> float:
    """Seconds to bring every layer to the device once, with nothing computed."""
    weights = llm._weights
    layers = [j for j in range(len(weights.layers)) if weights.streams(j)]
    start = time.perf_counter()
    for at, j in enumerate(layers):
        weights.get(j)
        if at + 1 < len(layers):
            weights.prefetch(layers[at + 1])
        weights.release(j)
    return time.perf_counter() - start


class NoReads:
    """While active, every layer computes with what lies in the slots: compute alone, in the same memory."""

    def __init__(self, llm):
        self.weights = llm._weights

    def __enter__(self):
        weights = self.weights
        self.before = weights.fill, weights.start_reads
        weights.fill = weights.start_reads = lambda *_: None

    def __exit__(self, *exc):
        self.weights.fill, self.weights.start_reads = self.before


def bench_disk_child(args) -> None:
    from h2o_flexgen import Policy

    result = {"blocks": [], "reads": "O_DIRECT" if args.direct else "buffered"}
    with common.scratch() as folder:
        llm = quiet_llm(args.model, policy=Policy(8, 1, (0, 0, 100, 0, 100, 0)), dtype="bfloat16", offload_dir=folder)
        llm.direct_reads = args.direct
        decode_steps(llm, 8, 1, 2)  # writes the weights, warms up
        result["planned"] = llm.report["planned_memory_bytes"]
        result["peak"] = llm.report["peak_memory_bytes"]
        reading = median([read_alone(llm) for _ in range(3)])
        with NoReads(llm):
            small, large = (median(decode_steps(llm, 64, n, 3)) for n in (1, 3))
        per_batch = (large - small) / 2
        balanced = max(2, round((reading - small) / per_batch) + 1)
        result["pilot"] = {"read_alone": reading, "compute_1x64": small, "compute_3x64": large}
        print(json.dumps(result["pilot"]), flush=True)
        for kind, batch, batches in (
            ("I/O bound", 16, 1),
            ("balanced", 64, balanced),
            ("compute bound", 64, 2 * balanced),
        ):
            times = {"step": [], "read": [], "compute": []}
            for _ in range(args.rounds):
                times["read"].append(read_alone(llm))
                times["step"] += decode_steps(llm, batch, batches, 3)
                report = llm.report
                with NoReads(llm):
                    times["compute"] += decode_steps(llm, batch, batches, 3)
            medians = {name: median(t) for name, t in times.items()}
            row = {
                "block": kind,
                "gpu_batch_size": batch,
                "num_gpu_batches": batches,
                "seconds": medians,
                "step_over_floor": medians["step"] / max(medians["read"], medians["compute"]),
                "peak_over_plan": sum(report["peak_memory_bytes"][t] for t in ("gpu", "cpu"))
                / sum(report["planned_memory_bytes"][t] for t in ("gpu", "cpu")),
                "peak": report["peak_memory_bytes"],
                "planned": report["planned_memory_bytes"],
                "runs": times,
            }
            result["blocks"].append(row)
            print(json.dumps({k: v for k, v in row.items() if k != "runs"}), flush=True)
        llm.close()
    with open(args.out, "w") as f:
        json.dump(result, f)


def bench_disk(args) -> None:
    cap = int(args.cap * GIB)
    results = []
    for direct in (True, False) if args.both else (True,):
        with common.scratch() as folder, MemoryCap(cap) as memory_cap:
            out = folder / "result.json"
            argv = [sys.executable, __file__, "disk-child", "--rounds", str(args.rounds), "--out", str(out)]
            argv += ["--model", args.model] + ([] if direct else ["--buffered"])
            done = memory_cap.run(argv, timeout=2400)
            peak = memory_cap.peak()
            if done.returncode:
                sys.exit(f"the run under the cap ended with {done.returncode}")
            results.append(json.loads(out.read_text()) | {"cgroup_peak_bytes": peak})
    workload = {"model": args.model + " shape, random weights, bf16", "percent": [0, 0, 100, 0, 100, 0], "prompt": 4}
    common.save("engine_disk", {"workload": workload, "results": results}, cap)


# reads


def bench_reads(args) -> None:
    """Reading 403 MB, the size of a layer of OPT-6.7B, again and again; alone, and beside bf16 products that keep
    every core busy."""
    import os

    import torch
    import torch.nn.functional as F

    from h2o_flexgen.offload.device import Device, as_numpy
    from h2o_flexgen.offload.disk import DiskIO, File, wait

    layer, count = 384 << 20, 10
    device = Device("cpu")
    buffers = [device.buffer(layer) for _ in range(2)]
    block = torch.randint(0, 255, (64 << 20,), dtype=torch.uint8)
    rows = []
    with common.scratch() as folder:
        file = File(folder / "weights", writable=True)
        for at in range(0, layer * count, len(block)):
            file.write_at(memoryview(block.numpy()), at)
        os.fsync(file.fd)
        x, w = torch.randn(256, 4096).bfloat16(), torch.randn(16384, 4096).bfloat16()

        def read(io, direct: bool) -> float:
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            for n in range(count):
                wait(io.read(file, as_numpy(buffers[n % 2]), n * layer, direct))
            return time.perf_counter() - start

        def products(seconds: float) -> float:
            done, start = 0, time.perf_counter()
            while time.perf_counter() - start < seconds:
                F.linear(x, w)
                done += 1
            return done / (time.perf_counter() - start)

        from concurrent.futures import ThreadPoolExecutor

        cases = [(d, t, r) for d in (False, True) for t in (2, 4) for r in (1 << 20, 4 << 20, 16 << 20)]
        samples = {case: {"alone": [], "beside": [], "products": [], "cpu": []} for case in cases}
        alone = []
        for _ in range(args.rounds):
            alone.append(products(1.0))
            for case in cases:
                direct, threads, request = case
                io = DiskIO(threads, request)
                cpu = time.process_time()
                samples[case]["alone"].append(read(io, direct))
                samples[case]["cpu"].append(time.process_time() - cpu)
                with ThreadPoolExecutor(1) as pool:
                    future = pool.submit(read, io, direct)
                    done, start = 0, time.perf_counter()
                    while not future.done():
                        F.linear(x, w)
                        done += 1
                    samples[case]["products"].append(done / (time.perf_counter() - start))
                    samples[case]["beside"].append(future.result())
                io.close()
        total = layer * count / 1e9
        for (direct, threads, request), s in samples.items():
            rows.append(
                {
                    "reads": "O_DIRECT" if direct else "buffered",
                    "threads": threads,
                    "request_mib": request >> 20,
                    "alone_gb_per_s": total / median(s["alone"]),
                    "alone_cpu_seconds_per_gb": median(s["cpu"]) / total,
                    "beside_compute_gb_per_s": total / median(s["beside"]),
                    "compute_rate_beside_reads": median(s["products"]) / median(alone),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
        file.close()
    common.save("disk", {"bytes": layer * count, "rows": rows})


# big


RUNS = {
    "opt-30b-searched": ("--model facebook/opt-30b --path _DUMMY_ --hh-ratio 0.2 --prompt-len 64 --gen-len 4", None),
    "opt-6.7b-8gib": (
        "--model facebook/opt-6.7b --path _DUMMY_ --percent 0 0 100 0 100 0 --hh-ratio 0.2 "
        "--gpu-batch-size 32 --num-gpu-batches 2 --prompt-len 64 --gen-len 8",
        8 * GIB,
    ),
}


def bench_run(name: str, args) -> None:
    """One run of the command line to its end, in a memory cgroup if the run has a cap."""
    options, cap = RUNS[name]
    argv = [sys.executable, "-m", "h2o_flexgen.flex_opt", *options.split(), "--verbose"]
    result = {"flex_opt": f"python -m h2o_flexgen.flex_opt {options}"}
    with common.scratch() as folder, MemoryCap(cap) as memory_cap:
        report = folder / "report.json"
        argv += ["--report", str(report), "--offload-dir", str(folder)]
        done = memory_cap.run(argv, timeout=None if cap is None else 2400, cwd=common.ROOT)
        if done.returncode:
            sys.exit(f"the run ended with {done.returncode}")
        if cap is not None:
            result["cgroup_peak_bytes"] = memory_cap.peak()
        common.save(name, result | {"report": json.loads(report.read_text())}, cap)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=["ram", "gemm", "disk", "disk-child", "reads", *RUNS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gen-len", type=int)
    parser.add_argument("--prompt-lens", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--model", default="facebook/opt-6.7b", help="disk: a model of about this size")
    parser.add_argument("--cap", type=float, default=8.0, help="disk: GiB of the memory cgroup")
    parser.add_argument("--both", action="store_true", help="disk: buffered reads too")
    parser.add_argument("--buffered", dest="direct", action="store_false", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    common.commit()  # of what runs: the working copy may change meanwhile
    sections = {"ram": bench_ram, "gemm": bench_gemm, "disk": bench_disk, "disk-child": bench_disk_child}
    runs = {name: partial(bench_run, name) for name in RUNS}
    (sections | runs | {"reads": bench_reads})[args.section](args)


if __name__ == "__main__":
    main()
