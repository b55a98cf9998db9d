"""Keep the tokens that contribute most to what attention returns, for their age."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from h2o_flexgen.kv_cache.rule import Tokens
from h2o_flexgen.kv_cache.value_norm import ValueNormCache


@dataclass(frozen=True)
class SmoothedCache(ValueNormCache):
    """H2O with a smoothed mean instead of the sum, times the value's norm: our own.

    A sum of attention favours old tokens. A mean favours new ones, whose few observations are mostly their own, which
    is large. So the mean of `queries` more observations is taken, in which a token received what each of the cache's
    tokens receives on average (additive smoothing). What attention returns is a sum of values, hence the factor of the
    value's L1 norm, as in VATP (arXiv 2406.12335). The smoothing also lets new tokens stay for a while, so that the
    window of recent ones may be smaller: the last quarter of the slots.

    Args:
        queries: how many observations the average counts for.
    """

    first: int = 0
    queries: int = 16

    name = "smoothed"

    def __post_init__(self):
        super().__post_init__()
        self.require(self.queries >= 0, "queries must be 0 or more")

    @property
    def recent_window(self) -> int:
        return min(self.recent, -(-self.slots // 4)) if self.heavy else self.recent

    def rank(self, tokens: Tokens) -> Tensor:
        observations = self.queries + tokens.newest + 1 - tokens.position
        prior = self.queries * self.groups / self.slots
        return tokens.metadata["value_norm"] * (tokens.score + prior) / observations
