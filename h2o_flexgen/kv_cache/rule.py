"""What of a sequence's keys and values is kept: what a rule must say, and what rules with a fixed budget share.

Shapes: B sequences, H query heads, KV heads of K and V, T prompt tokens (padded on the right), S slots, D elements of a
head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from h2o_flexgen.kernels.attention import cached_attention, causal_attention_with_scores
from h2o_flexgen.kv_cache.layout import KVLayout, KVTensors
from h2o_flexgen.models.spec import ModelSpec

#: later than any position
_LATEST = torch.iinfo(torch.int32).max


class CacheRule:
    """Says which tokens a cache keeps. Subclasses are frozen dataclasses whose docstring says what is kept, why, and
    from which paper. All methods are pure functions of tensors but for the cache they fill."""

    name: ClassVar[str]  # in the registry, in policy files and in profiles
    #: "append": a token's slot is its place in the text, the same for all heads; "fixed": a new token takes the slot of
    #: one that goes
    growth: ClassVar[str] = "append"
    #: (name, dtype) of what is kept for every slot of a KV head beside K and V
    metadata: ClassVar[tuple[tuple[str, torch.dtype], ...]] = ()

    @property
    def budget(self) -> int | None:
        """Tokens that are kept at most; None: all."""
        return None

    def to_dict(self) -> dict | None:
        """The KV budget as policy files and reports have it; None: all tokens are kept."""
        return None

    def segments(self, prompt_len: int, gen_len: int) -> tuple[int, ...]:
        """Slots per sequence and head, by segment, for prompts of up to `prompt_len` and outputs of `gen_len`."""
        raise NotImplementedError

    def layout(self, spec: ModelSpec, dtype: torch.dtype, batch: int, prompt_len: int, gen_len: int) -> KVLayout:
        """The KV block of a layer for a batch of so many sequences."""
        segments = self.segments(prompt_len, gen_len)
        return KVLayout(batch, spec.kv_heads, segments, spec.head_dim, dtype, self.metadata, self.growth)

    def prefill(self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        """Causal attention over the prompts, and fill the cache with what is kept of them.

        q (B, H, T, D), k and v (B, KV, T, D), lengths (B,) int64 on the CPU: sequence b has lengths[b] tokens, what
        follows is padding. Returns the context (B, H, T, D), of padding nothing of use.
        """
        raise NotImplementedError

    def decode(
        self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """Attention of one new token per sequence, and put it in the cache.

        q (B, H, 1, D), k and v (B, KV, 1, D), lengths (B,) int64 of the prompts, on the CPU. `step` is 1 for the first
        decode step; the new token's position is lengths + step - 1. Returns the context (B, H, 1, D), and the slots
        (B, KV) int64 that hold the new token.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class FixedRule(CacheRule):
    """Keeps `heavy` + `recent` tokens per sequence and KV head, with the score and the position of each.

    There is one slot more than the budget: the token that must go is chosen when the next one comes, and the new token
    takes its slot. So a step writes one slot per head, and no token ever moves. A rule says by three methods who stays.
    """

    heavy: int
    recent: int

    growth = "fixed"
    metadata = (("score", torch.float32), ("position", torch.int32))

    @property
    def budget(self) -> int:
        return self.heavy + self.recent

    def to_dict(self) -> dict:
        return {"heavy": self.heavy, "recent": self.recent, "rule": self.name}

    def prompt_scores(self, score: Tensor, position: Tensor, lengths: Tensor) -> Tensor:
        """(B, KV, T): of a prompt's tokens those with the highest stay, of equal ones the earlier. `score` (B, KV, T)
        fp32 is the attention that each token received from the prompt; position (T,), lengths (B, 1, 1)."""
        raise NotImplementedError

    def step_scores(self, score: Tensor, received: Tensor) -> Tensor:
        """The scores (B, KV, S) after a step in which the tokens received this attention (B, KV, S); it may write to
        `score`."""
        raise NotImplementedError

    def victim_scores(self, score: Tensor, position: Tensor, newest: Tensor) -> Tensor:
        """(B, KV, S), a tensor of its own: the token with the lowest goes, of equal ones the earlier. score and
        position (B, KV, S), newest (B, 1, 1) the position of the newest token."""
        raise NotImplementedError

    def segments(self, prompt_len: int, gen_len: int) -> tuple[int, ...]:
        return (min(self.budget, prompt_len + max(0, gen_len - 2)) + 1,)

    def prefill(self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        context, score = causal_attention_with_scores(q, k, v, lengths)
        B, KV, T, D = k.shape
        position = torch.arange(T, device=k.device)
        n = lengths.to(k.device, non_blocking=True)[:, None, None]
        kept = min(self.budget, T)
        if kept < T:
            ranked = self.prompt_scores(score, position, n).masked_fill(position >= n, float("-inf"))
            # stable: of equal scores the earlier token comes first
            best = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :kept]
        else:
            best = position.expand(B, KV, T)
        at = best[..., None].expand(B, KV, kept, D)
        cache.k[0][:, :, :kept] = k.gather(2, at)
        cache.v[0][:, :, :kept] = v.gather(2, at)
        cache.v[0][:, :, kept:] = 0  # masked, but 0 * NaN left by another prompt would spread
        cache.score.zero_()
        cache.score[:, :, :kept] = score.gather(2, best)
        cache.position.fill_(-1)
        cache.position[:, :, :kept] = best.masked_fill(best >= n, -1)
        return context

    def decode(
        self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        S = cache.k[0].shape[2]
        held = lengths.clamp(max=self.budget) + step  # tokens in the cache, this one included
        now = (lengths + step - 1).to(torch.int32).to(k.device, non_blocking=True)[:, None, None]
        slots = self._free_slot(cache, now - 1, may_be_empty=int(held.min()) <= S)
        cache.write(slots, k[:, :, 0], v[:, :, 0])
        at = slots[..., None]
        cache.score.scatter_(2, at, 0.0)
        cache.position.scatter_(2, at, now.expand(at.shape))
        empty = cache.position < 0 if int(held.min()) < S else None
        context, received = cached_attention(q, cache.k, cache.v, empty)
        cache.score.copy_(self.step_scores(cache.score, received))
        return context, slots

    def _free_slot(self, cache: KVTensors, newest: Tensor, may_be_empty: bool) -> Tensor:
        """(B, KV): an empty slot, or else that of the token that was due to go when `newest` was the newest."""
        score = self.victim_scores(cache.score, cache.position, newest)
        if may_be_empty:
            score.masked_fill_(cache.position < 0, float("-inf"))
        lowest = score.amin(-1, keepdim=True)
        return torch.where(score <= lowest, cache.position, _LATEST).argmin(-1)
