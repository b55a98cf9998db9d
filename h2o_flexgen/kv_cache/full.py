"""Keep everything."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from h2o_flexgen.kernels.attention import cached_attention, causal_attention
from h2o_flexgen.kv_cache.layout import KVTensors
from h2o_flexgen.kv_cache.rule import CacheRule
from h2o_flexgen.sizes import full_segments


@dataclass(frozen=True)
class NoCache(CacheRule):
    """Nothing stays: for jobs that end with prefill. Attention costs what it does with a full cache."""

    name = "full"

    def segments(self, prompt_len: int, gen_len: int) -> tuple[int, ...]:
        return (0,)

    def prefill(self, cache: KVTensors | None, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return causal_attention(q, k, v)


@dataclass(frozen=True)
class FullCache(CacheRule):
    """Every token stays: token n of a sequence is in slot n of all its heads. The first segment takes the
    prompt, the following ones the output; only those in use are attended to and moved."""

    name = "full"

    def segments(self, prompt_len: int, gen_len: int) -> tuple[int, ...]:
        return full_segments(prompt_len, gen_len)

    def prefill(self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        T = k.shape[2]
        cache.k[0][:, :, :T], cache.v[0][:, :, :T] = cache.form.stored(k, v)
        cache.v[0][:, :, T:] = 0  # masked, but 0 * NaN left by another prompt would spread
        return causal_attention(q, k, v)

    def decode(
        self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        at = lengths + step - 1
        newest = int(at.max())
        ends = list(accumulate(segment.shape[2] for segment in cache.k))
        used = next(n for n, end in enumerate(ends) if end > newest) + 1
        if used > 1 and newest == ends[used - 2]:
            cache.v[used - 1].zero_()  # as in prefill
        slots = at[:, None].expand(k.shape[:2])
        cache.write(slots, k[:, :, 0], v[:, :, 0])
        last = at.to(k.device, non_blocking=True)[:, None]
        empty = (torch.arange(ends[used - 1], device=k.device) > last)[:, None]
        context, _ = cached_attention(q, cache.k[:used], cache.v[:used], empty, form=cache.form)
        return context, slots
