"""llama.cpp, built for this CPU by bench/llama_cpp.sh: its `llama-batched-bench` on a mapped GGUF file, which the
kernel pages if it exceeds the cap. It warms up with one step of 16 tokens.

Options: its short flags, with "" for flags without a value: "ub": 1024, "ctk": "q8_0", or "nr": "", which avoids a
repacked copy of the weights, since that could not be paged. Each sequence has its own cache, padded to 256 tokens;
"kvu": "" gives all sequences one cache.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from bench.job import Job
from bench.systems import ensure_built


def command(job: Job) -> list[str]:
    steps = job.gen_len - 1  # the first token comes from the prompt
    argv = [ensure_built("llama_cpp") / "build/bin/llama-batched-bench", "-m", job.model, "--output-format", "jsonl"]
    argv += ["-npp", job.prompt_len, "-ntg", steps, "-npl", job.batch, "-c", job.batch * (job.prompt_len + steps)]
    return with_flags(argv, job.options)


def with_flags(argv: list, flags: dict) -> list[str]:
    """A command line with short flags, and a thread for each core unless they say otherwise."""
    for flag, value in ({"t": len(os.sched_getaffinity(0))} | flags).items():
        argv += [f"-{flag}"] if value == "" else [f"-{flag}", value]
    return list(map(str, argv))


def result(job: Job, printed: str) -> dict:
    """Raises ValueError if no printed line has times."""
    found = [json.loads(line) for line in printed.splitlines() if line.startswith('{"n_kv_max"')]
    if not found:
        raise ValueError("llama-batched-bench printed no times")
    return {
        "prefill": found[-1]["t_pp"],
        "decode": found[-1]["t_tg"],
        "lowest_tier": "RAM" if job.fits_in_ram else "disk",
        "version": version(ensure_built("llama_cpp")),
    }


def version(folder: Path) -> str:
    """The sources that were built in `folder`, by the name of their archive."""
    return f"llama.cpp ({next(folder.glob('*.tar.gz')).name.removesuffix('.tar.gz')})"
