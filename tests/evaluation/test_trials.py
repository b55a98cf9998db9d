"""Needles, copies, choices and lengths: what is asked, and that a right answer is what greedy decoding writes."""

from __future__ import annotations

import pytest

from h2o_flexgen import LLM, SamplingParams, UserError
from h2o_flexgen.engine.outputs import ScoreOutput
from h2o_flexgen.evaluation import choice, copying, lengths, needle
from h2o_flexgen.evaluation.passages import Passage, Source, passages_of
from h2o_flexgen.evaluation.settings import make_settings
from h2o_flexgen.evaluation.trials import Span, Trial, is_right, measure, of_each, spread

pytest_plugins = ["command_tools"]

TEXT = "The page cache keeps what was read from a disk in memory, so that it need not be read again. " * 40
BUDGET = make_settings(["h2o"], [], [40])


@pytest.fixture
def llm(talker):
    with LLM(str(talker), device="cpu", dtype="float32", progress=False) as llm:
        yield llm


@pytest.fixture
def passages(llm):
    return passages_of(Source("a.txt", text=TEXT), llm.model, 400, 40, 2)[0]


@pytest.mark.parametrize("has_chat", [True, False])
def test_needles_lie_at_their_depths_and_are_asked_for_by_name(llm, passages, has_chat):
    if not has_chat:
        llm.tokenizer.chat_template = None
    behind, in_front, several = (decoded(llm, trial) for trial in needle.trials_of(llm.model, passages[1], 1))
    (city,) = (city for city in needle.CITIES if city in behind)
    question = f"What is the secret number of {city}?"
    assert behind.count(f"The secret number of {city} is") == 2
    assert behind.index("page cache") < behind.index("secret") < behind.index(question)
    assert in_front.index(question) < in_front.index("page cache")
    cities = [city for city in needle.CITIES if city in several]
    assert len(cities) == 5
    for city in cities:
        sentence = f"The secret number of {city} is"
        assert several.count(f"What is the secret number of {city}?") == 1
        number = several.partition(f"{sentence} ")[2][:5]
        assert number.isdigit() and several.count(f"{sentence} {number}") == 2
    assert has_chat == ("assistant: " in behind)


def test_sentences_stand_behind_whole_words():
    text = "one two three four five"
    assert needle.hidden(text, {0.0: "A.", 0.5: "B.", 1.0: "C."}) == "A.\none two three\nB.\nfour five\nC."


def decoded(llm, trial: Trial) -> str:
    return llm.tokenizer.decode(trial.token_ids)


def test_a_number_is_found_if_each_of_its_tokens_is_the_most_likely(llm):
    texts = [Trial([1, 2, 3, 4, 5, 6], 2, [Span("a", 2, 4), Span("b", 4, 5), Span("b", 5, 6)], 0)]
    scores = [ScoreOutput(0, [1, 2, 3, 4, 5, 6], greedy_token_ids=[3, 4, 5, 9])]
    assert is_right(scores[0], texts[0].answers[0]) == [True, True]
    assert needle.judge(texts, scores) == {"a": [1.0], "b": [0.5]}


def test_copies_begin_behind_words_that_the_answer_repeats(llm, passages):
    (trial,) = copying.trials_of(llm.model, passages[1], 1, 20)
    text = decoded(llm, trial)
    passage, _, answer = text.partition(copying.QUESTION)
    assert len(trial.token_ids) - trial.prompt_len == 20
    words = answer.split()[1:]  # behind the role
    assert len(words) > copying.CUE and " ".join(words[:-1]) in passage
    scores = [ScoreOutput(0, [1, 2, 3, 4, 5], greedy_token_ids=[2, 3, 9, 5])]
    assert copying.judge([Trial([1, 2, 3, 4, 5], 1, [Span("copied", 1, 5)], 0)], scores) == {
        "copied": [0.5],
        "tokens right": [0.75],
    }


def test_the_right_answer_follows_the_passage_and_is_the_most_likely():
    trials = choice.trials_of(Passage([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 2), 7)
    assert [t.token_ids for t in trials] == [[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 7, 8], [1, 2, 9, 10]]
    logprobs = ([-1.0, -1.0], [-2.0, -0.5], [-1.0, -2.0], [-3.0, -1.0])
    scores = [ScoreOutput(n, trials[n].token_ids, list(each)) for n, each in enumerate(logprobs)]
    assert choice.judge(trials, scores) == {"right": [1.0]}
    assert choice.judge(trials, scores[::-1]) == {"right": [0.0]}


def test_right_tokens_are_those_that_generate_writes(llm, passages):
    """Behind what the model itself writes under a budget, all is right; with the full cache it is not."""
    prompt = passages[0].token_ids[:200]
    llm.kv_budget = BUDGET[0].budget
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=24, ignore_eos=True))
    written = output.outputs[0].token_ids
    trial = Trial(prompt + written, len(prompt), [Span("found", len(prompt), len(prompt) + 24)], 0)
    full, row = measure(llm, [trial], BUDGET, needle.judge)
    assert row["scores"]["found"]["mean"] == 1 and full["scores"]["found"]["mean"] == 0


def test_lengths_are_those_that_generate_writes(llm, passages):
    requests = [each for passage in passages for each in lengths.requests_of(llm, passage, 12)]
    _, row = lengths.measure(llm, requests, BUDGET, 12)
    llm.kv_budget = BUDGET[0].budget
    outputs = llm.generate([request.prompt for request in requests], SamplingParams(max_tokens=12))
    assert row["texts"] == [output.outputs[0].text for output in outputs]
    assert row["scores"][lengths.BEHIND]["mean"] == sum(len(o.outputs[0].token_ids) for o in outputs[::2]) / 2


def test_spreads():
    found = spread([0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0])
    assert found["mean"] == found["ratio"] == 0.5
    assert found["error"] == found["ratio_error"] == pytest.approx((1 / 3) ** 0.5 / 2)
    assert spread([2.0, 4.0], [1.0, 2.0])["ratio_error"] == 0  # every passage has twice the full cache's
    assert spread([1.0], [0.0])["ratio"] is None and spread([1.0], [0.0])["error"] == 0


def test_passages_without_room_are_errors(llm, passages):
    small = Passage(passages[0].token_ids, 60)
    items, errors = of_each([small, passages[1]], lambda passage, n: needle.trials_of(llm.model, passage, n))
    assert len(items) == 3 and errors[0].startswith("passage 0: `prompt_len` 60 leaves no room for a text")
    with pytest.raises(UserError, match="too few to copy 400 tokens"):
        copying.trials_of(llm.model, passages[0], 0, 400)
