"""Log-probabilities of given texts: of a whole text in one pass, or token by token behind a prompt."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.sizes import SAMPLE_ROWS


@dataclass
class ScoreOutput:
    """The score of one text.

    Attributes:
        index: place among the texts.
        token_ids: of the whole text.
        token_logprobs: natural logarithm of the probability of each scored token, the last ones of the text.
        is_greedy: whether each of them was the most likely token.
        error: why the text could not be scored, and then there is nothing else; or None.
    """

    index: int
    token_ids: list[int]
    token_logprobs: list[float] = field(default_factory=list)
    is_greedy: list[bool] = field(default_factory=list)
    error: str | None = None


class TeacherForcing:
    """A sink of logits that continues each sequence with the tokens of its text, and scores them.

    Args:
        targets: the tokens to score by the index of the sequence; each is also the input of the next step.
        every_position: the logits behind every token of the prompt are wanted, not only those behind the last.
    """

    def __init__(self, targets: dict[int, list[int]], every_position: bool):
        self.targets, self.every_position = targets, every_position
        self._next = {index: iter(tokens) for index, tokens in targets.items()}
        self.is_greedy: dict[int, list[bool]] = defaultdict(list)

    def take(self, i: int, sequences: list[Sequence], logits: Tensor) -> None:
        """As `step.LogitsSink`; with `every_position` a sequence stands once for each row that is its."""
        targets = [next(self._next[s.index], 0) for s in sequences]  # 0: one that has ended runs until its batch leaves
        logprobs, greedy = score_rows(logits, torch.tensor(targets))
        for s, target, logprob, is_greedy in zip(sequences, targets, logprobs, greedy):
            if s.append(target, logprob):
                self.is_greedy[s.index].append(is_greedy)
                if len(s.tokens) == len(self.targets[s.index]):
                    s.finish_reason = "length"


def score_rows(logits: Tensor, targets: Tensor) -> tuple[list[float], list[bool]]:
    """For each row of logits (B, V) the log-probability of its target (B,), in fp32, and whether no token has more."""
    logprobs, greedy = [], []
    for rows, target in zip(logits.split(SAMPLE_ROWS), targets.to(logits.device).split(SAMPLE_ROWS)):
        rows = rows.float()
        chosen = rows.gather(1, target[:, None])[:, 0]
        logprobs += (chosen - rows.logsumexp(-1)).tolist()
        greedy += (rows.argmax(-1) == target).tolist()
    return logprobs, greedy
