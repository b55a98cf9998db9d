"""Speed of the engine alone; medians.

    gemm               the matmuls of a decode step, streamed and packed, against F.linear on the same shapes
    stop               from a signal to the end of a job that waits for the disk
    opt-30b-searched   one run of the command line with a model larger than RAM

Results go to docs/benchmarks/.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from bench import common  # noqa: E402
from bench.systems.ours import policy_text  # noqa: E402
from h2o_flexgen.kernels.exact import can_pack, pack  # noqa: E402
from h2o_flexgen.models import opt  # noqa: E402
from h2o_flexgen.models.registry import named_spec  # noqa: E402

CAP = 8 * common.GIB


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


OPT_30B = "--model facebook/opt-30b --path _DUMMY_ --hh-ratio 0.2 --prompt-len 64 --gen-len 4"


def bench_opt_30b(rounds: int) -> None:
    """One run of the command line to its end, however many rounds."""
    with common.scratch() as folder:
        report = common.run_flex_opt(OPT_30B.split(), folder, None)
    if "failed" in report:
        sys.exit(f"error: the run ended with {report['failed']}")
    kept = {key: report[key] for key in ("workload", "dtype", "prefill", "decode", "predicted") if key in report}
    for kind in ("peak", "planned"):
        kept[f"{kind}_ram_gib"] = sum(report[f"{kind}_memory_bytes"][t] for t in ("gpu", "cpu")) / common.GIB
    kept["disk_gib"] = report["peak_memory_bytes"]["disk"] / common.GIB
    command = {"flex_opt": f"python -m h2o_flexgen.flex_opt {OPT_30B}", "policy": policy_text(report["policy"])}
    common.save("opt-30b-searched", command | kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = {"gemm": bench_gemm, "stop": bench_stop, "opt-30b-searched": bench_opt_30b}
    parser.add_argument("section", choices=list(sections))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    sections[args.section](args.rounds)


if __name__ == "__main__":
    main()
