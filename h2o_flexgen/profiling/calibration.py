"""How many slots each KV head needs: some look far back, others hardly beyond the recent tokens.

A text is split into a prompt and a continuation. In one head at a time, a few queries of the continuation attend only
to those prompt tokens that a rule would keep. The loss is how far this moves the hidden states behind the block:
|difference|^2 / |hidden state|^2. `kv_cache.layers` distributes the slots over all heads so that the sum of these
losses is smallest. That layers need different budgets is the idea of PyramidKV (arXiv 2406.02069), that heads do of
Ada-KV (arXiv 2407.11550), which chooses them anew for each prompt; here they are measured once for a model.

It takes one pass with full attention, in each layer of which the queries go once more through the block for every head
and budget. Against the divergence of the next-token probabilities, for which each of these would have to go on through
all later layers, this gives slots that lose as little, for a tenth of the time.

Shapes: B texts of N tokens, H query heads, KV heads, D elements of a head, Q queries of a text, V variants of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, prod
from time import perf_counter

import torch
from torch import Tensor

from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.errors import UserError
from h2o_flexgen.kernels.attention import EMPTY, Softmax, causal_attention, causal_attention_with_scores
from h2o_flexgen.kv_cache import head_losses, rule_for
from h2o_flexgen.kv_cache.budget_rule import BudgetRule
from h2o_flexgen.kv_cache.layers import HeadLosses
from h2o_flexgen.kv_cache.rule import LayerAttention, Tokens
from h2o_flexgen.models.spec import ModelSpec
from h2o_flexgen.policy import KVBudget
from h2o_flexgen.profiling.layer_model import LayerModel
from h2o_flexgen.utils.progress import bar

#: budgets whose loss is measured, as fractions of the text
GRID = (0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
#: lengths of the prompts, as fractions of the text
PROMPTS = (0.5, 0.75)
#: distance between the queries behind a prompt, and their number
EVERY = 16
QUERIES = 15
#: rows that go through a block at once
ROWS = 1024
#: tokens of the shortest text that can be used
LEAST = 64


def check(length: int, rule: str) -> None:
    """Raises UserError if the texts are too short, or the rule has slots by head already."""
    if length < LEAST:
        raise UserError(f"a window must have {LEAST} tokens or more, not {length}")
    if head_losses(rule):
        raise UserError("`kv_rule`: all heads are measured with the same slots: leave `layers` out")


def check_heads(spec: ModelSpec) -> None:
    """Raises UserError if layers differ in the size of their heads, so that slots differ in bytes."""
    if len(spec.head_dims) > 1:
        raise UserError("the model's layers have heads of different sizes, whose slots cannot be exchanged")


@dataclass
class Probe:
    """The queries behind a prompt of `prompt` tokens in texts of `length` tokens.

    Attributes:
        at: (Q,) their positions.
        losses: of each layer so far, (KV, number of rules).
    """

    model: LayerModel
    prompt: int
    rules: list[BudgetRule]
    length: int
    losses: list[Tensor] = field(default_factory=list)

    def __post_init__(self):
        self.at = torch.arange(self.prompt, min(self.length, self.prompt + EVERY * QUERIES), EVERY)

    def step(
        self, layer: int, hidden: Tensor, following: Tensor, softmax: Softmax, q: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Measure a layer. hidden, following (B, N, E): before and behind it, q (B, H, N, D), k and v (B, KV, N, D): of
        all tokens under full attention."""
        KV = k.shape[1]
        end = int(self.at[-1]) + 1
        rules = [rule.in_layer(layer) for rule in self.rules]
        logits = self._logits(q[:, :, self.at], k[:, :, :end], softmax)
        values = v[:, :, :end].float()
        full = _context(logits, values, softmax)
        target = following[:, self.at]
        scale = target.float().square().sum(-1)
        found = []
        for kept in self._kept(rules, q, k, v, softmax):
            unseen = torch.zeros(*kept.shape[:2], end, dtype=torch.bool)
            unseen[:, :, : self.prompt] = ~kept
            changed = _context(logits.masked_fill(unseen[:, :, None, None], float("-inf")), values, softmax)
            variants = full.expand(KV, *full.shape).clone()  # (KV, B, KV, H / KV, Q, D)
            heads = torch.arange(KV)
            variants[heads, :, heads] = changed.transpose(0, 1)
            moved = self._behind(layer, hidden[:, self.at], variants.flatten(2, 3)) - target
            found.append((moved.float().square().sum(-1) / scale).mean((1, 2)))
        self.losses.append(torch.stack(found, 1))

    def _logits(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        """(B, KV, H / KV, Q, N) fp32 of queries q (B, H, Q, D), each of which sees itself and the tokens before it."""
        q = q.unflatten(1, (k.shape[1], -1)).float() * softmax.scale_of(q.shape[-1])
        logits = q @ k.float()[:, :, None].transpose(3, 4)
        if softmax.cap is not None:
            logits = softmax.cap * torch.tanh(logits / softmax.cap)
        age = self.at[:, None] - torch.arange(k.shape[2])
        return logits.masked_fill_((age < 0) | (age >= (softmax.window or EMPTY)), float("-inf"))

    def _kept(self, rules: list[BudgetRule], q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> list[Tensor]:
        """(B, KV, prompt) bool for each rule: the prompt tokens that it keeps."""
        q, k, v = (x[:, :, : self.prompt] for x in (q, k, v))
        position = torch.arange(self.prompt, dtype=torch.int32)
        n = torch.full((len(k), 1, 1), self.prompt, dtype=torch.int32)
        weights = rules[0].weights_of(position.expand(len(k), -1), n[:, 0] - 1)  # the same for any number of slots
        _, score = causal_attention_with_scores(q, k, v, weights, softmax=softmax)
        position = position.expand(k.shape[:3])
        score = rules[0].prompt_scores({"position": position, **rules[0].received(score)})
        found = []
        for rule in rules:
            tokens = Tokens({"score": score, "position": position, **rule.remember(k, v)}, n - 1, n)
            kept = torch.zeros(score.shape, dtype=torch.bool)
            found.append(kept.scatter_(2, rule.chosen(tokens, min(rule.slots, self.prompt)).long(), True))
        return found

    def _behind(self, layer: int, hidden: Tensor, contexts: Tensor) -> Tensor:
        """Hidden states (V, B, Q, E) behind a layer in which the queries (B, Q, E) get these contexts
        (V, B, H, Q, D)."""
        B, Q, _ = hidden.shape
        found = []
        for part in contexts.split(max(1, ROWS // (B * Q))):
            V = len(part)
            context = part.permute(1, 2, 0, 3, 4).flatten(2, 3).to(hidden.dtype)  # (B, H, V * Q, D)
            rows = hidden.repeat(1, V, 1)
            states = self.model.block(layer, rows, self.at.repeat(B, V), lambda *_, context=context: context)
            found.append(states.unflatten(1, (V, Q)).transpose(0, 1))
        return torch.cat(found)


def _context(logits: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """(B, KV, H / KV, Q, D) of logits (B, KV, H / KV, Q, N) over v (B, KV, N, D)."""
    if softmax.sinks is not None:
        sinks = softmax.sinks.float().view(logits.shape[1], -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sinks], -1)
    return logits.softmax(-1)[..., : v.shape[2]] @ v[:, :, None]


class Watched:
    """Full attention that remembers how it computes, and its queries, keys and values, as `seen`."""

    def __init__(self, softmax: Softmax):
        self.softmax = softmax

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        softmax = self.softmax.with_sinks(sinks)
        self.seen = softmax, q, k, v
        return causal_attention(q, k, v, softmax)


def most_bytes(model: LoadedModel, rows: int) -> int:
    """An upper bound of the memory that `measure` takes for so many tokens: a layer's weights twice, and the floats of
    a block and of attention."""
    layers = [sum(map(prod, layer.shapes.values())) for layer in model.layers[1:-1]]
    spec = model.spec
    floats = rows * (8 * spec.hidden + 4 * spec.inner + rows * spec.heads // 4)
    return 2 * max(layers) * model.dtype.itemsize + floats * torch.float32.itemsize


@torch.inference_mode()
def measure(
    model: LayerModel, ids: Tensor, rule: str, progress: bool = True, most_seconds: float = inf
) -> HeadLosses | None:
    """The loss of each KV head under each budget, averaged over texts `ids` (B, N) and PROMPTS. `rule`: its name and
    options; half of the slots are for recent tokens. Raises UserError if most budgets are too small for the tokens that
    it protects. Returns None as soon as it is clear that this takes more than `most_seconds`."""
    N = ids.shape[1]
    spec = model.spec
    rules = rules_of(rule, N, spec)
    positions = torch.arange(N).expand(ids.shape)
    hidden = model.embed(ids, positions)
    probes = [Probe(model, int(part * N), list(rules.values()), N) for part in PROMPTS]
    begin = perf_counter()
    for layer in bar(range(spec.layers), "measuring how far each head looks back", unit="layers", show=progress):
        attention = Watched(LayerAttention.of(spec.at(layer), rolling=False).softmax)
        following = model.block(layer, hidden, positions, attention)
        took = perf_counter() - begin
        again = len(rules) * spec.at(layer).kv_heads * sum(len(probe.at) for probe in probes) / N  # of as many rows
        if max(took, 0 if layer else took * (1 + again) * spec.layers) > most_seconds:
            return None
        for probe in probes:
            probe.step(layer, hidden, following, *attention.seen)
        model.release(layer)
        hidden = following
    layers = zip(*(probe.losses for probe in probes))
    losses = tuple(tuple(map(tuple, torch.stack(layer).mean(0).tolist())) for layer in layers)
    return HeadLosses(tuple(rules), losses, text_len=N)


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
