"""Every cache rule against its oracle on random tensors, and H2O with ties."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import H2O, IN_SHORT, quantised, within
from oracle import make_rule as oracle_rule
from torch import Tensor

from h2o_flexgen.formats.forms import cache_format
from h2o_flexgen.kernels.attention import PLAIN, Softmax
from h2o_flexgen.kv_cache import RULES, HeavyHitterCache, KVLayout, make_rule
from h2o_flexgen.kv_cache import full as full_cache
from h2o_flexgen.kv_cache.full import FullCache
from h2o_flexgen.kv_cache.rule import LayerAttention, Rows
from h2o_flexgen.models.spec import Rope


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr(full_cache, "SEGMENT", 3)


def make_cache(rule, B, KV, T, D, steps, kind=None):
    """A cache that holds garbage, as another batch may have left behind: NaN, also in scales."""
    form = cache_format(kind, torch.float32, D)
    layout = KVLayout(B, KV, rule.segments(T, steps + 1), D, form, rule.slot_fields, rule.growth)
    kv = torch.zeros(layout.kv_bytes, dtype=torch.uint8)
    meta = torch.zeros(layout.meta_bytes, dtype=torch.uint8)
    cache = layout.view(kv, meta)
    for tensor in (*cache.k, *cache.v):
        tensor.fill_(float("nan") if tensor.is_floating_point() else 255)
    for tensor in cache.metadata.values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 3)
    return cache


def step_of(lengths, step) -> Rows:
    """Decode step `step`, 1 for the first, after prompts of these lengths."""
    prompt = torch.tensor(lengths)
    return Rows.steps(prompt + step - 1, prompt)


def cached(cache, b, h) -> list[int]:
    return sorted(p for p in cache.position[b, h].tolist() if p >= 0)


def assert_holds(cache, b, h, positions, k, v):
    """The cache holds exactly these positions, each with its own stored key and value."""
    keys, values = (
        form.floats(torch.cat([segment[b, h] for segment in segments]), torch.float32)
        for form, segments in zip(cache.form, (cache.k, cache.v))
    )
    at = {tuple(key): slot for slot, key in enumerate(keys.tolist())}
    for p in positions:
        slot = at[tuple(k[b, h, p].tolist())]
        assert torch.equal(values[slot], v[b, h, p]), p
        if cache.metadata:
            assert cache.position[b, h, slot] == p
    if cache.metadata:
        assert cached(cache, b, h) == sorted(positions)


@dataclass(frozen=True)
class Job:
    """Prompts of several lengths, and decode steps after each.

    Shapes: B sequences, H query heads, KV heads of K and V, T tokens of the longest prompt, N = T + steps.
    """

    lengths: list[int]  # the first is the longest
    KV: int
    group: int
    heavy: int
    recent: int
    steps: int
    seed: int

    @property
    def B(self) -> int:
        return len(self.lengths)

    @property
    def T(self) -> int:
        return self.lengths[0]

    @property
    def heads(self) -> tuple[int, int, int]:
        """Of q, k and v."""
        return (self.KV * self.group, self.KV, self.KV)

    def padded(self, tensors: list[Tensor]) -> list[Tensor]:
        """(B, heads, T, D) of the prompts, from (B, heads, N, D); padding is garbage."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        found = [x[:, :, : self.T].clone().uniform_(-9, 9, generator=generator) for x in tensors]
        for b, n in enumerate(self.lengths):
            for padded, x in zip(found, tensors):
                padded[b, :, :n] = x[b, :, :n]
        return found

    def at(self, step: int, tensors: list[Tensor]) -> list[Tensor]:
        """(B, heads, 1, D) of the tokens of a decode step, from (B, heads, N, D)."""
        now = [n + step - 1 for n in self.lengths]
        return [x[range(self.B), :, now][:, :, None] for x in tensors]


@st.composite
def jobs(draw):
    T = draw(st.integers(1, 14))
    heavy = draw(st.integers(0, 8))
    return Job(
        lengths=[T, *draw(st.lists(st.integers(1, T), max_size=2))],
        KV=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 1, 2, 3, 8])),
        heavy=heavy,
        recent=draw(st.integers(0 if heavy else 1, 8)),
        steps=draw(st.integers(0, 12)),
        seed=draw(st.integers(0, 2**32)),
    )


