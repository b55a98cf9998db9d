"""A layer whose KV heads have different numbers of slots.

Heads with as many slots form a group, and each group is a rectangular part of the layer's KV block:

    heads 0, 2: 51 slots      | K | V |
    head 1: 410 slots         |         K         |         V         |

All groups follow the same rule. Shapes: as in `rule`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache as remember
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.formats import KVFormat
from h2o_flexgen.kernels.cache_loops import by_loops
from h2o_flexgen.kv_cache import fixed_step
from h2o_flexgen.kv_cache.fixed_step import Part
from h2o_flexgen.kv_cache.layout import KVLayout, KVTensors
from h2o_flexgen.kv_cache.rule import CacheRule, Rows, Text
from h2o_flexgen.models.spec import ModelSpec

if TYPE_CHECKING:
    from h2o_flexgen.kv_cache.budget_rule import BudgetRule

#: KV heads of a layer
Heads = tuple[int, ...]


@dataclass(frozen=True)
class HeadGroups(CacheRule):
    """The same rule in every group of heads, with the slots of the group.

    Args:
        groups: the heads of each group, and its rule. The caches of all rules have a constant size.
    """

    groups: tuple[tuple[Heads, BudgetRule], ...]

    growth = "fixed"

    def __post_init__(self):
        assert all(rule.growth == "fixed" for rule in self.rules)

    @property
    def rules(self) -> list[BudgetRule]:
        return [rule for _, rule in self.groups]

    @property
    def heads(self) -> list[Heads]:
        return [heads for heads, _ in self.groups]

    # what all groups share

    @property
    def name(self) -> str:
        return self.rules[0].name

    @property
    def rope(self):
        return self.rules[0].rope

    @property
    def metadata(self):
        return self.rules[0].metadata

    @property
    def scores_prompt(self) -> bool:
        return self.rules[0].scores_prompt

    @property
    def voters(self) -> int:
        return self.rules[0].voters

    # sizes

    @property
    def slots(self) -> int:
        """Of the heads with the most."""
        return max(rule.slots for rule in self.rules)

    @property
    def budget(self) -> int:
        return self.slots

    def segments(self, prompt_len: int, gen_len: int) -> tuple[int, ...]:
        """Of the heads with the most slots."""
        return max(rule.segments(prompt_len, gen_len) for rule in self.rules)

    def layout(self, spec: ModelSpec, form: KVFormat, batch: int, prompt_len: int, gen_len: int) -> HeadLayout:
        parts = []
        for heads, rule in self.groups:
            segments = rule.segments(prompt_len, gen_len)
            parts.append(KVLayout(batch, len(heads), segments, spec.head_dim, form, rule.slot_fields, rule.growth))
        return HeadLayout(tuple(parts), tuple(self.heads))

    # a layer

    def read(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Rows,
        past: Text | HeadTexts | None = None,
        form: KVFormat | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Text | HeadTexts]:
        if not isinstance(past, HeadTexts):  # nothing was dropped, so that all heads see the same tokens
            return self.rules[0].read(q, k, v, rows, past, form, sinks)
        contexts = []
        texts = []
        for (heads, rule), before in zip(self.groups, past.parts):
            own = Inputs(q, k, v, sinks).of_heads(heads)
            context, text = rule.read(own.q, own.k, own.v, rows, before, form, own.sinks)
            contexts.append(by_query_group(context, len(heads)))
            texts.append(text)
        return joined(contexts, self.heads).view(q.shape), HeadTexts(tuple(texts))

    def keep(self, cache: HeadTensors, text: Text | HeadTexts) -> None:
        if isinstance(text, HeadTexts):
            parts = text.parts
        else:
            parts = [text.of_heads(index(heads, text.k.device)) for heads in self.heads]
        for rule, part, own in zip(self.rules, cache.parts, parts):
            rule.keep(part, own)

    def past(self, cache: HeadTensors, length: Tensor, prompt: Tensor, dtype: torch.dtype) -> HeadTexts:
        return HeadTexts(tuple(rule.past(part, length, prompt, dtype) for rule, part in zip(self.rules, cache.parts)))

    def decode(
        self, cache: HeadTensors, q: Tensor, k: Tensor, v: Tensor, rows: Rows, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.rope is None and by_loops(k.device):
            parts = [Part(heads, rule, part) for (heads, rule), part in zip(self.groups, cache.parts)]
            return fixed_step.decode(parts, q, k, v, rows, sinks)
        contexts = []
        slots = []
        for (heads, rule), part in zip(self.groups, cache.parts):
            own = Inputs(q, k, v, sinks).of_heads(heads)
            context, taken = rule.decode(part, own.q, own.k, own.v, rows, own.sinks)
            contexts.append(by_query_group(context, len(heads)))
            slots.append(taken)
        return joined(contexts, self.heads).view(q.shape), joined(slots, self.heads)

    def clear(self, cache: HeadTensors) -> None:
        """Empty the cache."""
        for rule, part in zip(self.rules, cache.parts):
            rule.clear(part)


@dataclass(frozen=True)
class HeadTexts:
    """A text for each group of heads, which have dropped different tokens."""

    parts: tuple[Text, ...]

    def to(self, device: torch.device) -> HeadTexts:
        return HeadTexts(tuple(part.to(device) for part in self.parts))


@dataclass
class HeadTensors:
    """As `KVTensors`, with a part for each group of heads."""

    parts: list[KVTensors]
    heads: tuple[Heads, ...]

    @property
    def form(self) -> KVFormat:
        return self.parts[0].form

    @property
    def k(self) -> list[Tensor]:
        """Of each part."""
        return [part.k[0] for part in self.parts]

    def token(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        found = [part.token(slots[:, index(heads, slots.device)]) for part, heads in zip(self.parts, self.heads)]
        return tuple(joined(each, self.heads) for each in zip(*found))

    def move(self, source: int, target: int, cached_len: int) -> None:
        for part in self.parts:
            part.move(source, target, cached_len)

    @contextmanager
    def rows(self, rows: list[int]) -> Iterator[HeadTensors]:
        with ExitStack() as stack:
            yield HeadTensors([stack.enter_context(part.rows(rows)) for part in self.parts], self.heads)


@dataclass(frozen=True)
class HeadLayout:
    """As `KVLayout`: the buffers hold the parts one after another."""

    parts: tuple[KVLayout, ...]
    of_parts: tuple[Heads, ...]

    growth = "fixed"

    @property
    def batch(self) -> int:
        return self.parts[0].batch

    @property
    def heads(self) -> int:
        return sum(part.heads for part in self.parts)

    @property
    def slots(self) -> int:
        return max(part.slots for part in self.parts)

    @property
    def segments(self) -> tuple[int, ...]:
        return (self.slots,)

    @property
    def row_bytes(self) -> int:
        return sum(part.row_bytes for part in self.parts)

    @property
    def kv_bytes(self) -> int:
        return sum(part.kv_bytes for part in self.parts)

    @property
    def meta_bytes(self) -> int:
        return sum(part.meta_bytes for part in self.parts)

    @property
    def ends(self) -> list[int]:
        return [self.slots]

    def used_bytes(self, cached_len: int) -> int:
        return self.kv_bytes

    def slots_within(self, used: int) -> int:
        return self.slots

    def row_spans(self, place: int, used: int) -> list[tuple[int, int]]:
        found = []
        for part, begin in zip(self.parts, self._begins):
            found += [(begin + first, begin + last) for first, last in part.row_spans(place, part.kv_bytes)]
        return found

    @property
    def _begins(self) -> list[int]:
        """Where the K and V of each part begin."""
        return [*accumulate((part.kv_bytes for part in self.parts), initial=0)][:-1]

    def put(self, kv: np.ndarray, rows: np.ndarray, slots: np.ndarray) -> None:
        k, v = np.split(rows[:, : self.row_bytes], [self.batch * self.heads * self.parts[0].vector_bytes[0]], axis=1)
        by_head = [x.reshape(len(rows), self.batch, self.heads, -1) for x in (k, v)]
        for part, heads, begin in zip(self.parts, self.of_parts, self._begins):
            own = np.concatenate([x[:, :, list(heads)].reshape(len(rows), -1) for x in by_head], 1)
            part.put(kv[begin : begin + part.kv_bytes], own, slots[:, :, list(heads)])

    def view(self, kv: Tensor, meta: Tensor) -> HeadTensors:
        found = []
        begin = 0
        for part, first in zip(self.parts, self._begins):
            own = meta[begin : begin + part.meta_bytes]
            found.append(part.view(kv[first : first + part.kv_bytes], own))
            begin += part.meta_bytes
        return HeadTensors(found, self.of_parts)


def alike(sizes: Sequence[int]) -> dict[int, Heads]:
    """{slots: the heads that have as many}, the fewest first."""
    found: dict[int, Heads] = defaultdict(tuple)
    for head, slots in enumerate(sizes):
        found[slots] += (head,)
    return dict(sorted(found.items()))


class Inputs(NamedTuple):
    """What attention reads: q (B, H, T, D), k and v (B, KV, T, D), sinks (H,) or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None

    def of_heads(self, heads: Heads) -> Inputs:
        """The part that belongs to some KV heads."""
        at = index(heads, self.k.device)
        KV = self.k.shape[1]
        queries = by_query_group(self.q, KV)[:, at].flatten(1, 2)
        sinks = None if self.sinks is None else self.sinks.view(KV, -1)[at].flatten()
        return Inputs(queries, self.k[:, at], self.v[:, at], sinks)


def by_query_group(q: Tensor, kv_heads: int) -> Tensor:
    """(B, H, T, D) as (B, KV, H / KV, T, D)."""
    return q.unflatten(1, (kv_heads, -1))


def joined(parts: Sequence[Tensor], heads: Sequence[Heads]) -> Tensor:
    """The parts (B, heads of a group, ...) as one tensor (B, KV, ...)."""
    first = parts[0]
    found = first.new_empty(first.shape[0], sum(map(len, heads)), *first.shape[2:])
    for part, own in zip(parts, heads):
        found.index_copy_(1, index(own, first.device), part)
    return found


@remember
def index(heads: Heads, device: torch.device) -> Tensor:
    """Heads as an index on a device, copied there once."""
    return torch.tensor(heads, device=device)
