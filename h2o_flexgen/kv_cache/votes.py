"""What rules share in which the last queries of a prompt vote for its tokens (SnapKV, arXiv 2404.14469, section 4)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from h2o_flexgen.kv_cache.budget_rule import BudgetRule


@dataclass(frozen=True)
class VotingRule(BudgetRule):
    """Votes are pooled over neighbours, so that a token stays with its context.

    Args:
        window: number of the last queries of the prompt, which vote.
        pool: size of a neighbourhood, including the token itself; odd.
    """

    window: int = 32
    pool: int = 7

    def __post_init__(self):
        super().__post_init__()
        self.require(self.window >= 1, "window must be 1 or more")
        self.require(self.pool % 2 == 1 and self.pool >= 1, "pool must be odd, 1 or more")

    @property
    def voters(self) -> int:
        return self.window

    def has_vote(self, position: Tensor, newest: Tensor) -> Tensor:
        """(B, T) fp32, 1 for queries that vote and 0 for others; as `query_weights`."""
        return (position > newest - self.window).float()
