"""The memory layout of a KV block, the cache of one (layer, batch), and its tensors.

Shapes: B sequences, H KV heads, S slots of a segment, D head size. A vector, K or V of one token and head, is stored as
W elements: D floats, or the bytes of a quantised vector, whose number may differ between K and V.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.formats import KVFormat
from h2o_flexgen.kernels.cache_loops import by_loops, put


@dataclass
class KVTensors:
    """A KV block as tensors on the device of its bytes. Matmuls are fast only over whole, contiguous tensors, so a
    growing cache consists of segments. Slots are numbered consecutively through all of them."""

    k: list[Tensor]  # per segment (B, H, S, W)
    v: list[Tensor]
    metadata: dict[str, Tensor]  # (B, H, S) by name; only of caches with one segment
    form: KVFormat

    @property
    def score(self) -> Tensor:
        """(B, H, S) fp32: the attention that the slot's token has received."""
        return self.metadata["score"]

    @property
    def position(self) -> Tensor:
        """(B, H, S) int32: the token's position in its text, -1 for an empty slot."""
        return self.metadata["position"]

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write one token per sequence and head, k and v (B, H, D) floats, into slots (B, H). With several segments,
        all heads of a sequence have the same slot, and `slots` is on the CPU."""
        stored = self.form.stored(k, v)
        if by_loops(k.device):
            put((tuple(range(k.shape[1])),), [[self.k], [self.v]], slots, stored)
            return
        for segments, new in zip((self.k, self.v), stored):
            W = new.shape[-1]
            for at, rows, n in self._places(slots):
                segments[n].view(-1, W).index_copy_(0, at, (new if rows is None else new[rows]).reshape(-1, W))

    def token(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The stored K and V (B, H, W) in slots (B, H), which are as for `write`."""
        found = []
        for segments in (self.k, self.v):
            B, H, _, W = segments[0].shape
            token = segments[0].new_empty(B, H, W)
            for at, rows, n in self._places(slots):
                vectors = segments[n].view(-1, W).index_select(0, at).view(-1, H, W)
                token = vectors if rows is None else token.index_copy_(0, rows, vectors)
            found.append(token)
        return tuple(found)

    @property
    def reads_empty_slots(self) -> bool:
        """Whether attention also reads slots without a token. These are masked, but their values must be finite, since
        0 * NaN is NaN. In a growing cache compiled loops read no slot after the last token."""
        return bool(self.metadata) or not by_loops(self.k[0].device)

    def move(self, source: int, target: int, cached_len: int) -> None:
        """Copy the cache of sequence `source`, in its first `cached_len` slots, over the cache of `target`."""
        for segments in (self.k, self.v):
            left = cached_len
            for segment in segments:
                used = segment.shape[2] if self.reads_empty_slots else min(segment.shape[2], max(0, left))
                segment[target, :, :used] = segment[source, :, :used]
                left -= used
        for tensor in self.metadata.values():
            tensor[target] = tensor[source]

    def _places(self, slots: Tensor) -> Iterator[tuple[Tensor, Tensor | None, int]]:
        """For each segment n: (indices among its vectors, their sequences or None for all, n)."""
        device = self.k[0].device
        heads = torch.arange(slots.numel(), device=device).view(slots.shape)
        begin = 0
        for n, segment in enumerate(self.k):
            size = segment.shape[2]
            local = slots - begin
            begin += size
            if len(self.k) == 1:
                yield (heads * size + local.to(device, non_blocking=True)).view(-1), None, n
                continue
            rows = ((local[:, 0] >= 0) & (local[:, 0] < size)).nonzero()[:, 0]
            if len(rows):
                local = local[rows].to(device, non_blocking=True)
                rows = rows.to(device, non_blocking=True)
                yield (heads[rows] * size + local).view(-1), rows, n

    @contextmanager
    def rows(self, rows: list[int]) -> Iterator[KVTensors]:
        """The caches of some sequences, in order. Changes to them take effect here, at the latest on exit."""
        if len(rows) == self.k[0].shape[0]:  # the usual case
            yield self
            return
        whole = [*self.k, *self.v, *self.metadata.values()]
        index = None
        if rows == list(range(rows[0], rows[-1] + 1)):
            parts = [x[rows[0] : rows[-1] + 1] for x in whole]
        else:
            index = torch.tensor(rows, device=whole[0].device)
            parts = [x.index_select(0, index) for x in whole]
        count = len(self.k)
        metadata = dict(zip(self.metadata, parts[2 * count :]))
        yield KVTensors(parts[:count], parts[count : 2 * count], metadata, self.form)
        if index is not None:
            for x, part in zip(whole, parts):
                x.index_copy_(0, index, part)


