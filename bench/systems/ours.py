"""h2o_flexgen's command line with the policy that its search finds for the job, without a warm-up."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch

from bench.checkpoint import files_of
from bench.common import random_prompts
from bench.job import Job
from bench.rates import disk_rate, matmul_rate
from h2o_flexgen.formats.forms import experts_of
from h2o_flexgen.kernels.int8 import INT8_ROWS
from h2o_flexgen.models import inspect
from h2o_flexgen.models.registry import family
from h2o_flexgen.models.spec import Tensors
from h2o_flexgen.planning.workload import batch_sizes, group_rows, matmul_rows
from h2o_flexgen.policy import Policy


def command(job: Job) -> list[str]:
    scratch = Path(job.scratch)
    rows = [json.dumps({"prompt_token_ids": ids}) for ids in random_prompts(job.batch, job.prompt_len)]
    (scratch / "prompts.jsonl").write_text("\n".join(rows))
    argv = f"h2o_flexgen.flex_opt --ignore-eos --gen-len {job.gen_len} --device {job.device} {job.flags}"
    argv += f" --gpu-mem {job.gpu_bytes / 2**30:g}" if job.gpu_bytes else ""
    files = ["--model", job.model, "--input-file", str(scratch / "prompts.jsonl")]
    files += ["--report", str(scratch / "report.json"), "--offload-dir", str(scratch)]
    if job.device == "cpu":  # the rate of a shared disk varies: it is measured right before a run and right after
        (scratch / "disk_rate").write_text(str(disk_rate(_largest_file(job))))
    return [*job.python, *shlex.split(argv), *files]


def result(job: Job, printed: str) -> dict:
    report = json.loads((Path(job.scratch) / "report.json").read_text())
    assert report["total"]["generated_tokens"] == job.batch * job.gen_len
    policy = report["policy"]
    prefill = report["prefill"]["seconds"]
    decode = report["decode"]["seconds"]
    peak = report["peak_memory_bytes"]
    planned = report["planned_memory_bytes"]
    read = report["decode"]["bytes_moved"]["disk_to_cpu"]
    found = {
        "prefill": prefill,
        "decode": decode,
        "lowest_tier": lowest_tier(policy["percent"], job.device),
        "policy": policy_text(policy),
        "computes_in": report["dtype"],
        "peak_over_plan": (peak["gpu"] + peak["cpu"]) / (planned["gpu"] + planned["cpu"]),
        "read_gb_per_step": read / max(1, job.gen_len - 1) / 1e9,
    }
    if "predicted" in report:
        guess = report["predicted"]
        seconds = guess["prefill_seconds"] + guess["decode_seconds"]
        found |= {"predicted_over_measured": seconds / (prefill + decode), "bound_by": guess["bound_by"]}
    if job.device == "cpu" and not job.avx2:  # matmuls here have newer instructions
        found["share_of_bound"] = max(disk_seconds(job, read), matmul_seconds(job, report)) / decode
    return found


def disk_seconds(job: Job, nbytes: int) -> float:
    """Seconds to read `nbytes` from disk, at the mean of the rates before and after the run."""
    if not nbytes:
        return 0.0
    before = float((Path(job.scratch) / "disk_rate").read_text())
    return 2 * nbytes / (before + disk_rate(_largest_file(job)))


def _largest_file(job: Job) -> Path:
    return max(files_of(Path(job.model)), key=lambda path: path.stat().st_size)


def matmul_seconds(job: Job, report: dict) -> float:
    """Seconds of all decode steps' matmuls alone, at the rates of a block's and of experts that share rows evenly."""
    policy = Policy(**report["policy"])
    dtype = torch.int8 if report.get("compute") == "int8" else getattr(torch, report["dtype"])
    found = inspect.find(job.model)
    spec = found.spec
    _, first_block, *_, last = family(spec.model_type).tensors(spec)
    block, expert, head = map(_matrices, (first_block.streamed, first_block.expert, last.streamed))
    rows = max(matmul_rows(batch_sizes(job.batch, policy), group_rows(spec)))
    elements = spec.layers * sum(map(prod, block)) + sum(map(prod, head))
    seconds = 2 * elements / matmul_rate(block, dtype, rows)
    if expert:
        if dtype == torch.int8:  # experts are multiplied as stored
            formats, _ = found.formats(None)
            dtype = next(form for name, form in formats.items() if experts_of(name)[1])
        each = max(1, rows * spec.active // spec.experts)
        elements = spec.layers * spec.active * sum(map(prod, expert))
        seconds += 2 * elements / matmul_rate(expert, dtype, each, groups=max(1, INT8_ROWS // each))
    return seconds * job.batch * (job.gen_len - 1)


def _matrices(tensors: Tensors) -> list[tuple[int, ...]]:
    return [shape for _, shape in tensors.values() if len(shape) == 2]


def policy_text(policy: dict) -> str:
    """Batch size x number of batches, the six numbers of `--percent`, and `--prefill-tokens` unless default."""
    text = f"{policy['gpu_batch_size']} x {policy['num_gpu_batches']}, " + " ".join(f"{x:g}" for x in policy["percent"])
    tokens = policy["prefill_tokens"]
    return text + f", prefill {tokens}" * (tokens != Policy.prefill_tokens)


def lowest_tier(percent: Sequence[float], device: str) -> str:
    """The slowest tier that a policy uses."""
    gpu = percent[0::2]
    cpu = percent[1::2]
    if any(g + c < 100 for g, c in zip(gpu, cpu)):
        return "disk"
    return "RAM" if any(cpu) or device == "cpu" else "GPU"
