"""What of a sequence's keys and values is kept: what every rule must say.

Shapes: B sequences, H query heads, KV heads of K and V, T prompt tokens (padded on the right), S slots, D elements of a
head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from h2o_flexgen.formats import KVFormat
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
