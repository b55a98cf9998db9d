"""What of a sequence's keys and values is kept: what a rule must say, and what rules with a budget share.

Shapes: B sequences, H query heads, KV heads of K and V, T prompt tokens (padded on the right), S slots, D elements of a
head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import KVFormat
from h2o_flexgen.kernels.attention import cached_attention, causal_attention_with_scores
from h2o_flexgen.kv_cache.layout import KVLayout, KVTensors
from h2o_flexgen.models.rope import rotate_to
from h2o_flexgen.models.spec import ModelSpec, Rope

#: later than any position
_LATEST = torch.iinfo(torch.int32).max
#: fields of a rule that are no options of a KV budget's `rule`
NO_OPTIONS = ("heavy", "recent", "by_layer", "groups", "rope")


class CacheRule:
    """Says which tokens a cache keeps. Subclasses are frozen dataclasses whose docstring says what is kept, why, and
    from which paper. All methods are pure functions of tensors but for the cache they fill."""

    name: ClassVar[str]  # in the registry, in policy files and in reports
    #: "append": tokens are added in the same slot of all heads; "fixed": a new token takes the slot of one that goes
    growth: ClassVar[str] = "append"
    #: (name, dtype) of what is kept for every slot of a KV head beside K and V
    metadata: ClassVar[tuple[tuple[str, torch.dtype], ...]] = ()
    #: whether prefill sums the attention that each token of a prompt receives
    scores_prompt: ClassVar[bool] = False
    #: with position rolling the model's RoPE: keys and queries come unrotated, and are cached so
    rope: ClassVar[Rope | None] = None

    @property
    def budget(self) -> int | None:
        """Tokens that are kept at most; None: they grow with the text."""
        return None

    def to_dict(self) -> dict | None:
        """The KV budget as policy files and reports have it; None: all tokens are kept."""
        return None

    def measured_as(self, phase: str) -> str:
        """The rule whose measured attention rates hold for this one too; phase as in `Profile.attention`."""
        return self.name

    def in_layer(self, layer: int) -> CacheRule:
        """The rule of one transformer block, which may have fewer or more slots than the average one."""
        return self

    def segments(self, prompt_len: int, gen_len: int) -> tuple[int, ...]:
        """Slots per sequence and head, by segment, for prompts of up to `prompt_len` and outputs of `gen_len`."""
        raise NotImplementedError

    def held(self, prompt_len: int, step: int) -> int:
        """Slots in use before a decode step, for prompts of up to `prompt_len`, if the cache grows."""
        return prompt_len + step - 1

    def layout(self, spec: ModelSpec, form: KVFormat, batch: int, prompt_len: int, gen_len: int) -> KVLayout:
        """The KV block of a layer for `batch` sequences, with vectors in a format."""
        segments = self.segments(prompt_len, gen_len)
        return KVLayout(batch, spec.kv_heads, segments, spec.head_dim, form, self.slot_fields, self.growth)

    def layouts(
        self, spec: ModelSpec, form: KVFormat, batches: Sequence[tuple[int, int]], gen_len: int
    ) -> dict[tuple[int, int], KVLayout]:
        """The KV blocks of every (layer, batch); of each batch the sequences, and the tokens of the longest prompt."""
        rules, found = [self.in_layer(layer) for layer in range(spec.layers)], {}
        for rule in dict.fromkeys(rules):
            made = {batch: rule.layout(spec, form, *batch, gen_len) for batch in set(batches)}
            found[rule] = [made[batch] for batch in batches]
        return {(layer, k): layout for layer, rule in enumerate(rules) for k, layout in enumerate(found[rule])}

    @property
    def slot_fields(self) -> tuple[tuple[str, torch.dtype], ...]:
        """All that is kept for a slot beside K and V: `metadata`, and with position rolling the token's rank."""
        return self.metadata + ((("rank", torch.int32),) if self.rope else ())

    def prefill(self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        """Causal attention over the prompts as they are, and fill the cache with what is kept of them, in its format.

        q (B, H, T, D), k and v (B, KV, T, D), lengths (B,) int64 on the CPU: sequence b has lengths[b] tokens, what
        follows is padding. Returns the context (B, H, T, D), of padding nothing of use.
        """
        raise NotImplementedError

    def decode(
        self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """Put one new token per sequence in the cache, and then let it attend to what the cache holds.

        q (B, H, 1, D), k and v (B, KV, 1, D), lengths (B,) int64 of the prompts, on the CPU. `step` is 1 for the first
        decode step; the new token's position is lengths + step - 1. Returns the context (B, H, 1, D), and the slots
        (B, KV) int64 that hold the new token.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Tokens:
    """The tokens among which a rule chooses: those of a prompt, or those in the slots of a cache.

    Attributes:
        metadata: (B, KV, N) by name, of N tokens for each KV head.
        newest: (B, 1, 1) int32, position of the newest token; prompt: (B, 1, 1) int32, tokens of the prompt.
    """

    metadata: dict[str, Tensor]
    newest: Tensor
    prompt: Tensor

    @property
    def score(self) -> Tensor:
        """fp32, the attention that a token has received."""
        return self.metadata["score"]

    @property
    def position(self) -> Tensor:
        """int32, a token's place in its text; -1 for padding and empty slots."""
        return self.metadata["position"]


@dataclass(frozen=True)
class Past:
    """What sequences have been through before the tokens that are fed now: texts that may be longer than the cache.

    Attributes:
        seen: (B,) int64 on the CPU, tokens so far.
        prompt: (B,) int64 on the CPU, tokens up to the end of the last prompt; those behind it were decoded.
    """

    seen: Tensor
    prompt: Tensor


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
        """(B, T) fp32: in a prompt's scores the attention of each query counts so much; None: 1. position (B, T) of the
        queries, newest (B, 1) the last real one."""
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

    def prefill(
        self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, past: Past | None = None
    ) -> Tensor:
        """As `CacheRule.prefill`; with a `past`, which only a `FixedRule` takes, over the tokens that stayed of it.

        The new tokens attend to the held ones, and causally to themselves. Each query adds its attention to the scores
        of both; then of both together those stay that would stay of a prompt. With one token it is what a decode step
        does, but for equal scores.
        """
        past = past or Past(torch.zeros_like(lengths), torch.zeros_like(lengths))
        held = past.seen.clamp(max=self.slots)
        before, is_ragged, newest = int(held.max()), bool((held < held.max()).any()), past.seen + lengths - 1
        position = past.seen[:, None] + torch.arange(k.shape[2])
        weights = self.weights_of(position, newest[:, None]).to(k.device, non_blocking=True)
        position = torch.where(position <= newest[:, None], position, -1)[:, None]
        position = position.to(torch.int32).to(k.device, non_blocking=True)
        new = {"position": position.expand(k.shape[:3]), **self.remember(k, v)}
        held, newest = _column(held, k.device), _column(newest, k.device)
        empty, stored = None, cache.form.stored(k, v)
        if before:
            old = self._held(cache, past, before)
            k, v, stored = old.joined(k, v, *stored)
            new = {name: torch.cat([old.metadata[name], values], 2) for name, values in new.items()}
            empty = torch.arange(before, device=k.device) >= held[:, 0] if is_ragged else None
        rotated = self._rolled(q, k, held, before) if self.rope else (q, k)
        context, score = causal_attention_with_scores(*rotated, v, weights, empty)
        if before:
            count = _column(lengths, k.device)
            score[:, :, :before] = self.prompt_step_scores(old.score, score[:, :, :before], count)
        self._keep(cache, *stored, Tokens({"score": score, **new}, newest, newest + 1))
        return context

    def weights_of(self, position: Tensor, newest: Tensor) -> Tensor:
        """(B, T) fp32: how much each query counts, as `query_weights` says; padding does not."""
        weights, real = self.query_weights(position, newest), position <= newest
        return real.float() if weights is None else torch.where(real, weights, 0.0)

    def _keep(self, cache: KVTensors, k: Tensor, v: Tensor, tokens: Tokens) -> None:
        """Fill the cache with those of these tokens, k and v (B, KV, N, W) as they are stored, that stay."""
        kept = min(self.slots, k.shape[2])
        best = self.chosen(tokens, kept)
        cache.k[0][:, :, :kept], cache.v[0][:, :, :kept] = gather(best, k, v)
        cache.v[0][:, :, kept:] = 0  # masked, but 0 * NaN left by another prompt would spread
        for name, _ in self.metadata:
            cache.metadata[name][:, :, kept:] = -1
            cache.metadata[name][:, :, :kept] = tokens.metadata[name].gather(2, best)
        if self.rope:
            cache.metadata["rank"].copy_((cache.position >= 0).cumsum(-1) - 1).clamp_(min=0)

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
        """The scores (B, KV, N) of tokens that were there before a prompt of `count` (B, 1, 1) tokens, which gave them
        this attention, each query times its weight. What `step_scores` forgets from step to step must be forgotten here
        as often."""
        return self.step_scores(score, received)

    # what a cache holds

    def clear(self, cache: KVTensors) -> None:
        """Let the cache hold nothing, as `prefill` over a past of no tokens finds it."""
        for tensor in (*cache.k, *cache.v, *cache.metadata.values()):
            tensor.zero_()
        cache.position.fill_(-1)

    def _held(self, cache: KVTensors, past: Past, count: int) -> KVTensors:
        """`count` tokens of each head in the order of the text, or as many as it has and behind them empty places."""
        seen, prompt = (_column(x, cache.position.device) for x in (past.seen, past.prompt))
        order = torch.where(cache.position < 0, _LATEST, cache.position)
        # in a cache without an empty slot one token is due to go
        due = self._free_slot(Tokens(cache.metadata, seen - 1, prompt), may_be_empty=True)
        order.scatter_(2, due[..., None], _LATEST)
        order, at = (x[..., :count] for x in order.sort(-1))
        metadata = {name: values.gather(2, at) for name, values in cache.metadata.items()}
        metadata["position"] = torch.where(order < _LATEST, order, -1)
        k, v = gather(at, cache.k[0], cache.v[0])
        return KVTensors([k], [v], metadata, cache.form)

    def _rolled(self, q: Tensor, k: Tensor, held: Tensor, before: int) -> tuple[Tensor, Tensor]:
        """Queries and keys at their ranks: of the keys the first `before` are of held tokens, `held` (B, 1, 1) of each
        sequence, and the others and the queries of new ones."""
        end = k.shape[2]
        rank = torch.arange(end, device=k.device)
        rank = torch.where(rank < before, rank, rank - before + held)
        return rotate_to(self.rope, q, rank[..., before:], end), rotate_to(self.rope, k, rank, end)

    # a step

    def decode(
        self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        S = cache.k[0].shape[2]
        held = lengths.clamp(max=self.slots) + step  # tokens in the cache, this one included
        n = _column(lengths, k.device)
        now = n + step - 1
        slots = self._free_slot(Tokens(cache.metadata, now - 1, n), may_be_empty=int(held.min()) <= S)
        cache.write(slots, k[:, :, 0], v[:, :, 0])
        at = slots[..., None]
        new = {"score": at.new_zeros(at.shape, dtype=torch.float32), "position": now.expand(at.shape)}
        if self.rope:
            self._close_gap(cache, at)
            rank = _column(held.clamp(max=S) - 1, k.device)
            new["rank"] = rank.expand(at.shape)
        for name, value in (new | self.remember(k, v)).items():
            cache.metadata[name].scatter_(2, at, value)
        empty = cache.position < 0 if int(held.min()) < S else None
        rotate = None
        if self.rope:
            q = rotate_to(self.rope, q, rank, S)
            ranks = cache.metadata["rank"].view(-1, 1, S)
            rotate = lambda keys, part: rotate_to(self.rope, keys, ranks[part], S)
        context, received = cached_attention(q, cache.k, cache.v, empty, rotate, cache.form)
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


def _column(lengths: Tensor, device: torch.device) -> Tensor:
    """(B,) on the CPU as (B, 1, 1) int32 on a device."""
    return lengths.to(torch.int32).to(device, non_blocking=True)[:, None, None]


def gather(at: Tensor, *stored: Tensor) -> list[Tensor]:
    """Vectors (B, KV, N, W) at places (B, KV, n): (B, KV, n, W) of each."""
    return [x.gather(2, at[..., None].expand(*at.shape, x.shape[3])) for x in stored]
