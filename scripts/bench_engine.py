"""Measure the engine alone; results, mostly medians, go to docs/benchmarks/.

gemm               the matmuls of a decode step, streamed and packed, against F.linear on the same shapes
stop               the time from a signal to the end of a job that waits for the disk
opt-30b-searched   one run of the command line with a model larger than RAM
"""

from __future__ import annotations

import argparse
import json
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
from h2o_flexgen.models.spec import ModelSpec  # noqa: E402


def random_layer(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Weights of a block by short name."""
    streamed = opt.tensors(spec)[1].streamed
    return {name: torch.randn(shape).mul_(0.02).bfloat16() for name, (_, shape) in streamed.items()}


def pack_layer(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: pack(tensor) if tensor.dim() == 2 else tensor for name, tensor in weights.items()}


def bench_gemm(rounds: int) -> None:
    """Time a decoder layer without its attention, with streamed matrices and with matrices packed as in RAM, against
    its six matmuls. Layers take turns, so that weights come from memory and not from caches."""

    def matmuls(spec, w: dict, hidden, wide) -> None:
        for short in ("q", "k", "v", "out", "up"):
            F.linear(hidden, w[f"{short}.weight"], w[f"{short}.bias"])
        F.linear(wide, w["down.weight"], w["down.bias"])

    def layer(spec, w: dict, hidden, wide) -> None:
        opt.block(spec, w, hidden, None, lambda q, k, v: q)

    rows = []
    for name, count in (("facebook/opt-1.3b", 24), ("facebook/opt-6.7b", 8)):
        spec = named_spec(name)
        layers = [random_layer(spec) for _ in range(count)]
        systems = {"F.linear": (matmuls, layers), "ours": (layer, layers)}
        if can_pack(torch.bfloat16):
            systems["ours, packed"] = (layer, [*map(pack_layer, layers)])
        for batch in (8, 32, 128):
            hidden = torch.randn(batch, spec.hidden).bfloat16()
            wide = torch.randn(batch, spec.inner).bfloat16()
            times: dict[str, list[float]] = {system: [] for system in systems}
            with torch.inference_mode():
                for _ in range(4 * rounds + 1):  # the first warms up
                    for system, (run, weights) in systems.items():
                        start = time.perf_counter()
                        for w in weights:
                            run(spec, w, hidden, wide)
                        times[system].append((time.perf_counter() - start) / count)
            flops = 2 * batch * sum(w.numel() for w in layers[0].values() if w.dim() == 2)
            rates = {system: flops / median(t[1:]) / 1e12 for system, t in times.items()}
            rows.append({"model": name, "batch": batch, "tflops": rates, "passes": 4 * rounds})
            print(rows[-1], flush=True)
    common.save("engine_gemm", {"dtype": "bfloat16", "rows": rows})


def bench_stop(rounds: int) -> None:
    """Time from a signal to the end of the process, sent in decode steps that wait for the disk."""
    model = "facebook/opt-1.3b"
    options = f"--model {model} --path _DUMMY_ --dtype bfloat16 --percent 0 0 0 0 0 0 --ignore-eos --prompt-len 8 "
    options += "--gen-len 64 --gpu-batch-size 64 --num-gpu-batches 2"
    seconds = []
    with common.scratch() as folder:
        argv = [sys.executable, "-m", "h2o_flexgen.flex_opt", *options.split(), "--offload-dir", str(folder)]
        for n in range(2 * rounds):
            job = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, bufsize=0)
            while deleted_files(job.pid) < 3:  # the job runs once weights, cache and hidden states are placed
                time.sleep(0.1)
            time.sleep(25 + 1.7 * n)  # until decode
            begin = time.perf_counter()
            job.send_signal(signal.SIGTERM)
            job.communicate()
            seconds.append(time.perf_counter() - begin)
            print(job.returncode, seconds[-1], flush=True)
    found = {"median": median(seconds), "max": max(seconds), "stops": len(seconds)}
    workload = {"model": f"{model} shape, random weights, bf16", "percent": [0] * 6, "block": "64 x 2"}
    common.save("engine_stop", {"workload": workload, "rows": [found]})


def deleted_files(pid: int) -> int:
    """The number of deleted files that a process holds open: what it has offloaded."""
    return sum(os.readlink(link).endswith("(deleted)") for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists())


OPT_30B = "--model facebook/opt-30b --path _DUMMY_ --hh-ratio 0.2 --prompt-len 64 --gen-len 4"


def bench_opt_30b(rounds: int) -> None:
    """Run the command line to its end, once whatever the number of rounds."""
    with common.scratch() as folder:
        report_file = folder / "report.json"
        argv = [sys.executable, "-m", "h2o_flexgen.flex_opt", *OPT_30B.split(), "--offload-dir", str(folder)]
        if subprocess.run([*argv, "--report", str(report_file)], cwd=ROOT).returncode:
            sys.exit("error: the run failed")
        report = json.loads(report_file.read_text())
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
