"""A decode step over a cache of constant size by compiled loops: all KV heads of a layer in one call, even if they have
different numbers of slots.

Shapes: as in `rule`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.kernels import cache_loops
from h2o_flexgen.kernels.cache_loops import Cache, Candidates
from h2o_flexgen.kv_cache.layout import KVTensors
from h2o_flexgen.kv_cache.rule import Rows, Tokens

if TYPE_CHECKING:
    from h2o_flexgen.kv_cache.fixed_rule import FixedRule


class Part(NamedTuple):
    """The KV heads of a layer that have as many slots."""

    heads: tuple[int, ...]
    rule: FixedRule
    cache: KVTensors

    def candidates(self, rows: Rows) -> Candidates:
        """The slots that the new token may take."""
        tokens = Tokens(self.cache.metadata, rows.newest, rows.prompt_end)
        shape = tokens.position.shape  # a rule may leave out axes along which it does not change
        rank, stays = (
            x.expand(shape).contiguous() for x in (self.rule.rank(tokens).float(), self.rule.protects(tokens))
        )
        return Candidates(rank, stays, tokens.position)

    @property
    def fields(self) -> list[list[Tensor]]:
        """What a slot holds, each by segments."""
        return [self.cache.k, self.cache.v, *([x] for x in self.cache.metadata.values())]


def decode(
    parts: list[Part], q: Tensor, k: Tensor, v: Tensor, rows: Rows, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`CacheRule.decode` of rules that differ only in the number of slots."""
    rule = parts[0].rule
    heads = tuple(part.heads for part in parts)
    slots = cache_loops.free_slots(heads, [part.candidates(rows) for part in parts], rows.newest, rule.softmax.window)

    form = parts[0].cache.form
    new = {
        "score": torch.zeros(k.shape[:3]),
        "position": rows.position.expand(k.shape[:3]),
        **rule.remember(k, v),
    }
    new = [*form.stored(k[:, :, 0], v[:, :, 0]), *(new[name] for name in parts[0].cache.metadata)]
    cache_loops.put(heads, [*zip(*(part.fields for part in parts))], slots, new)

    empty = [part.cache.position < 0 if rows.shortest + 1 < part.cache.k[0].shape[2] else None for part in parts]
    k_of_parts = [part.cache.k for part in parts]
    v_of_parts = [part.cache.v for part in parts]
    cache = Cache(heads, k_of_parts, v_of_parts, form, empty=empty)
    context, received = cache_loops.attend(q, cache, rule.softmax.with_sinks(sinks))
    for part, each in zip(parts, received):
        score = part.cache.score
        score.copy_(part.rule.step_scores(score, each))
    return context, slots