#: options of a rule's own
OPTIONS = {
    "decayed": st.sampled_from(["", ":decay=0.5", ":decay=1.0"]),
    "snapkv": st.builds(
        ":window={}:pool={}:pooling={}".format,
        st.sampled_from([1, 2, 3, 16]),
        st.sampled_from([1, 3, 7]),
        st.sampled_from(["max", "avg"]),
    ),
    "voted": st.builds(
        ":window={}:pool={}:others={}".format, *map(st.sampled_from, ([1, 2, 16], [1, 3, 7], [0.0, 0.3, 1.0]))
    ),
}


def protected(draw, heavy: int) -> str:
    """Options for tokens at both ends that fit into the slots of heavy hitters."""
    first = draw(st.sampled_from([0, draw(st.integers(0, heavy))]))
    return f":first={first}:last={draw(st.sampled_from([0, heavy - first]))}"


def rules(name: str, job: Job, data, softmax: Softmax = PLAIN):
    """A rule in a layer with this softmax, and its oracles by (sequence, KV head). The full cache is one with a slot
    for each token."""
    places = list(product(range(job.B), range(job.KV)))
    own = () if softmax == PLAIN else (LayerAttention(softmax, job.group, None),)
    sight = softmax.window or 1 << 30
    slots = within(sight, job.heavy, job.recent)
    if name == "full":
        rule = FullCache(attention=own)
        oracles = {place: H2O(100, 0) for place in places}
    else:
        text = name + protected(data.draw, slots[0]) + data.draw(OPTIONS.get(name, st.just("")))
        rule = replace(make_rule(text, job.heavy, job.recent), groups=job.group, attention=own)
        oracles = {(b, h): oracle_rule(text, *slots, h) for b, h in places}
    for oracle in oracles.values():
        oracle.sight = sight
        oracle.group = job.group
        if oracle.grows and softmax.window:
            oracle.slots = sight - 1
    return rule.in_layer(0), oracles


@pytest.mark.parametrize("name", ["full", *RULES])
@settings(max_examples=20)
@given(
    job=jobs(),
    kind=st.sampled_from([None, "int8", "int4"]),
    D=st.integers(1, 6),
    scale=st.sampled_from([0.1, 1.0, 3.0]),
    data=st.data(),
)
def test_random_tensors_keep_what_the_oracle_keeps(name, job, kind, D, scale, data):
    """A prompt attends to its tokens before they are stored, a step to all stored ones, including its own."""
    D *= {None: 1, "int8": 2, "int4": 4}[kind]
    H = job.KV * job.group
    window = st.none() | st.integers(1, 12)
    any_softmax = st.builds(
        Softmax, st.sampled_from([None, 0.3]), st.sampled_from([None, 2.0]), window, sinks=st.none()
    )
    softmax = data.draw(st.just(PLAIN) | any_softmax, "softmax")
    sinks = data.draw(st.none() | st.lists(st.floats(-3, 3), min_size=H, max_size=H).map(torch.tensor), "sinks")
    rule, oracles = rules(name, job, data, softmax)
    generator = torch.Generator().manual_seed(job.seed)
    tensors = [torch.randn(job.B, H, job.T + job.steps, D, generator=generator) * scale for H in job.heads]
    q, k, v = tensors
    stored_k, stored_v = quantised(kind, k, v)
    cache = make_cache(rule, job.B, job.KV, job.T, D, job.steps, kind)
    context = rule.prefill(cache, *job.padded(tensors), Rows.prompts(torch.tensor(job.lengths)), sinks=sinks)

    def check(b, h, t, seen, k, v, found) -> None:
        """Compare what the queries at position t get from the tokens `seen`, and show it to the oracle."""
        group = range(h * job.group, (h + 1) * job.group)
        logits = q[b, group, t].double() @ k[b, h, seen].double().T * (softmax.scale or D**-0.5)
        if softmax.cap:
            logits = softmax.cap * torch.tanh(logits / softmax.cap)
        own = torch.tensor([-torch.inf]).expand(len(group)) if sinks is None else sinks[group]
        p = torch.softmax(torch.cat([logits, own.double()[:, None]], -1), -1)[:, :-1]
        expected = p @ v[b, h, seen].double()
        torch.testing.assert_close(found[b, group].double(), expected, atol=1e-5, rtol=1e-4)
        oracles[b, h].see_token(t, tensors[1][b, h, t].tolist(), tensors[2][b, h, t].tolist())
        oracles[b, h].see_query(t, dict(zip(seen, p.sum(0).tolist())))

    kept = {}
    for (b, h), oracle in oracles.items():
        n = job.lengths[b]
        for t in range(n):
            seen = range(max(0, t + 1 - (softmax.window or t + 1)), t + 1)
            check(b, h, t, list(seen), k, v, context[:, :, t])
        kept[b, h], gap = oracle.keep(n)
        assume(gap > 1e-5)
        assert_holds(cache, b, h, kept[b, h], stored_k, stored_v)
    for step in range(1, job.steps + 1):
        context, slots = rule.decode(cache, *job.at(step, tensors), step_of(job.lengths, step), sinks)
        for (b, h), oracle in oracles.items():
            t = job.lengths[b] + step - 1
            seen = sorted(kept[b, h] | {t})
            assert softmax.window is None or seen[0] > t - softmax.window
            assert_holds(cache, b, h, seen, stored_k, stored_v)
            if cache.metadata:
                assert cache.position[b, h, slots[b, h]] == t
            check(b, h, t, seen, stored_k, stored_v, context[:, :, 0])
            goes, gap = oracle.evict(set(seen), t)
            assume(gap > 1e-5)
            kept[b, h] = set(seen) - goes


