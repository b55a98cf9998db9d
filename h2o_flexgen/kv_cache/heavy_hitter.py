"""Keep the tokens that attention keeps coming back to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_flexgen.kernels.attention import cached_attention, causal_attention_with_scores
from h2o_flexgen.kv_cache.layout import KVTensors
from h2o_flexgen.kv_cache.rule import CacheRule

_LATE = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class HeavyHitterCache(CacheRule):
    """H2O, the heavy-hitter oracle (arXiv 2306.14048, section 4, algorithm 1).

    A few tokens receive most of the attention, and those that did so far go on doing so. Per sequence and KV head
    the cache keeps the last `recent` tokens, and of the others the `heavy` ones whose score, the sum of the
    attention probabilities they received, is highest. Ties go to the earlier token in prefill's choice of what
    stays, and in a decode step's choice of what goes.

    There is one slot more than the budget: the token that must go is chosen when the next one comes, and the new
    token takes its slot. So a step writes one slot per head, and no token ever moves.

    Args:
        heavy: slots for heavy hitters; 0 keeps a local window only.
        recent: slots for the last tokens, the newest included.
    """

    heavy: int
    recent: int

    scored = True

    @property
    def budget(self) -> int:
        return self.heavy + self.recent

    def segments(self, prompt_len: int, gen_len: int) -> tuple[int, ...]:
        return (min(self.budget, prompt_len + max(0, gen_len - 2)) + 1,)

    def prefill(self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        context, score = causal_attention_with_scores(q, k, v, lengths)
        B, H, T, D = k.shape
        position = torch.arange(T, device=k.device)
        n = lengths.to(k.device, non_blocking=True)[:, None, None]
        worth = score.masked_fill(position >= n - self.recent, float("inf"))
        worth = worth.masked_fill(position >= n, float("-inf"))
        kept = min(self.budget, T)
        if kept < T:
            # stable: of equal scores the earlier token comes first
            best = worth.sort(dim=-1, descending=True, stable=True).indices[..., :kept]
        else:
            best = position.expand(B, H, T)
        at = best[..., None].expand(B, H, kept, D)
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
        now = lengths + step - 1
        S = cache.k[0].shape[2]
        held = lengths.clamp(max=self.budget) + step  # tokens in the cache, this one included
        slots = self._free_slot(cache, now, may_be_empty=int(held.min()) <= S)
        cache.write(slots, k[:, :, 0], v[:, :, 0])
        at = slots[..., None]
        cache.score.scatter_(2, at, 0.0)
        newest = now.to(torch.int32).to(k.device, non_blocking=True)
        cache.position.scatter_(2, at, newest[:, None, None].expand(at.shape))
        empty = cache.position < 0 if int(held.min()) < S else None
        context, p = cached_attention(q, cache.k, cache.v, empty)
        cache.score += p
        return context, slots

    def _free_slot(self, cache: KVTensors, now: Tensor, may_be_empty: bool) -> Tensor:
        """(B, H): an empty slot, or else that of the token with the lowest score outside the recent window.

        The choice is the one due at the end of the step before, when token now - 1 was the newest.
        """
        first_recent = (now - self.recent).to(cache.position.device, torch.int32, non_blocking=True)[:, None, None]
        # torch.where: on a CPU masked_fill takes twice as long
        score = torch.where(cache.position >= first_recent, float("inf"), cache.score)
        if may_be_empty:
            score.masked_fill_(cache.position < 0, float("-inf"))
        lowest = score.amin(-1, keepdim=True)
        return torch.where(score <= lowest, cache.position, _LATE).argmin(-1)
