"""A stream with Python sets: every key is kept unrotated, and all else is recomputed at each step.

A stream is read in chunks. The tokens of a chunk see the tokens in a head's cache and, causally, one another. The rule
is shown all of it; then, of both together, the protected tokens stay and the highest-ranked others. A decode step is as
in `oracle.py`: a chunk of one token, which is not a prompt. With rolling positions the n cached tokens have, in order,
the positions 0 to n - 1, and the q tokens of a chunk n to n + q - 1; without, those of the text.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from oracle import Oracle, fresh_rotary
from torch import Tensor


class StreamOracle:
    """One stream through the layers of an `Oracle`.

    Attributes:
        slack: the smallest gap between ranks that decided; margin: the smallest between the best two logits.
        logprobs: of every token that was read or generated, except the first.
    """

    def __init__(self, oracle: Oracle, heavy: int, recent: int, rule: str = "smoothed", rolling: bool = True):
        self.oracle = copy.copy(oracle)
        self.oracle.rotate = lambda x: x
        self.oracle.attention = self.attention
        self.rolling = rolling
        layers = range(oracle.layers)
        self.k = [None for _ in layers]
        self.v = [None for _ in layers]
        self.rules = {}
        for layer in layers:
            for h, own in enumerate(oracle.rules_of(layer, rule, heavy, recent)):
                self.rules[layer, h] = own
                if rolling:  # the window is one of ranks, and all that are kept are in it
                    own.sight = float("inf")
        self.kept = {place: set() for place in self.rules}
        self.length = 0
        self.logits = None
        self.logprobs = []
        self.slack = float("inf")
        self.margin = float("inf")
        self.rotary = fresh_rotary(oracle.model)

    @torch.no_grad()
    def read(self, tokens: list[int], is_prompt: bool = True) -> None:
        """Read a chunk, or one token that was generated."""
        self.is_prompt = is_prompt
        if self.logits is not None:
            self.score(tokens[0])
        x = self.oracle.embed(tokens, range(self.length, self.length + len(tokens)))
        for layer in range(self.oracle.layers):
            x = self.oracle.block(layer, x)
        self.length += len(tokens)
        for row, token in zip(x, [*tokens[1:], None]):
            self.logits = self.oracle.logits(row)
            if token is not None:
                self.score(token)

    def score(self, token: int) -> None:
        """Append the log-probability of the next token."""
        self.logprobs.append(float(torch.log_softmax(self.logits, 0)[token]))

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

    # attention, one KV head after the other

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (n, H, D), k and v (n, KV, D) of new tokens, all unrotated -> (n, H * D)."""
        is_first = self.k[layer] is None
        self.k[layer] = k if is_first else torch.cat([self.k[layer], k])
        self.v[layer] = v if is_first else torch.cat([self.v[layer], v])
        KV = k.shape[1]
        groups = q.split(q.shape[1] // KV, 1)
        contexts = [self._head(layer, h, groups[h]) for h in range(KV)]
        return torch.cat(contexts, 1).flatten(1)

    def _head(self, layer: int, h: int, q: Tensor) -> Tensor:
        """q (n, G, D) of the group of KV head h -> (n, G, D)."""
        n = len(q)
        new = range(self.length, self.length + n)
        seen = [*sorted(self.kept[layer, h]), *new]
        v = self.v[layer][seen, h]
        cached_k = self.k[layer][seen, h]
        places = range(len(seen)) if self.rolling else seen
        k = self._rotated(cached_k[:, None], places)[:, 0]
        q = self._rotated(q, places[-n:])
        places = torch.tensor([*places])
        behind = places[-n:, None] - places[None, :]
        hidden = (behind < 0) | (behind >= self.oracle.sights[layer])
        logits = torch.einsum("igd,jd->gij", q, k)
        p = self.oracle.probabilities(layer, h, logits, q.shape[-1], hidden)
        rule = self.rules[layer, h]
        for j, key, value in zip(new, (cached_k if self.rolling else k)[-n:].tolist(), v[-n:].tolist()):
            rule.see_token(j, key, value)
        for i, row in zip(new, p.sum(0).tolist()):
            rule.see_query(i, {j: received for j, received in zip(seen, row) if j <= i})
        if self.is_prompt:
            rule.end_prompt(seen, n)
        self.kept[layer, h] = self._staying(rule, seen)
        return torch.einsum("gij,jd->igd", p, v)

    def _staying(self, rule, seen: list[int]) -> set[int]:
        now = seen[-1]
        seen = sorted(rule.visible(seen, now))
        if len(seen) <= rule.slots:
            return set(seen)
        protected = {j for j in seen if rule.protects(j, now)}
        ranks = {j: rule.rank(j, now) for j in seen if j not in protected}
        others = sorted(ranks, key=lambda j: (-ranks[j], j))
        room = rule.slots - len(protected)
        self.slack = min(self.slack, rule.gap([ranks[j] for j in others], room) / rule.unit)
        return {*protected, *others[:room]}

    def _rotated(self, x: Tensor, places: Sequence[int]) -> Tensor:
        """x (n, heads, D) at these positions."""
        if self.rotary is None:
            return x
        self.oracle.rotary = self.rotary
        self.oracle.turn_to(torch.tensor([list(places)]))
        return type(self.oracle).rotate(self.oracle, x)
