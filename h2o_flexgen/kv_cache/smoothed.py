"""Keep the tokens that contribute most to the output of attention, for their age."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil, log

import torch
from torch import Tensor

from h2o_flexgen.kv_cache.decayed import DecayedCache
from h2o_flexgen.kv_cache.rule import Tokens
from h2o_flexgen.kv_cache.value_norm import ValueNormCache

#: ages in a table at most
_AGES = 1 << 17


@dataclass(frozen=True)
class SmoothedCache(DecayedCache, ValueNormCache):
    """H2O with a smoothed mean instead of the sum, times the norm of the value: our own.

    Keeps the last tokens, up to a quarter of the slots, and of the others those with the highest product of two
    factors: the smoothed mean of the attention received, and the L1 norm of the value.
    Why: a sum of attention favours old tokens. A mean favours new ones, whose few observations are mostly their own,
    which is large. So the mean includes `queries` more observations, each the average attention of a slot (additive
    smoothing); this also gives new tokens time, so that a smaller window suffices. The output of attention is a sum of
    values, hence the norm, as in VATP (arXiv 2406.12335). In an endless stream the mean of a whole life says little
    about what comes next, so that old observations fade as in `DecayedCache`, but slowly: a few thousand tokens count.

    Args:
        queries: weight of the average, in observations.
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
        if self.decay < 1:
            age = _faded(age, self.decay)
        prior = self.queries * self.groups / max(1, self.slots)  # none beside the new token in a window of one
        return tokens.metadata["value_norm"] * (tokens.score + prior) / (self.queries + age)


def _faded(age: Tensor, decay: float) -> Tensor:
    """1 + decay + ... + decay^(age - 1)."""
    most = ceil(log(2**-26) / log(decay))  # later summands are lost in rounding
    if most >= _AGES:
        return _sum_of_powers(age, decay)
    # torch runs expm1 in threads even for the few tokens of a decode step, and waking one takes longer than the rest
    table = _table(decay, most, age.device)
    return table.index_select(0, age.clamp(0, most).flatten()).view(age.shape)


@cache
def _table(decay: float, most: int, device: torch.device) -> Tensor:
    return _sum_of_powers(torch.arange(most + 1, dtype=torch.int32, device=device), decay)


def _sum_of_powers(count: Tensor, decay: float) -> Tensor:
    return torch.expm1(count * log(decay)) / (decay - 1)
