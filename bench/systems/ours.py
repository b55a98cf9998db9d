"""h2o_flexgen's command line, with the policy that its search finds for the job. Nothing warms it up."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.checkpoint import files_of
from bench.common import random_prompts
from bench.job import Job
from bench.rates import disk_rate


def command(job: Job) -> list[str]:
    scratch = Path(job.scratch)
    rows = [json.dumps({"prompt_token_ids": ids}) for ids in random_prompts(job.batch, job.prompt_len)]
    (scratch / "prompts.jsonl").write_text("\n".join(rows))
    argv = f"-m h2o_flexgen.flex_opt --ignore-eos --gen-len {job.gen_len} --device {job.device} {job.flags}"
    argv += f" --gpu-mem {job.gpu_bytes / 2**30:g}" if job.gpu_bytes else ""
    files = {"--model": job.model, "--input-file": scratch / "prompts.jsonl", "--report": scratch / "report.json"}
    files |= {"--offload-dir": scratch}
    return [sys.executable, *shlex.split(argv), *(str(word) for pair in files.items() for word in pair)]


def result(job: Job, printed: str) -> dict:
    report = json.loads((Path(job.scratch) / "report.json").read_text())
    assert report["total"]["generated_tokens"] == job.batch * job.gen_len
    policy, prefill, decode = report["policy"], report["prefill"]["seconds"], report["decode"]["seconds"]
    peak, planned = ([report[f"{what}_memory_bytes"][t] for t in ("gpu", "cpu")] for what in ("peak", "planned"))
    read = report["decode"]["bytes_moved"]["disk_to_cpu"]
    found = {
        "prefill": prefill,
        "decode": decode,
        "lowest_tier": lowest_tier(policy["percent"], job.device),
        "policy": policy_text(policy),
        "computes_in": report["dtype"],
        "peak_over_plan": sum(peak) / sum(planned),
        "read_gb_per_step": read / max(1, job.gen_len - 1) / 1e9,
    }
    if "predicted" in report:
        guess = report["predicted"]
        seconds = guess["prefill_seconds"] + guess["decode_seconds"]
        found |= {"predicted_over_measured": seconds / (prefill + decode), "bound_by": guess["bound_by"]}
        if guess["bound_by"] == "disk":  # its rate on a shared machine changes: measured now
            file = max(files_of(Path(job.model)), key=lambda path: path.stat().st_size)
            found["share_of_bound"] = read / disk_rate(file) / decode
    return found


def policy_text(policy: dict) -> str:
    """Batch size x number of batches, and the six numbers of `--percent`."""
    return f"{policy['gpu_batch_size']} x {policy['num_gpu_batches']}, " + " ".join(f"{x:g}" for x in policy["percent"])


def lowest_tier(percent: Sequence[float], device: str) -> str:
    """The slowest tier on which a policy puts anything."""
    gpu, cpu = percent[0::2], percent[1::2]
    if any(g + c < 100 for g, c in zip(gpu, cpu)):
        return "disk"
    return "RAM" if any(cpu) or device == "cpu" else "GPU"
