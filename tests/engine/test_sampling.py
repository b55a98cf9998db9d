"""From logits to tokens."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen import SamplingParams, UserError
from h2o_flexgen.engine.sampling import Draw, sample
from h2o_flexgen.planning.workload import SAMPLE_ROWS

V = 12


def logits_of(seed, rows=5, scale=2.0):
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * scale


def draw(logits, step=0, keys=None, **params):
    """Draws of rows that have all generated `step` tokens."""
    return sample(logits, [SamplingParams(**params)] * len(logits), draws(keys or range(len(logits)), step))


def draws(keys, step: int) -> list[Draw]:
    return [Draw(key, step) for key in keys]


@given(seed=st.integers(0, 2**32))
def test_temperature_zero_takes_the_most_likely_token(seed):
    logits = logits_of(seed)
    tokens, logprobs = draw(logits)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).amax(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [SAMPLE_ROWS - 1, SAMPLE_ROWS, SAMPLE_ROWS + 1, 3 * SAMPLE_ROWS + 5])
def test_many_rows_draw_what_each_draws_alone(rows):
    logits = logits_of(3, rows)
    together, _ = draw(logits, temperature=1.3, top_p=0.9)
    assert together.tolist() == [
        int(draw(logits[n : n + 1], keys=[n], temperature=1.3, top_p=0.9)[0]) for n in range(rows)
    ]


@given(seed=st.integers(0, 2**32), temperature=st.floats(0.05, 5), k=st.integers(0, 14), p=st.floats(0.01, 1))
def test_logprobs_are_those_of_the_model_whatever_the_sampling(seed, temperature, k, p):
    logits = logits_of(seed)
    tokens, logprobs = draw(logits, temperature=temperature, top_k=k, top_p=p)
    expected = torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


@given(seed=st.integers(0, 2**32), k=st.integers(1, 14), step=st.integers(0, 50))
def test_top_k_stays_among_the_k_most_likely(seed, k, step):
    logits = logits_of(seed)
    tokens, _ = draw(logits, step, temperature=3.0, top_k=k)
    rank = (logits > logits.gather(1, tokens[:, None])).sum(-1)
    assert (rank < k).all()


@given(seed=st.integers(0, 2**32), p=st.floats(0.01, 1), step=st.integers(0, 50), temperature=st.floats(0.5, 3))
def test_top_p_stays_in_the_nucleus(seed, p, step, temperature):
    logits = logits_of(seed)
    tokens, _ = draw(logits, step, temperature=temperature, top_p=p)
    probs = torch.softmax(logits.double() / temperature, -1)
    for row, token in zip(probs, tokens.tolist()):
        more_likely = row[row > row[token]].sum()
        assert more_likely < p + 1e-5, "the tokens before this one reach p already"


@given(seed=st.integers(0, 2**32), step=st.integers(0, 50))
def test_top_k_one_and_a_tiny_nucleus_are_greedy(seed, step):
    logits = logits_of(seed)
    best = logits.argmax(-1).tolist()
    for params in (dict(top_k=1), dict(top_p=1e-6), dict(top_k=1, top_p=0.5)):
        assert draw(logits, step, temperature=1.0, **params)[0].tolist() == best
    assert draw(logits, step, temperature=1e-30)[0].tolist() == best


@pytest.mark.parametrize(
    "params", [dict(), dict(temperature=0.5), dict(top_k=4), dict(top_p=0.7), dict(top_k=5, top_p=0.8)], ids=str
)
def test_frequencies_are_the_probabilities(params):
    params = {"temperature": 1.0, **params}
    row = logits_of(3, rows=1, scale=1.0)[0]
    n = 4000
    tokens, _ = draw(row.expand(n, V), keys=list(range(n)), **params)
    p = torch.softmax(row.double() / params["temperature"], -1)
    order = p.argsort(descending=True)
    keep = torch.zeros(V, dtype=torch.bool)
    total = 0.0
    within = order[: params.get("top_k") or V]
    scale = p[within].sum()
    for token in within:
        if total >= params.get("top_p", 1.0):
            break
        keep[token] = True
        total += float(p[token] / scale)
    p = p * keep / (p * keep).sum()
    counts = Counter(tokens.tolist())
    for token in range(V):
        sigma = float((n * p[token] * (1 - p[token])) ** 0.5)
        assert abs(counts[token] - n * float(p[token])) <= 4.5 * sigma, token


@given(seed=st.integers(0, 2**32), order=st.permutations(range(5)), step=st.integers(0, 9), job_seed=st.integers(0, 99))
def test_a_draw_depends_on_seed_key_and_step_alone(seed, order, step, job_seed):
    logits = logits_of(seed)
    params = dict(temperature=1.0, seed=job_seed)
    together = draw(logits, step, **params)[0].tolist()
    mixed = draw(logits[list(order)], step, keys=list(order), **params)[0].tolist()
    alone = [draw(logits[n : n + 1], step, keys=[n], **params)[0].item() for n in range(5)]
    assert alone == together and mixed == [together[n] for n in order]


def test_other_seeds_keys_and_steps_draw_other_numbers():
    row = torch.zeros(1, 1000)
    base = dict(temperature=1.0)
    first = draw(row, 0, [0], **base)[0].item()
    assert draw(row, 1, [0], **base)[0].item() != first
    keys = (1, 2**63, 2**63 + 1, 2**64 - 1)
    assert len({first, *(draw(row, 0, [key], **base)[0].item() for key in keys)}) == 5
    assert draw(row, 0, [0], seed=1, **base)[0].item() != first
    assert draw(row, 0, [0], **base)[0].item() == first


#: sampling parameters of the rows of a batch, except seeds
WAYS = [
    dict(),
    dict(temperature=1.0),
    dict(temperature=0.4),
    dict(temperature=1.0, top_k=3),
    dict(temperature=2, top_p=0.7),
]


@given(seed=st.integers(0, 2**32), data=st.data(), rows=st.integers(1, 2 * SAMPLE_ROWS + 3))
def test_every_row_is_drawn_by_its_own_parameters(seed, data, rows):
    logits = logits_of(seed, rows)
    ways = data.draw(st.lists(st.sampled_from(WAYS), min_size=rows, max_size=rows))
    seeds = data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=rows, max_size=rows))
    params = [SamplingParams(**way, seed=seed, max_tokens=n + 1) for n, (way, seed) in enumerate(zip(ways, seeds))]
    steps = data.draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))  # rows enter at different times
    tokens, logprobs = sample(logits, params, [Draw(*each) for each in enumerate(steps)])
    for n, p in enumerate(params):
        alone = sample(logits[n : n + 1], [p], [Draw(n, steps[n])])
        like_all = sample(logits, [p] * rows, [Draw(*each) for each in enumerate(steps)])
        assert tokens[n] == alone[0][0] == like_all[0][n]
        assert logprobs[n] == like_all[1][n]


@pytest.mark.parametrize("params", [dict(), dict(temperature=1.0), dict(temperature=1.0, top_k=3, top_p=0.5)], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_says_so_and_leaves_the_others(params, bad):
    logits = logits_of(0)
    clean = draw(logits, **params)
    logits[2, 4] = bad
    tokens, logprobs = draw(logits, **params)
    others = [0, 1, 3, 4]
    assert tokens[others].tolist() == clean[0][others].tolist()
    assert torch.equal(logprobs[others], clean[1][others])
    assert not torch.isfinite(logprobs[2])
    assert 0 <= tokens[2] < V


@pytest.mark.parametrize(
    "values",
    [
        dict(temperature=-1),
        dict(temperature=float("nan")),
        dict(temperature=float("inf")),
        dict(top_k=-2),
        dict(top_p=0),
        dict(top_p=1.01),
        dict(top_p=float("nan")),
        dict(max_tokens=0),
        dict(seed=-1),
        dict(seed=2**64),
        dict(temperature=10**400),
        dict(temperature="1"),
        dict(temperature=None),
        dict(temperature=True),
        dict(top_p=[0.5]),
        dict(max_tokens=8.0),
        dict(ignore_eos="no"),
    ],
    ids=str,
)
def test_a_parameter_out_of_range_is_refused(values):
    with pytest.raises(UserError):
        SamplingParams(**values)


def test_parameters_are_values():
    one, other = (SamplingParams(temperature=1, top_p=1, stop=stop) for stop in (["a"], ("a",)))
    assert one == other and len({one, other, SamplingParams()}) == 2
    with pytest.raises(AttributeError):
        one.seed = 3
