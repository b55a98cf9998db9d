"""Keep what the end of the prompt asks for, then what attention returns to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.kv_cache.mean import MeanAttentionCache
from h2o_flexgen.kv_cache.rule import Tokens


@dataclass(frozen=True)
class VotedCache(MeanAttentionCache):
    """The mean of attention with the votes of SnapKV for the prompt: our own.

    Keeps the last `recent` tokens and, of the others, the `heavy` ones that received most attention per query, of the
    last `window` queries of the prompt and of those that follow. A token of the prompt counts as much as that of its
    `pool` neighbours which received most from the former, so that it stays with its context (SnapKV, arXiv 2404.14469,
    section 4).
    Why: the question stands at the end of a prompt, and what it attends to is what the output will need. The mean over
    all queries of a prompt drops what the text itself never returns to.

    In a stream the queries of each new text vote, and what came before counts no more.

    Args:
        window: number of the last queries of the prompt, which vote.
        pool: size of a neighbourhood, including the token itself; odd.
    """

    window: int = 8
    pool: int = 15

    name = "voted"

    def __post_init__(self):
        super().__post_init__()
        self.require(self.window >= 1, "window must be 1 or more")
        self.require(self.pool % 2 == 1 and self.pool >= 1, "pool must be odd, 1 or more")

    @property
    def voters(self) -> int:
        return self.window

    def query_weights(self, position: Tensor, newest: Tensor) -> Tensor:
        return (position > newest - self.window).float()

    def prompt_step_scores(self, score: Tensor, received: Tensor, count: Tensor) -> Tensor:
        return received

    def prompt_scores(self, score: Tensor, position: Tensor) -> Tensor:
        # padding between cached and new tokens must not part neighbours
        real = (position < 0).sort(dim=-1, stable=True).indices
        pooled = F.max_pool1d(score.gather(-1, real), self.pool, 1, self.pool // 2)
        return torch.empty_like(score).scatter_(-1, real, pooled)

    def rank(self, tokens: Tokens) -> Tensor:
        seen = tokens.newest + 1 - torch.maximum(tokens.position, tokens.prompt - self.window)
        return tokens.score / seen
