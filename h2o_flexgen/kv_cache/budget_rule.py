"""What all rules with a KV budget share: which tokens of a prompt are kept.

Shapes: as in `rule`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import KVFormat
from h2o_flexgen.kernels.attention import EMPTY, causal_attention_with_scores
from h2o_flexgen.kv_cache.full import fill, gather
from h2o_flexgen.kv_cache.head_groups import HeadGroups, alike
from h2o_flexgen.kv_cache.layers import ByHead
from h2o_flexgen.kv_cache.layout import KVTensors
from h2o_flexgen.kv_cache.rule import CacheRule, Rows, Text, Tokens, codes, column
from h2o_flexgen.models.rope import rotate_to
from h2o_flexgen.models.spec import Rope


@dataclass(frozen=True)
class BudgetRule(CacheRule):
    """Keeps `heavy` + `recent` tokens of a prompt, separately for each KV head.

    Protected tokens stay: the last `recent` ones and, out of the `heavy` slots, those of the options `first` and
    `last`. Among the others the rule's `rank` decides.

    Fields with a default are options of the KV budget (`name:option=value`), except keyword-only ones, which the engine
    fills in.

    Args:
        heavy, recent: slots.
        first: protected tokens at the beginning of the text, such as attention sinks (arXiv 2309.17453).
        last: protected tokens at the end of the prompt, where a question stands (arXiv 2605.18053).
        layers: how the slots of all KV heads are divided among them. Empty: as was measured for this model and rule,
            the first time that they met (`profiling.head_slots`); "none": all get the same; else a file by `h2o-flexgen
            calibrate`.
        by_head: slots of each KV head, by layer; empty: all have `heavy` + `recent`, which else are their means.
        groups: query heads that share a KV head.
        rope: with position rolling the model's; otherwise None.

    Raises:
        UserError: more tokens are protected than there are slots, or an option has an invalid value.
    """

    heavy: int
    recent: int
    first: int = 0
    last: int = 0
    layers: str = ""
    by_head: ByHead = field(default=(), kw_only=True)
    groups: int = field(default=1, kw_only=True)
    rope: Rope | None = field(default=None, kw_only=True)

    #: whether all KV heads of a layer must have as many slots
    needs_equal_heads: ClassVar[bool] = False
    scores_prompt = True

    def __post_init__(self):
        self.require(self.first >= 0 and self.last >= 0, "first and last must be 0 or more")
        if self.first + self.last + self.recent_window > self.slots:
            raise UserError(
                f"`kv_rule` {self.label} protects {self.first} + {self.last} tokens, but the KV budget has only "
                f"{self.slots - self.recent_window} slots besides the recent ones: give more, or protect less"
            )

    def require(self, holds: bool, what: str) -> None:
        """Raise UserError with the message `what` unless `holds`."""
        if not holds:
            raise UserError(f"`kv_rule` {self.label}: {what}")

    @property
    def slots(self) -> int:
        return self.heavy + self.recent

    @classmethod
    def options(cls) -> dict[str, object]:
        """{name: default} of the options of a KV budget."""
        return {f.name: f.default for f in fields(cls) if not f.kw_only and f.name not in ("heavy", "recent")}

    @property
    def label(self) -> str:
        """The name and the options that differ from the defaults, as in a KV budget."""
        options = {name: getattr(self, name) for name in self.options()}
        return self.name + "".join(f":{name}={x}" for name, x in options.items() if x != self.options()[name])

    def to_dict(self) -> dict:
        found = {"heavy": self.heavy, "recent": self.recent, "rule": self.label}
        if self.by_head:
            found["layers"] = [list(slots) if len(set(slots)) > 1 else slots[0] for slots in self.by_head]
        if self.rope:
            found["position_rolling"] = True
        return found

    def in_layer(self, layer: int) -> CacheRule:
        if not (self.by_head or self.attention):
            return self.for_layer(layer)
        own = self.attention[layer]._asdict() if self.attention else {}
        sizes = self.by_head[layer] if self.by_head else (self.slots,)
        groups = [(heads, self.for_layer(layer)._with_slots(slots, own)) for slots, heads in alike(sizes).items()]
        return groups[0][1] if len(groups) == 1 else HeadGroups(tuple(groups), softmax=groups[0][1].softmax)

    def _with_slots(self, slots: int, attention: dict) -> BudgetRule:
        """The rule of KV heads with so many slots, as many of them for recent tokens as on average."""
        recent = round(slots * self.recent / self.slots)
        heavy = slots - recent
        if attention and attention["softmax"].window is not None:
            heavy, recent = _within(attention["softmax"].window, heavy, recent)
        return replace(self, heavy=heavy, recent=recent, by_head=(), attention=(), **attention)

    def average(self) -> BudgetRule:
        return replace(self, by_head=())

    # what a rule may override

    def for_layer(self, layer: int) -> BudgetRule:
        """The rule for a layer, for rules that differ from one layer to the next."""
        return self

    @property
    def recent_window(self) -> int:
        """Number of the last tokens that are protected."""
        return self.recent

    def query_weights(self, position: Tensor, newest: Tensor) -> Tensor | None:
        """(B, T) fp32: the weight of each query's attention in a prompt's scores; None: 1. Or (B, 2, T), whose second
        half counts as `votes`. position (B, T) of the queries, newest (B, 1) the last real one."""
        return None

    def remember(self, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """{name: (B, KV, T)}: what else `rank` needs to know about each token. k, v (B, KV, T, D)."""
        return {}

    def protects(self, tokens: Tokens) -> Tensor:
        """(B, KV, N) bool, a new tensor: the tokens that must stay, at most `slots` in all."""
        position = tokens.position
        stays = position > tokens.newest - self.recent_window
        if self.first:
            stays.logical_or_(position < self.first)
        if self.last:
            stays.logical_or_((position >= tokens.prompt - self.last) & (position < tokens.prompt))
        return stays

    def rank(self, tokens: Tokens) -> Tensor:
        """(B, KV, N) floats, which decide among unprotected tokens: the highest stay after a prompt, the lowest goes
        after a step. Of equal ones the earlier stays after a prompt and goes after a step. Values for padding and empty
        slots are ignored."""
        return tokens.score

    def step_scores(self, score: Tensor, received: Tensor) -> Tensor:
        """The scores (B, KV, S) after a step in which the tokens received this attention (B, KV, S); may write to
        `score`."""
        return score.add_(received)

    def prompt_step_scores(self, score: Tensor, received: Tensor, count: Tensor) -> Tensor:
        """(B, KV, N): the scores of earlier tokens after `count` (B, 1, 1) more tokens of a prompt, from which they
        received this weighted attention; may write to `score`. Where `step_scores` lets scores fade at every step, this
        must do so `count` times."""
        return self.step_scores(score, received)

    def prompt_scores(self, metadata: dict[str, Tensor]) -> Tensor:
        """(B, KV, N): the scores with which the tokens of a prompt enter the cache. `metadata`: (B, KV, N) by name, of
        all of them: `score`, and `votes` if there are any; `position` ascends, but for padding, -1."""
        return metadata["score"]

    # the prompt

    def read(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Rows,
        past: Text | None = None,
        form: KVFormat | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Text]:
        """As `CacheRule.read`. Every query also adds its attention to the scores of all tokens that it sees. With one
        new token this is a decode step, except for ties and votes.

        Keys, and so scores, are laid out as

            | past, padded to its longest row | new tokens, padded to the longest row |
            0                             past_end                                     N
        """
        T = k.shape[2]
        newest = (rows.length + rows.new - 1)[:, None]
        position = rows.length[:, None] + torch.arange(T)
        weights = self.weights_of(position, newest, rows.prompt[:, None] - 1).to(k.device, non_blocking=True)
        position = torch.where(position <= newest, position, -1)[:, None]
        position = position.to(torch.int32).to(k.device, non_blocking=True)
        metadata = {"position": position.expand(k.shape[:3]), **self.remember(k, v)}
        text = Text(k, v, codes(form, k, v), metadata, rows.new).appended_to(past)
        past_end = text.k.shape[2] - T
        past_len = torch.zeros_like(rows.new) if past is None else past.length
        ages = self._ages(past, rows) if past_end else None
        keys = text.k
        if self.rope:
            q, keys = self._rolled(q, keys, past_len, past_end)
        context, score = causal_attention_with_scores(q, keys, text.v, weights, ages, self.softmax.with_sinks(sinks))
        received = self.received(score)
        text.metadata.update(received)
        if past_end:  # so far `score` counts the new queries alone
            received = received["score"][:, :, :past_end]
            before = past.metadata["score"].expand(received.shape).clone()
            received.copy_(self.prompt_step_scores(before, received, column(rows.new, k.device)))
        return context, text

    def _ages(self, past: Text, rows: Rows) -> Tensor | None:
        """As for `causal_attention_with_scores`: by positions in the text where a window needs them, else by ranks."""
        end = past.k.shape[2]
        by_rank = self.softmax.window is None or self.rope is not None
        if int(past.length.min()) == end and (by_rank or int(rows.length.max()) == end):
            return None
        device = past.k.device
        place = torch.arange(end, dtype=torch.int32, device=device)
        cached_len = column(past.length, device)
        ages = cached_len - place if by_rank else column(rows.length, device) - past.metadata["position"]
        return torch.where(place < cached_len, ages, EMPTY)

    def weights_of(self, position: Tensor, newest: Tensor, prompt_end: Tensor | None = None) -> Tensor:
        """`query_weights`, and 0 for padding, which is after `newest`. `prompt_end`: position of the prompt's last
        token, if it is not `newest`."""
        weights = self.query_weights(position, newest if prompt_end is None else prompt_end)
        real = position <= newest
        if weights is None:
            return real.float()
        return torch.where(real if weights.dim() == 2 else real[:, None], weights, 0.0)

    @staticmethod
    def received(score: Tensor) -> dict[str, Tensor]:
        """{name: (B, KV, N)} of what tokens received with `weights_of`."""
        return {"score": score} if score.dim() == 3 else dict(zip(("score", "votes"), score.unbind(2)))

    def _rolled(self, q: Tensor, k: Tensor, past_len: Tensor, past_end: int) -> tuple[Tensor, Tensor]:
        """Queries and keys rotated to their ranks. The first `past_end` keys are cached tokens, `past_len` (B,) of each
        sequence; the ranks of new tokens follow those."""
        end = k.shape[2]
        place = torch.arange(end, device=k.device)
        rank = torch.where(place < past_end, place, place - past_end + column(past_len, k.device))
        return rotate_to(self.rope, q, rank[..., past_end:], end), rotate_to(self.rope, k, rank, end)

    def keep(self, cache: KVTensors, text: Text) -> None:
        position = text.metadata["position"]
        newest = position[:, :1].amax(2, keepdim=True)
        scores = self.prompt_scores(text.metadata)
        tokens = Tokens(text.metadata | {"score": scores}, newest, newest + 1)
        k, v = text.stored
        kept = min(self.slots, k.shape[2])
        best = self.chosen(tokens, kept)
        fill(cache, *gather(best, k, v))
        for name, _ in self.metadata:
            cache.metadata[name][:, :, kept:] = -1
            cache.metadata[name][:, :, :kept] = tokens.metadata[name].gather(2, best)
        if self.rope:
            cache.metadata["rank"].copy_((cache.position >= 0).cumsum(-1) - 1).clamp_(min=0)

    def chosen(self, tokens: Tokens, kept: int) -> Tensor:
        """(B, KV, kept) int64: indices of the tokens that stay; padding and empty slots are among them only where there
        are too few tokens. With position rolling they are in ascending order."""
        shape = tokens.position.shape
        if kept == shape[-1]:
            return torch.arange(kept, device=tokens.position.device).expand(shape)
        ranked = self._ranked(tokens).masked_fill_(tokens.position < 0, float("-inf"))
        # stable: of equal scores the earlier token comes first
        best = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :kept]
        return best.sort(-1).values if self.rope else best

    def _ranked(self, tokens: Tokens) -> Tensor:
        """`rank` as a new tensor (B, KV, N), with infinity for protected tokens, and minus infinity for those that the
        next query does not see."""
        # torch.where: on a CPU masked_fill takes twice as long
        ranked = torch.where(self.protects(tokens), float("inf"), self.rank(tokens))
        if self.softmax.window is None or self.rope is not None:
            return ranked
        return torch.where(tokens.position > tokens.newest + 1 - self.softmax.window, ranked, float("-inf"))


def _within(window: int, heavy: int, recent: int) -> tuple[int, int]:
    """Slots of the same ratio beside a new token in its window."""
    most = window - 1
    if heavy + recent <= most:
        return heavy, recent
    least = min(1, recent, most)
    recent = max(least, round(most * recent / (heavy + recent)))
    return most - recent, recent
