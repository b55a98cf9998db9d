"""Compress the prompt once, then keep everything."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.kv_cache.full import WindowCache, append, full_segments
from h2o_flexgen.kv_cache.layout import KVTensors
from h2o_flexgen.kv_cache.rule import CacheRule, Rows, Tokens
from h2o_flexgen.kv_cache.votes import VotingRule


@dataclass(frozen=True)
class SnapKVCache(VotingRule):
    """SnapKV (arXiv 2404.14469, section 4).

    Keeps the last `recent` tokens of the prompt, the `heavy` others with the most votes, and every generated token, so
    that the cache grows with the output. The last `window` queries of the prompt vote with their attention, summed over
    the query heads of a group; votes are pooled over neighbours, so that a token stays with its context. In the paper
    `recent` equals `window`. A layer with a sliding window that texts outgrow keeps its window, whatever the budget.
    Why: the question stands at the end of a prompt, and what it attends to is what the output will need.

    Args:
        window, pool: as for `VotingRule`.
        pooling: "max" as in the paper's experiments, or "avg".
    """

    pooling: str = "max"

    name = "snapkv"
    needs_equal_heads = True

    def __post_init__(self):
        super().__post_init__()
        self.require(self.pooling in ("max", "avg"), "pooling must be max or avg")

    def in_layer(self, layer: int) -> CacheRule:
        if self.attention and self.attention[layer].softmax.window is not None:
            return WindowCache(softmax=self.attention[layer].softmax)
        return super().in_layer(layer)

    def measured_as(self, phase: str) -> str:
        return "h2o" if phase == "prefill" else "full"

    def segments(self, prompt_len: int, gen_len: int) -> tuple[int, ...]:
        return full_segments(min(self.slots, prompt_len), gen_len)

    def cached_len(self, length: int, prompt: int) -> int:
        return length - max(0, prompt - self.slots)

    def query_weights(self, position: Tensor, newest: Tensor) -> Tensor:
        return self.has_vote(position, newest)

    def rank(self, tokens: Tokens) -> Tensor:
        # the window stays in any case: it must not help its neighbours
        votes = torch.where(tokens.position > tokens.newest - self.recent_window, 0.0, tokens.score)
        pooled = F.max_pool1d if self.pooling == "max" else F.avg_pool1d
        return pooled(votes, self.pool, 1, self.pool // 2)

    def decode(
        self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, rows: Rows, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        at = rows.length - (rows.prompt - self.slots).clamp(min=0)
        return append(cache, q, k, v, at, self.softmax.with_sinks(sinks))
