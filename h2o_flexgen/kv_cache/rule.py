"""What a cache rule must do.

Shapes: B sequences, H query heads, KV heads of K and V, T prompt tokens (padded on the right), D elements of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.kv_cache.layout import KVLayout, KVTensors
from h2o_flexgen.models.spec import ModelSpec


class CacheRule:
    """A rule says which tokens a cache keeps. Subclasses are dataclasses whose docstring says what is kept,
    why, and from which paper. All methods are pure functions of tensors but for the cache they fill."""

    #: whether the cache carries scores and positions
    scored = False

    def segments(self, prompt_len: int, gen_len: int) -> tuple[int, ...]:
        """Slots per sequence and head, by segment, for prompts of up to `prompt_len` and outputs of `gen_len`."""
        raise NotImplementedError

    def layout(self, spec: ModelSpec, dtype: torch.dtype, batch: int, prompt_len: int, gen_len: int) -> KVLayout:
        """The cache of a layer for a batch of so many sequences."""
        segments = self.segments(prompt_len, gen_len)
        return KVLayout(batch, spec.kv_heads, segments, spec.head_dim, dtype, self.scored)

    def prefill(self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        """Causal attention over the prompts, and fill the cache with what is kept of them.

        Args:
            q (B, H, T, D), k and v (B, KV, T, D); sequence b has lengths[b] tokens, what follows is padding.
            lengths: (B,) int64, on the CPU.

        Returns:
            The context (B, H, T, D); rows of padding hold nothing of use.
        """
        raise NotImplementedError

    def decode(
        self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """Attention of one new token per sequence, and put it into the cache.

        Args:
            q (B, H, 1, D), k and v (B, KV, 1, D).
            lengths: (B,) int64 prompt lengths, on the CPU.
            step: 1 for the first decode step; the new token's position is lengths + step - 1.

        Returns:
            The context (B, H, 1, D), and the slots (B, KV) int64 into which the new token went.
        """
        raise NotImplementedError
