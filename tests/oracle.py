"""Cache rules with Python sets: one prompt at a time, the whole history kept, nothing clever.

Written from the papers and from transformers' models, without looking at the engine: its own attention, norms and
rotations, and a set of kept positions per layer and KV head. Slow and easy to check. Also full attention
(`heavy=None`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers.activations import ACT2FN


@dataclass
class Trace:
    """What was generated for one prompt, and how close the decisions were.

    Attributes:
        greedy: the most likely token at each step, whether it was chosen or not.
        margins: per token, the distance of its logit from the best other one.
        slack: the smallest difference in rank that decided which token stays or goes.
        rounding: the smallest gap that decided how a number in the cache was rounded (`rounded`).
        kept: per step (0 is prefill), layer and KV head: the positions kept at the end of the step.
        evicted: per layer and KV head: how many tokens were dropped.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    greedy: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    slack: float = float("inf")
    rounding: float = float("inf")
    kept: list[list[list[frozenset[int]]]] = field(default_factory=list)
    evicted: list[list[int]] = field(default_factory=list)

    @property
    def margin(self) -> float:
        return min(self.margins)


class H2O:
    """The cache of one KV head under H2O (arXiv 2306.14048, section 4), and the base of the other rules.

    It is shown every token and every query, those of the prompt first, and decides which tokens stay. Positions count
    from 0.

    Attributes:
        score: by position, the score from the attention so far.
        prompt: tokens of the prompt.
        sight: the sliding window of the layer: a query sees so many tokens, its own included.
        group: query heads that share the KV head.
    """

    sight = float("inf")
    group = 1
    #: whether only the prompt is cut, and every later token stays
    grows = False
    #: gaps between ranks are divided by this, to be comparable with gaps between sums of attention
    unit = 1.0

    def __init__(self, heavy: int, recent: int, head: int = 0, first: int = 0, last: int = 0):
        self.slots = heavy + recent
        self.window = recent
        self.head = head
        self.first = first
        self.last = last
        self.score: dict[int, float] = {}
        self.prompt = 0

    # what it is shown

    def see_token(self, j: int, k: list[float], v: list[float]) -> None:
        """The token at position j, with its rotated key and its value."""

    def see_query(self, i: int, row: dict[int, float]) -> None:
        """The query at position i: the attention it gives to each token, summed over the heads of a group."""
        for j, p in row.items():
            self.score[j] = self.score.get(j, 0) + p

    def end_prompt(self, tokens: list[int], count: int) -> None:
        """A prompt has ended, or a chunk of one: `tokens` in order, which the last `count` queries have seen."""
        self.prompt = tokens[-1] + 1

    # what it decides

    def rank(self, j: int, now: int) -> float:
        """Of the unprotected tokens the highest stay, when the newest token is at position `now`."""
        return self.score[j]

    def protects(self, j: int, now: int) -> bool:
        at_end = self.prompt - self.last <= j < self.prompt
        return j > now - self.window or j < self.first or at_end

    def keep(self, n: int) -> tuple[set[int], float]:
        """Positions that stay of a prompt of n tokens, and the smallest gap between a kept and a dropped rank, which
        rounding errors must not exceed. Of equal ranks the earlier stays."""
        self.end_prompt(list(range(n)), n)
        tokens = self.visible(range(n), n - 1)
        if len(tokens) <= self.slots:
            return tokens, float("inf")
        protected = {j for j in tokens if self.protects(j, n - 1)}
        ranks = {j: self.rank(j, n - 1) for j in tokens - protected}
        others = sorted(ranks, key=lambda j: (-ranks[j], j))
        room = self.slots - len(protected)
        assert room >= 0, "more tokens are protected than there are slots"
        return protected | set(others[:room]), self.gap([ranks[j] for j in others], room) / self.unit

    def visible(self, tokens, now: int) -> set[int]:
        """Those that the next query, at position `now` + 1, can see."""
        return {j for j in tokens if j > now + 1 - self.sight}

    def gap(self, ranks: list[float], room: int) -> float:
        """`ranks` are descending; the first `room` stay."""
        return ranks[room - 1] - ranks[room] if room else float("inf")

    def evict(self, kept: set[int], now: int) -> tuple[set[int], float]:
        """The tokens that go after a step whose new token is at position `now`, and the gap between the worst and the
        next worst where that decided. Those that the next query cannot see go first. Of equal ranks the earlier
        goes."""
        visible = self.visible(kept, now)
        if self.grows or len(visible) <= self.slots:
            return kept - visible, float("inf")
        assert visible == kept, "two would go"
        ranks = {j: self.rank(j, now) for j in kept if not self.protects(j, now)}
        worst = sorted(ranks, key=lambda j: (ranks[j], j))
        gap = ranks[worst[1]] - ranks[worst[0]] if len(worst) > 1 else float("inf")
        return {worst[0]}, gap / self.unit


