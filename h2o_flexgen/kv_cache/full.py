"""Keep everything."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_flexgen.kv_cache.attention import cached_attention, causal_attention
from h2o_flexgen.kv_cache.base import CacheRule, KVTensors


@dataclass(frozen=True)
class FullCache(CacheRule):
    """Every token stays: token n of a sequence lies in slot n of all its heads."""

    def slots(self, prompt_len: int, gen_len: int) -> int:
        return prompt_len + max(0, gen_len - 1)  # the last token is never attended to

    def prefill(self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        T = k.shape[2]
        cache.k[:, :, :T] = k
        cache.v[:, :, :T] = v
        cache.v[:, :, T:] = 0  # masked, but 0 * NaN left by another job would spread
        return causal_attention(q, k, v)

    def decode(
        self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        at = lengths + step - 1
        held = int(at.max()) + 1
        slots = at.to(k.device)[:, None].expand(k.shape[:2])
        cache.write(slots, k[:, :, 0], v[:, :, 0])
        empty = None
        if int(at.min()) + 1 < held:
            empty = (torch.arange(held) > at[:, None]).to(k.device)[:, None]
            cache.v[:, :, held - 1].masked_fill_(empty[:, :, -1:], 0)
        context, _ = cached_attention(q, cache.k[:, :, :held], cache.v[:, :, :held], empty)
        return context, slots
