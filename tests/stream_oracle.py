"""A stream, with sets: every key kept as it was before it was rotated, all else recomputed at each step.

A stream is read in chunks. The tokens of a chunk see what a head holds and, causally, themselves; the rule is told of
all of it; then of both together those stay that it protects, and of the others those that it ranks highest. In a decode
step it is as in `oracle.py`: a chunk of one token, but no prompt. With rolling positions the n tokens that a head holds
have, in order, the positions 0 to n - 1, and the q tokens of a chunk n to n + q - 1; without, those of the text.
"""

from __future__ import annotations

import copy

import torch
from oracle import Oracle, fresh_rotary, make_rule
from torch import Tensor


class StreamOracle:
    """One stream through the layers of an `Oracle`.

    Attributes:
        slack: the smallest gap between ranks that decided; margin: of a logit above the second best.
        logprobs: of every token but the first that was read or generated.
    """

    def __init__(self, oracle: Oracle, heavy: int, recent: int, rule: str = "smoothed", rolling: bool = True):
        self.oracle = copy.copy(oracle)
        self.oracle.rotate = lambda x: x
        self.oracle.attention = self.attention
        self.rolling = rolling
        L, KV = oracle.layers, oracle.kv_heads
        self.k, self.v = [None] * L, [None] * L
        self.kept = [[set() for _ in range(KV)] for _ in range(L)]
        self.rules = [[make_rule(rule, heavy, recent, h) for h in range(KV)] for _ in range(L)]
        self.length, self.logits, self.logprobs = 0, None, []
        self.slack = self.margin = float("inf")
        self.rotary = fresh_rotary(oracle.model)

    # what is done with a stream

    @torch.no_grad()
    def read(self, tokens: list[int], is_prompt: bool = True) -> None:
        """One chunk, or a token that was generated."""
        self.is_prompt, at = is_prompt, range(self.length, self.length + len(tokens))
        if self.logits is not None:
            self._score(self.logits, tokens[0])
        x = self.oracle.embed(tokens, at)
        for layer in range(self.oracle.layers):
            x = self.oracle.block(layer, x)
        each = [self.oracle.logits(row) for row in x]
        for logits, token in zip(each, tokens[1:]):
            self._score(logits, token)
        self.length, self.logits = at.stop, each[-1]

    def _score(self, logits: Tensor, token: int) -> None:
        self.logprobs.append(float(torch.log_softmax(logits, 0)[token]))

    def feed(self, tokens: list[int], chunk: int) -> None:
        for begin in range(0, len(tokens), chunk):
            self.read(tokens[begin : begin + chunk])

    def generate(self, count: int) -> list[int]:
        """The last token is not read."""
        found = []
        for step in range(count):
            if step:
                self.read(found[-1:], is_prompt=False)
            best, second = self.logits.topk(2).values
            self.margin = min(self.margin, float(best - second))
            found.append(int(self.logits.argmax()))
        return found

    # attention, for one head of keys and values after the other

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (n, H, D), k and v (n, KV, D) of new tokens, none of them rotated -> (n, H * D)."""
        is_first = self.k[layer] is None
        self.k[layer] = k if is_first else torch.cat([self.k[layer], k])
        self.v[layer] = v if is_first else torch.cat([self.v[layer], v])
        contexts = []
        for h in range(self.oracle.kv_heads):
            contexts += self._head(layer, h, q[:, h * self.oracle.group : (h + 1) * self.oracle.group])
        return torch.cat(contexts, -1)

    def _head(self, layer: int, h: int, q: Tensor) -> list[Tensor]:
        new = range(self.length, self.length + len(q))
        held = [*sorted(self.kept[layer][h]), *new]
        k, v = self.k[layer][held, h], self.v[layer][held, h]
        places = range(len(held)) if self.rolling else held
        k = self._rotated(k[:, None], places)[:, 0]
        q = self._rotated(q, list(places)[-len(q) :])
        future = torch.tensor([[j > i for j in held] for i in new])
        each = [q[:, g] @ k.T / q.shape[-1] ** 0.5 for g in range(q.shape[1])]
        each = [logits.masked_fill(future, float("-inf")).softmax(-1) for logits in each]
        rule = self.rules[layer][h]
        for j, value in zip(new, v[-len(q) :].tolist()):
            rule.see_token(j, value)
        for i, row in zip(new, sum(each).tolist()):
            rule.see_query(i, {j: p for j, p in zip(held, row) if j <= i})
        self.kept[layer][h] = self._staying(rule, held)
        return [p @ v for p in each]

    def _staying(self, rule, held: list[int]) -> set[int]:
        now = held[-1]
        if self.is_prompt:
            rule.prompt = now + 1
        if len(held) <= rule.slots:
            return set(held)
        protected = {j for j in held if rule.protects(j, now)}
        ranks = {j: rule.rank(j, now) for j in held if j not in protected}
        others = sorted(ranks, key=lambda j: (-ranks[j], j))
        room = rule.slots - len(protected)
        self.slack = min(self.slack, rule.gap([ranks[j] for j in others], room) / rule.unit)
        return {*protected, *others[:room]}

    def _rotated(self, x: Tensor, places) -> Tensor:
        """x (n, heads, D) at these positions."""
        if self.rotary is None:
            return x
        self.oracle.rotary = self.rotary
        self.oracle._turn(torch.tensor([list(places)]))
        return type(self.oracle).rotate(self.oracle, x)
