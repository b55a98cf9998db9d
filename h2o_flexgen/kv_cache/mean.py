"""Keep the tokens that attention comes back to most often for their age."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from h2o_flexgen.kv_cache.fixed_rule import FixedRule
from h2o_flexgen.kv_cache.rule import Tokens


@dataclass(frozen=True)
class MeanAttentionCache(FixedRule):
    """H2O with the mean instead of the sum (as arXiv 2512.12008 runs H2O, and RoCo, arXiv 2402.06262, begins).

    A sum of attention favours tokens that have been there for long. Of the tokens that are not protected the cache
    keeps those that received most attention per query that could see them, themselves included.
    """

    name = "mean"

    def rank(self, tokens: Tokens) -> Tensor:
        return tokens.score / (tokens.newest + 1 - tokens.position)
