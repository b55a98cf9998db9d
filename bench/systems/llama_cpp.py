"""llama.cpp, built for this CPU by bench/llama_cpp.sh: its `llama-batched-bench` on a mapped GGUF file, which the
kernel pages if it is larger than the cap. It warms up by one step of 16 tokens.

Options: its own short flags, with "" for those without a value, such as "ub": 1024, "ctk": "q8_0", or "nr": "", without
a copy of the weights in the order that its kernels like, which could not be paged. Sequences have caches of their own,
padded to 256 tokens; with "kvu": "" one for all.
"""

from __future__ import annotations

import json
import os

from bench.job import Job
from bench.systems import built


def command(job: Job) -> list[str]:
    steps = job.gen_len - 1  # the first token comes from the prompt
    argv = [built("llama_cpp") / "build" / "bin" / "llama-batched-bench", "-m", job.model, "--output-format", "jsonl"]
    argv += ["-npp", job.prompt_len, "-ntg", steps, "-npl", job.batch, "-c", job.batch * (job.prompt_len + steps)]
    for flag, value in ({"t": len(os.sched_getaffinity(0))} | job.options).items():
        argv += [f"-{flag}"] if value == "" else [f"-{flag}", value]
    return list(map(str, argv))


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
