"""Keep the tokens that attention keeps coming back to."""

from __future__ import annotations

from dataclasses import dataclass

from h2o_flexgen.kv_cache.fixed_rule import FixedRule


@dataclass(frozen=True)
class HeavyHitterCache(FixedRule):
    """H2O, the heavy-hitter oracle (arXiv 2306.14048, section 4, algorithm 1).

    A few tokens receive most of the attention, and those that did so far go on doing so. Per sequence and KV head the
    cache keeps the last `recent` tokens, and of the others the `heavy` ones whose score, the sum of the attention
    probabilities they received from the head's queries, is highest.

    Args:
        heavy: slots for heavy hitters; 0 keeps a local window only.
        recent: slots for the last tokens, the newest included.
        first, last: as in `BudgetRule`.
    """

    name = "h2o"


@dataclass(frozen=True)
class HeavyOnlyCache(HeavyHitterCache):
    """H2O without its local window: all slots go to the highest scores (arXiv 2306.14048, section 5.3, where it loses:
    a new token has had no time to collect attention)."""

    name = "heavy"

    @property
    def recent_window(self) -> int:
        return 0
