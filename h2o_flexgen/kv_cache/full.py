"""Keep everything."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from h2o_flexgen.formats import KVFormat
from h2o_flexgen.kernels.attention import PLAIN, Softmax, cached_attention
from h2o_flexgen.kv_cache.layout import KVTensors
from h2o_flexgen.kv_cache.rule import CacheRule, Rows, Text

#: slots of the segments by which a full cache grows after the prompt: an eighth of what it holds, rounded to a multiple
#: of SEGMENT. Empty slots of the last segment are moved like the rest, and on a GPU attended to; there every segment
#: also takes two more matmuls.
SEGMENT = 32
LARGEST_SEGMENT = 128


@dataclass(frozen=True)
class NoCache(CacheRule):
    """Keeps nothing: for jobs that end with prefill. Attention costs the same as with a full cache."""

    name = "full"

    def segments(self, prompt_len: int, gen_len: int) -> tuple[int, ...]:
        return (0,)


@dataclass(frozen=True)
class FullCache(CacheRule):
    """Keeps every token: token n of a sequence is in slot n of all its heads. The first segment takes the prompt, the
    others the output; only segments in use are attended to and moved."""

    name = "full"

    def segments(self, prompt_len: int, gen_len: int) -> tuple[int, ...]:
        return full_segments(prompt_len, gen_len)

    def keep(self, cache: KVTensors, text: Text) -> None:
        fill(cache, *text.stored)

    def decode(
        self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, rows: Rows, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return append(cache, q, k, v, rows.length, self.softmax.with_sinks(sinks))

    def in_layer(self, layer: int) -> CacheRule:
        rule = super().in_layer(layer)
        return rule if rule.softmax.window is None else WindowCache(softmax=rule.softmax)


@dataclass(frozen=True)
class WindowCache(FullCache):
    """Keeps the tokens of a sliding window: token n of a sequence is in slot n modulo the window of all its heads,
    where it takes the place of the token that leaves the window (Mistral, arXiv 2310.06825, section 2)."""

    growth = "fixed"

    def segments(self, prompt_len: int, gen_len: int) -> tuple[int, ...]:
        return (min(self.softmax.window, prompt_len + gen_len - 1),)

    def cached_len(self, length: int, prompt: int) -> int:
        return min(length, self.softmax.window)

    def keep(self, cache: KVTensors, text: Text) -> None:
        S = cache.k[0].shape[2]
        B, KV, N, _ = text.k.shape
        if N > S:
            slot = torch.arange(S)
            newest = slot + (text.length[:, None] - 1 - slot) // S * S  # the last token of each slot; negative: none
            at = newest.clamp(min=0).to(text.k.device)[:, None].expand(B, KV, S)
            fill(cache, *gather(at, *text.stored))
        else:
            fill(cache, *text.stored)

    def decode(
        self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, rows: Rows, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        S = cache.k[0].shape[2]
        slots = (rows.length % S)[:, None].expand(k.shape[:2])
        cache.write(slots, k[:, :, 0], v[:, :, 0])
        used = (rows.length + 1).clamp(max=S)
        softmax = self.softmax.with_sinks(sinks)
        context, _ = cached_attention(q, cache.k, cache.v, used, form=cache.form, softmax=softmax)
        return context, slots


def fill(cache: KVTensors, k: Tensor, v: Tensor) -> None:
    """Put tokens, k and v (B, KV, n, W), into the first n slots of a cache; the other slots are then empty."""
    for segments, stored in ((cache.k, k), (cache.v, v)):
        begin = 0
        for segment in segments:
            part = stored[:, :, begin : begin + segment.shape[2]]
            segment[:, :, : part.shape[2]] = part
            begin += segment.shape[2]
            if segments is cache.v and cache.reads_empty_slots:
                segment[:, :, part.shape[2] :] = 0


def gather(at: Tensor, *stored: Tensor) -> list[Tensor]:
    """From each of the tensors (B, KV, N, W) the vectors at indices (B, KV, n): (B, KV, n, W)."""
    return [x.gather(2, at[..., None].expand(*at.shape, x.shape[3])) for x in stored]


def append(
    cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, at: Tensor, softmax: Softmax = PLAIN
) -> tuple[Tensor, Tensor]:
    """`CacheRule.decode` where the new token of each sequence takes slot `at` (B,) int64."""
    ends = list(accumulate(segment.shape[2] for segment in cache.k))
    newest = int(at.max())
    if newest >= ends[-1]:  # compiled loops would write out of bounds
        raise IndexError(f"slot {newest} of {ends[-1]}")
    used = 1 + bisect(ends, newest)
    slots = at[:, None].expand(k.shape[:2])
    cache.write(slots, k[:, :, 0], v[:, :, 0])
    context, _ = cached_attention(q, cache.k[:used], cache.v[:used], at + 1, form=cache.form, softmax=softmax)
    return context, slots


def prepare_cache(form: KVFormat, dtype: torch.dtype, head_dim: int, rolling: bool) -> None:
    """Compile the loops of a decode step on a CPU, or load them from numba's cache, before memory is measured."""
    if rolling:  # rotated keys are attended to in fp32
        dtype = torch.float32
        form = KVFormat.dense(dtype)
    q = torch.zeros(1, 1, 1, head_dim, dtype=dtype)
    k, v = form.stored(q, q)
    append(KVTensors([k], [v], {}, form), q, q, q, torch.zeros(1, dtype=torch.int64))


def full_segments(prompt_len: int, gen_len: int) -> tuple[int, ...]:
    """Slots of each segment of a full cache: the prompt's, then those of the output."""
    sizes = [prompt_len]
    left = gen_len - 1  # the last token is never attended to
    while left > 0:
        size = max(SEGMENT, sum(sizes) // 8 // SEGMENT * SEGMENT)
        sizes.append(min(size, LARGEST_SEGMENT, left))
        left -= sizes[-1]
    return tuple(sizes)
