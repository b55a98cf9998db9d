"""`score` gives the log-probabilities of transformers with a full cache, and those of the oracle with H2O."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import zoo
from oracle import fresh_rotary

from h2o_flexgen import LLM, Policy, UserError
from h2o_flexgen.engine.observer import Observer

#: the basic model of every family, RoPE by length in two kinds, and sliding windows
MODELS = [*zoo.FIRST.values(), "llama_groups_of_8_dynamic", "llama_longrope", *zoo.WINDOWS]
LENGTHS = [9, 24, 17, 10, 2]
PROMPT = 8
BUDGET = (3, 4)
POLICIES = {
    "gpu": dict(percent=(100, 0, 100, 0, 100, 0), gpu_batch_size=7),
    "disk": dict(percent=(0, 0, 0, 0, 0, 0), gpu_batch_size=2, num_gpu_batches=2, prefill_tokens=20),
    "thirds": dict(percent=(33, 33, 33, 33, 33, 33), gpu_batch_size=3, num_gpu_batches=3),
    "in_turn": dict(percent=(50, 0, 50, 0, 0, 50), gpu_batch_size=4, overlap=False),
    "at_once": dict(percent=(0, 0, 100, 0, 0, 100), gpu_batch_size=2, num_gpu_batches=2),
}
CASES = [(name, list(POLICIES)[n % len(POLICIES)]) for n, name in enumerate(MODELS)]


def score(model, texts, prompt_len=None, budget=None, **policy):
    kv_budget = None if budget is None else zoo.sized(*budget)
    with LLM(str(model.folder), Policy(**policy), kv_budget, device="cpu", dtype="float32", progress=False) as llm:
        return llm.score(texts, prompt_len)


def expected(model, text: list[int]) -> tuple[list[float], list[bool]]:
    """Scores by transformers of all tokens but the first; the last one is not an input."""
    model.hf.base_model.rotary_emb = fresh_rotary(model.hf)
    with torch.inference_mode():
        rows = model.hf(torch.tensor([text[:-1]])).logits[0].log_softmax(-1)
    found = rows.gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    return found.tolist(), (rows.argmax(-1) == torch.tensor(text[1:])).tolist()


def natural(model, lengths) -> list[list[int]]:
    """Texts whose second halves are the model's own choice."""
    prompts = model.prompts(n // 2 for n in lengths)
    return [p + model.reference(p, n - len(p)).tokens for n, p in zip(lengths, prompts)]


@pytest.mark.parametrize("name, policy", CASES)
def test_a_whole_text_scores_as_with_transformers(tiny, name, policy):
    model = tiny(name)
    texts = natural(model, LENGTHS)
    for output, text in zip(score(model, texts, **POLICIES[policy]), texts, strict=True):
        logprobs, greedy = expected(model, text)
        assert output.error is None and output.token_ids == text
        assert output.token_logprobs == pytest.approx(logprobs, abs=1e-4)
        assert output.is_greedy == greedy
        assert any(greedy) or len(text) < 4


@pytest.mark.parametrize("name, policy", [case for case in CASES if case[0] not in zoo.BY_LENGTH])
def test_tokens_after_a_prompt_score_as_with_transformers(tiny, name, policy):
    """Except with RoPE by length: token by token it depends on the text so far, in one pass on the whole text."""
    model = tiny(name)
    texts = natural(model, LENGTHS)
    for output, text in zip(score(model, texts, PROMPT, **POLICIES[policy]), texts, strict=True):
        if len(text) <= PROMPT:
            assert "none to score after the first 8" in output.error and output.token_logprobs == []
            continue
        logprobs, greedy = expected(model, text)
        assert output.token_logprobs == pytest.approx(logprobs[PROMPT - 1 :], abs=1e-4)
        assert output.is_greedy == greedy[PROMPT - 1 :]


@pytest.mark.parametrize("name, policy", CASES)
def test_under_a_kv_budget_the_tokens_score_as_with_the_oracle(tiny, name, policy):
    model = tiny(name)
    texts, references = clear_cut(model, [9, 24, 17])
    outputs = score(model, texts, PROMPT, BUDGET, **POLICIES[policy])
    for output, reference in zip(outputs, references, strict=True):
        assert output.token_logprobs == pytest.approx(reference.logprobs, abs=1e-4)
        assert output.is_greedy == [margin > 0 for margin in reference.margins]
        assert output.greedy_token_ids == reference.greedy
    full = score(model, texts, PROMPT, **POLICIES[policy])
    assert any(a.token_logprobs != pytest.approx(b.token_logprobs, abs=1e-3) for a, b in zip(outputs, full))


def test_where_weights_stream_a_pass_scores_several_tokens_of_a_text(tiny):
    model = tiny("llama")
    texts = natural(model, LENGTHS[:4])
    found = {}
    passes = Counter()
    for policy in ("gpu", "at_once"):
        watch = Observer()
        watch.on_pass = lambda rows, policy=policy: passes.update([policy])
        options = dict(device="cpu", dtype="float32", progress=False, observer=watch)
        with LLM(str(model.folder), Policy(**POLICIES[policy]), zoo.sized(*BUDGET), **options) as llm:
            found[policy] = [output.token_logprobs for output in llm.score(texts, PROMPT)]
    for some, others in zip(*found.values(), strict=True):
        assert some == pytest.approx(others, abs=1e-4)
    assert passes == {"gpu": 16, "at_once": 5}


def clear_cut(model, lengths):
    """Texts for which no eviction is a close call, and their scores by the oracle."""
    found = []
    for n in lengths:
        for seed in range(100):
            (text,) = model.prompts([n], seed=10_000 * n + seed)
            trace = model.oracle.generate(text[:PROMPT], n - PROMPT, *BUDGET, forced=text[PROMPT:])
            if trace.slack > zoo.SLACK and min(map(abs, trace.margins)) > zoo.MARGIN:
                found.append((text, trace))
                break
    assert len(found) == len(lengths)
    return zip(*found)


def test_each_text_may_have_a_prompt_of_its_own_length(tiny):
    model = tiny("llama")
    texts = natural(model, LENGTHS)
    lens = [1, 12, 16, 3, 1]
    for output, text, prompt_len in zip(score(model, texts, lens, **POLICIES["thirds"]), texts, lens, strict=True):
        logprobs, greedy = expected(model, text)
        assert output.token_logprobs == pytest.approx(logprobs[prompt_len - 1 :], abs=1e-4)
        assert output.is_greedy == greedy[prompt_len - 1 :]
    with pytest.raises(UserError, match="`prompt_len` has 2 for 5 texts"):
        score(model, texts, [4, 8])


def test_outputs_are_handed_on_as_their_batches_are_done(tiny):
    model = tiny("llama")
    seen = []
    texts = [*natural(model, LENGTHS), [400]]
    with LLM(str(model.folder), Policy(3, 1), device="cpu", dtype="float32", progress=False) as llm:
        outputs = llm.score(texts, on_output=seen.append)
    assert sorted(seen, key=lambda output: output.index) == outputs[:-1]
    assert outputs[-1].error is not None


@pytest.mark.parametrize(
    "name, budget, prompt_len", [("opt", None, None), ("opt", BUDGET, 128), ("llama", None, 127), ("llama", BUDGET, 1)]
)
def test_a_text_may_have_one_token_more_than_the_model_has_positions(tiny, name, budget, prompt_len):
    """The last one is never an input."""
    model = tiny(name)
    text = natural(model, [129])[0]
    (output,) = score(model, [text], prompt_len, budget)
    begin = (prompt_len or 1) - 1
    assert output.error is None and len(output.token_logprobs) == 128 - begin
    if budget is None or prompt_len in (None, 128):  # no token was evicted before the last was scored
        assert output.token_logprobs == pytest.approx(expected(model, text)[0][begin:], abs=1e-4)


def test_a_text_that_cannot_be_scored_does_not_stop_the_others(tiny):
    model = tiny("opt")
    texts = [[5], [1, 2, 3], [], [7, 400], "no tokenizer", list(range(90)) * 2]
    outputs = score(model, texts)
    too_long = "the text has 180 tokens, more than the model's 128 positions"
    says = ["none to score after the first 1", None, "empty", "the vocabulary", "no tokenizer", too_long]
    for output, expects in zip(outputs, says, strict=True):
        assert (output.error is None) if expects is None else (expects in output.error)
    assert len(outputs[1].token_logprobs) == 2


def test_a_whole_text_takes_no_memory_for_a_cache(tiny):
    model = tiny("opt")
    with LLM(str(model.folder), Policy(), device="cpu", dtype="float32", progress=False) as llm:
        llm.score(model.prompts([30] * 8))
        assert not any("KV cache" in what for _, what, _ in llm.choice.plan.items)
        assert llm.report["total"]["generated_tokens"] == 8 * 29


def test_a_prompt_without_tokens_is_refused(tiny):
    for bad in (0, [0], [1.5], True):
        with pytest.raises(UserError, match="prompt_len. must be a whole number, 1 or more"):
            score(tiny("opt"), [[1, 2]], bad)
    with pytest.raises(UserError, match="prompt_len. has 2 for 1 texts"):
        score(tiny("opt"), [[1, 2]], [1, 1])
