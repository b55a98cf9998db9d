"""Keep the tokens that attention has returned to lately."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from h2o_flexgen.kv_cache.fixed_rule import FixedRule


@dataclass(frozen=True)
class DecayedCache(FixedRule):
    """A2SF, accumulative attention score with forgetting factor (arXiv 2407.20485).

    Keeps the last `recent` tokens and, of the others, the `heavy` ones with the highest decayed score: every query
    multiplies all scores by `decay` before it adds its own attention, so that of n queries the one at position i
    counts decay^(n - 1 - i).
    Why: a plain sum of attention favours tokens that have been in the cache for long.

    Args:
        decay: in (0, 1]; 1 is H2O.
    """

    decay: float = 0.95

    name = "decayed"

    def __post_init__(self):
        super().__post_init__()
        self.require(0 < self.decay <= 1, "decay must lie in (0, 1]")

    def query_weights(self, position: Tensor, newest: Tensor) -> Tensor:
        return self.decay ** (newest - position).clamp(min=0).float()

    def step_scores(self, score: Tensor, received: Tensor) -> Tensor:
        return score.mul_(self.decay).add_(received)

    def prompt_step_scores(self, score: Tensor, received: Tensor, count: Tensor) -> Tensor:
        return score.mul_(self.decay**count).add_(received)
