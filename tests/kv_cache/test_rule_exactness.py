"""Every cache rule against its oracle on random tensors, and H2O with score ties too."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import H2O, quantised
from oracle import make_rule as oracle_rule

from h2o_flexgen.formats.forms import cache_format
from h2o_flexgen.kv_cache import RULES, HeavyHitterCache, KVLayout, make_rule
from h2o_flexgen.kv_cache.full import FullCache
from h2o_flexgen.kv_cache.rule import Rows
from h2o_flexgen.models.spec import Rope


def make_cache(rule, B, KV, T, D, steps, used_before=True, kind=None):
    form = cache_format(kind, torch.float32, D)
    layout = KVLayout(B, KV, rule.segments(T, steps + 1), D, form, rule.slot_fields, rule.growth)
    kv, meta = torch.zeros(layout.kv_bytes, dtype=torch.uint8), torch.zeros(layout.meta_bytes, dtype=torch.uint8)
    cache = layout.view(kv, meta)
    if used_before:  # what another batch or block may have left behind
        for tensor in (*cache.k, *cache.v):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 255)  # a scale of NaN too
        for tensor in cache.metadata.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 3)
    return cache


def step_of(lengths, step) -> Rows:
    """Decode step `step`, 1 for the first, behind prompts of these lengths."""
    prompt = torch.tensor(lengths)
    return Rows.steps(prompt + step - 1, prompt)


def held(cache, b, h) -> list[int]:
    return sorted(p for p in cache.position[b, h].tolist() if p >= 0)


def assert_holds(cache, b, h, positions, k, v):
    """The cache holds exactly these positions, each with its own key and value as it is stored."""
    forms = zip(cache.form, (cache.k, cache.v))
    slots = [torch.cat([form.floats(segment[b, h], torch.float32) for segment in each]) for form, each in forms]
    at = {tuple(key): slot for slot, key in enumerate(slots[0].tolist())}
    for p in positions:
        slot = at[tuple(k[b, h, p].tolist())]
        assert torch.equal(slots[1][slot], v[b, h, p]), p
        if cache.metadata:
            assert cache.position[b, h, slot] == p
    if cache.metadata:
        assert held(cache, b, h) == sorted(positions)


@st.composite
def jobs(draw):
    T = draw(st.integers(1, 14))
    return dict(
        B=(B := draw(st.integers(1, 3))),
        KV=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 1, 2, 3, 8])),
        T=T,
        lengths=[T] + [draw(st.integers(1, T)) for _ in range(B - 1)],
        heavy=(heavy := draw(st.integers(0, 8))),
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
}


def protected(draw, heavy: int) -> str:
    """Options for tokens at both ends that fit into the slots of heavy hitters."""
    first = draw(st.sampled_from([0, draw(st.integers(0, heavy))]))
    return f":first={first}:last={draw(st.sampled_from([0, heavy - first]))}"


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=30)
@given(
    job=jobs(),
    kind=st.sampled_from([None, "int8", "int4"]),
    D=st.integers(1, 6),
    scale=st.sampled_from([0.1, 1.0, 3.0]),
    data=st.data(),
)
def test_random_tensors_keep_what_the_oracle_keeps(name, job, kind, D, scale, data):
    """A prompt attends to its tokens as they are, a step to all of them as they are stored, the new one included."""
    D = {None: D, "int8": 2 * D, "int4": 4 * D}[kind]
    B, KV, group, T, lengths, steps = (job[x] for x in ("B", "KV", "group", "T", "lengths", "steps"))
    text = name + protected(data.draw, job["heavy"]) + data.draw(OPTIONS.get(name, st.just("")))
    rule = replace(make_rule(text, job["heavy"], job["recent"]), groups=group)
    generator = torch.Generator().manual_seed(job["seed"])
    total, heads = T + steps, (KV * group, KV, KV)
    q, k, v = (torch.randn(B, H, total, D, generator=generator) * scale for H in heads)
    # each sequence's tokens follow one another; the padding between prompt and output is garbage
    ragged = [torch.zeros(B, H, T, D).uniform_(-9, 9, generator=generator) for H in heads]
    for b, n in enumerate(lengths):
        for padded, x in zip(ragged, (q, k, v)):
            padded[b, :, :n] = x[b, :, :n]
    cache = make_cache(rule, B, KV, T, D, steps, kind=kind)
    context = rule.prefill(cache, *ragged, Rows.prompts(torch.tensor(lengths))).unflatten(1, (KV, group))
    q = q.unflatten(1, (KV, group))
    stored_k, stored_v = quantised(kind, k, v)

    def attend(b, h, t, seen, k=stored_k, v=stored_v) -> tuple[torch.Tensor, dict[int, float]]:
        """What the queries at position t get from the tokens `seen`, and the attention that each of these receives."""
        logits = q[b, h, :, t].double() @ k[b, h, seen].double().T / D**0.5
        p = torch.softmax(logits, -1)
        return p @ v[b, h, seen].double(), dict(zip(seen, p.sum(0).tolist()))

    kept, oracles = {}, {}
    for b, n in enumerate(lengths):
        for h in range(KV):
            oracle = oracles[b, h] = oracle_rule(text, job["heavy"], job["recent"], h)
            for t in range(n):
                expected, row = attend(b, h, t, list(range(t + 1)), k, v)
                torch.testing.assert_close(context[b, h, :, t].double(), expected, atol=1e-5, rtol=1e-4)
                oracle.see_token(t, v[b, h, t].tolist())
                oracle.see_query(t, row)
            kept[b, h], gap = oracle.keep(n)
            assume(gap > 1e-5)
            assert_holds(cache, b, h, kept[b, h], stored_k, stored_v)

    for step in range(1, steps + 1):
        now = [n + step - 1 for n in lengths]
        qs = torch.stack([q[b, :, :, t] for b, t in enumerate(now)]).flatten(1, 2)[:, :, None]
        ks, vs = (torch.stack([x[b, :, t] for b, t in enumerate(now)])[:, :, None] for x in (k, v))
        context, slots = rule.decode(cache, qs, ks, vs, step_of(lengths, step))
        context = context.unflatten(1, (KV, group))
        for b, t in enumerate(now):
            for h in range(KV):
                seen = sorted(kept[b, h] | {t})
                assert_holds(cache, b, h, seen, stored_k, stored_v)
                if cache.metadata:
                    assert cache.position[b, h, slots[b, h]] == t
                expected, row = attend(b, h, t, seen)
                torch.testing.assert_close(context[b, h, :, 0].double(), expected, atol=1e-5, rtol=1e-4)
                oracles[b, h].see_token(t, v[b, h, t].tolist())
                oracles[b, h].see_query(t, row)
                goes, gap = oracles[b, h].evict(set(seen), t)
                assume(gap > 1e-5)
                kept[b, h] = set(seen) - {goes}


def dyadic_targets(rng, i):
    """Whom token i attends to, itself among them: 1, 2 or 4 tokens, so that each gets exactly 1, 1/2 or 1/4."""
    others = rng.sample(range(i), min(rng.choice([0, 0, 1, 1, 3]), i))
    return {i, *(others[:1] if len(others) == 2 else others)}


@settings(max_examples=150)
@given(job=jobs())
def test_exact_ties_go_as_the_set_model_says(job):
    """Keys are orthogonal and large, queries are sums of keys: a query gives each of its targets the same share and
    the others exactly 0, so that many scores are equal to the last bit."""
    B, KV, group, T, lengths, steps = (job[x] for x in ("B", "KV", "group", "T", "lengths", "steps"))
    rule = HeavyHitterCache(job["heavy"], job["recent"])
    rng = random.Random(job["seed"])
    total = D = T + steps
    large = (250 * D**0.5) ** 0.5
    k = (torch.eye(total) * large).expand(B, KV, total, D).clone()
    v = torch.arange(total, dtype=torch.float32)[:, None].expand(B, KV, total, D).clone()
    H = KV * group
    targets = {(b, h, i): dyadic_targets(rng, i) for b in range(B) for h in range(H) for i in range(total)}
    q = torch.zeros(B, H, total, D)
    for (b, h, i), chosen in targets.items():
        q[b, h, i, list(chosen)] = large
    cache = make_cache(rule, B, KV, T, D, steps)
    rule.prefill(cache, q[:, :, :T], k[:, :, :T], v[:, :, :T], Rows.prompts(torch.tensor(lengths)))

    kept, oracles = {}, {}

    def received(b, h, t, seen) -> dict[int, float]:
        """What the queries at position t give to the tokens `seen`; all sums of it are exact in fp32."""
        row = dict.fromkeys(seen, 0.0)
        for g in range(h * group, (h + 1) * group):
            attended = targets[b, g, t] & seen
            for j in attended:
                row[j] += 1 / len(attended)
        return row

    for b, n in enumerate(lengths):
        for h in range(KV):
            oracle = oracles[b, h] = H2O(rule.heavy, rule.recent)
            for t in range(n):
                oracle.see_query(t, received(b, h, t, set(range(t + 1))))
            kept[b, h], _ = oracle.keep(n)
            assert_holds(cache, b, h, kept[b, h], k, v)

    for step in range(1, steps + 1):
        now = [n + step - 1 for n in lengths]
        for (b, h), positions in kept.items():
            for g in range(h * group, (h + 1) * group):
                attended = targets[b, g, now[b]] & (positions | {now[b]})
                if len(attended) == 3:  # thirds add up to other sums in another order
                    gone = min(attended)
                    targets[b, g, now[b]].remove(gone)
                    q[b, g, now[b], gone] = 0
        qs, ks, vs = (torch.stack([x[b, :, t] for b, t in enumerate(now)])[:, :, None] for x in (q, k, v))
        rule.decode(cache, qs, ks, vs, step_of(lengths, step))
        for b, t in enumerate(now):
            for h in range(KV):
                seen = kept[b, h] | {t}
                assert_holds(cache, b, h, seen, k, v)
                oracles[b, h].see_query(t, received(b, h, t, seen))
                goes, _ = oracles[b, h].evict(seen, t)
                kept[b, h] = seen - {goes}


def test_of_equal_scores_the_earlier_token_stays_in_prefill_and_goes_in_decode():
    """Every token attends only to itself: all scores are 1."""
    rule = HeavyHitterCache(2, 1)
    n, D = 6, 16
    k = (torch.eye(D) * 100)[None, None]
    cache = make_cache(rule, 1, 1, n, D, 3)
    rule.prefill(cache, k[:, :, :n], k[:, :, :n], k[:, :, :n], Rows.prompts(torch.tensor([n])))
    assert held(cache, 0, 0) == [0, 1, 5]
    kept = [[0, 1, 5, 6], [1, 5, 6, 7], [5, 6, 7, 8]]  # the token that goes leaves when the next one comes
    for step, expected in enumerate(kept, 1):
        new = k[:, :, n + step - 1][:, :, None]
        rule.decode(cache, new, new, new, step_of([n], step))
        assert held(cache, 0, 0) == expected


def test_hundreds_of_equal_scores():
    """More than a sort may swap: the earliest stay, in prefill, whatever the length."""
    n = 300
    x = (torch.eye(n) * 100)[None, None]
    rule = HeavyHitterCache(120, 7)
    cache = make_cache(rule, 1, 1, n, n, 1)
    rule.prefill(cache, x, x, x, Rows.prompts(torch.tensor([n])))
    assert held(cache, 0, 0) == [*range(120), *range(n - 7, n)]


def test_equal_keys_everywhere():
    """Uniform attention: the earliest tokens have the highest sums, and of the kept the newest goes."""
    rule = HeavyHitterCache(3, 2)
    n, D = 8, 4
    x = torch.ones(1, 2, n, D)
    cache = make_cache(rule, 1, 2, n, D, 4)
    rule.prefill(cache, x, x, x, Rows.prompts(torch.tensor([n])))
    for h in range(2):
        assert held(cache, 0, h) == [0, 1, 2, 6, 7]
    for step in range(1, 5):
        rule.decode(cache, x[:, :, :1], x[:, :, :1], x[:, :, :1], step_of([n], step))
        now = n + step - 1
        for h in range(2):
            assert held(cache, 0, h) == [0, 1, 2, now - 2, now - 1, now]


@given(heavy=st.integers(0, 9), recent=st.integers(0, 9), prompt=st.integers(1, 12), gen=st.integers(1, 12))
def test_slots_hold_the_budget_and_never_more_than_the_text(heavy, recent, prompt, gen):
    slots = sum(HeavyHitterCache(heavy, recent).segments(prompt, gen))
    assert slots <= heavy + recent + 1
    assert slots >= min(heavy + recent + 1, prompt + gen - 1)
    assert slots <= prompt + gen


def test_a_nan_sequence_stays_alone():
    """Its scores and choices are its own affair; the neighbours' caches are as without it."""
    rule = HeavyHitterCache(2, 2)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, 9, 4, generator=generator) for _ in range(3))
    lengths = torch.tensor([9, 7, 5])

    def go(q, k, v):
        cache = make_cache(rule, 3, 2, 9, 4, 4)
        contexts = [rule.prefill(cache, q, k, v, Rows.prompts(lengths))]
        contexts += [
            rule.decode(cache, *(x[:, :, i : i + 1] for x in (q, k, v)), step_of(lengths.tolist(), i))[0]
            for i in range(1, 5)
        ]
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
READ_ON = [
    ("full", False),
    ("snapkv", False),
    *((name, rolls) for name in RULES if name != "snapkv" for rolls in (0, 1)),
]


