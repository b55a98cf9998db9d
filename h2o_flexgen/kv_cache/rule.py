"""Which keys and values of a sequence are kept: the interface of a rule.

Shapes: B sequences, H query heads, KV heads of K and V, T tokens of a prompt (padded on the right), L tokens before
them, N tokens to choose from, S slots, D elements of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.formats import KVFormat
from h2o_flexgen.kernels.attention import PLAIN, Softmax, causal_attention
from h2o_flexgen.kv_cache.layout import KVLayout, KVTensors
from h2o_flexgen.models.rope import rollable
from h2o_flexgen.models.spec import ModelSpec, Rope


class LayerAttention(NamedTuple):
    """What a rule knows about the attention of a layer."""

    softmax: Softmax
    groups: int  # query heads that share a KV head
    rope: Rope | None  # with position rolling; else None

    @classmethod
    def of(cls, spec: ModelSpec, rolling: bool) -> LayerAttention:
        """Raises UserError if positions cannot roll."""
        softmax = Softmax(spec.scale, spec.cap, spec.window)
        return cls(softmax, spec.groups, rollable(spec) if rolling else None)


@dataclass(frozen=True)
class CacheRule:
    """Decides which tokens a cache keeps. Subclasses are frozen dataclasses whose docstring says what is kept, why, and
    in which paper. Methods are pure functions of tensors, except that they fill the cache they are given.

    Args:
        softmax: of the layer's attention. No query sees a token outside its window.
        attention: of each layer, in the rule of a whole model; empty if `softmax` is that of all layers.
    """

    softmax: Softmax = field(default=PLAIN, kw_only=True)
    attention: tuple[LayerAttention, ...] = field(default=(), kw_only=True)

    name: ClassVar[str]  # in the registry, in policy files and in reports
    #: "append": a token is added in the same slot of all heads; "fixed": it takes the slot of one that goes
    growth: ClassVar[str] = "append"
    #: (name, dtype) of what each slot of a KV head holds besides K and V
    metadata: ClassVar[tuple[tuple[str, torch.dtype], ...]] = ()
    #: whether prefill sums the attention that each token of a prompt receives
    scores_prompt: ClassVar[bool] = False
    #: whether a prompt's tokens have `votes` besides
    has_votes: ClassVar[bool] = False
    #: with position rolling the model's RoPE: keys and queries then arrive unrotated, and are cached unrotated
    rope: ClassVar[Rope | None] = None

    @property
    def budget(self) -> int | None:
        """The most tokens that are kept; None: the cache grows with the text."""
        return None

    @property
    def voters(self) -> int:
        """How many of a prompt's last queries count differently and so cannot be shared; 0: none."""
        return 0

    def to_dict(self) -> dict | None:
        """The KV budget in policy files and reports; None: all tokens are kept."""
        return None

    def measured_as(self, phase: str) -> str:
        """The rule whose measured attention rates apply to this one; `phase` as in `Profile.attention`."""
        return self.name

    def in_layer(self, layer: int) -> CacheRule:
        """The rule of one transformer block, which may have fewer or more slots than the average one, and a sliding
        window."""
        return replace(self, softmax=self.attention[layer].softmax, attention=()) if self.attention else self

    def average(self) -> CacheRule:
        """The rule of a whole model, all layers of which have the same budget."""
        return self

    def segments(self, prompt_len: int, gen_len: int) -> tuple[int, ...]:
        """Slots per sequence and head in each segment, for prompts of up to `prompt_len` and outputs of `gen_len`."""
        raise NotImplementedError

    def cached_len(self, length: int, prompt: int) -> int:
        """Slots in use for a text of `length` tokens, the first `prompt` of which were its prompt."""
        return length

    def layout(self, spec: ModelSpec, form: KVFormat, batch: int, prompt_len: int, gen_len: int) -> KVLayout:
        """The KV block of a layer for `batch` sequences, with vectors in the format `form`."""
        segments = self.segments(prompt_len, gen_len)
        return KVLayout(batch, spec.kv_heads, segments, spec.head_dim, form, self.slot_fields, self.growth)

    def layouts(
        self, spec: ModelSpec, form: Callable[[int], KVFormat], batches: Sequence[tuple[int, int]], gen_len: int
    ) -> dict[tuple[int, int], KVLayout]:
        """The KV block of every (layer, batch). `form`: the format of vectors, by their elements; `batches`:
        (sequences, tokens of the longest prompt) of each batch."""
        layers = [(self.in_layer(layer), spec.at(layer)) for layer in range(spec.layers)]
        kinds = product(set(layers), set(batches))
        made = {}
        for (rule, own), batch in kinds:
            made[(rule, own), batch] = rule.layout(own, form(own.head_dim), *batch, gen_len)
        return {(layer, k): made[kind, batch] for layer, kind in enumerate(layers) for k, batch in enumerate(batches)}

    @property
    def slot_fields(self) -> tuple[tuple[str, torch.dtype], ...]:
        """`metadata` and, with position rolling, the token's rank."""
        return self.metadata + ((("rank", torch.int32),) if self.rope else ())

    def prefill(
        self,
        cache: KVTensors,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Rows,
        past: Text | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`read`, and then `keep`: returns the context (B, H, T, D)."""
        context, text = self.read(q, k, v, rows, past, cache.form, sinks)
        self.keep(cache, text)
        return context

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
        """Causal attention over uncompressed tokens and the tokens of `past` before them.

        Args:
            q: (B, H, T, D); k, v: (B, KV, T, D). In row b the first `rows.new[b]` are tokens, the rest is padding.
            past: of each row, or a single row for all; None if nothing comes before.
            form: format of vectors in the cache; None: nothing will be kept.
            sinks: (H,) floats, as in `Softmax`.

        Returns:
            The context (B, H, T, D), undefined for padding, and the whole texts for `keep`.
        """
        text = Text(k, v, codes(form, k, v), {}, rows.new).appended_to(past)
        return causal_attention(q, text.k, text.v, self.softmax.with_sinks(sinks)), text

    def keep(self, cache: KVTensors, text: Text) -> None:
        """Overwrite the cache with what is kept of these texts, in its format."""
        raise NotImplementedError

    def past(self, cache: KVTensors, length: Tensor, prompt: Tensor, dtype: torch.dtype) -> Text:
        """The cached tokens of texts of `length` tokens, in their order and as floats of type `dtype`, so that reading
        can go on. `prompt`: tokens up to the end of the last prompt. Both are (B,) int64 on the CPU."""
        raise NotImplementedError

    def decode(
        self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, rows: Rows, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Put one new token per sequence into the cache, then let it attend to the cache.

        q (B, H, 1, D), k and v (B, KV, 1, D), sinks (H,) as in `Softmax`. Returns the context (B, H, 1, D) and the
        slots (B, KV) int64 of the new tokens.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Rows:
    """Sequences that compute together; each field is (B,) int64 on the CPU."""

    length: Tensor  # tokens of each text that were computed before
    new: Tensor  # tokens that are computed now
    prompt: Tensor  # tokens up to the end of the prompt

    @classmethod
    def prompts(cls, lengths: Tensor) -> Rows:
        """Whole prompts."""
        return cls(torch.zeros_like(lengths), lengths, lengths)

    @classmethod
    def steps(cls, length: Tensor, prompt: Tensor) -> Rows:
        """A decode step."""
        return cls(length, torch.ones_like(length), prompt)

    # of a decode step, the same for all layers

    @cached_property
    def shortest(self) -> int:
        """Tokens of the shortest text."""
        return int(self.length.min())

    @cached_property
    def position(self) -> Tensor:
        """(B, 1, 1) int32 on the CPU, of the new tokens."""
        return column(self.length, self.length.device)

    @cached_property
    def newest(self) -> Tensor:
        """(B, 1, 1) int32 on the CPU, positions of the tokens before."""
        return self.position - 1

    @cached_property
    def prompt_end(self) -> Tensor:
        """`prompt` as (B, 1, 1) int32 on the CPU."""
        return column(self.prompt, self.prompt.device)


@dataclass(frozen=True)
class Text:
    """All tokens of texts, before any is dropped."""

    k: Tensor  # (B, KV, N, D) floats
    v: Tensor
    codes: tuple[Tensor, Tensor] | None  # both as the cache stores them, (B, KV, N, W); None if it stores floats
    metadata: dict[str, Tensor]  # (B, KV, N) by name; a `position` of -1 marks a place without a token
    length: Tensor  # (B,) int64 on the CPU, tokens of each text; the rest is padding

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """K and V as the cache stores them."""
        return self.codes or (self.k, self.v)

    def appended_to(self, past: Text | None) -> Text:
        """The tokens of `past`, of each row or of a single row for all, followed by these. `score` stays unchanged."""
        if past is None:
            return self
        rows = len(self.k)

        def joined(before: Tensor, after: Tensor) -> Tensor:
            return torch.cat([before.expand(rows, *before.shape[1:]), after], 2)

        metadata = {
            name: values if name == "score" else joined(past.metadata[name], values)
            for name, values in self.metadata.items()
        }
        codes = self.codes and tuple(map(joined, past.stored, self.stored))
        return Text(joined(past.k, self.k), joined(past.v, self.v), codes, metadata, past.length + self.length)

    def tail(self, begin: int) -> Text:
        """A copy of the tokens from `begin` on, with all of `score`, which belongs to the whole text."""
        own = {name: x for name, x in self.metadata.items() if name != "votes"}  # which are still to come
        metadata = {name: x if name == "score" else x[:, :, begin:] for name, x in own.items()}
        codes = self.codes and tuple(x[:, :, begin:] for x in self.codes)
        part = Text(self.k[:, :, begin:], self.v[:, :, begin:], codes, metadata, self.length - begin)
        return part._each(torch.clone)

    def of_heads(self, heads: Tensor) -> Text:
        """The tokens of some KV heads."""
        return self._each(lambda x: x[:, heads])

    def to(self, device: torch.device) -> Text:
        """The texts on another device."""
        return self if self.k.device == device else self._each(lambda x: x.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Text:
        codes = self.codes and tuple(map(change, self.codes))
        metadata = {name: change(values) for name, values in self.metadata.items()}
        return Text(change(self.k), change(self.v), codes, metadata, self.length)


@dataclass(frozen=True)
class Tokens:
    """The tokens that a rule chooses from: those of a prompt, or those in the slots of a cache."""

    metadata: dict[str, Tensor]  # (B, KV, N) by name
    newest: Tensor  # (B, 1, 1) int32, position of the newest token
    prompt: Tensor  # (B, 1, 1) int32, tokens of the prompt

    @property
    def score(self) -> Tensor:
        """fp32, the attention that each token has received."""
        return self.metadata["score"]

    @property
    def position(self) -> Tensor:
        """int32, each token's position in its text; -1 for padding and empty slots."""
        return self.metadata["position"]


def codes(form: KVFormat | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """`Text.codes` of K and V for a cache that stores vectors in `form`."""
    return None if form is None or form.is_dense else form.stored(k, v)


def column(lengths: Tensor, device: torch.device) -> Tensor:
    """(B,) on the CPU as (B, 1, 1) int32 on a device."""
    return lengths.to(torch.int32).to(device, non_blocking=True)[:, None, None]
