"""What of a sequence's keys and values is kept: what every rule must say.

Shapes: B sequences, H query heads, KV heads of K and V, T tokens of a prompt (padded on the right), L tokens before
them, S slots, D elements of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from h2o_flexgen.formats import KVFormat
from h2o_flexgen.kernels.attention import causal_attention
from h2o_flexgen.kv_cache.layout import KVLayout, KVTensors
from h2o_flexgen.models.spec import ModelSpec, Rope


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

    @property
    def voters(self) -> int:
        """How many of a prompt's last queries alone give scores, so that none of them may be shared; 0: all do."""
        return 0

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

    def cached_len(self, length: int, prompt: int) -> int:
        """Slots that a text of `length` tokens, of which the first `prompt` were its prompt, has in use."""
        return length

    def layout(self, spec: ModelSpec, form: KVFormat, batch: int, prompt_len: int, gen_len: int) -> KVLayout:
        """The KV block of a layer for `batch` sequences, with vectors in a format."""
        segments = self.segments(prompt_len, gen_len)
        return KVLayout(batch, spec.kv_heads, segments, spec.head_dim, form, self.slot_fields, self.growth)

    def layouts(
        self, spec: ModelSpec, form: KVFormat, batches: Sequence[tuple[int, int]], gen_len: int
    ) -> dict[tuple[int, int], KVLayout]:
        """The KV blocks of every (layer, batch); of each batch the sequences, and the tokens of the longest prompt."""
        rules = [self.in_layer(layer) for layer in range(spec.layers)]
        found = {}
        for rule in dict.fromkeys(rules):
            made = {batch: rule.layout(spec, form, *batch, gen_len) for batch in set(batches)}
            found[rule] = [made[batch] for batch in batches]
        return {(layer, k): layout for layer, rule in enumerate(rules) for k, layout in enumerate(found[rule])}

    @property
    def slot_fields(self) -> tuple[tuple[str, torch.dtype], ...]:
        """All that is kept for a slot beside K and V: `metadata`, and with position rolling the token's rank."""
        return self.metadata + ((("rank", torch.int32),) if self.rope else ())

    def prefill(
        self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, rows: Rows, past: Text | None = None
    ) -> Tensor:
        """`read`, and fill the cache with what is kept: returns the context (B, H, T, D)."""
        context, text = self.read(q, k, v, rows, past, cache.form)
        self.keep(cache, text)
        return context

    def read(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, past: Text | None = None, form: KVFormat | None = None
    ) -> tuple[Tensor, Text]:
        """Causal attention over tokens as they are, and over those of `past` before them.

        Args:
            q: (B, H, T, D); k, v: (B, KV, T, D); of row b the first `rows.new[b]` are tokens, what follows is padding.
            past: of each row, or one that all rows share; None if there is nothing before.
            form: that the cache stores vectors in; None: nothing will be kept.

        Returns:
            The context (B, H, T, D), of padding nothing of use, and the whole texts for `keep`.
        """
        text = Text(k, v, codes(form, k, v), {}, rows.new).behind(past)
        return causal_attention(q, text.k, text.v), text

    def keep(self, cache: KVTensors, text: Text) -> None:
        """Fill the cache with what is kept of these texts, in its format; what it held before is gone."""
        raise NotImplementedError

    def past(self, cache: KVTensors, length: Tensor, prompt: Tensor, dtype: torch.dtype) -> Text:
        """What a cache holds of texts of `length` tokens, in their order and as floats of a type, so that they can be
        read on. `prompt`: tokens up to the end of the last prompt; (B,) int64 on the CPU both."""
        raise NotImplementedError

    def decode(self, cache: KVTensors, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Put one new token per sequence in the cache, and then let it attend to what the cache holds.

        q (B, H, 1, D), k and v (B, KV, 1, D). Returns the context (B, H, 1, D), and the slots (B, KV) int64 that hold
        the new tokens.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Rows:
    """Sequences that compute together: (B,) int64 on the CPU each.

    Attributes:
        length: tokens of each text that were computed before; new: tokens that come now.
        prompt: tokens up to the end of the prompt.
    """

    length: Tensor
    new: Tensor
    prompt: Tensor

    @classmethod
    def prompts(cls, lengths: Tensor) -> Rows:
        """Whole prompts."""
        return cls(torch.zeros_like(lengths), lengths, lengths)

    @classmethod
    def steps(cls, length: Tensor, prompt: Tensor) -> Rows:
        """A decode step."""
        return cls(length, torch.ones_like(length), prompt)


@dataclass(frozen=True)
class Text:
    """All tokens of texts, before any goes.

    Attributes:
        k, v: (B, KV, N, D) floats; codes: both as a cache stores them, (B, KV, N, W), if not as floats.
        metadata: (B, KV, N) by name; position, if it is there, is -1 for places without a token.
        length: (B,) int64 on the CPU, tokens of each; the others are padding.
    """

    k: Tensor
    v: Tensor
    codes: tuple[Tensor, Tensor] | None
    metadata: dict[str, Tensor]
    length: Tensor

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """K and V as a cache stores them."""
        return self.codes or (self.k, self.v)

    def behind(self, past: Text | None) -> Text:
        """These tokens, and before them those of `past`, which one row may have for all. `score` stays as it is."""
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

    def since(self, begin: int) -> Text:
        """The tokens from `begin` on, in memory of their own; but all of `score`, which belongs to the whole text."""
        metadata = {name: x if name == "score" else x[:, :, begin:] for name, x in self.metadata.items()}
        codes = self.codes and tuple(x[:, :, begin:] for x in self.codes)
        part = Text(self.k[:, :, begin:], self.v[:, :, begin:], codes, metadata, self.length - begin)
        return part._each(torch.clone)

    def to(self, device: torch.device) -> Text:
        """The same on another device."""
        return self if self.k.device == device else self._each(lambda x: x.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Text:
        codes = self.codes and tuple(map(change, self.codes))
        metadata = {name: change(values) for name, values in self.metadata.items()}
        return Text(change(self.k), change(self.v), codes, metadata, self.length)


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


def codes(form: KVFormat | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """`Text.codes` of K and V for a cache that stores vectors in `form`."""
    return None if form is None or form.is_dense else form.stored(k, v)