class Mean(H2O):
    """Attention per query that could see the token."""

    def rank(self, j, now):
        return self.score[j] / (now - j + 1)


class Decayed(H2O):
    """A2SF (arXiv 2407.20485): a query's attention counts decay^(number of later queries)."""

    def __init__(self, *args, decay: float = 0.95, **options):
        super().__init__(*args, **options)
        self.decay = decay

    def see_query(self, i, row):
        self.score = {j: self.decay * score for j, score in self.score.items()}
        super().see_query(i, row)


class ValueAware(H2O):
    """VATP (arXiv 2406.12335): the score times the L1 norm of the value; 20 sinks stay."""

    def __init__(self, *args, first: int = 20, **options):
        super().__init__(*args, first=first, **options)
        self.norm: dict[int, float] = {}

    @property
    def unit(self):
        return max(self.norm.values())

    def see_token(self, j, k, v):
        self.norm[j] = sum(map(abs, v))

    def rank(self, j, now):
        return self.score[j] * self.norm[j]


class Smoothed(ValueAware):
    """The mean attention of a token times the L1 norm of its value, with `queries` more observations in which it
    received one slot's share of a query's attention; an observation counts decay^(number of later ones). The window is
    a quarter of the slots."""

    def __init__(self, heavy, recent, *args, queries: int = 16, first: int = 0, decay: float = 0.9995, **options):
        super().__init__(heavy, recent, *args, first=first, **options)
        self.queries = queries
        self.decay = decay
        if heavy:
            self.window = min(recent, (self.slots + 3) // 4)

    def see_query(self, i, row):
        self.score = {j: self.decay * score for j, score in self.score.items()}
        super().see_query(i, row)
        self.share = self.group / max(1, self.slots)

    def rank(self, j, now):
        seen = sum(self.decay**n for n in range(now - j + 1))
        return self.norm[j] * (self.score[j] + self.queries * self.share) / (seen + self.queries)


class HeavyOnly(H2O):
    """No local window."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.window = 0


class Recent(H2O):
    """The last tokens."""

    def rank(self, j, now):
        return j


class Sinks(Recent):
    """StreamingLLM (arXiv 2309.17453): the first tokens and the last."""

    def __init__(self, *args, first: int = 4, **options):
        super().__init__(*args, first=first, **options)


class Strided(Recent):
    """Sparse Transformer (arXiv 1904.10509), strided: every s-th token of the text, s the smallest power of two for
    which they fit."""

    def room(self) -> int:
        """Slots for columns."""
        return self.slots - self.window - self.first - self.last

    def columns(self, n: int) -> set[int]:
        """The tokens on the lattice in a text of n tokens."""
        if self.room() == 0:
            return set()
        s = 1
        while len(range(0, n, s)) > self.room():
            s *= 2
        return set(range(0, n, s))

    def protects(self, j, now):
        return super().protects(j, now) or j in self.columns(now + 1)


class StridedH2O(Strided):
    """With heavy hitters in half of the slots."""

    def room(self):
        return super().room() // 2

    def rank(self, j, now):
        return self.score[j]


class Fixed(Strided):
    """Sparse Transformer, fixed: the last c tokens of every block of `recent` tokens. With more blocks than slots the
    last one of every 2, 4, ... blocks."""

    def columns(self, n):
        room = self.room()
        size = max(1, self.window)
        blocks = n // size
        if room == 0 or blocks == 0:
            return set()
        c = max(1, room // blocks)
        joined = 1
        while joined * room < blocks:
            joined *= 2
        ends = range(joined * size, n + 1, joined * size)
        return {j for end in ends for j in range(max(0, end - min(c, size)), end)}


class FixedH2O(Fixed, StridedH2O):
    """With heavy hitters in half of the slots."""


class SnapKV(H2O):
    """SnapKV (arXiv 2404.14469, section 4): of the prompt its last tokens stay, and those that its last queries vote
    for; votes of tokens outside the window are pooled over neighbours. Then everything stays."""

    grows = True

    def __init__(self, *args, window: int = 32, pool: int = 7, pooling: str = "max", **options):
        super().__init__(*args, **options)
        self.voters = window
        self.pool = pool
        self.pooling = pooling
        self.rows: list[dict[int, float]] = []

    def see_query(self, i, row):
        self.rows.append(row)

    def rank(self, j, now):
        neighbours = range(max(0, j - self.pool // 2), min(j + self.pool // 2, now - self.window) + 1)
        votes = map(self.votes, neighbours)
        return max(votes) if self.pooling == "max" else sum(votes)

    def votes(self, j):
        return sum(row.get(j, 0) for row in self.rows[-self.voters :])

    def gap(self, ranks, room):
        # equal ranks are one vote that reaches several tokens: rounding moves them together
        worst = ranks[room - 1] if room else 0
        return min((abs(worst - rank) for rank in ranks if room and rank != worst), default=float("inf"))


class Voted(Mean):
    """Attention per query, of which the prompt's count `others`, but for the last `window`: of what these gave, a token
    gets the most that any of its `pool` neighbours got."""

    gap = SnapKV.gap

    def __init__(self, *args, window: int = 8, pool: int = 15, others: float = 0.05, **options):
        super().__init__(*args, **options)
        self.voters = window
        self.reach = pool // 2
        self.others = others
        self.rows: list[dict[int, float]] = []

    def see_query(self, i, row):
        self.rows.append(row)
        super().see_query(i, row)

    def end_prompt(self, tokens, count):
        super().end_prompt(tokens, count)
        rows = self.rows[-count:]
        votes = [sum(row.get(j, 0) for row in rows[-self.voters :]) for j in tokens]
        for n, j in enumerate(tokens):
            self.score[j] -= votes[n] + (1 - self.others) * sum(row.get(j, 0) for row in rows[: -self.voters])
            self.score[j] += max(votes[max(0, n - self.reach) : n + self.reach + 1])

    def rank(self, j, now):
        voted = now + 1 - max(j, self.prompt - self.voters)
        return self.score[j] / (voted + self.others * (now + 1 - j - voted))


class Random(H2O):
    """A hash of position and head."""

    def rank(self, j, now):
        x = np.array([j * 0x2545F491 + (self.head + 1) * 0x1B873593]).astype(np.int32)
        x = (x ^ (x >> 15)) * np.int32(0x2C1B3C6D)
        return int((x ^ (x >> 13))[0] >> 8)


#: by their names in a KV budget
RULES = {
    "smoothed": Smoothed,
    "h2o": H2O,
    "mean": Mean,
    "voted": Voted,
    "decayed": Decayed,
    "vatp": ValueAware,
    "heavy": HeavyOnly,
    "snapkv": SnapKV,
    "recent": Recent,
    "sinks": Sinks,
    "strided": Strided,
    "strided_h2o": StridedH2O,
    "fixed": Fixed,
    "fixed_h2o": FixedH2O,
    "random": Random,
}
#: options with which rounding decides nothing in a short prompt
IN_SHORT = {"voted": ":window=4:pool=3"}


def make_rule(text: str, heavy: int, recent: int, head: int = 0) -> H2O:
    """ "name" or "name:option=value:option=value", for a KV head. Values are numbers where they look like one."""
    name, *given = text.split(":")
    options = {}
    for each in given:
        option, value = each.split("=")
        for kind in (str, float, int):
            with suppress(ValueError):
                options[option] = kind(value)
    return RULES[name](heavy, recent, head, **options)


def within(sight: float, heavy: int, recent: int) -> tuple[int, int]:
    """Slots in a layer with a sliding window, which has room for one token less beside the next one: the ratio stays,
    and one recent token at least if there was one."""
    room = sight - 1
    if heavy + recent <= room:
        return heavy, recent
    fewer = min(max(round(room * recent / (heavy + recent)), min(1, recent)), room)
    return room - fewer, fewer


def quantised(kind: str | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """K and V (..., D) as a cache in 8 or 4 bits returns them, vector by vector; K has 8 bits in both."""
    return rounded(kind, k, v)[:2]


def rounded(kind: str | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, float]:
    """The same, and the smallest gap between a number and the point where it would round the other way, in units of
    possible fp32 errors."""
    if kind is None:
        return k, v, float("inf")
    rounded_k, k_gaps = zip(*map(rounded8, k.reshape(-1, k.shape[-1])))
    rounded_v, v_gaps = zip(*map(rounded8 if kind == "int8" else rounded4, v.reshape(-1, v.shape[-1])))
    return torch.stack(rounded_k).view_as(k), torch.stack(rounded_v).view_as(v), min(*k_gaps, *v_gaps)


def rounded8(x: Tensor) -> tuple[Tensor, float]:
    """Each element as one of -127 to 127 steps, where 127 is the largest element."""
    step, gap = half(float(x.abs().max()) / 127)
    codes = x / step if step else x * 0
    return torch.round(codes) * step, min(gap, between(codes))


def rounded4(x: Tensor) -> tuple[Tensor, float]:
    """Each element as one of 16 values from the smallest element to the largest."""
    least, gap = half(float(x.min()))
    step, other = half(float(x.max() - x.min()) / 15)
    codes = (x - least) / step if step else x * 0
    return torch.round(codes).clamp(0, 15) * step + least, min(gap, other, between(codes))


def half(x: float) -> tuple[float, float]:
    """In fp16, and the gap in units of 0.002 of its last place."""
    found = np.float16(x)
    place = float(np.spacing(np.abs(found)))
    return float(found), abs(abs(x - float(found)) - place / 2) / (2e-3 * place)


def between(codes: Tensor) -> float:
    """The gap of numbers that are rounded to integers, in units of 0.0003."""
    return float((codes - torch.floor(codes) - 0.5).abs().min()) / 3e-4


def fresh_rotary(model):
    """A new rotary module of a transformers model, or None: with dynamic RoPE a used one remembers the longest text it
    has seen."""
    used = getattr(model.base_model, "rotary_emb", None)
    return None if used is None else type(used)(model.config)


class Oracle:
    """Generates with the weights of a transformers model in `dtype`. A subclass computes the layers of a family.

    Shapes: n tokens of one sequence, H query heads, KV heads of K and V, D elements of a head.
    """

    prefix = "model."

    def __init__(self, model, dtype: torch.dtype = torch.float64):
        self.model = model
        self.config = model.config
        self.dtype = dtype
        self.w = {name.removeprefix(self.prefix): t.detach().to(dtype) for name, t in model.state_dict().items()}
        self.layers = self.config.num_hidden_layers
        self.heads = self.config.num_attention_heads
        self.kv_heads = getattr(self.config, "num_key_value_heads", None) or self.heads
        self.kv_heads_of = [self.kv_heads] * self.layers
        self.sights = [self._sight(layer) for layer in range(self.layers)]
        self.cap = getattr(self.config, "attn_logit_softcapping", None)
        self.scale_base = getattr(self.config, "query_pre_attn_scalar", None)  # else the size of a head

    def _sight(self, layer: int) -> float:
        """The sliding window of a layer."""
        window = getattr(self.config, "sliding_window", None)
        types = getattr(self.config, "layer_types", None)
        sees_all = window is None or (types and types[layer] != "sliding_attention")
        return float("inf") if sees_all else window

    # what a family defines

    def embed(self, tokens: list[int], positions: range) -> Tensor:
        raise NotImplementedError

    def block(self, layer: int, x: Tensor) -> Tensor:
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    # parts

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
        return x * self.w[f"{name}.weight"] + self.w[f"{name}.bias"] if f"{name}.weight" in self.w else x

    def rms_norm(self, name: str, x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.rms_norm_eps) * self.w[f"{name}.weight"]

    def rotate(self, x: Tensor) -> Tensor:
        """x (n, heads, D) at the positions of this step. Elements i and i + half of a head are rotated as a pair, for
        each i < half; elements from 2 * half on stay."""
        half = self.angles.shape[-1]
        cos = torch.cos(self.angles)[:, None] * self.scale
        sin = torch.sin(self.angles)[:, None] * self.scale
        a = x[..., :half]
        b = x[..., half : 2 * half]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)

    # one prompt

    @torch.no_grad()
    def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        heavy: int | None = None,
        recent: int | None = None,
        rule: str = "smoothed",
        cache: str | None = None,
        forced: list[int] | None = None,
    ) -> Trace:
        """Generate the most likely tokens, or feed those of `forced`. `heavy` and `recent` may be tuples: slots for
        each layer, or a tuple of those for each KV head. `cache`: "int8" or "int4"."""
        L = self.layers
        self.cache = cache
        self.trace = Trace(evicted=[[0] * KV for KV in self.kv_heads_of])
        heavies, recents = (n if isinstance(n, tuple) else (n,) * L for n in (heavy, recent))
        self.rules = [None] * L
        if heavy is not None:
            self.rules = [self.rules_of(layer, rule, *slots) for layer, slots in enumerate(zip(heavies, recents))]
        self.rotary = fresh_rotary(self.model)
        self.k = [None] * L
        self.v = [None] * L
        self.kept = []
        for KV in self.kv_heads_of:
            self.kept.append([set() for _ in range(KV)])
        fed = list(prompt)
        first = 0
        for step in range(max_tokens):
            logits = self._forward(fed, first)
            first += len(fed)
            greedy = int(logits.argmax())
            token = greedy if forced is None else forced[step]
            others = torch.cat([logits[:token], logits[token + 1 :]])
            self.trace.tokens.append(token)
            self.trace.greedy.append(greedy)
            self.trace.logprobs.append(float(torch.log_softmax(logits, 0)[token]))
            self.trace.margins.append(float(logits[token] - others.max()))
            self.trace.kept.append([list(map(frozenset, layer)) for layer in self.kept])
            fed = [token]
        return self.trace

    def rules_of(self, layer: int, text: str, heavy: int | tuple, recent: int | tuple) -> list[H2O]:
        """The rule of each KV head of a layer."""
        sight = self.sights[layer]
        KV = self.kv_heads_of[layer]
        heavies, recents = (n if isinstance(n, tuple) else (n,) * KV for n in (heavy, recent))
        rules = [make_rule(text, *within(sight, heavies[h], recents[h]), h) for h in range(KV)]
        for rule in rules:
            rule.sight = sight
            rule.group = self.heads // KV
            if rule.grows and sight < float("inf"):
                rule.slots = sight - 1
        return rules

    def _forward(self, tokens: list[int], first: int) -> Tensor:
        """Logits after the last of `tokens`, the first of which is at position `first`."""
        positions = range(first, first + len(tokens))
        if self.rotary is not None:
            self.turn_to(torch.tensor([list(positions)]))
        x = self.embed(tokens, positions)
        for layer in range(self.layers):
            x = self.block(layer, x)
        return self.logits(x[-1])

    def turn_to(self, positions: Tensor) -> None:
        """Set the angles (n, pairs) of this step, with transformers' radians per position at this length of text."""
        self.rotary(torch.zeros(1), positions)
        self.angles = positions[0, :, None].to(self.dtype) * self.rotary.inv_freq.to(self.dtype)
        self.scale = self.rotary.attention_scaling

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (n, H, D), k and v (n, KV, D) of new tokens -> (n, H * D). The tokens of a prompt see one another before
        they are rounded for the cache; a later token sees all of them rounded, itself included."""
        is_prompt = self.k[layer] is None
        stored_k, stored_v, gap = rounded(self.cache, k, v)
        self.trace.rounding = min(self.trace.rounding, gap)
        self.k[layer] = stored_k if is_prompt else torch.cat([self.k[layer], stored_k])
        self.v[layer] = stored_v if is_prompt else torch.cat([self.v[layer], stored_v])
        of_a_head = self._prompt if is_prompt else self._token
        KV = k.shape[1]
        groups = q.split(self.heads // KV, 1)
        contexts = [of_a_head(layer, h, groups[h], k[:, h], v[:, h]) for h in range(KV)]
        return torch.cat(contexts, 1).flatten(1)

    def _prompt(self, layer: int, h: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """KV head h over a prompt: q (n, G, D) of its group, k and v (n, D) -> (n, G, D)."""
        n = len(k)
        behind = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        hidden = (behind < 0) | (behind >= self.sights[layer])
        p = self.probabilities(layer, h, torch.einsum("igd,jd->gij", q, k), k.shape[1], hidden)
        self.kept[layer][h] = set(range(n))
        if self.rules[layer] is not None:
            rule = self.rules[layer][h]
            received = p.sum(0).tolist()
            for i in range(n):
                rule.see_token(i, k[i].tolist(), v[i].tolist())
                rule.see_query(i, dict(enumerate(received[i][: i + 1])))
            kept, gap = rule.keep(n)
            self._drop(layer, h, self.kept[layer][h] - kept, gap)
        return torch.einsum("gij,jd->igd", p, v)

    def _token(self, layer: int, h: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """KV head h for one more token: q (1, G, D) of its group, k and v (1, D), not yet rounded -> (1, G, D)."""
        now = len(self.k[layer]) - 1
        if self.rules[layer] is None:  # a full cache lets nothing go but what has left the window
            self.kept[layer][h] = {j for j in self.kept[layer][h] if j > now - self.sights[layer]}
        self.kept[layer][h].add(now)
        seen = sorted(self.kept[layer][h])
        assert seen[0] > now - self.sights[layer]
        p = self.probabilities(layer, h, (q[0] @ self.k[layer][seen, h].T)[:, None], k.shape[1])[:, 0]
        if self.rules[layer] is not None:
            rule = self.rules[layer][h]
            rule.see_token(now, k[0].tolist(), v[0].tolist())
            rule.see_query(now, dict(zip(seen, p.sum(0).tolist())))
            self._drop(layer, h, *rule.evict(self.kept[layer][h], now))
        return (p @ self.v[layer][seen, h])[None]

    def probabilities(self, layer: int, h: int, logits: Tensor, D: int, hidden: Tensor | None = None) -> Tensor:
        """What the queries of KV head h give to each token, from their products (G, n, S); `hidden` (n, S)."""
        logits = logits / (self.scale_base or D) ** 0.5
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        if hidden is not None:
            logits = logits.masked_fill(hidden, float("-inf"))
        sinks = self.w.get(f"layers.{layer}.self_attn.sinks")
        if sinks is None:
            return logits.softmax(-1)
        G, n, _ = logits.shape
        own = sinks[h * G : (h + 1) * G, None, None].expand(G, n, 1)
        return torch.cat([logits, own], -1).softmax(-1)[..., :-1]

    def _drop(self, layer: int, h: int, gone: set[int], gap: float) -> None:
        self.kept[layer][h] -= gone
        self.trace.evicted[layer][h] += len(gone)
        self.trace.slack = min(self.trace.slack, gap)


class OptOracle(Oracle):
    """OPT."""

    prefix = "model.decoder."

    def __init__(self, model, dtype: torch.dtype = torch.float64):
        super().__init__(model, dtype)
        self.act = model.model.decoder.layers[0].activation_fn

    def embed(self, tokens, positions):
        x = self.w["embed_tokens.weight"][tokens]
        if "project_in.weight" in self.w:
            x = self.linear("project_in", x)
        return x + self.w["embed_positions.weight"][[2 + p for p in positions]]

    def block(self, layer, x):
        at = f"layers.{layer}"
        before = self.config.do_layer_norm_before
        y = self.norm(f"{at}.self_attn_layer_norm", x, 1e-5) if before else x
        q, k, v = (self.linear(f"{at}.self_attn.{p}_proj", y).view(len(x), self.heads, -1) for p in "qkv")
        x = x + self.linear(f"{at}.self_attn.out_proj", self.attention(layer, q, k, v))
        x = x if before else self.norm(f"{at}.self_attn_layer_norm", x, 1e-5)
        y = self.norm(f"{at}.final_layer_norm", x, 1e-5) if before else x
        x = x + self.linear(f"{at}.fc2", self.act(self.linear(f"{at}.fc1", y)))
        return x if before else self.norm(f"{at}.final_layer_norm", x, 1e-5)

    def logits(self, x):
        if self.config.do_layer_norm_before and not self.config._remove_final_layer_norm:
            x = self.norm("final_layer_norm", x, 1e-5)
        if "project_out.weight" in self.w:
            x = self.linear("project_out", x)
        return self.linear("lm_head", x)


class LlamaOracle(Oracle):
    """LLaMA and the families with its blocks; with norms of each head's queries and keys where there are such."""

    def __init__(self, model, dtype: torch.dtype = torch.float64):
        super().__init__(model, dtype)
        self.act = ACT2FN[getattr(self.config, "hidden_act", None) or self.config.hidden_activation]

    def embed(self, tokens, positions):
        return self.w["embed_tokens.weight"][tokens]

    def block(self, layer, x):
        x = x + self.attend(layer, self.rms_norm(f"layers.{layer}.input_layernorm", x))
        return x + self.gated(layer, self.rms_norm(f"layers.{layer}.post_attention_layernorm", x))

    def attend(self, layer, y):
        at = f"layers.{layer}.self_attn"
        q = self.linear(f"{at}.q_proj", y).view(len(y), self.heads, -1)
        k = self.linear(f"{at}.k_proj", y).view(len(y), self.kv_heads_of[layer], -1)
        v = self.linear(f"{at}.v_proj", y).view(len(y), self.kv_heads_of[layer], -1)
        if f"{at}.q_norm.weight" in self.w:
            q = self.rms_norm(f"{at}.q_norm", q)
            k = self.rms_norm(f"{at}.k_norm", k)
        return self.linear(f"{at}.o_proj", self.attention(layer, self.rotate(q), self.rotate(k), v))

    def gated(self, layer, y):
        at = f"layers.{layer}.mlp"
        gated = self.act(self.linear(f"{at}.gate_proj", y)) * self.linear(f"{at}.up_proj", y)
        return self.linear(f"{at}.down_proj", gated)

    def logits(self, x):
        return self.linear("lm_head", self.rms_norm("norm", x))


class ExpertsOracle(LlamaOracle):
    """Mixtral and Qwen3's mixtures of experts: each token by itself."""

    def gated(self, layer, y):
        at = f"layers.{layer}.mlp"
        if f"{at}.experts.down_proj" not in self.w:
            return super().gated(layer, y)
        return torch.stack([self._token_mlp(at, token) for token in y])

    def _token_mlp(self, at: str, x: Tensor) -> Tensor:
        shares = self.linear(f"{at}.gate", x).softmax(-1)
        chosen = shares.argsort(descending=True)[: self.config.num_experts_per_tok].tolist()
        whole = sum(shares[e] for e in chosen) if getattr(self.config, "norm_topk_prob", True) else 1
        found = torch.zeros_like(x)
        for e in chosen:
            gate, up = (self.w[f"{at}.experts.gate_up_proj"][e] @ x).chunk(2)
            found += shares[e] / whole * (self.w[f"{at}.experts.down_proj"][e] @ (self.act(gate) * up))
        return found


class SharedExpertOracle(ExpertsOracle):
    """Qwen2's mixtures of experts."""

    def _token_mlp(self, at, x):
        shared = self.act(self.linear(f"{at}.shared_expert.gate_proj", x))
        shared = self.linear(f"{at}.shared_expert.down_proj", shared * self.linear(f"{at}.shared_expert.up_proj", x))
        return super()._token_mlp(at, x) + shared / (1 + torch.exp(-self.linear(f"{at}.shared_expert_gate", x)))


class GptOssOracle(ExpertsOracle):
    """gpt-oss."""

    def _token_mlp(self, at, x):
        logits = self.linear(f"{at}.router", x)
        chosen = logits.argsort(descending=True)[: self.config.num_experts_per_tok]
        limit = self.config.swiglu_limit
        found = torch.zeros_like(x)
        for e, share in zip(chosen.tolist(), logits[chosen].softmax(-1)):
            both = x @ self.w[f"{at}.experts.gate_up_proj"][e] + self.w[f"{at}.experts.gate_up_proj_bias"][e]
            gate = both[::2].clamp(max=limit)
            up = both[1::2].clamp(-limit, limit)
            inner = (up + 1) * gate / (1 + torch.exp(-self.config.swiglu_alpha * gate))
            found += share * (inner @ self.w[f"{at}.experts.down_proj"][e] + self.w[f"{at}.experts.down_proj_bias"][e])
        return found


class NeoXOracle(Oracle):
    """GPT-NeoX."""

    prefix = "gpt_neox."

    def __init__(self, model, dtype: torch.dtype = torch.float64):
        super().__init__(model, dtype)
        self.act = model.gpt_neox.layers[0].mlp.act

    def embed(self, tokens, positions):
        return self.w["embed_in.weight"][tokens]

    def block(self, layer, x):
        at = f"layers.{layer}"
        eps = self.config.layer_norm_eps
        mixed = self.linear(f"{at}.attention.query_key_value", self.norm(f"{at}.input_layernorm", x, eps))
        D = x.shape[-1] // self.heads
        # one head after the other, and of each its query, key and value
        q, k, v = mixed.view(len(x), self.heads, 3 * D).split(D, -1)
        y = x + self.linear(f"{at}.attention.dense", self.attention(layer, self.rotate(q), self.rotate(k), v))
        z = self.norm(f"{at}.post_attention_layernorm", x if self.config.use_parallel_residual else y, eps)
        return y + self.linear(f"{at}.mlp.dense_4h_to_h", self.act(self.linear(f"{at}.mlp.dense_h_to_4h", z)))

    def logits(self, x):
        return self.linear("lm_head", self.norm("final_layer_norm", x, self.config.layer_norm_eps))


class GemmaOracle(LlamaOracle):
    """Gemma 2 and 3."""

    def embed(self, tokens, positions):
        return self.w["embed_tokens.weight"][tokens] * self.config.hidden_size**0.5

    def rms_norm(self, name, x):
        square = (x * x).mean(-1, keepdim=True)
        return x / torch.sqrt(square + self.config.rms_norm_eps) * (1 + self.w[f"{name}.weight"])

    def block(self, layer, x):
        at = f"layers.{layer}"
        self.kind = self.config.layer_types[layer]
        y = self.rms_norm(f"{at}.input_layernorm", x)
        y = self.rms_norm(f"{at}.post_attention_layernorm", self.attend(layer, y))
        x = x + y
        y = self.gated(layer, self.rms_norm(f"{at}.pre_feedforward_layernorm", x))
        return x + self.rms_norm(f"{at}.post_feedforward_layernorm", y)

    def logits(self, x):
        cap = self.config.final_logit_softcapping
        y = super().logits(x)
        return y if cap is None else cap * torch.tanh(y / cap)


class Gemma3Oracle(GemmaOracle):
    """With another rotation in layers with a window."""

    def turn_to(self, positions):
        rotary = self.rotary
        self.turns = {}
        for kind in set(self.config.layer_types):
            rotary(torch.zeros(1), positions, kind)
            each = getattr(rotary, f"{kind}_inv_freq").to(self.dtype)
            self.turns[kind] = positions[0, :, None].to(self.dtype) * each, getattr(rotary, f"{kind}_attention_scaling")

    def rotate(self, x):
        self.angles, self.scale = self.turns[self.kind]
        return super().rotate(x)


class Gemma4Oracle(Gemma3Oracle):
    """Gemma 4, with an MLP alone or beside experts."""

    def __init__(self, model, dtype: torch.dtype = torch.float64):
        model.config.allow_global_per_layer_attribute_access = True
        super().__init__(model, dtype)
        self.scale_base = 1.0
        self.kv_heads_of = [layer.num_key_value_heads for layer in self.config.per_layer_config]

    def plain_norm(self, x):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.rms_norm_eps)

    def rms_norm(self, name, x):
        return self.plain_norm(x) * self.w[f"{name}.weight"]

    def attend(self, layer, y):
        at = f"layers.{layer}.self_attn"
        q = self.linear(f"{at}.q_proj", y).view(len(y), self.heads, -1)
        k = self.linear(f"{at}.k_proj", y).view(len(y), self.kv_heads_of[layer], -1)
        v = self.linear(f"{at}.v_proj", y).view(k.shape) if f"{at}.v_proj.weight" in self.w else k
        q = self.rotate(self.rms_norm(f"{at}.q_norm", q))
        k = self.rotate(self.rms_norm(f"{at}.k_norm", k))
        return self.linear(f"{at}.o_proj", self.attention(layer, q, k, self.plain_norm(v)))

    def block(self, layer, x):
        at = f"layers.{layer}"
        self.kind = self.config.layer_types[layer]
        y = self.attend(layer, self.rms_norm(f"{at}.input_layernorm", x))
        x = x + self.rms_norm(f"{at}.post_attention_layernorm", y)
        y = self.gated(layer, self.rms_norm(f"{at}.pre_feedforward_layernorm", x))
        if self.config.enable_moe_block:
            mixed = torch.stack([self._mixture(at, token) for token in x])
            mixed = self.rms_norm(f"{at}.post_feedforward_layernorm_2", mixed)
            y = self.rms_norm(f"{at}.post_feedforward_layernorm_1", y) + mixed
        return (x + self.rms_norm(f"{at}.post_feedforward_layernorm", y)) * self.w[f"{at}.layer_scalar"]

    def _mixture(self, at: str, x: Tensor) -> Tensor:
        read = self.plain_norm(x) * self.w[f"{at}.router.scale"] / len(x) ** 0.5
        shares = self.linear(f"{at}.router.proj", read).softmax(-1)
        chosen = shares.argsort(descending=True)[: self.config.top_k_experts].tolist()
        whole = sum(shares[e] for e in chosen)
        y = self.rms_norm(f"{at}.pre_feedforward_layernorm_2", x)
        found = torch.zeros_like(x)
        for e in chosen:
            gate, up = (self.w[f"{at}.experts.gate_up_proj"][e] @ y).chunk(2)
            output = self.w[f"{at}.experts.down_proj"][e] @ (self.act(gate) * up)
            found += shares[e] / whole * self.w[f"{at}.router.per_expert_scale"][e] * output
        return found


