"""Keep the tokens that contribute most to what attention returns, for their age."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from h2o_flexgen.kv_cache.decayed import DecayedCache
from h2o_flexgen.kv_cache.rule import Tokens
from h2o_flexgen.kv_cache.value_norm import ValueNormCache


@dataclass(frozen=True)
class SmoothedCache(DecayedCache, ValueNormCache):
    """H2O with a smoothed mean instead of the sum, times the value's norm: our own.

    A sum of attention favours old tokens. A mean favours new ones, whose few observations are mostly their own, which
    is large. So the mean of `queries` more observations is taken, in which a token received what each of the cache's
    tokens receives on average (additive smoothing). What attention returns is a sum of values, hence the factor of the
    value's L1 norm, as in VATP (arXiv 2406.12335). The smoothing also lets new tokens stay for a while, so that the
    window of recent ones may be smaller: the last quarter of the slots.

    In a stream without end the mean of a whole life says little about what comes next. So old observations fade, as in
    `DecayedCache`, but slowly: some thousand tokens count.

    Args:
        queries: how many observations the average counts for.
    """

    first: int = 0
    decay: float = 0.9995
    queries: int = 16

    name = "smoothed"

    def __post_init__(self):
        super().__post_init__()
        self.require(self.queries >= 0, "queries must be 0 or more")

    @property
    def recent_window(self) -> int:
        return min(self.recent, -(-self.slots // 4)) if self.heavy else self.recent

    def rank(self, tokens: Tokens) -> Tensor:
        age = tokens.newest + 1 - tokens.position
        if self.decay < 1:  # 1 + decay + ... + decay^(age - 1)
            age = torch.expm1(age * log(self.decay)) / (self.decay - 1)
        prior = self.queries * self.groups / self.slots
        return tokens.metadata["value_norm"] * (tokens.score + prior) / (self.queries + age)
