"""How many slots each layer needs: some layers look far back, others hardly beyond the recent tokens.

A text is split into a prompt and a continuation. In one layer at a time the continuation attends only to those prompt
tokens that a rule would keep, and the loss is the Kullback-Leibler divergence of the next-token probabilities from
those with full attention. `kv_cache.layers` distributes the slots over the layers so that the sum of these losses is
smallest. That layers need different budgets is the idea of PyramidKV (arXiv 2406.02069), which gives the lower ones
more; here it is measured.

One sweep over the layers does it all. From each layer on, a few queries behind the prompt continue in one more variant
per budget, so that each layer's weights are needed once:

    layer 0      all tokens    the queries, by the budgets of layer 0
    layer 1      all tokens    the queries, by the budgets of layer 0, and of layer 1
    ...
    head                       all variants, each compared with the queries under full attention

Shapes: B texts of N tokens, H query heads, KV heads, D elements of a head, Q queries of a text, V variants of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_flexgen.analysis.model import Attend, LayerModel
from h2o_flexgen.errors import UserError
from h2o_flexgen.kernels.attention import causal_attention, causal_attention_with_scores
from h2o_flexgen.kv_cache import layer_losses, rule_for
from h2o_flexgen.kv_cache.budget_rule import BudgetRule
from h2o_flexgen.kv_cache.layers import LayerLosses
from h2o_flexgen.kv_cache.rule import Tokens
from h2o_flexgen.models.spec import ModelSpec
from h2o_flexgen.policy import KVBudget
from h2o_flexgen.utils.progress import bar

#: budgets whose loss is measured, as fractions of the text
GRID = (0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
#: lengths of the prompts, as fractions of the text
PROMPTS = (0.5, 0.75)
#: distance between the queries behind a prompt, and their number
EVERY = 16
QUERIES = 15
#: variants that go through a layer at once
VARIANTS = 16
#: tokens of the shortest text that can be used
LEAST = 64


def check(length: int, rule: str) -> None:
    """Raises UserError if the texts are too short, or the rule has slots by layer already."""
    if length < LEAST:
        raise UserError(f"a window must have {LEAST} tokens or more, not {length}")
    if layer_losses(rule):
        raise UserError("`kv_rule`: all layers are measured with the same slots: leave `layers` out")


@dataclass
class Probe:
    """The queries behind a prompt of `prompt` tokens, on their way through the layers.

    Attributes:
        at: (Q,) their positions.
        hidden: (V, B, Q, E) hidden states of each variant; the first has full attention in every layer.
    """

    model: LayerModel
    prompt: int
    rules: list[BudgetRule]
    hidden: Tensor  # given as (B, N, E), of all tokens behind the embedding

    def __post_init__(self):
        self.at = torch.arange(self.prompt, min(self.hidden.shape[1], self.prompt + EVERY * QUERIES), EVERY)
        self.hidden = self.hidden[None, :, self.at]

    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Take all variants, and one more for each rule, through a layer. q (B, H, N, D), k and v (B, KV, N, D): of all
        tokens under full attention."""
        end = int(self.at[-1]) + 1
        k = k[:, :, :end]
        v = v[:, :, :end]
        before = torch.arange(end, device=k.device) < self.at.to(k.device)[:, None]  # (Q, N)
        full = before.expand(*k.shape[:2], *before.shape)
        parts = [self._block(layer, part, Behind(k, v, full)) for part in self.hidden.split(VARIANTS)]
        for kept in self._kept(q, k, v):
            seen = full.clone()
            seen[..., : self.prompt] &= kept[:, :, None]
            parts.append(self._block(layer, self.hidden[:1], Behind(k, v, seen)))
        self.hidden = torch.cat(parts)

    def _kept(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """(B, KV, N) bool for each rule: the prompt tokens that it keeps."""
        q, k, v = (x[:, :, : self.prompt] for x in (q, k, v))
        position = torch.arange(self.prompt, dtype=torch.int32, device=k.device)
        n = torch.full((len(k), 1, 1), self.prompt, dtype=torch.int32, device=k.device)
        weights = self.rules[0].weights_of(position.expand(len(k), -1), n[:, 0] - 1)  # the same for any number of slots
        _, score = causal_attention_with_scores(q, k, v, weights)
        position = position.expand(score.shape)
        found = []
        for rule in self.rules:
            tokens = Tokens({"score": score, "position": position, **rule.remember(k, v)}, n - 1, n)
            kept = torch.zeros(score.shape, dtype=torch.bool, device=k.device)
            found.append(kept.scatter_(2, rule.chosen(tokens, min(rule.slots, self.prompt)).long(), True))
        return found

    def _block(self, layer: int, hidden: Tensor, attend: Attend) -> Tensor:
        """Hidden states (V, B, Q, E) behind a layer."""
        V, B, Q, E = hidden.shape
        rows = hidden.transpose(0, 1).reshape(B, V * Q, E)
        found = self.model.block(layer, rows, self.at.repeat(B, V), attend)
        return found.view(B, V, Q, E).transpose(0, 1)

    def losses(self) -> Tensor:
        """(V - 1,) divergence of each variant from full attention."""
        full = self.model.log_softmax(self.hidden[0].flatten(0, 1))
        p = full.exp()
        variants = (self.model.log_softmax(each.flatten(0, 1)) for each in self.hidden[1:])
        return torch.stack([(p * (full - each)).sum(-1).mean() for each in variants])


@dataclass
class Behind:
    """Attention of V * Q queries, each to itself and to those earlier tokens k, v (B, KV, N, D) that it has `seen`
    (B, KV, Q, N)."""

    k: Tensor
    v: Tensor
    seen: Tensor

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, T, D = q.shape
        KV, N = self.k.shape[1:3]
        Q = self.seen.shape[2]
        q = q.view(B, KV, H // KV, T, D).float() * D**-0.5
        logits = (q.flatten(2, 3) @ self.k.float().transpose(2, 3)).view(B, KV, H // KV, T // Q, Q, N)
        logits = logits.masked_fill_(~self.seen[:, :, None, None], float("-inf")).view(B, KV, H // KV, T, N)
        itself = (q * k[:, :, None].float()).sum(-1, keepdim=True)
        p = torch.cat([logits, itself], -1).softmax(-1)
        context = (p[..., :-1].flatten(2, 3) @ self.v.float()).view(q.shape) + p[..., -1:] * v[:, :, None].float()
        return context.view(B, H, T, D).to(v.dtype)


class Watched:
    """Full attention that remembers its queries, keys and values as `seen`."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.seen = q, k, v
        return causal_attention(q, k, v)


@torch.inference_mode()
def measure(model: LayerModel, ids: Tensor, rule: str, progress: bool = True) -> LayerLosses:
    """The loss of each layer under each budget, averaged over texts `ids` (B, N) and PROMPTS. `rule`: its name and
    options; half of the slots are for recent tokens. Raises UserError if most budgets are too small for the tokens that
    it protects."""
    N = ids.shape[1]
    spec = model.spec
    rules = rules_of(rule, N, spec)
    positions = torch.arange(N).expand(ids.shape)
    hidden = model.embed(ids, positions)
    probes = [Probe(model, int(part * N), list(rules.values()), hidden) for part in PROMPTS]
    for layer in bar(range(spec.layers), "calibrating", unit="layers", show=progress):
        attention = Watched()
        following = model.block(layer, hidden, positions, attention)
        for probe in probes:
            probe.step(layer, *attention.seen)
        model.release(layer)
        hidden = following
    losses = torch.stack([probe.losses() for probe in probes]).mean(0)
    return LayerLosses(tuple(rules), tuple(map(tuple, losses.view(spec.layers, len(rules)).tolist())))


def rules_of(text: str, length: int, spec: ModelSpec) -> dict[float, BudgetRule]:
    """The rule with the slots of each budget of GRID that has room for the tokens it protects."""
    found = {}
    for part in GRID:
        slots = int(part * length)
        try:
            budget = KVBudget.from_size(slots - slots // 2, slots // 2, text)
            found[part] = rule_for(budget, length, 2, spec)
        except UserError as e:
            too_few = e
    if len(found) < 2:
        raise UserError(f"take a larger `window` than {length}: {too_few}")
    return found