class Phi3Oracle(LlamaOracle):
    """Phi-3: LLaMA with its matrices cut out of fused ones."""

    def __init__(self, model, dtype: torch.dtype = torch.float64):
        Oracle.__init__(self, model, dtype)
        self.act = ACT2FN[self.config.hidden_act]
        head_dim = self.config.hidden_size // self.heads
        for layer in range(self.layers):
            at = f"layers.{layer}"
            sizes = [n * head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
            qkv = self.w[f"{at}.self_attn.qkv_proj.weight"].split(sizes)
            gate_up = self.w[f"{at}.mlp.gate_up_proj.weight"].chunk(2)
            self.w |= {f"{at}.self_attn.{name}_proj.weight": matrix for name, matrix in zip("qkv", qkv)}
            self.w |= {f"{at}.mlp.{name}_proj.weight": matrix for name, matrix in zip(("gate", "up"), gate_up)}


#: families whose blocks are not LLaMA's
ORACLES = {
    "opt": OptOracle,
    "gpt_neox": NeoXOracle,
    "gemma2": GemmaOracle,
    "gemma3_text": Gemma3Oracle,
    "gemma4_text": Gemma4Oracle,
    "phi3": Phi3Oracle,
    "qwen2_moe": SharedExpertOracle,
    "qwen3_moe": ExpertsOracle,
    "mixtral": ExpertsOracle,
    "gpt_oss": GptOssOracle,
}


def oracle_of(model) -> Oracle:
    """The oracle with the weights of a transformers model."""
    return ORACLES.get(model.config.model_type, LlamaOracle)(model)
