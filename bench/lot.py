"""Run one job with the version of h2o_flexgen that PYTHONPATH names, and nothing else of this repository. Rows end at
random lengths, which the engine cannot know: a sampler draws them.

python -P bench/lot.py JOB.json
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import h2o_flexgen
import h2o_flexgen.llm
from h2o_flexgen import LLM, Policy, SamplingParams
from h2o_flexgen.engine.sampling import Sampler

#: ids of random prompts, which every vocabulary in the benchmarks has
TOKENS = range(4, 49000)
#: mean of the geometric distribution
MEAN = 12


def output_length(draw: str | None, seed: int, row: int, most: int) -> int:
    """The length of a row's output in tokens, at most `most`, as a function of seed and row.

    Args:
        draw: "geometric" with a mean of MEAN before it is cut, "uniform" from 1, or None for always `most`.
    """
    if draw is None:
        return most
    random = np.random.default_rng([seed, row])
    length = random.geometric(1 / MEAN) if draw == "geometric" else random.integers(1, most + 1)
    return min(int(length), most)


def random_prompts(rows: int, length: int, shared: int, seed: int) -> list[list[int]]:
    """Random prompts; the first `shared` tokens are common to all."""
    random = np.random.default_rng(seed)
    common = random.integers(TOKENS.start, TOKENS.stop, shared).tolist()
    return [common + random.integers(TOKENS.start, TOKENS.stop, length - shared).tolist() for _ in range(rows)]


class LotSampler(Sampler):
    """Ends each row at the length that `length_of` gives, as an end-of-sequence token would.

    Attributes:
        row_steps: rows in all decode steps.
        running: the rows among them that had not ended.
    """

    length_of: Callable[[int], int]
    row_steps = 0
    running = 0

    def take(self, *args, **kwargs) -> None:
        """As `Sampler.take`. Versions differ in its other arguments; the sequences are its only list."""
        sequences = next(each for each in (*args, *kwargs.values()) if isinstance(each, list))
        before = [s for s in sequences if s.finish_reason is None]
        cls = type(self)
        cls.row_steps += sum(len(s.tokens) > 0 for s in sequences)
        cls.running += sum(len(s.tokens) > 0 for s in before)
        super().take(*args, **kwargs)
        for s in before:
            if s.finish_reason in (None, "length") and len(s.tokens) >= self.length_of(s.index):
                s.finish_reason = "stop"


def run(job: dict) -> dict:
    """The figures of a job, with a digest of its outputs."""
    if job.get("answers"):
        return run_answers(job)
    prompts = random_prompts(job["rows"], job["prompt_len"], job["shared"], job["seed"])
    policy = Policy(**job["policy"])
    h2o_flexgen.llm.Sampler = LotSampler
    LotSampler.length_of = staticmethod(lambda row: job["most"])
    with open_llm(job, policy) as llm:
        # warm-up: compiles loops and fills caches
        llm.generate(prompts[: policy.block_size], SamplingParams(max_tokens=2, ignore_eos=True))
        LotSampler.length_of = staticmethod(lambda row: output_length(job["draw"], job["seed"], row, job["most"]))
        LotSampler.row_steps = 0
        LotSampler.running = 0
        begin = time.perf_counter()
        outputs = llm.generate(prompts, SamplingParams(max_tokens=job["most"], ignore_eos=True))
        wall_seconds = time.perf_counter() - begin
        return figures(llm.report, [out.outputs[0].token_ids for out in outputs]) | {"wall_seconds": wall_seconds}


def open_llm(job: dict, policy: Policy) -> LLM:
    options = dict(dtype=job["dtype"], compute=job["compute"], offload_dir=job["scratch"], progress=False)
    return LLM(job["model"], policy, **options)


def run_answers(job: dict) -> dict:
    """Score several answers to each question with a full cache, as the lm-eval model does. Older versions also score
    the questions' tokens."""
    questions = random_prompts(job["rows"], job["prompt_len"], 0, job["seed"])
    random = np.random.default_rng([job["seed"], 1])
    texts = []
    for question in questions:
        for _ in range(job["answers"]):
            texts.append(question + random.integers(TOKENS.start, TOKENS.stop, job["most"]).tolist())
    policy = Policy(**job["policy"])
    has_option = "first_scored" in inspect.signature(LLM.score).parameters
    options = {"first_scored": job["prompt_len"]} if has_option else {}
    with open_llm(job, policy) as llm:
        llm.score(texts[: policy.block_size], **options)
        begin = time.perf_counter()
        scores = llm.score(texts, **options)
        wall_seconds = time.perf_counter() - begin
        rounded = [np.round(score.token_logprobs[-job["most"] :], 1).tolist() for score in scores]
        return figures(llm.report, rounded) | {"wall_seconds": wall_seconds}


def figures(report: dict, outputs: list[list[int]]) -> dict:
    seconds = report["total"]["seconds"]
    tokens = sum(map(len, outputs))
    return {
        "package": str(Path(h2o_flexgen.__file__).parent),
        "dtype": report["dtype"],
        "seconds": seconds,
        "prefill_seconds": report["prefill"]["seconds"],
        "decode_seconds": report["decode"]["seconds"],
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "row_steps": LotSampler.row_steps,
        "running_share": LotSampler.running / max(1, LotSampler.row_steps),
        "moved_gb": sum(report["bytes_moved"].values()) / 1e9,
        "peak_over_plan": in_memory(report["peak_memory_bytes"]) / in_memory(report["planned_memory_bytes"]),
        "lengths": list(map(len, outputs)),
        "digest": hashlib.sha256(json.dumps(outputs).encode()).hexdigest()[:16],
        "report": report,
    }


def in_memory(nbytes: dict[str, int]) -> int:
    """Bytes on all tiers but disk."""
    return sum(nbytes.values()) - nbytes.get("disk", 0)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    (path.parent / "result.json").write_text(json.dumps(run(json.loads(path.read_text()))))