class Dyadic:
    """Queries whose attention is exact in fp32. Keys are orthogonal and large, and a query is a sum of 1, 2 or 4 keys,
    its own among them: each of these tokens receives the same share, and all others exactly 0. So many scores are equal
    to the last bit."""

    def __init__(self, job: Job):
        self.job = job
        D = job.T + job.steps
        self.large = (250 * D**0.5) ** 0.5
        self.k = (torch.eye(D) * self.large).expand(job.B, job.KV, D, D).clone()
        self.v = torch.arange(D, dtype=torch.float32)[:, None].expand(job.B, job.KV, D, D).clone()
        self.q = torch.zeros(job.B, job.heads[0], D, D)
        self.targets = {}
        rng = random.Random(job.seed)
        for b, g, t in product(range(job.B), range(job.heads[0]), range(D)):
            others = rng.sample(range(t), min(rng.choice([0, 0, 1, 1, 3]), t))
            if len(others) == 2:
                others.pop()
            self.targets[b, g, t] = {t, *others}
            self.q[b, g, t, list(self.targets[b, g, t])] = self.large

    def received(self, b: int, h: int, t: int, seen: set[int]) -> dict[int, float]:
        """The attention that the queries of KV head h at position t give to the tokens `seen`. A query with three
        targets among these loses one: thirds have no exact sums."""
        row = dict.fromkeys(seen, 0.0)
        for g in range(h * self.job.group, (h + 1) * self.job.group):
            attended = self.targets[b, g, t] & seen
            if len(attended) == 3:
                gone = min(attended)
                attended.remove(gone)
                self.q[b, g, t, gone] = 0
            for j in attended:
                row[j] += 1 / len(attended)
        return row


@settings(max_examples=60)
@given(job=jobs())
def test_exact_ties_are_broken_as_by_the_oracle(job):
    rule = HeavyHitterCache(job.heavy, job.recent)
    x = Dyadic(job)
    oracles = {place: H2O(job.heavy, job.recent) for place in product(range(job.B), range(job.KV))}
    cache = make_cache(rule, job.B, job.KV, job.T, x.k.shape[-1], job.steps)
    prompts = (tensor[:, :, : job.T] for tensor in (x.q, x.k, x.v))
    rule.prefill(cache, *prompts, Rows.prompts(torch.tensor(job.lengths)))
    kept = {}
    for (b, h), oracle in oracles.items():
        for t in range(job.lengths[b]):
            oracle.see_query(t, x.received(b, h, t, set(range(t + 1))))
        kept[b, h], _ = oracle.keep(job.lengths[b])
        assert_holds(cache, b, h, kept[b, h], x.k, x.v)
    for step in range(1, job.steps + 1):
        for (b, h), oracle in oracles.items():
            t = job.lengths[b] + step - 1
            kept[b, h].add(t)
            oracle.see_query(t, x.received(b, h, t, kept[b, h]))
        rule.decode(cache, *job.at(step, [x.q, x.k, x.v]), step_of(job.lengths, step))
        for (b, h), oracle in oracles.items():
            assert_holds(cache, b, h, kept[b, h], x.k, x.v)
            goes, _ = oracle.evict(kept[b, h], job.lengths[b] + step - 1)
            kept[b, h] -= goes


