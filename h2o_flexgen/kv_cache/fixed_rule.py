"""What rules share whose cache stays at its size: each new token takes the slot of one that goes.

Shapes: as in `rule`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from h2o_flexgen.kernels.attention import cached_attention
from h2o_flexgen.kv_cache.budget_rule import BudgetRule, column, gather
from h2o_flexgen.kv_cache.layout import KVTensors
from h2o_flexgen.kv_cache.rule import Rows, Text, Tokens
from h2o_flexgen.models.rope import rotate_to
from h2o_flexgen.models.spec import Rope

#: later than any position
_LATEST = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class FixedRule(BudgetRule):
    """Keeps `heavy` + `recent` tokens per sequence and KV head, whatever the length of the text, with the score and the
    position of each. Unless a rule says otherwise, a token's rank is H2O's score.

    There is one slot more than the budget: the token that must go is chosen when the next one comes, and the new token
    takes its slot. So a step writes one slot per head, and no token ever moves.

    With position rolling the n tokens that a head holds have, in the order of the text, the positions 0 to n - 1: their
    ranks. Keys are rotated whenever they are used, so that no rounding adds up.

    Args:
        rope: None, or with position rolling the model's.
    """

    rope: Rope | None = field(default=None, kw_only=True)

    growth = "fixed"
    metadata = (("score", torch.float32), ("position", torch.int32))

    @property
    def budget(self) -> int:
        return self.slots

    def measured_as(self, phase: str) -> str:
        """Rules with a budget do the same attention, and differ in a pass over the scores."""
        return "h2o"

    def segments(self, prompt_len: int, gen_len: int) -> tuple[int, ...]:
        return (min(self.slots, prompt_len + max(0, gen_len - 2)) + 1,)

    # what a rule may say otherwise

    def step_scores(self, score: Tensor, received: Tensor) -> Tensor:
        """The scores (B, KV, S) after a step in which the tokens received this attention (B, KV, S); it may write to
        `score`."""
        return score.add_(received)

    def prompt_step_scores(self, score: Tensor, received: Tensor, count: Tensor) -> Tensor:
        """As `BudgetRule`: what `step_scores` forgets from step to step must be forgotten here as often."""
        return self.step_scores(score, received)

    # what a cache holds

    def clear(self, cache: KVTensors) -> None:
        """Let the cache hold nothing."""
        for tensor in (*cache.k, *cache.v, *cache.metadata.values()):
            tensor.zero_()
        cache.position.fill_(-1)

    def past(self, cache: KVTensors, length: Tensor, prompt: Tensor, dtype: torch.dtype) -> Text:
        cached_len = length.clamp(max=self.slots)
        count = int(cached_len.max())
        newest, ends = (column(x, cache.position.device) for x in (length - 1, prompt))
        order = torch.where(cache.position < 0, _LATEST, cache.position)
        # in a cache without an empty slot one token is due to go
        due = self._free_slot(Tokens(cache.metadata, newest, ends), may_be_empty=True)
        order.scatter_(2, due[..., None], _LATEST)
        order, at = (x[..., :count] for x in order.sort(-1))
        metadata = {name: values.gather(2, at) for name, values in cache.metadata.items()}
        metadata["position"] = torch.where(order < _LATEST, order, -1)
        stored = gather(at, cache.k[0], cache.v[0])
        if cache.form.is_dense:
            return Text(*stored, None, metadata, cached_len)
        floats = [form.floats(x, dtype) for form, x in zip(cache.form, stored)]
        return Text(*floats, tuple(stored), metadata, cached_len)

    # a step

    def decode(self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        S = cache.k[0].shape[2]
        # tokens in the cache, this one included
        cached_len = rows.prompt.clamp(max=self.slots) + rows.length - rows.prompt + 1
        now, n = (column(x, k.device) for x in (rows.length, rows.prompt))
        slots = self._free_slot(Tokens(cache.metadata, now - 1, n), may_be_empty=int(cached_len.min()) <= S)
        cache.write(slots, k[:, :, 0], v[:, :, 0])
        at = slots[..., None]
        new = {"score": at.new_zeros(at.shape, dtype=torch.float32), "position": now.expand(at.shape)}
        if self.rope:
            self._close_gap(cache, at)
            rank = column(cached_len.clamp(max=S) - 1, k.device)
            new["rank"] = rank.expand(at.shape)
        for name, value in (new | self.remember(k, v)).items():
            cache.metadata[name].scatter_(2, at, value)
        empty = cache.position < 0 if int(cached_len.min()) < S else None
        rotate = None
        if self.rope:
            q = rotate_to(self.rope, q, rank, S)
            ranks = cache.metadata["rank"].view(-1, 1, S)
            rotate = lambda keys, part: rotate_to(self.rope, keys, ranks[part], S)
        context, received = cached_attention(q, cache.k, cache.v, None, empty, rotate, cache.form)
        cache.score.copy_(self.step_scores(cache.score, received))
        return context, slots

    def _close_gap(self, cache: KVTensors, at: Tensor) -> None:
        """The tokens in slots `at` (B, KV, 1) go: those behind them move up by a rank. An empty slot has none."""
        rank = cache.metadata["rank"]
        gone = torch.where(cache.position.gather(2, at) < 0, _LATEST, rank.gather(2, at))
        rank.sub_((rank > gone).to(torch.int32))

    def _free_slot(self, tokens: Tokens, may_be_empty: bool) -> Tensor:
        """(B, KV): an empty slot, or else that of the token that was due to go when `newest` was the newest."""
        ranked = self._ranked(tokens)
        if may_be_empty:
            ranked.masked_fill_(tokens.position < 0, float("-inf"))
        lowest = ranked.amin(-1, keepdim=True)
        return torch.where(ranked <= lowest, tokens.position, _LATEST).argmin(-1)
