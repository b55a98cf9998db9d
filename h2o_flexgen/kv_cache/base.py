"""The tensors of a cache and what a cache rule must do with them.

Shapes: B sequences, H KV heads, S slots, T prompt tokens (padded on the right), D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class KVTensors:
    """The cache of one (layer, batch), on whatever device its bytes are.

    Attributes:
        k, v: (B, H, S, D).
        score: (B, H, S) fp32, the attention that the slot's token has received; scored caches only.
        position: (B, H, S) int32, the token's place in its text, -1 for an empty slot; scored only.
    """

    k: Tensor
    v: Tensor
    score: Tensor | None = None
    position: Tensor | None = None

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put one token per sequence and head, k and v (B, H, D), into slots (B, H)."""
        B, H, S, D = self.k.shape
        at = torch.arange(B * H, device=slots.device) * S + slots.reshape(-1)
        self.k.view(-1, D).index_copy_(0, at, k.reshape(-1, D))
        self.v.view(-1, D).index_copy_(0, at, v.reshape(-1, D))

    def rows(self, begin: int, end: int) -> KVTensors:
        """The sequences begin..end."""
        cut = [None if t is None else t[begin:end] for t in (self.k, self.v, self.score, self.position)]
        return KVTensors(*cut)


@dataclass(frozen=True)
class KVLayout:
    """How the cache of one (layer, batch) lies in a flat buffer: k, v, then score and position."""

    batch: int
    heads: int
    slots: int
    head_dim: int
    dtype: torch.dtype
    scored: bool

    @property
    def row_bytes(self) -> int:
        """K and V of one token for the whole batch: what a decode step adds."""
        return 2 * self.batch * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def kv_bytes(self) -> int:
        return self.row_bytes * self.slots

    @property
    def meta_bytes(self) -> int:
        return 8 * self.batch * self.heads * self.slots if self.scored else 0

    @property
    def nbytes(self) -> int:
        return self.kv_bytes + self.meta_bytes

    def view(self, kv: Tensor, meta: Tensor | None = None) -> KVTensors:
        """Buffers of bytes, `kv_bytes` and `meta_bytes` long, seen as a cache."""
        shape = (self.batch, self.heads, self.slots, self.head_dim)
        k, v = (part.view(self.dtype).view(shape) for part in kv[: self.kv_bytes].chunk(2))
        if not self.scored:
            return KVTensors(k, v)
        score, position = meta[: self.meta_bytes].chunk(2)
        return KVTensors(k, v, score.view(torch.float32).view(shape[:3]), position.view(torch.int32).view(shape[:3]))


class CacheRule:
    """A rule says which tokens a cache keeps. Subclasses are dataclasses whose docstring says what is kept,
    why, and from which paper. All methods are pure functions of tensors but for the cache they fill."""

    #: whether the cache carries scores and positions
    scored = False

    def slots(self, prompt_len: int, gen_len: int) -> int:
        """Slots per sequence and head for prompts of up to `prompt_len` and outputs of `gen_len` tokens."""
        raise NotImplementedError

    def prefill(self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        """Causal attention over the prompts, and fill the cache with what is kept of them.

        Args:
            q, k, v: (B, H, T, D); sequence b has lengths[b] tokens, what follows is padding.
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
            q, k, v: (B, H, 1, D).
            lengths: (B,) int64 prompt lengths, on the CPU.
            step: 1 for the first decode step; the new token's position is lengths + step - 1.

        Returns:
            The context (B, H, 1, D), and the slots (B, H) int64 into which the new token went.
        """
        raise NotImplementedError
