"""Copying: how much of a passage a model repeats word for word.

Behind the passage the model is asked to repeat it from some words on, and its answer begins with these words, which
stand at one of five depths of the passage.
"""

from __future__ import annotations

from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.engine.outputs import ScoreOutput
from h2o_flexgen.engine.scoring import question_of
from h2o_flexgen.errors import UserError
from h2o_flexgen.evaluation.asking import asks, fitted, prompt
from h2o_flexgen.evaluation.needle import DEPTHS
from h2o_flexgen.evaluation.passages import Passage
from h2o_flexgen.evaluation.trials import Span, Trial, is_right

QUESTION = "Repeat this text word for word."
#: words that the answer begins with
CUE = 24


def trials_of(model: LoadedModel, passage: Passage, index: int, gen_len: int) -> list[Trial]:
    """One trial: `gen_len` tokens to copy. Line breaks and indents become spaces, which small models would not repeat.
    Raises UserError if the passage is too short."""
    ask = lambda text, begun: prompt(model, asks(text, QUESTION, in_front=False), begun)
    words = fitted(model, passage, ask("", "word " * CUE + "end")).split()
    room = len(words) - CUE - gen_len
    if room < 0:
        raise UserError(f"the text has {len(words)} words, too few to copy {gen_len} tokens behind {CUE} words")
    begin = int(DEPTHS[index % len(DEPTHS)] * room)
    cue = " ".join(words[begin : begin + CUE])
    answer = " ".join(["", *words[begin + CUE : begin + CUE + gen_len]])
    question = question_of(model, ask(" ".join(words), cue), [answer])
    ids = question.prompt + question.token_ids[0][:gen_len]
    return [Trial(ids, len(question.prompt), [Span("copied", len(question.prompt), len(ids))], index)]


def judge(trials: list[Trial], scores: list[ScoreOutput]) -> dict[str, list[float]]:
    """The fraction of tokens before the first wrong one, and of all tokens, each behind the right ones."""
    rights = [is_right(score, trial.answers[0]) for trial, score in zip(trials, scores, strict=True)]
    return {
        "copied": [[*right, False].index(False) / len(right) for right in rights],
        "tokens right": [sum(right) / len(right) for right in rights],
    }
