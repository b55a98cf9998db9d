"""h2o_flexgen, with the policy that its search finds for the job, or with one block of a given size.

Options: "block", sequences of one block instead of what the search would choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from bench.common import random_prompts
from bench.job import Job
from bench.rates import disk_rate
from h2o_flexgen import LLM, KVBudget, SamplingParams

#: sequences of a batch at most, where a block of a given size is asked for
BATCH = 64


def run(job: Job) -> dict:
    block = job.options.get("block")
    prompts = random_prompts(job.batch, job.prompt_len)
    rates = [checkpoint_rate(job)]  # of a shared machine's disk, which changes while a job runs
    with LLM(
        job.model,
        kv_budget=None if job.kv_budget is None else KVBudget.from_size(*job.kv_budget),
        device=job.device,
        dtype=job.dtype,
        offload_dir=job.scratch,
        gpu_mem=job.gpu_bytes,
        gpu_batch_size=None if block is None else min(BATCH, block),
        num_gpu_batches=None if block is None else -(-block // BATCH),
        hardware=job.hardware,
        progress=False,
    ) as llm:
        llm.generate(prompts[:1], SamplingParams(max_tokens=2, ignore_eos=True))
        outputs = llm.generate(prompts, SamplingParams(max_tokens=job.gen_len, ignore_eos=True))
        report = llm.report
    rates.append(checkpoint_rate(job))
    assert all(len(o.outputs[0].token_ids) == job.gen_len for o in outputs)
    policy, prefill, decode = report["policy"], report["prefill"]["seconds"], report["decode"]["seconds"]
    peak, planned = ([report[f"{what}_memory_bytes"][t] for t in ("gpu", "cpu")] for what in ("peak", "planned"))
    result = {
        "prefill": prefill,
        "decode": decode,
        "lowest_tier": lowest_tier(policy["percent"], job.device),
        "policy": policy_text(policy),
        "peak_over_plan": sum(peak) / sum(planned),
    }
    if "predicted" in report:
        guess = report["predicted"]
        seconds = guess["prefill_seconds"] + guess["decode_seconds"]
        result |= {"predicted_over_measured": seconds / (prefill + decode), "bound_by": guess["bound_by"]}
    if "bytes_moved" in report["decode"]:
        read = report["decode"]["bytes_moved"]["disk_to_cpu"]
        result["read_gb_per_step"] = read / (job.gen_len - 1) / 1e9
        if result.get("bound_by") == "disk":
            result["share_of_bound"] = read / mean(rates) / decode
    return result


def checkpoint_rate(job: Job) -> float:
    return disk_rate(max(Path(job.model).glob("*.safetensors"), key=lambda path: path.stat().st_size))


def policy_text(policy: dict) -> str:
    """Batch size x number of batches, and the six numbers of `--percent`."""
    return f"{policy['gpu_batch_size']} x {policy['num_gpu_batches']}, " + " ".join(f"{x:g}" for x in policy["percent"])


def lowest_tier(percent: Sequence[float], device: str) -> str:
    """The slowest tier on which a policy puts anything."""
    gpu, cpu = percent[0::2], percent[1::2]
    if any(g + c < 100 for g, c in zip(gpu, cpu)):
        return "disk"
    return "RAM" if any(cpu) or device == "cpu" else "GPU"
