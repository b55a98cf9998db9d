"""One job in a process of its own, in whatever version of h2o_flexgen its PYTHONPATH names: it imports nothing else of
this repository. A sampler of its own ends each row at a length that is drawn by lot, which the engine cannot know.

python -P bench/lot.py JOB.json
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

import h2o_flexgen
import h2o_flexgen.llm
from h2o_flexgen import LLM, Policy, SamplingParams
from h2o_flexgen.engine.sampling import Sampler

#: ids of tokens in random prompts, which every vocabulary of the benchmarks has
TOKENS = range(4, 49000)
#: mean of the geometric lengths
MEAN = 12


def drawn(draw: str | None, seed: int, row: int, most: int) -> int:
    """Tokens of a row's output, which depend on nothing but these. `draw`: "geometric" with a mean of MEAN before it is
    cut at `most`, "uniform" from 1, or None: all have the most."""
    if draw is None:
        return most
    random = np.random.default_rng([seed, row])
    length = random.geometric(1 / MEAN) if draw == "geometric" else random.integers(1, most + 1)
    return min(int(length), most)


def random_prompts(rows: int, length: int, shared: int, seed: int) -> list[list[int]]:
    """Prompts of random tokens, of which the first `shared` are those of all."""
    random = np.random.default_rng(seed)
    common = random.integers(TOKENS.start, TOKENS.stop, shared).tolist()
    return [common + random.integers(TOKENS.start, TOKENS.stop, length - shared).tolist() for _ in range(rows)]


class LotSampler(Sampler):
    """Ends each row where `length_of` says, as an end-of-sequence token would.

    Attributes:
        row_steps: rows of all decode steps; running: of them, rows that had not ended.
    """

    length_of: Callable[[int], int]
    row_steps = running = 0

    def take(self, *args, **named) -> None:
        """As `Sampler.take`, whatever else a version passes beside the sequences."""
        sequences = next(each for each in (*args, *named.values()) if isinstance(each, list))
        before = [s for s in sequences if s.finish_reason is None]
        cls = type(self)
        cls.row_steps += sum(len(s.tokens) > 0 for s in sequences)
        cls.running += sum(len(s.tokens) > 0 for s in before)
        super().take(*args, **named)
        for s in before:
            if s.finish_reason in (None, "length") and len(s.tokens) >= self.length_of(s.index):
                s.finish_reason = "stop"


def run(job: dict) -> dict:
    """Figures of the job, and of its outputs a digest."""
    if job.get("answers"):
        return run_answers(job)
    prompts = random_prompts(job["rows"], job["prompt_len"], job["shared"], job["seed"])
    policy = Policy(**job["policy"])
    h2o_flexgen.llm.Sampler = LotSampler
    LotSampler.length_of = staticmethod(lambda row: job["most"])
    with opened(job, policy) as llm:
        # the first block compiles loops and fills caches
        llm.generate(prompts[: policy.block_size], SamplingParams(max_tokens=2, ignore_eos=True))
        LotSampler.length_of = staticmethod(lambda row: drawn(job["draw"], job["seed"], row, job["most"]))
        LotSampler.row_steps = LotSampler.running = 0
        begin = time.perf_counter()
        outputs = llm.generate(prompts, SamplingParams(max_tokens=job["most"], ignore_eos=True))
        wall_seconds = time.perf_counter() - begin
        return figures(llm.report, [out.outputs[0].token_ids for out in outputs]) | {"wall_seconds": wall_seconds}


def opened(job: dict, policy: Policy) -> LLM:
    given = dict(dtype=job["dtype"], compute=job["compute"], offload_dir=job["scratch"], progress=False)
    return LLM(job["model"], policy, **given)


def run_answers(job: dict) -> dict:
    """As the lm-eval model does: the log-probabilities of several answers to each question, with a full cache. Older
    versions score the question's tokens too."""
    questions = random_prompts(job["rows"], job["prompt_len"], 0, job["seed"])
    random = np.random.default_rng([job["seed"], 1])
    texts = [
        question + random.integers(TOKENS.start, TOKENS.stop, job["most"]).tolist()
        for question in questions
        for _ in range(job["answers"])
    ]
    policy = Policy(**job["policy"])
    how = {"first_scored": job["prompt_len"]} if "first_scored" in inspect.signature(LLM.score).parameters else {}
    with opened(job, policy) as llm:
        llm.score(texts[: policy.block_size], **how)
        begin = time.perf_counter()
        scores = llm.score(texts, **how)
        wall_seconds = time.perf_counter() - begin
        answers = [score.token_logprobs[-job["most"] :] for score in scores]
        rounded = [[round(logprob, 1) for logprob in answer] for answer in answers]
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
        "peak_over_plan": ratio(report["peak_memory_bytes"], report["planned_memory_bytes"]),
        "lengths": list(map(len, outputs)),
        "digest": hashlib.sha256(json.dumps(outputs).encode()).hexdigest()[:16],
        "report": report,
    }


def ratio(peak: dict, planned: dict) -> float:
    """Of what is in memory, the tier disk left out."""

    def in_memory(tiers: dict) -> Iterable[int]:
        return (nbytes for tier, nbytes in tiers.items() if tier != "disk")

    return sum(in_memory(peak)) / sum(in_memory(planned))


if __name__ == "__main__":
    path = Path(sys.argv[1])
    (path.parent / "result.json").write_text(json.dumps(run(json.loads(path.read_text()))))
