"""Compiled loops over a KV cache on a CPU: attention, and the slots of new tokens.

KV heads with as many slots are a part of the cache; one call serves all parts. Shapes: B sequences, H query heads, KV
heads of K and V, D elements of a head, S slots, W elements of a stored vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache as remember
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.compiled import threads
from h2o_flexgen.compiled.threads import float_array
from h2o_flexgen.formats import KVFormat

if TYPE_CHECKING:
    from h2o_flexgen.kernels.attention import Softmax

#: of a cache all slots of which are in use, and of attention without sinks
_ALL_SLOTS = np.empty(0, np.int64)
_NO_SINKS = np.empty((0, 0), np.float32)

#: the KV heads of each part of a cache
Heads = tuple[tuple[int, ...], ...]
#: (B, heads of the part, slots, W), or without W, of each segment of each part
Segments = Sequence[Sequence[Tensor]]


def by_loops(device: torch.device) -> bool:
    """Whether there are compiled loops, which read no slot beyond those in use, for caches on a device."""
    return device.type == "cpu" and threads.compiled() is not None


class Cache(NamedTuple):
    """K and V."""

    heads: Heads
    k: Segments
    v: Segments
    form: KVFormat
    cached_len: Tensor | None = None  # as in `attention.cached_attention`
    empty: Sequence[Tensor | None] | None = None  # of each part (B, heads, sum of S) bool; None: no slot is empty


def attend(q: Tensor, cache: Cache, softmax: Softmax) -> tuple[Tensor, list[Tensor] | None]:
    """`attention.cached_attention`, with the attention that the slots of each part receive."""
    B, H, _, D = q.shape
    KV = sum(map(len, cache.heads))
    queries = q.reshape(B * KV, H // KV, D)
    context = torch.empty_like(queries)
    sizes = _sizes(cache.k)
    slots = sizes.sum(1).tolist()
    cached_len = cache.cached_len
    received = None
    if cached_len is None:
        received = [torch.zeros(B, len(heads), S) for heads, S in zip(cache.heads, slots)]
        read = B * sum(len(heads) * S for heads, S in zip(cache.heads, slots))
    else:
        read = KV * int(cached_len.sum())
    sinks = _NO_SINKS if softmax.sinks is None else softmax.sinks_of(B, KV).numpy()
    # `Vectors`, `Slots` and `Softmax` of the loop as plain tuples
    none = [None] * len(slots)
    used = _ALL_SLOTS if cached_len is None else cached_len.numpy()
    places = (sizes, _places(cache.heads), used, _each(cache.empty or none))
    stored = (_vectors(cache.form.k, D, cache.k), _vectors(cache.form.v, D, cache.v), places)
    logits = (softmax.scale_of(D), softmax.cap or 0.0, sinks)
    arrays = [stored, logits, float_array(queries), float_array(context), _each(received or none)]
    loop = threads.compiled().attention.attend
    threads.in_threads(lambda begin, end: loop(begin, end, *arrays), B * KV, 2 * D * read)
    return context.view(B, H, 1, D), received


class Candidates(NamedTuple):
    """The slots that a new token may take, each (B, heads of a part, S)."""

    rank: Tensor  # fp32
    stays: Tensor  # bool, protected
    position: Tensor  # int32, below 0 if empty


def free_slots(heads: Heads, parts: Sequence[Candidates], newest: Tensor, window: int | None) -> Tensor:
    """(B, KV) int64: the slot of each head that the next token takes. An empty one; or that of a token which the next
    query does not see; or the unprotected one of the lowest rank. Of equal ones it is the earliest.

    Args:
        newest: (B, 1, 1) int32, position of the newest token.
        window: as in `Softmax`.
    """
    assert all(x.dtype == torch.float32 for x, _, _ in parts)
    assert all(rank.shape == stays.shape == position.shape for rank, stays, position in parts)
    slots = torch.empty(len(newest), sum(map(len, heads)), dtype=torch.int64)
    tokens = np.array([_each(x) for x in zip(*parts)])
    sizes = _sizes([[x] for x, _, _ in parts])
    arrays = [newest.view(-1).numpy(), window or 0, slots.view(-1).numpy()]
    threads.compiled().attention.free_slots(tokens, sizes, _places(heads), *arrays)
    return slots


def put(heads: Heads, fields: Sequence[Segments], slots: Tensor, new: Sequence[Tensor]) -> None:
    """Write one vector per sequence and head of each field, new (B, KV, W) of its type, into slots (B, KV)."""
    assert all(segments[0][0].dtype == x.dtype for segments, x in zip(fields, new))
    new = [x.contiguous() for x in new]
    count = slots.numel()
    nbytes = np.array([x.nbytes // count for x in new])
    parts = [*chain.from_iterable(fields)]
    where = _addresses(parts).reshape(len(fields), len(heads), -1)
    slots = slots.reshape(-1).contiguous().numpy()
    threads.compiled().attention.put(where, nbytes, _sizes(fields[0]), _places(heads), slots, _each(new))


def _vectors(form, D: int, segments: Segments) -> tuple:
    vectors = segments[0][0]
    return (form.loop_kind, D, vectors.shape[-1] * vectors.itemsize, _addresses(segments))


def _addresses(segments: Segments) -> np.ndarray:
    """(P, N) int64. The compiled loops check neither these nor sizes."""
    return _each([*chain.from_iterable(segments)]).reshape(len(segments), -1)


def _each(tensors: Sequence[Tensor | None]) -> np.ndarray:
    """Their addresses, 0 for None."""
    assert all(x is None or x.is_contiguous() for x in tensors)
    return np.array([0 if x is None else x.data_ptr() for x in tensors])


def _sizes(segments: Segments) -> np.ndarray:
    """(P, N) int64: slots."""
    sizes = [x.shape[2] for x in chain.from_iterable(segments)]
    return np.array(sizes).reshape(len(segments), -1)


@remember
def _places(heads: Heads) -> np.ndarray:
    """`Slots.heads` of the loop."""
    found = np.empty((sum(map(len, heads)), 3), np.int64)
    for part, own in enumerate(heads):
        for place, head in enumerate(own):
            found[head] = part, place, len(own)
    return found
