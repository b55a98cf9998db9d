"""`embed` gives the pooled hidden states of transformers, and `score_answers` the probabilities of whole texts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import zoo
from oracle import fresh_rotary

from h2o_flexgen import LLM, KVBudget, Policy, UserError
from h2o_flexgen.engine import prefixes
from h2o_flexgen.engine.scoring import Question, question_of

pytest_plugins = ["command_tools"]

#: the basic model of every family, OPT's projections and missing norms, RoPE by length, and a sliding window
MODELS = [*zoo.FIRST.values(), "350m_style", "no_final_norm", "llama_groups_of_8_dynamic", "mistral_window"]
LENGTHS = [9, 24, 1, 17]
POLICIES = {
    "gpu": dict(percent=(100, 0, 100, 0, 100, 0), gpu_batch_size=7),
    "disk": dict(percent=(0, 0, 0, 0, 0, 0), gpu_batch_size=2, num_gpu_batches=2, prefill_tokens=20),
    "thirds": dict(percent=(33, 33, 33, 33, 33, 33), gpu_batch_size=3, num_gpu_batches=3),
}
CASES = [(name, list(POLICIES)[n % len(POLICIES)]) for n, name in enumerate(MODELS)]


def opened(model, budget=None, **policy) -> LLM:
    return LLM(str(model.folder), Policy(**policy), budget, device="cpu", dtype="float32", progress=False)


def states(model, text: list[int]) -> torch.Tensor:
    """transformers' last hidden states of a text (n, W)."""
    model.hf.base_model.rotary_emb = fresh_rotary(model.hf)
    with torch.inference_mode():
        return model.hf.base_model(torch.tensor([text])).last_hidden_state[0]


def expected(model, text: list[int], pooling: str) -> np.ndarray:
    found = states(model, text)
    return (found.mean(0) if pooling == "mean" else found[-1]).numpy()


@pytest.fixture
def small_prefixes(monkeypatch):
    """Prefixes of a few tokens are shared."""
    monkeypatch.setattr(prefixes, "LEAST_SAVED", 3)
    monkeypatch.setattr(prefixes, "LEAST_TOKENS", 1)


@pytest.mark.parametrize("name, policy", CASES)
def test_embeddings_are_the_pooled_states_of_transformers(tiny, name, policy):
    model = tiny(name)
    texts = model.prompts(LENGTHS)
    with opened(model, **POLICIES[policy]) as llm:
        for pooling in ("mean", "last"):
            for output, text in zip(llm.embed(texts, pooling, normalize=False), texts, strict=True):
                assert output.error is None and output.prompt_token_ids == text
                assert output.embedding.dtype == np.float32
                np.testing.assert_allclose(output.embedding, expected(model, text, pooling), rtol=1e-4, atol=1e-4)
        assert llm.report["total"]["generated_tokens"] == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_shared_prefix_is_computed_once_and_counts_in_the_mean(tiny, small_prefixes, policy, pooling):
    model = tiny("llama")
    (first, second, *ends) = model.prompts([20, 12, 3, 5, 2, 7, 4])
    texts = [first + second + ends[0], first + second + ends[1], first + ends[2], first + second, ends[3], first]
    with opened(model, **POLICIES[policy]) as llm:
        found = llm.embed(texts, pooling, normalize=False)
        assert llm.report["shared_tokens"] > 60
    for output, text in zip(found, texts):
        np.testing.assert_allclose(output.embedding, expected(model, text, pooling), rtol=1e-4, atol=1e-4)


def test_embeddings_have_length_1_unless_they_are_to_stay_as_they_are(tiny):
    model = tiny("opt")
    texts = model.prompts(LENGTHS)
    with opened(model, KVBudget.from_size(2, 3)) as llm:  # which a single pass has no use for
        unit = llm.embed(texts)
        raw = llm.embed(texts, normalize=False)
    for a, b in zip(unit, raw):
        assert np.linalg.norm(a.embedding) == pytest.approx(1, abs=1e-6)
        np.testing.assert_allclose(a.embedding * np.linalg.norm(b.embedding), b.embedding, rtol=1e-4, atol=1e-5)


def test_neither_the_head_is_run_nor_a_cache_kept(tiny, monkeypatch):
    def logits(*args):
        raise AssertionError

    monkeypatch.setattr("h2o_flexgen.models.opt.logits", logits)
    with opened(tiny("opt")) as llm:
        assert llm.embed([[5, 6]])[0].error is None
        assert not any("KV cache" in what for _, what, _ in llm.choice.plan.items)


def test_a_text_that_cannot_be_embedded_does_not_stop_the_others(tiny):
    with opened(tiny("opt")) as llm:
        found = llm.embed([[], [5] * 129, [400], "text", [5] * 128, None])
        says = ["empty", "129 tokens, more than the model's 128", "vocabulary", "no tokenizer", None, "a prompt is"]
        for output, expects in zip(found, says, strict=True):
            assert (output.error is None) if expects is None else (expects in output.error)
            assert (output.embedding is None) == (expects is not None)
        for bad in ({"pooling": "max"}, {"normalize": 1}):
            with pytest.raises(UserError, match=next(iter(bad))):
                llm.embed([[5]], **bad)