@pytest.mark.parametrize(("name", "rolling"), READ_ON)
@settings(max_examples=15)
@given(
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    ends=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    kind=st.sampled_from([None, "int8", "int4"]),
    group=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**32),
)
def test_prompts_behind_a_shared_prefix_keep_what_they_keep_alone(name, rolling, cuts, ends, kind, group, seed):
    """However the prefix was cut: contexts, and all that the cache then holds."""
    KV, D, shared = 2, 8, sum(cuts)
    rope = Rope("default", 1e4, D, 64) if rolling else None
    rule = FullCache()
    if name != "full":
        text = name + {"snapkv": ":window=2", "vatp": ":first=1", "sinks": ":first=1"}.get(name, "")
        rule = replace(make_rule(text, 3, 4), groups=group)
        rule = replace(rule, rope=rope) if rolling else rule
    voters = rule.voters
    ends = [max(end, voters) for end in ends]
    B, T = len(ends), max(ends)
    generator = torch.Generator().manual_seed(seed)
    heads = (KV * group, KV, KV)
    first = [torch.randn(1, H, shared, D, generator=generator) for H in heads]
    last = [torch.randn(B, H, T, D, generator=generator) for H in heads]
    path = None
    begin = 0
    form = cache_format(kind, torch.float32, D)
    for cut in cuts:
        length, new = torch.tensor([begin]), torch.tensor([cut])
        rows = Rows(length, new, length + new + voters)
        _, text = rule.read(*(x[:, :, begin : begin + cut] for x in first), rows, path, form)
        path = text.since(begin).behind(path)
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
