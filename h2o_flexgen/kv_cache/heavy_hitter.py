"""Keep the tokens that attention keeps coming back to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_flexgen.kv_cache.rule import FixedRule


@dataclass(frozen=True)
class HeavyHitterCache(FixedRule):
    """H2O, the heavy-hitter oracle (arXiv 2306.14048, section 4, algorithm 1).

    A few tokens receive most of the attention, and those that did so far go on doing so. Per sequence and KV head the
    cache keeps the last `recent` tokens, and of the others the `heavy` ones whose score, the sum of the attention
    probabilities they received from the head's queries, is highest.

    Args:
        heavy: slots for heavy hitters; 0 keeps a local window only.
        recent: slots for the last tokens, the newest included.
    """

    name = "h2o"

    def prompt_scores(self, score: Tensor, position: Tensor, lengths: Tensor) -> Tensor:
        return score.masked_fill(position >= lengths - self.recent, float("inf"))

    def step_scores(self, score: Tensor, received: Tensor) -> Tensor:
        return score.add_(received)

    def victim_scores(self, score: Tensor, position: Tensor, newest: Tensor) -> Tensor:
        # torch.where: on a CPU masked_fill takes twice as long
        return torch.where(position > newest - self.recent, float("inf"), score)
