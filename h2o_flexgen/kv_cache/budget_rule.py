"""What rules with a KV budget share: what of a prompt is kept.

Shapes: as in `rule`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import KVFormat
from h2o_flexgen.kernels.attention import causal_attention_with_scores
from h2o_flexgen.kv_cache.full import fill
from h2o_flexgen.kv_cache.layout import KVTensors
from h2o_flexgen.kv_cache.rule import CacheRule, Rows, Text, Tokens, codes
from h2o_flexgen.models.rope import rotate_to

#: fields of a rule that are no options of a KV budget's `rule`
NO_OPTIONS = ("heavy", "recent", "by_layer", "groups", "rope")


@dataclass(frozen=True)
class BudgetRule(CacheRule):
    """Keeps `heavy` + `recent` tokens of a prompt, for each KV head its own.

    Protected tokens stay: the last `recent` ones, and of the `heavy` slots the first tokens of the text and the last
    ones of the prompt, if the rule is given such options. Among the others the rule's `rank` decides.

    Args:
        heavy, recent: slots.
        first: protected tokens at the beginning of the text, such as attention sinks (arXiv 2309.17453).
        last: protected tokens at the end of the prompt, where a question stands (arXiv 2605.18053).
        layers: a file by `h2o-flexgen calibrate`, which says how the slots of all layers are shared out among them;
            empty: all layers get the same.
        by_layer: (heavy, recent) of each layer by that file; then `heavy` and `recent` are their means.
        groups: query heads that share a KV head.

    Raises:
        UserError: more tokens are protected than there are slots for, or an option has a value that means nothing.
    """

    heavy: int
    recent: int
    first: int = 0
    last: int = 0
    layers: str = ""
    by_layer: tuple[tuple[int, int], ...] = field(default=(), kw_only=True)
    groups: int = field(default=1, kw_only=True)

    scores_prompt = True

    def __post_init__(self):
        self.require(self.first >= 0 and self.last >= 0, "first and last must be 0 or more")
        if self.first + self.last + self.recent_window > self.slots:
            raise UserError(
                f"`kv_rule` {self.label} protects {self.first} + {self.last} tokens, but the KV budget has only "
                f"{self.slots - self.recent_window} slots besides the recent ones: give more, or protect less"
            )

    def require(self, holds: bool, what: str) -> None:
        """Raises UserError, which says `what` must be so of the options, unless it is."""
        if not holds:
            raise UserError(f"`kv_rule` {self.label}: {what}")

    @property
    def slots(self) -> int:
        return self.heavy + self.recent

    @property
    def label(self) -> str:
        """The name, and the options that are not the rule's defaults, as a KV budget has them."""
        options = [f for f in fields(self) if f.name not in NO_OPTIONS]
        given = [f":{f.name}={getattr(self, f.name)}" for f in options if getattr(self, f.name) != f.default]
        return self.name + "".join(given)

    def to_dict(self) -> dict:
        found = {"heavy": self.heavy, "recent": self.recent, "rule": self.label}
        found |= {"layers": [heavy + recent for heavy, recent in self.by_layer]} if self.by_layer else {}
        return found | ({"position_rolling": True} if self.rope else {})

    def in_layer(self, layer: int) -> BudgetRule:
        if not self.by_layer:
            return self
        heavy, recent = self.by_layer[layer]
        return replace(self, heavy=heavy, recent=recent, by_layer=())

    # what a rule may say otherwise

    @property
    def recent_window(self) -> int:
        """How many of the last tokens are protected."""
        return self.recent

    def query_weights(self, position: Tensor, newest: Tensor) -> Tensor | None:
        """(B, T) fp32: what the attention of each query is multiplied with in a prompt's scores; None: 1. position
        (B, T) of the queries, newest (B, 1) the last real one."""
        return None

    def remember(self, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """(B, KV, T) by name: what else of each token `rank` must know. k, v (B, KV, T, D)."""
        return {}

    def protects(self, tokens: Tokens) -> Tensor:
        """(B, KV, N) bool, a tensor of its own: the tokens that must stay, at most `slots` in all."""
        position = tokens.position
        stays = position > tokens.newest - self.recent_window
        if self.first:
            stays.logical_or_(position < self.first)
        if self.last:
            stays.logical_or_((position >= tokens.prompt - self.last) & (position < tokens.prompt))
        return stays

    def rank(self, tokens: Tokens) -> Tensor:
        """(B, KV, N) floats: of the tokens that are not protected, the highest stay after a prompt, of equal ones the
        earlier; and the lowest goes after a step, of equal ones the earlier. What it says of padding and empty slots is
        of no account."""
        return tokens.score

    # the prompt

    def read(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, past: Text | None = None, form: KVFormat | None = None
    ) -> tuple[Tensor, Text]:
        """As `CacheRule.read`: each query adds its attention to the scores of all tokens that it sees, those of `past`
        too. With one token it is what a decode step does, but for equal scores."""
        newest = rows.length + rows.new - 1
        position = rows.length[:, None] + torch.arange(k.shape[2])
        weights = self.weights_of(position, newest[:, None], rows.prompt[:, None] - 1).to(k.device, non_blocking=True)
        position = torch.where(position <= newest[:, None], position, -1)[:, None]
        position = position.to(torch.int32).to(k.device, non_blocking=True)
        metadata = {"position": position.expand(k.shape[:3]), **self.remember(k, v)}
        text = Text(k, v, codes(form, k, v), metadata, rows.new).behind(past)
        before = text.k.shape[2] - k.shape[2]
        empty = None
        rotated = (q, text.k)
        if before and int(past.length.min()) < before:
            empty = torch.arange(before, device=k.device) >= column(past.length, k.device)[:, 0]
        if self.rope:
            rotated = self._rolled(q, text.k, torch.zeros_like(rows.new) if past is None else past.length, before)
        context, score = causal_attention_with_scores(*rotated, text.v, weights, empty)
        if before:
            received = score[:, :, :before]
            old = past.metadata["score"].expand(received.shape).clone()
            received.copy_(self.prompt_step_scores(old, received, column(rows.new, k.device)))
        text.metadata["score"] = score
        return context, text

    def prompt_step_scores(self, score: Tensor, received: Tensor, count: Tensor) -> Tensor:
        """The scores (B, KV, N) of tokens that were there before `count` (B, 1, 1) tokens of a prompt, which gave them
        this attention, each query times its weight; it may write to `score`."""
        return score.add_(received)

    def weights_of(self, position: Tensor, newest: Tensor, last: Tensor | None = None) -> Tensor:
        """(B, T) fp32: how much each query counts, as `query_weights` says; padding, behind `newest`, does not. `last`:
        position of the prompt's last token, if that is not `newest`."""
        weights = self.query_weights(position, newest if last is None else last)
        real = position <= newest
        return real.float() if weights is None else torch.where(real, weights, 0.0)

    def keep(self, cache: KVTensors, text: Text) -> None:
        newest = text.metadata["position"][:, :1].amax(2, keepdim=True)
        tokens = Tokens(text.metadata, newest, newest + 1)
        k, v = text.stored
        kept = min(self.slots, k.shape[2])
        best = self.chosen(tokens, kept)
        fill(cache, *gather(best, k, v))
        for name, _ in self.metadata:
            cache.metadata[name][:, :, kept:] = -1
            cache.metadata[name][:, :, :kept] = tokens.metadata[name].gather(2, best)
        if self.rope:
            cache.metadata["rank"].copy_((cache.position >= 0).cumsum(-1) - 1).clamp_(min=0)

    def _rolled(self, q: Tensor, k: Tensor, cached_len: Tensor, before: int) -> tuple[Tensor, Tensor]:
        """Queries and keys at their ranks: of the keys the first `before` are of held tokens, `cached_len` (B,) of each
        sequence, and the others and the queries of new ones."""
        end = k.shape[2]
        rank = torch.arange(end, device=k.device)
        rank = torch.where(rank < before, rank, rank - before + column(cached_len, k.device))
        return rotate_to(self.rope, q, rank[..., before:], end), rotate_to(self.rope, k, rank, end)

    def chosen(self, tokens: Tokens, kept: int) -> Tensor:
        """(B, KV, kept) int64: places of the tokens that stay, with padding and empty ones only where there are no
        others. With position rolling they are in order."""
        shape = tokens.position.shape
        if kept == shape[-1]:
            return torch.arange(kept, device=tokens.position.device).expand(shape)
        ranked = self._ranked(tokens).masked_fill_(tokens.position < 0, float("-inf"))
        # stable: of equal scores the earlier token comes first
        best = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :kept]
        return best.sort(-1).values if self.rope else best

    def _ranked(self, tokens: Tokens) -> Tensor:
        """`rank` in a tensor of its own (B, KV, N), with infinity for the tokens that must stay."""
        # torch.where: on a CPU masked_fill takes twice as long
        return torch.where(self.protects(tokens), float("inf"), self.rank(tokens))


def column(lengths: Tensor, device: torch.device) -> Tensor:
    """(B,) on the CPU as (B, 1, 1) int32 on a device."""
    return lengths.to(torch.int32).to(device, non_blocking=True)[:, None, None]


def gather(at: Tensor, *stored: Tensor) -> list[Tensor]:
    """Vectors (B, KV, N, W) at places (B, KV, n): (B, KV, n, W) of each."""
    return [x.gather(2, at[..., None].expand(*at.shape, x.shape[3])) for x in stored]
