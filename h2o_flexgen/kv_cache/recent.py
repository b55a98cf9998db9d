"""Keep the last tokens, whatever attention says."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from h2o_flexgen.kv_cache.fixed_rule import FixedRule
from h2o_flexgen.kv_cache.rule import Tokens


@dataclass(frozen=True)
class RecentCache(FixedRule):
    """Local window.

    Keeps the last `heavy` + `recent` tokens.
    Why: it is the baseline that every other rule must beat.
    """

    name = "recent"

    def rank(self, tokens: Tokens) -> Tensor:
        return tokens.position.float()


@dataclass(frozen=True)
class SinkCache(RecentCache):
    """StreamingLLM (arXiv 2309.17453, section 3.2).

    Keeps the `first` tokens of the text, and a local window in all other slots.
    Why: attention that no token needs goes to the first tokens (attention sinks), and a model breaks without them.
    """

    first: int = 4

    name = "sinks"
