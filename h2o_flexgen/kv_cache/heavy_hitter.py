"""Keep the tokens that attention keeps returning to."""

from __future__ import annotations

from dataclasses import dataclass

from h2o_flexgen.kv_cache.fixed_rule import FixedRule


@dataclass(frozen=True)
class HeavyHitterCache(FixedRule):
    """H2O, the heavy-hitter oracle (arXiv 2306.14048, section 4, algorithm 1).

    Keeps the last `recent` tokens and, of the others, the `heavy` ones with the highest score: the sum of the attention
    probabilities that a token has received from the queries of its KV head.
    Why: a few tokens receive most of the attention, and those that have done so far go on doing so.

    Args:
        heavy: slots for heavy hitters; 0 keeps a local window only.
        recent: slots for the last tokens, including the newest.
        first, last: as in `BudgetRule`.
    """

    name = "h2o"


@dataclass(frozen=True)
class HeavyOnlyCache(HeavyHitterCache):
    """H2O without its local window (arXiv 2306.14048, section 5.3).

    Keeps the highest scores in all slots.
    Why: to show that the window matters. This rule loses, since a new token has had no time to collect attention.
    """

    name = "heavy"

    @property
    def recent_window(self) -> int:
        return 0
