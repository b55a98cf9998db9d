"""How the cache of one (layer, batch), a KV block, lies in memory, and its tensors.

Shapes: B sequences, H KV heads, S slots of a segment, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor


@dataclass
class KVTensors:
    """The cache of one (layer, batch), on whatever device its bytes are. A matmul is fast only over a whole, contiguous
    tensor, hence a cache that grows does so by segments. Slots are numbered through all segments."""

    k: list[Tensor]  # per segment (B, H, S, D)
    v: list[Tensor]
    metadata: dict[str, Tensor] = field(default_factory=dict)  # (B, H, S) by name; only of caches with one segment

    @property
    def score(self) -> Tensor:
        """(B, H, S) fp32: the attention that the slot's token has received."""
        return self.metadata["score"]

    @property
    def position(self) -> Tensor:
        """(B, H, S) int32: the token's place in its text, -1 for an empty slot."""
        return self.metadata["position"]

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put one token per sequence and head, k and v (B, H, D), into slots (B, H). With several segments, the
        slots of a sequence are the same for all heads, and lie on the CPU."""
        if len(self.k) == 1:
            B, H, S, D = self.k[0].shape
            at = torch.arange(B * H, device=slots.device) * S + slots.reshape(-1)
            self.k[0].view(-1, D).index_copy_(0, at, k.reshape(-1, D))
            self.v[0].view(-1, D).index_copy_(0, at, v.reshape(-1, D))
            return
        column, begins = slots[:, 0], list(accumulate((x.shape[2] for x in self.k), initial=0))
        segments = torch.bucketize(column, torch.tensor(begins), right=True) - 1
        for n in segments.unique().tolist():
            rows = (segments == n).nonzero()[:, 0]
            local = column[rows] - begins[n]
            rows, local = (x.to(k.device, non_blocking=True) for x in (rows, local))
            self.k[n][rows, :, local] = k[rows]
            self.v[n][rows, :, local] = v[rows]

    def token_of_all(self, rows: list[int], slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For the sequences `rows` the token that they have been given, its slots (rows, H), k and v (rows, H, D); for
        the others one that stays as it is. (B, H), (B, H, D) and (B, H, D)."""
        shape = self.k[0].shape
        if len(rows) == shape[0]:
            return slots, k, v
        at = torch.tensor(rows, device=slots.device)
        k, v = (x[0][:, :, 0].index_copy(0, at, new) for x, new in ((self.k, k), (self.v, v)))
        return slots.new_zeros(shape[:2]).index_copy_(0, at, slots), k, v

    @contextmanager
    def rows(self, rows: list[int]) -> Iterator[KVTensors]:
        """The caches of some sequences, in order; what is changed in them is changed here, at the end at the latest."""
        if len(rows) == self.k[0].shape[0]:  # as in nearly all steps
            yield self
            return
        whole, index = [*self.k, *self.v, *self.metadata.values()], None
        if rows == list(range(rows[0], rows[-1] + 1)):
            parts = [x[rows[0] : rows[-1] + 1] for x in whole]
        else:
            index = torch.tensor(rows, device=whole[0].device)
            parts = [x.index_select(0, index) for x in whole]
        count = len(self.k)
        yield KVTensors(parts[:count], parts[count : 2 * count], dict(zip(self.metadata, parts[2 * count :])))
        if index is not None:
            for x, part in zip(whole, parts):
                x.index_copy_(0, index, part)


@dataclass(frozen=True)
class KVLayout:
    """How a KV block lies in memory: a buffer with k and v of each segment, and one with the metadata of all slots. The
    segments in use are the beginning of the first buffer."""

    batch: int
    heads: int
    segments: tuple[int, ...]
    head_dim: int
    dtype: torch.dtype
    metadata: tuple[tuple[str, torch.dtype], ...] = ()  # as the rule has it, like `growth`
    growth: str = "append"

    @property
    def slots(self) -> int:
        return sum(self.segments)

    @property
    def row_bytes(self) -> int:
        """K and V of one token for the whole batch: what a decode step adds."""
        return 2 * self.batch * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def kv_bytes(self) -> int:
        return self.row_bytes * self.slots

    @property
    def meta_bytes(self) -> int:
        return self.batch * self.heads * self.slots * sum(dtype.itemsize for _, dtype in self.metadata)

    @property
    def ends(self) -> list[int]:
        """Slots up to the end of each segment."""
        return list(accumulate(self.segments))

    def used_bytes(self, held: int) -> int:
        """Bytes of the segments that hold the first `held` slots."""
        return self.row_bytes * next((end for end in self.ends if end >= held), self.slots)

    def bytes_before(self, slot: int) -> int:
        """Bytes of the segments before that of a slot."""
        return self.row_bytes * max(end for end in (0, *self.ends[:-1]) if end <= slot)

    def vectors(self, kv: np.ndarray) -> np.ndarray:
        """Bytes of a cache, or of tokens k and v (..., 2, B, H, D), as one array of their vectors of D elements."""
        return kv.view(np.dtype((np.void, self.head_dim * self.dtype.itemsize)))

    def places(self, slots: np.ndarray) -> np.ndarray:
        """Where a token's k and v (2, B, H, D) lie among the `vectors` of a cache if it is in slots (..., B, H):
        (..., 2 B H)."""
        ends = np.cumsum(self.segments)
        segment = np.searchsorted(ends, slots, side="right")
        size = np.array(self.segments)[segment]
        begin = ends[segment] - size
        count = self.batch * self.heads
        k = (2 * count - 1) * begin + slots + np.arange(count).reshape(self.batch, self.heads) * size
        v = k + count * size
        return np.stack((k, v), axis=-3).reshape(*slots.shape[:-2], -1)

    def view(self, kv: Tensor, meta: Tensor | None = None) -> KVTensors:
        """Buffers of bytes, at least `kv_bytes` and `meta_bytes` long, seen as a cache."""
        parts = kv[: self.kv_bytes].split([self.row_bytes * slots for slots in self.segments])
        shapes = [(2, self.batch, self.heads, slots, self.head_dim) for slots in self.segments]
        ks, vs = zip(*(part.view(self.dtype).view(shape) for part, shape in zip(parts, shapes)))
        found, begin = {}, 0
        for name, dtype in self.metadata:
            end = begin + self.batch * self.heads * self.slots * dtype.itemsize
            found[name] = meta[begin:end].view(dtype).view(self.batch, self.heads, self.slots)
            begin = end
        return KVTensors(list(ks), list(vs), found)
