"""What changes logits, and what is told of them, by vLLM's formulas written out for one row at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen import SamplingParams, UserError
from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.logits import LogitChanges, bad_word_ids
from h2o_flexgen.engine.sampling import Draw, Sampler, alternatives, sample

V = 12
EOS = frozenset({11})
tokens_of = st.lists(st.integers(0, V - 1), max_size=8)
changes_of = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": st.sampled_from([-2.0, 0.3, 1.7]),
        "frequency_penalty": st.sampled_from([-0.7, 0.1, 2.0]),
        "repetition_penalty": st.sampled_from([0.7, 1.3]),
        "logit_bias": st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100.0, -1.5, 0.25]), max_size=3),
        "allowed_token_ids": st.lists(st.integers(0, V - 1), min_size=1, max_size=5),
        "min_tokens": st.integers(0, 9),
        "stop_token_ids": st.lists(st.integers(0, V - 1), max_size=2),
    },
)


class Words:
    """A tokenizer of letters, whose first letter of a word is another token."""

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(c) - ord("a") for c in text.replace(" a", "k").replace(" b", "l").strip()]


def sequence(prompt, tokens, index=0, **params) -> Sequence:
    scored = [0.0] * len(tokens)
    return Sequence(index, prompt or [0], SamplingParams(max_tokens=20, **params), tokens=list(tokens), logprobs=scored)


def expected(logits: torch.Tensor, s: Sequence, bad_words=()) -> torch.Tensor:
    """vLLM's v1/sample: allowed tokens, bad words, min_tokens, logit_bias, then penalties."""
    p = s.params
    row = logits.clone()
    for token in range(V):
        if p.allowed_token_ids is not None and token not in p.allowed_token_ids:
            row[token] = -torch.inf
    for word in bad_words:
        count = len(word) - 1
        if len(s.tokens) >= count and s.tokens[len(s.tokens) - count :] == word[:-1]:
            row[word[-1]] = -torch.inf
    if len(s.tokens) < p.min_tokens:
        for token in EOS.union(p.stop_token_ids):
            row[token] = -torch.inf
    for token, bias in p.logit_bias:
        row[token] += bias
    one = torch.tensor(1.0)
    for token in range(V):
        count = torch.tensor(float(s.tokens.count(token)))
        if token in s.tokens or token in s.prompt:
            penalty = torch.tensor(p.repetition_penalty)
            row[token] *= one / penalty if row[token] > 0 else penalty
        row[token] -= torch.tensor(p.frequency_penalty) * count
        row[token] -= torch.tensor(p.presence_penalty) * (count > 0)
    return row


@given(seed=st.integers(0, 2**32), rows=st.lists(st.tuples(tokens_of, tokens_of, changes_of), min_size=1, max_size=4))
def test_logits_are_changed_as_vllm_does_to_the_bit(seed, rows):
    logits = torch.randn(len(rows), V, generator=torch.Generator().manual_seed(seed)) * 3
    sequences = [sequence(prompt, tokens, n, **params) for n, (prompt, tokens, params) in enumerate(rows)]
    changes = LogitChanges(EOS)
    found = logits.clone()
    wanted = [n for n, s in enumerate(sequences) if changes.are_wanted(s)]
    if wanted:
        changed = found[wanted]
        changes.apply(changed, [sequences[n] for n in wanted])
        found[wanted] = changed
    for n, s in enumerate(sequences):
        assert torch.equal(found[n], expected(logits[n], s))


@given(tokens=st.lists(st.integers(0, 3), max_size=6))
def test_bad_words_are_forbidden_where_they_would_end(tokens):
    words = [[0, 1], [2], [10, 1]]  # the last one is the first after a blank
    assert bad_word_ids(("ab", "c"), Words()) == [[0, 1], [10, 1], [2]]
    s = sequence([5], tokens, bad_words=["ab", "c"])
    logits = torch.zeros(1, V)
    LogitChanges(EOS, Words()).apply(logits, [s])
    assert torch.equal(logits[0], expected(torch.zeros(V), s, words))


@given(seed=st.integers(0, 2**32), p=st.floats(0.01, 1), step=st.integers(0, 20))
def test_min_p_stays_among_likely_tokens(seed, p, step):
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(seed)) * 2
    params = SamplingParams(temperature=1.5, min_p=p)
    token = int(sample(logits, [params], [Draw(0, step)]).tokens)
    probabilities = torch.softmax(logits[0] / 1.5, -1)
    assert probabilities[token] >= p * probabilities.max()


def test_answers_to_a_prompt_are_drawn_apart():
    logits = torch.zeros(40, V)
    params = [SamplingParams(temperature=1.0)] * 40
    found = sample(logits, params, [Draw(3, 0, n) for n in range(40)]).tokens
    assert len(found.unique()) > 4
    assert found[0] == sample(logits[:1], params[:1], [Draw(3, 0)]).tokens


@given(seed=st.integers(0, 2**32), count=st.integers(1, V))
def test_alternatives_are_the_most_likely_tokens(seed, count):
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(seed)).bfloat16()
    found = alternatives(logits, torch.tensor([1, 2, 3]), [count, 0, count])
    assert found.keys() == {0, 2}
    for row in found:
        exact = logits[row].float().log_softmax(-1)
        assert found[row].logprob == exact[row + 1]
        assert list(found[row].most_likely.values()) == exact.topk(count).values.tolist()
        assert all(exact[token] == value for token, value in found[row].most_likely.items())


def test_a_sampler_applies_all_of_it_to_its_rows_alone():
    logits = torch.zeros(3, V)
    logits[:, 4] = 1.0
    rows = [sequence([1], []), sequence([4], [4], presence_penalty=2.0), sequence([1], [], logit_bias={7: 9})]
    rows[1].params = SamplingParams(max_tokens=20, presence_penalty=2.0, top_logprobs=2)
    Sampler(EOS).take(rows, logits)
    assert [s.tokens[-1] for s in rows] == [4, 0, 7]
    plain = logits[0].log_softmax(-1)
    assert rows[1].logprobs[1:] == [float(plain[0])]  # under the model, not after the penalty
    assert list(rows[1].top_logprobs[0])[0] == 4
    assert not rows[0].top_logprobs


@pytest.mark.parametrize(
    "params, say",
    [
        (dict(n=0), "n must be a whole number, 1 or more"),
        (dict(n=200, temperature=1), "n must be 128 or less"),
        (dict(n=2), "n 2 at temperature 0 would give the same answer"),
        (dict(n=3, best_of=2, temperature=1), "best_of must be n or more"),
        (dict(top_logprobs=21), "top_logprobs must be 20 or less"),
        (dict(presence_penalty=3), "presence_penalty must lie in"),
        (dict(repetition_penalty=0), "repetition_penalty must be more than 0"),
        (dict(min_p=2), "min_p must lie in"),
        (dict(min_tokens=20), "min_tokens 20 is more than max_tokens 16"),
        (dict(logit_bias={5: 101}), "logit_bias must lie in"),
        (dict(logit_bias={"x": 1}), "logit_bias must have a number"),
        (dict(logit_bias=[5]), "logit_bias must have a number"),
        (dict(bad_words=[""]), "a bad word must be a text that is not empty"),
        (dict(allowed_token_ids=[]), "allowed_token_ids is empty"),
        (dict(structured={"json": {}}), "structured must be a Structured"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(params, say):
    with pytest.raises(UserError, match=say):
        SamplingParams(**params)
