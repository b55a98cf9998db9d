"""A choice among given answers by their probability: which of four pieces follows a passage.

All four come from the text behind the passage, so that topic and style do not give the right one, the first, away.
"""

from __future__ import annotations

from itertools import groupby
from math import fsum

from h2o_flexgen.engine.outputs import ScoreOutput
from h2o_flexgen.evaluation.passages import Passage
from h2o_flexgen.evaluation.trials import Span, Trial

ANSWERS = 4


def trials_of(passage: Passage, index: int) -> list[Trial]:
    """One trial for each answer; the first is right. They are equally long."""
    prompt = passage.token_ids[: passage.prompt_len]
    behind = passage.token_ids[passage.prompt_len :]
    length = len(behind) // ANSWERS
    pieces = [behind[n * length : (n + 1) * length] for n in range(ANSWERS)]
    span = Span("right", len(prompt), len(prompt) + length)
    return [Trial(prompt + piece, len(prompt), [span], index) for piece in pieces]


def judge(trials: list[Trial], scores: list[ScoreOutput]) -> dict[str, list[float]]:
    """Whether the right answer is the most likely one, for each passage."""
    rights = []
    for _, pairs in groupby(zip(trials, scores, strict=True), key=lambda pair: pair[0].group):
        logprobs = [fsum(score.token_logprobs) for _, score in pairs]
        rights.append(float(logprobs[0] == max(logprobs)))
    return {"right": rights}
