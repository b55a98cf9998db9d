"""llama.cpp, built for this processor by bench/llama_cpp.sh: its `llama-batched-bench` on a mapped GGUF file, which the
kernel pages if it is larger than the cap. It warms up by one step of 16 tokens.

Options: "batch" and "ubatch", tokens that are computed together; "cache", the type of K and V; "threads".
"""

from __future__ import annotations

import json
import os

from bench.job import Job
from bench.systems import built


def command(job: Job) -> list[str]:
    o, steps = job.options, job.gen_len - 1  # the first token comes from the prompt
    kinds = o.get("cache", "f16")
    argv = [built("llama_cpp") / "build" / "bin" / "llama-batched-bench", "-m", job.model, "--output-format", "jsonl"]
    argv += ["-npp", job.prompt_len, "-ntg", steps, "-npl", job.batch, "-c", job.batch * (job.prompt_len + steps)]
    argv += ["-b", o.get("batch", 2048), "-ub", o.get("ubatch", 512), "-ctk", kinds, "-ctv", kinds]
    return list(map(str, [*argv, "-t", o.get("threads", len(os.sched_getaffinity(0)))]))


def result(job: Job, printed: str) -> dict:
    """Raises ValueError if no line of what was printed has times."""
    found = [json.loads(line) for line in printed.splitlines() if line.startswith('{"n_kv_max"')]
    if not found:
        raise ValueError("llama-batched-bench printed no times")
    sdist = next(built("llama_cpp").glob("*.tar.gz")).name
    return {
        "prefill": found[-1]["t_pp"],
        "decode": found[-1]["t_tg"],
        "lowest_tier": "RAM" if job.fits_in_ram else "disk",
        "version": f"llama.cpp ({sdist.removesuffix('.tar.gz')})",
    }
