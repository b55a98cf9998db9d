"""What rules with a cache of constant size share: each new token takes the slot of one that goes.

Shapes: as in `rule`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_flexgen.kernels.attention import cached_attention
from h2o_flexgen.kernels.cache_loops import by_loops
from h2o_flexgen.kv_cache import fixed_step
from h2o_flexgen.kv_cache.budget_rule import BudgetRule
from h2o_flexgen.kv_cache.fixed_step import Part
from h2o_flexgen.kv_cache.full import gather
from h2o_flexgen.kv_cache.layout import KVTensors
from h2o_flexgen.kv_cache.rule import Rows, Text, Tokens, column
from h2o_flexgen.models.rope import rotate_to

#: later than any position
_LATEST = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class FixedRule(BudgetRule):
    """Keeps `heavy` + `recent` tokens per sequence and KV head, whatever the length of the text, with the score and the
    position of each. Unless a rule overrides it, a token's rank is H2O's score.

    There is one slot more than the budget: which token goes is decided when the next one arrives, and that one takes
    its slot. So a step writes one slot per head, and no token ever moves.

    With position rolling the n tokens in a head's cache have, in the order of the text, the positions 0 to n - 1: their
    ranks. Keys are rotated at every use, so that rounding errors do not add up.

    In a layer with a sliding window at most one slot less is kept than the window has tokens, and each step the token
    that the next query does not see goes first. With position rolling the window is one of ranks, and holds them all.
    """

    growth = "fixed"
    metadata = (("score", torch.float32), ("position", torch.int32))

    @property
    def budget(self) -> int:
        return self.slots

    def measured_as(self, phase: str) -> str:
        """Rules with a budget do the same attention and differ in one pass over the scores."""
        return "h2o"

    def segments(self, prompt_len: int, gen_len: int) -> tuple[int, ...]:
        return (min(self.slots, prompt_len + max(0, gen_len - 2)) + 1,)

    # the cache as a text

    def clear(self, cache: KVTensors) -> None:
        """Empty the cache."""
        for tensor in (*cache.k, *cache.v, *cache.metadata.values()):
            tensor.zero_()
        cache.position.fill_(-1)

    def past(self, cache: KVTensors, length: Tensor, prompt: Tensor, dtype: torch.dtype) -> Text:
        cached_len = length.clamp(max=self.slots)
        order = torch.where(cache.position < 0, _LATEST, cache.position)
        # a full cache holds one token more than the budget: the one that goes next is no longer part of the text
        tokens = Tokens(cache.metadata, column(length - 1, order.device), column(prompt, order.device))
        due = self._free_slot(tokens, may_be_empty=True)
        order.scatter_(2, due[..., None], _LATEST)
        count = int(cached_len.max())
        position, at = (x[..., :count] for x in order.sort(-1))
        metadata = {name: values.gather(2, at) for name, values in cache.metadata.items()}
        metadata["position"] = torch.where(position < _LATEST, position, -1)
        stored = gather(at, cache.k[0], cache.v[0])
        if cache.form.is_dense:
            return Text(*stored, None, metadata, cached_len)
        floats = [form.floats(x, dtype) for form, x in zip(cache.form, stored)]
        return Text(*floats, tuple(stored), metadata, cached_len)

    # a step

    def decode(
        self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, rows: Rows, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.rope is None and by_loops(k.device):
            return fixed_step.decode([Part(tuple(range(k.shape[1])), self, cache)], q, k, v, rows, sinks)
        S = cache.k[0].shape[2]
        position = column(rows.length, k.device)
        # a prompt was cut to the budget, and each step has added a token, this one included
        cached_len = rows.prompt.clamp(max=self.slots) + rows.length - rows.prompt + 1
        fewest = int(cached_len.min())
        before = Tokens(cache.metadata, position - 1, column(rows.prompt, k.device))
        slots = self._free_slot(before, may_be_empty=fewest <= S)
        cache.write(slots, k[:, :, 0], v[:, :, 0])
        at = slots[..., None]
        new = {"score": at.new_zeros(at.shape, dtype=torch.float32), "position": position.expand(at.shape)}
        rotate = None
        if self.rope:
            self._close_gap(cache, at)
            rank = column(cached_len.clamp(max=S) - 1, k.device)
            new["rank"] = rank.expand(at.shape)
            q = rotate_to(self.rope, q, rank, S)
            ranks = cache.metadata["rank"].view(-1, 1, S)
            rotate = lambda keys, part: rotate_to(self.rope, keys, ranks[part], S)
        for name, value in (new | self.remember(k, v)).items():
            cache.metadata[name].scatter_(2, at, value)
        empty = cache.position < 0 if fewest < S else None
        softmax = self.softmax.with_sinks(sinks)
        context, received = cached_attention(q, cache.k, cache.v, None, empty, rotate, cache.form, softmax)
        cache.score.copy_(self.step_scores(cache.score, received))
        return context, slots

    def _close_gap(self, cache: KVTensors, at: Tensor) -> None:
        """Lower the ranks of the tokens after the one in slot `at` (B, KV, 1), which goes; none for an empty slot."""
        rank = cache.metadata["rank"]
        gone = torch.where(cache.position.gather(2, at) < 0, _LATEST, rank.gather(2, at))
        rank.sub_((rank > gone).to(torch.int32))

    def _free_slot(self, tokens: Tokens, may_be_empty: bool) -> Tensor:
        """(B, KV): an empty slot or, if there is none, the slot of the token that goes."""
        ranked = self._ranked(tokens)
        if may_be_empty:
            ranked.masked_fill_(tokens.position < 0, float("-inf"))
        lowest = ranked.amin(-1, keepdim=True)
        return torch.where(ranked <= lowest, tokens.position, _LATEST).argmin(-1)