@dataclass(frozen=True)
class KVLayout:
    """The memory layout of a KV block: a buffer with K and V of each segment in turn, so that the segments in use are
    its beginning, and a buffer with the metadata of all slots."""

    batch: int
    heads: int
    segments: tuple[int, ...]
    head_dim: int
    form: KVFormat
    metadata: tuple[tuple[str, torch.dtype], ...] = ()  # of the rule, like `growth`
    growth: str = "append"

    @property
    def slots(self) -> int:
        return sum(self.segments)

    @property
    def vector_bytes(self) -> tuple[int, int]:
        """Bytes of K and of V of one token and head."""
        return tuple(form.nbytes((self.head_dim,)) for form in self.form)

    @property
    def row_bytes(self) -> int:
        """K and V of one token for the whole batch: what a decode step adds."""
        return self.batch * self.heads * sum(self.vector_bytes)

    @property
    def kv_bytes(self) -> int:
        return self.row_bytes * self.slots

    @property
    def meta_bytes(self) -> int:
        return self.batch * self.heads * self.slots * sum(dtype.itemsize for _, dtype in self.metadata)

    @property
    def ends(self) -> list[int]:
        """Slot number at the end of each segment."""
        return list(accumulate(self.segments))

    def used_bytes(self, cached_len: int) -> int:
        """Bytes of the segments that hold the first `cached_len` slots."""
        return self.row_bytes * next((end for end in self.ends if end >= cached_len), self.slots)

    def slots_within(self, used: int) -> int:
        """Slots in the first `used` bytes, which end with a segment."""
        return used // self.row_bytes

    def bytes_before(self, slot: int) -> int:
        """Bytes of the segments before the one that holds a slot."""
        return self.row_bytes * max(end for end in (0, *self.ends[:-1]) if end <= slot)

    def row_spans(self, place: int, used: int) -> list[tuple[int, int]]:
        """(begin, end) of the bytes of the sequence at `place` within the first `used` bytes."""
        spans = []
        begin = 0
        for slots in self.segments:
            for nbytes in self.vector_bytes:
                each = self.heads * slots * nbytes
                spans.append((begin + place * each, begin + (place + 1) * each))
                begin += self.batch * each
        return [span for span in spans if span[1] <= used]

    def put(self, kv: np.ndarray, rows: np.ndarray, slots: np.ndarray) -> None:
        """Write n tokens into the bytes `kv` of a cache: rows (n, row_bytes), K and then V of all sequences and heads,
        into slots (n, B, H). The last of several tokens for one slot wins; those for slot -1 are skipped."""
        ends = np.cumsum(self.segments)
        valid = slots.reshape(-1) >= 0
        segment = np.searchsorted(ends, slots, side="right")
        size = np.array(self.segments)[segment]
        begin = ends[segment] - size
        count = self.batch * self.heads
        place = np.arange(count).reshape(self.batch, self.heads) * size + slots - begin  # in its segment's K or V
        before = begin * self.row_bytes
        read = 0
        for nbytes in self.vector_bytes:
            vector = np.dtype((np.void, nbytes))
            anywhere = np.ndarray(len(kv) - nbytes + 1, vector, kv, 0, (1,))  # the vector that begins at each byte
            vectors = np.ascontiguousarray(rows[:, read : read + count * nbytes]).view(vector).reshape(-1)
            anywhere[(before + place * nbytes).reshape(-1)[valid]] = vectors[valid]
            before += count * size * nbytes
            read += count * nbytes

    def view(self, kv: Tensor, meta: Tensor | None = None) -> KVTensors:
        """A cache over byte buffers of at least `kv_bytes` and `meta_bytes`."""
        count = self.batch * self.heads
        found = KVTensors([], [], {}, self.form)
        begin = 0
        for slots in self.segments:
            for form, nbytes, segments in zip(self.form, self.vector_bytes, (found.k, found.v)):
                end = begin + count * slots * nbytes
                width = nbytes // form.dtype.itemsize
                segments.append(kv[begin:end].view(form.dtype).view(self.batch, self.heads, slots, width))
                begin = end
        begin = 0
        for name, dtype in self.metadata:
            end = begin + count * self.slots * dtype.itemsize
            found.metadata[name] = meta[begin:end].view(dtype).view(self.batch, self.heads, self.slots)
            begin = end
        return found
