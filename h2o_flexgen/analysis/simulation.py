"""Eviction by masks: every layer keeps the keys and values of all tokens, and a mask says which have a slot.

Slow, since nothing is dropped, but the whole history can be inspected. The engine, which really drops tokens, must give
the same log-probabilities. Shapes: L layers, B windows of N tokens (P of prompt, then M = N - P), KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from h2o_flexgen.analysis.attention import mix, probabilities
from h2o_flexgen.kv_cache.fixed_rule import FixedRule
from h2o_flexgen.kv_cache.rule import Tokens
from h2o_flexgen.profiling.layer_model import LayerModel
from h2o_flexgen.utils.progress import bar


@dataclass
class MaskedCache:
    """The cache of one layer under a rule, for texts of `length` tokens: all tokens so far, and which are `kept`
    (B, KV, N)."""

    rule: FixedRule
    length: int
    seen: int = field(init=False, default=0)  # tokens so far

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `CacheRule.prefill`, for prompts of equal length."""
        B, KV, T, _ = k.shape
        self.seen = T
        self.prompt = torch.full((B, 1, 1), T, dtype=torch.int32)
        p = probabilities(q, k, torch.ones(T, T, dtype=torch.bool).tril())
        weights = self.rule.weights_of(torch.arange(T).expand(B, T), self.prompt[:, 0] - 1).view(B, 1, -1, T)
        received = self.rule.received((weights @ p.sum(2)).squeeze(2))
        position = torch.arange(T, dtype=torch.int32).expand(B, KV, T)
        score = self.rule.prompt_scores({"position": position, **received})
        new = {"score": score, "position": position, **self.rule.remember(k, v)}
        self.k = self._with_room(k)
        self.v = self._with_room(v)
        self.metadata = {name: self._with_room(values) for name, values in new.items()}
        self.kept = torch.zeros(B, KV, self.length, dtype=torch.bool)
        best = self.rule.chosen(Tokens(new, self.prompt - 1, self.prompt), min(self.rule.slots, T))
        self.kept.scatter_(2, best.long(), True)
        return mix(p, v)

    def _with_room(self, values: Tensor) -> Tensor:
        """Values of the prompt (B, KV, T, ...) with room for the whole text."""
        full = values.new_zeros(*values.shape[:2], self.length, *values.shape[3:])
        full[:, :, : values.shape[2]] = values
        return full

    def decode(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `CacheRule.decode`; the evicted tokens are gone when it returns."""
        at = slice(self.seen, self.seen + 1)
        self.seen += 1
        self.k[:, :, at] = k
        self.v[:, :, at] = v
        self.kept[:, :, at] = True
        new = {"score": torch.zeros(()), "position": torch.tensor(self.seen - 1), **self.rule.remember(k, v)}
        for name, values in new.items():
            self.metadata[name][:, :, at] = values
        past = slice(self.seen)
        p = probabilities(q, self.k[:, :, past], self.kept[:, :, None, past])
        if self.rule.growth == "fixed":
            score = self.metadata["score"][:, :, past]
            score.copy_(self.rule.step_scores(score, p.sum((2, 3))))
            self._evict()
        return mix(p, self.v[:, :, past])

    def _evict(self) -> None:
        """Evict down to the budget. Of equal tokens the earlier one goes: a rule keeps the first that it sees, so it is
        shown the newest first."""
        B, KV, _ = self.kept.shape
        held = self.kept.nonzero()[:, 2].view(B, KV, -1).flip(-1)
        if held.shape[2] > self.rule.slots:
            seen = {name: values.gather(2, held) for name, values in self.metadata.items()}
            tokens = Tokens(seen, torch.full_like(self.prompt, self.seen - 1), self.prompt)
            stay = held.gather(2, self.rule.chosen(tokens, self.rule.slots))
            self.kept = torch.zeros_like(self.kept).scatter_(2, stay, True)


@dataclass
class Run:
    """The outcome of texts under a rule.

    Attributes:
        logprobs: (B, M) fp32, for the tokens behind the prompt.
        kept: (L, B, KV, M, N) bool: the tokens in the cache just before each of the M tokens.
    """

    logprobs: Tensor
    kept: Tensor


@torch.inference_mode()
def simulate(model: LayerModel, ids: Tensor, prompt_len: int, rule: FixedRule, progress: bool = False) -> Run:
    """Teacher-forced decode of texts ids (B, N) behind their prompts, as in `LLM.score` with a KV budget."""
    B, N = ids.shape
    caches = [MaskedCache(rule.in_layer(layer), N) for layer in range(model.spec.layers)]
    kept = torch.zeros(len(caches), B, model.spec.kv_heads, N - prompt_len, N, dtype=torch.bool)
    hidden = model.run(ids[:, :prompt_len], 0, lambda layer, *qkv: caches[layer].prefill(*qkv))[:, -1:]
    logprobs = []
    for step, at in enumerate(bar(range(prompt_len, N), f"decode with {rule.name}", unit="tokens", show=progress)):
        logprobs.append(model.logprobs(hidden, ids[:, at : at + 1]))
        kept[:, :, :, step] = torch.stack([cache.kept for cache in caches])
        if at + 1 < N:
            hidden = model.run(ids[:, at : at + 1], at, lambda layer, *qkv: caches[layer].decode(*qkv))
    return Run(torch.cat(logprobs, 1), kept)


@torch.inference_mode()
def masked_logprobs(model: LayerModel, ids: Tensor, prompt_len: int, seen: Tensor) -> Tensor:
    """Log-probabilities (M,) of a text ids (N,) behind its prompt, in one pass. Attention within the prompt is full; a
    later token sees itself, and those earlier tokens that are `seen` (L, KV, M or 1, N)."""
    N = len(ids)
    causal = torch.ones(N, N, dtype=torch.bool).tril()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        visible = causal.repeat(1, k.shape[1], 1, 1)
        visible[0, :, prompt_len:] &= seen[layer]
        visible.diagonal(dim1=2, dim2=3).fill_(True)
        return mix(probabilities(q, k, visible), v)

    hidden = model.run(ids[None], 0, attend)
    return model.logprobs(hidden[:, prompt_len - 1 : -1], ids[None, prompt_len:])[0]