def test_states_that_overflow_are_an_error_of_their_row(tiny, monkeypatch):
    from h2o_flexgen.models import opt

    real = opt.final_states

    def nan(spec, w, hidden):
        return real(spec, w, hidden).masked_fill(torch.arange(len(hidden))[:, None] == len(hidden) - 1, math.nan)

    monkeypatch.setattr("h2o_flexgen.models.opt.final_states", nan)
    with opened(tiny("opt"), gpu_batch_size=4) as llm:
        found = llm.embed([[5, 6, 7], [5, 6, 8]])  # one piece, whose last token is broken
    assert [output.error is None for output in found] == [True, False]
    assert "overflowed" in found[1].error


# answers

ANSWERS = [[5], [6], [5, 7], [5, 7, 9], [8, 1], [8, 2], [3, 4, 5, 6]]


def logprob(model, prompt: list[int], answer: list[int]) -> float:
    model.hf.base_model.rotary_emb = fresh_rotary(model.hf)
    with torch.inference_mode():
        rows = model.hf(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    return sum(float(rows[len(prompt) - 1 + n, token]) for n, token in enumerate(answer))


@pytest.mark.parametrize("name", ["opt", "llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("policy", ["thirds", "disk"])
def test_answers_score_as_with_transformers(tiny, small_prefixes, name, policy):
    model = tiny(name)
    prompts = model.prompts(LENGTHS)
    with opened(model, **POLICIES[policy]) as llm:
        found = llm.score_answers(prompts, ANSWERS)
    for output, prompt in zip(found, prompts, strict=True):
        wanted = [logprob(model, prompt, answer) for answer in ANSWERS]
        assert [score.logprob for score in output.scores] == pytest.approx(wanted, abs=1e-4)
        assert [score.token_ids for score in output.scores] == ANSWERS
        shares = np.exp(wanted) / np.exp(wanted).sum()
        assert [score.probability for score in output.scores] == pytest.approx(shares, abs=1e-4)
        assert output.answer == ANSWERS[int(np.argmax(wanted))]


def test_answers_of_one_token_need_the_prompt_alone():
    sequences = Question([9, 9], [], [[5], [6], [7]]).sequences(0)
    assert [(s.prompt, s.wanted, s.task.targets) for s in sequences] == [([9, 9], 1, [[5, 6, 7]])]


def test_answers_that_begin_alike_share_a_sequence():
    sequences = Question([9], [], [[5, 7], [5, 8], [6, 1, 2], [6], [6, 1]]).sequences(3)
    assert [s.prompt for s in sequences] == [[9, 5], [9, 6, 1]]
    assert [s.task.targets for s in sequences] == [[[5, 5, 6], [7, 8]], [[6, 6, 6], [1, 1], [2]]]


def test_a_prompt_is_computed_once_for_all_its_answers(tiny):
    model = tiny("llama")
    prompts = model.prompts([90, 80])
    answers = [[first, 1, 2] for first in range(10)]
    with opened(model, gpu_batch_size=20) as llm:
        llm.score_answers(prompts, answers)
        assert llm.report["computed_tokens"] == 90 + 80 + 2 * len(answers) * 2 + 2 * (len(answers) - 1)
        llm.score_answers(prompts, [answer[:1] for answer in answers])
        assert llm.report["computed_tokens"] == 90 + 80


def test_each_prompt_may_have_answers_of_its_own(tiny):
    with opened(tiny("opt")) as llm:
        a, b = llm.score_answers([[5, 6], [5, 6]], [[[7]], [[7], [8]]])
        assert [len(a.scores), len(b.scores)] == [1, 2] and a.scores[0].probability == 1
        assert a.scores[0].logprob == pytest.approx(b.scores[0].logprob, abs=1e-5)
        with pytest.raises(UserError, match="`answers` has 1 lists for 2 prompts"):
            llm.score_answers([[5], [6]], [[[7], [8]]])
        bad = llm.score_answers([[5], [], [5] * 128, [5] * 128], [[[7], []], [[7]], [[7, 8]], [[7]]])
        says = ["answer 1: it has no tokens", "empty", "130 tokens, more than the model's 128 positions", None]
        for output, expects in zip(bad, says, strict=True):
            assert (output.error is None) if expects is None else (expects in output.error)
        for wrong, says in {
            "word": "must be a list of texts",
            ("a", "a"): "answer 1, 'a', is given twice",
            tuple(f"{n}" for n in range(10_000)): "1 to 1000 answers, not 10000",
        }.items():
            if isinstance(wrong, str):
                with pytest.raises(UserError, match=says):
                    llm.score_answers([[5]], wrong)
            else:
                assert says in llm.score_answers([[5]], list(wrong))[0].error


def test_a_text_has_the_tokens_that_it_has_behind_the_prompt(talker):
    with LLM(str(talker), device="cpu", dtype="float32", progress=False) as llm:
        encode = llm.model.encode
        found = question_of(llm.model, "import", [" os", "s"])
        assert [found.prompt + ids for ids in found.token_ids][0] == encode("import os")
        conversation = [{"role": "user", "content": "Hello"}]
        found = question_of(llm.model, conversation, ["yes"])
        assert found.prompt == encode(conversation)
        assert found.prompt + found.token_ids[0] == encode("user: Hello\nyes", begins=False)
