"""An engine that computes nothing, for jobs of many rows.

By hand, the memory that jobs of a million rows take, with a model in FOLDER/model that has 128 positions or more:

    python tests/stub_engine.py FOLDER 10000 1000000
"""

from __future__ import annotations

import json
import random
import resource
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.jobs.input import read_rows
from h2o_flexgen.jobs.job import Job


class StubLLM(LLM):
    """What it generates follows from a row alone. It reads `window` rows at a time, which end in any order and are
    reported as one pass; after `stop` rows it is interrupted."""

    window = 256
    stop = None

    def run(self, job, writer):
        writer.on_plan(SimpleNamespace(compress_cache=None, kv_budget=None))
        writer.on_begin()
        rows = iter(job.rows)
        rng = random.Random(0)
        left = len(job.workload.prompt_lens) if self.stop is None else self.stop
        while window := list(islice(rows, self.window)):
            rng.shuffle(window)
            ended = window[:left]
            for s in ended:
                s.tokens = [s.key % 89, *s.prompt[::-1]][: s.params.max_tokens]
                s.logprobs = [-1.0] * len(s.tokens)
                s.finish_reason = "length"
            writer.on_finished(ended)
            left -= len(ended)
            if len(ended) < len(window):
                raise KeyboardInterrupt
        assert self.stop is not None or left == 0


def peak_bytes(folder: Path, count: int) -> int:
    """Peak RAM of this process after a job of `count` rows of 64 tokens, stopped in the middle and resumed."""
    with open(folder / "in.jsonl", "w") as file:
        for n in range(count):
            print(json.dumps({"prompt_token_ids": [3 + n % 90] * 64, "custom_id": f"row {n}"}), file=file)
    with StubLLM(str(folder / "model"), device="cpu", dtype="float32", progress=False) as llm:
        for stop in (count // 2, None):
            llm.stop = stop
            with Job(str(folder / f"{count}.jsonl")) as job, suppress(KeyboardInterrupt):
                job.run(llm, read_rows(str(folder / "in.jsonl")), SamplingParams(max_tokens=64))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


if __name__ == "__main__":
    for count in map(int, sys.argv[2:]):
        print(peak_bytes(Path(sys.argv[1]), count), flush=True)