def test_hundreds_of_equal_scores():
    """More than an unstable sort leaves in order."""
    n = 300
    x = (torch.eye(n) * 100)[None, None]
    rule = HeavyHitterCache(120, 7)
    cache = make_cache(rule, 1, 1, n, n, 1)
    rule.prefill(cache, x, x, x, Rows.prompts(torch.tensor([n])))
    assert cached(cache, 0, 0) == [*range(120), *range(n - 7, n)]


def test_a_sequence_of_nan_does_not_affect_its_neighbours():
    rule = HeavyHitterCache(2, 2)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, 9, 4, generator=generator) for _ in range(3))
    lengths = torch.tensor([9, 7, 5])

    def go(q, k, v):
        cache = make_cache(rule, 3, 2, 9, 4, 4)
        contexts = [rule.prefill(cache, q, k, v, Rows.prompts(lengths))]
        for step in range(1, 5):
            token = (x[:, :, step : step + 1] for x in (q, k, v))
            contexts.append(rule.decode(cache, *token, step_of(lengths.tolist(), step))[0])
        return cache, contexts

    clean, expected = go(q, k, v)
    for x in (q, k, v):
        x[1] = float("nan")
    cache, contexts = go(q, k, v)
    for b in (0, 2):
        assert torch.equal(cache.position[b], clean.position[b])
        assert torch.equal(cache.score[b], clean.score[b])
        assert torch.equal(contexts[0][b, :, : lengths[b]], expected[0][b, :, : lengths[b]])
        for got, wanted in zip(contexts[1:], expected[1:]):
            assert torch.equal(got[b], wanted[b])


#: (rule, whether positions roll)
READ_ON = [(name, False) for name in ["full", *RULES]] + [(name, True) for name in ("h2o", "smoothed", "voted")]


@pytest.mark.parametrize(("name", "rolling"), READ_ON)
@settings(max_examples=10)
@given(
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    ends=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    kind=st.sampled_from([None, "int8", "int4"]),
    group=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**32),
)
def test_prompts_after_a_shared_prefix_keep_what_they_keep_alone(name, rolling, cuts, ends, kind, group, seed):
    """With the prefix in any number of pieces: the same contexts, and the same caches."""
    KV = 2
    D = 8
    shared = sum(cuts)
    rule = FullCache()
    if name != "full":
        text = name + {"snapkv": ":window=2", "vatp": ":first=1", "sinks": ":first=1", **IN_SHORT}.get(name, "")
        rule = replace(make_rule(text, 3, 4), groups=group)
    if rolling:
        rule = replace(rule, rope=Rope("default", 1e4, D, 64))
    voters = rule.voters
    ends = [max(end, voters) for end in ends]
    B = len(ends)
    T = max(ends)
    generator = torch.Generator().manual_seed(seed)
    heads = (KV * group, KV, KV)
    first = [torch.randn(1, H, shared, D, generator=generator) for H in heads]
    last = [torch.randn(B, H, T, D, generator=generator) for H in heads]
    path = None
    begin = 0
    form = cache_format(kind, torch.float32, D)
    for cut in cuts:
        length = torch.tensor([begin])
        new = torch.tensor([cut])
        rows = Rows(length, new, length + new + voters)
        _, text = rule.read(*(x[:, :, begin : begin + cut] for x in first), rows, path, form)
        path = text.tail(begin).appended_to(path)
        begin += cut
    lengths = torch.tensor(ends)
    shares, alone = (make_cache(rule, B, KV, shared + T, D, 2, kind=kind) for _ in range(2))
    rows = Rows(torch.full((B,), shared), lengths, lengths + shared)
    got = rule.prefill(shares, *last, rows, path)
    whole = [torch.cat([a.expand(B, -1, -1, -1), b], 2) for a, b in zip(first, last)]
    wanted = rule.prefill(alone, *whole, Rows.prompts(lengths + shared))
    for b, n in enumerate(ends):
        torch.testing.assert_close(got[b, :, :n], wanted[b, :, shared : shared + n])
        if "score" in alone.metadata:  # near-ties may fall either way
            same = alone.position[b] == shares.position[b]
            assume(same.all())
            valid = alone.position[b] >= 0
            for values, others in zip(alone.metadata.values(), shares.metadata.values()):
                torch.testing.assert_close(others[b][valid], values[b][valid])
            assert torch.equal(shares.k[0][b][valid], alone.k[0][b][valid])
            assert torch.equal(shares.v[0][b][valid], alone.v[0][b][valid])
        else:
            n = min(shared + n, shares.v[0].shape[2])
            assert torch.equal(shares.v[0][b, :, :n], alone.v[0][b, :, :n])
