"""Keep the tokens that attention returns to most often for their age."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from h2o_flexgen.kv_cache.fixed_rule import FixedRule
from h2o_flexgen.kv_cache.rule import Tokens


@dataclass(frozen=True)
class MeanAttentionCache(FixedRule):
    """H2O with a mean instead of the sum (H2O as run in arXiv 2512.12008; the first step of RoCo, arXiv 2402.06262).

    Keeps the last `recent` tokens and, of the others, the `heavy` ones that received most attention per query that
    could see them, their own query included.
    Why: a sum of attention favours tokens that have been in the cache for long.
    """

    name = "mean"

    def rank(self, tokens: Tokens) -> Tensor:
        return tokens.score / (tokens.newest + 1 - tokens.position)
