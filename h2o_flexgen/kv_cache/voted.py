"""Keep what the end of the prompt asks for, and what attention returns to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.kv_cache.mean import MeanAttentionCache
from h2o_flexgen.kv_cache.rule import Tokens
from h2o_flexgen.kv_cache.votes import VotingRule


@dataclass(frozen=True)
class VotedCache(VotingRule, MeanAttentionCache):
    """The mean of attention, with SnapKV's votes for the prompt: our own.

    Keeps the last `recent` tokens and, of the others, the `heavy` ones that received most attention per query. The last
    `window` queries of the prompt vote: a token's votes are the most that any token in its neighbourhood of `pool`
    received from them, so that it stays with its context (SnapKV, arXiv 2404.14469, section 4). Each query before them
    counts only `others`, each one after the prompt 1.
    Why: the question stands at the end of a prompt, and what it attends to is what the output will need. A mean over
    all queries drops what the text itself never returns to; votes alone drop what it does return to.

    In a stream each chunk is a prompt, so that earlier votes count too much: `smoothed` is better there.

    Args:
        window, pool: as for `VotingRule`.
        others: weight of a query that does not vote, in [0, 1]; 1 without a neighbourhood is the mean.
    """

    window: int = 8
    pool: int = 15
    others: float = 0.05

    name = "voted"
    has_votes = True

    def __post_init__(self):
        super().__post_init__()
        self.require(0 <= self.others <= 1, "others must lie in [0, 1]")

    def query_weights(self, position: Tensor, newest: Tensor) -> Tensor:
        votes = self.has_vote(position, newest)
        return torch.stack([self.others * (1 - votes), votes], 1)

    def prompt_scores(self, metadata: dict[str, Tensor]) -> Tensor:
        # padding between cached and new tokens must not part neighbours
        is_empty = (metadata["position"] < 0).to(torch.int8)  # CUDA sorts no bools before torch 2.6
        order = is_empty.sort(dim=-1, stable=True).indices
        most = F.max_pool1d(metadata["votes"].gather(-1, order), self.pool, 1, self.pool // 2)
        return torch.empty_like(most).scatter_(-1, order, most).add_(metadata["score"])

    def rank(self, tokens: Tokens) -> Tensor:
        voted = tokens.newest + 1 - torch.maximum(tokens.position, tokens.prompt - self.window)
        seen = tokens.newest + 1 - tokens.position
        return tokens.score / (voted + self.others * (seen - voted))
