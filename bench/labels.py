"""Labelling chats with the demo model: generating an answer, choosing one of three words, and scoring the three.

    python -m bench.labels

All three see the same conversations, in turns. Results go to docs/benchmarks/labels.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

from bench import common
from h2o_flexgen import LLM, Policy, SamplingParams, Structured

ROWS = 128
PLACES = 64
RUNS = 3
TOKENS = 32
WORDS = ["positive", "negative", "neutral"]
PARTS = ["The battery died after two days.", "It works, and looks good on my desk.", "It arrived on Monday, in a box."]


def conversations() -> list[list[dict]]:
    found = []
    for n in range(ROWS):
        review = " ".join(PARTS[(n + part) % 3] for part in range(1 + n % 3))
        question = f"Review {n}: {review}\nIs it {', '.join(WORDS[:2])} or {WORDS[2]}? Answer, and say why."
        found.append([{"role": "user", "content": question}])
    return found


def main() -> None:
    chats = conversations()
    with LLM(policy=Policy(PLACES), device="cpu", progress=False) as llm:
        choose = SamplingParams(max_tokens=TOKENS, structured=Structured(choice=WORDS))
        ways: dict[str, Callable] = {
            "generated": partial(llm.chat, chats, SamplingParams(max_tokens=TOKENS)),
            "chosen": partial(llm.chat, chats, choose),
            "scored": partial(llm.score_answers, chats, WORDS),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        ways["chosen"]()
        for _ in range(RUNS):
            for name, run in ways.items():
                begin = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - begin)
        chosen = [output.outputs[0].text for output in ways["chosen"]()]
        scored = [output.answer for output in ways["scored"]()]
    medians = {name: median(each) for name, each in seconds.items()}
    agree = sum(a == b for a, b in zip(chosen, scored)) / ROWS
    rows = [{"way": name, "seconds": each, "speed": medians["generated"] / each} for name, each in medians.items()]
    common.save("labels", {"conversations": ROWS, "tokens": TOKENS, "agree": agree, "rows": rows})


if __name__ == "__main__":
    main()
