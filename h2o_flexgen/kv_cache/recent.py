"""Keep the last tokens, whatever attention says."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from h2o_flexgen.kv_cache.fixed_rule import FixedRule
from h2o_flexgen.kv_cache.rule import Tokens


@dataclass(frozen=True)
class RecentCache(FixedRule):
    """A local window over all slots: the baseline that every rule must beat."""

    name = "recent"

    def rank(self, tokens: Tokens) -> Tensor:
        return tokens.position.float()


@dataclass(frozen=True)
class SinkCache(RecentCache):
    """StreamingLLM (arXiv 2309.17453, section 3.2): the first tokens, into which attention goes that no other token
    needs (attention sinks), and a local window over all other slots."""

    first: int = 4

    name = "sinks"
