"""Structured output: every finished text matches, whatever shares its block, and wherever its cache is."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams, Structured, UserError
from h2o_flexgen.engine import runner
from h2o_flexgen.engine.masks import Masks
from h2o_flexgen.engine.observer import Observer
from h2o_flexgen.engine.report import Meter

pytest_plugins = ["command_tools"]
OPTIONS = dict(device="cpu", dtype="float32", progress=False)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog"]},
        "legs": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["name", "kind", "legs"],
    "additionalProperties": False,
}
SHAPES = [
    Structured(json=SCHEMA),
    Structured(choice=["yes", "no", "perhaps"]),
    Structured(regex=r"[a-c]{3}-\d{2}"),
    Structured(grammar='root ::= "<" [0-9]+ ">"'),
    Structured(json=json.dumps({"type": "boolean"})),
]
TEXTS = ["A letter.", "Once upon a time there was", "x", "The weather in the north of the country"]


def matches(structured: Structured, text: str) -> bool:
    if structured.json is not None:
        jsonschema.validate(json.loads(text), json.loads(structured.json))
        return True
    if structured.choice is not None:
        return text in structured.choice
    return re.fullmatch(structured.regex or "<[0-9]+>", text) is not None


@pytest.fixture
def folder(talker):
    """A random model with a tokenizer: without a mask its text would match nothing."""
    return talker


POLICIES = [Policy(4), Policy(2, 2, percent=(0, 0, 0, 0, 0, 0))]


@pytest.mark.parametrize("budget", [None, KVBudget.from_size(6, 6)], ids=["full", "h2o"])
def test_texts_match_and_do_not_depend_on_their_neighbours(folder, budget):
    """Five shapes and rows without one, greedy and drawn, in blocks that refill."""
    prompts = TEXTS * 3
    params = []
    for n in range(len(prompts)):
        shape = (*SHAPES, None)[n % 6]
        params.append(SamplingParams(temperature=n % 2, seed=n, max_tokens=70, structured=shape, ignore_eos=True))
    found = []
    for policy in POLICIES:
        with LLM(str(folder), policy, budget, **OPTIONS) as llm:
            found.append([each.outputs[0] for each in llm.generate(prompts, params)])
    for output, p in zip(found[0], params):
        if p.structured is not None and output.finish_reason == "stop":
            assert matches(p.structured, output.text), output.text
    assert sum(output.finish_reason == "stop" for output in found[0]) >= 6
    for others in found[1:]:  # a draw may fall between the last bits of two sums
        assert [each.token_ids for each in others[::2]] == [each.token_ids for each in found[0][::2]]
        assert [each.text for each in others[::2]] == [each.text for each in found[0][::2]]


def test_a_text_that_cannot_go_on_ends_without_another_step(folder):
    params = SamplingParams(max_tokens=50, structured=Structured(regex="ab"))
    with LLM(str(folder), Policy(1), **OPTIONS) as llm:
        (output,) = llm.generate("Say ab.", params)
    assert output.outputs[0].text == "ab" and output.outputs[0].finish_reason == "stop"
    assert llm.tokenizer.decode(output.outputs[0].token_ids) == "ab"  # no end-of-text token behind it


class Passes(Observer):
    """Counts passes, and the rows of each."""

    def __init__(self):
        self.rows = []

    def on_pass(self, rows):
        self.rows.append(len(rows))


@pytest.mark.parametrize("budget", [None, KVBudget.from_size(6, 6)], ids=["full", "h2o"])
@pytest.mark.parametrize("percent", [(100, 0, 100, 0, 100, 0), (0, 0, 100, 0, 100, 0)], ids=["ram", "disk"])
def test_tokens_that_must_follow_share_a_pass(folder, budget, percent):
    """With the tokens and log-probabilities of one step each, beside rows that take one step each."""
    shape = Structured(regex="<[ab]: and nothing else than [cd]>")
    params = [SamplingParams(max_tokens=60, structured=shape, top_logprobs=1)] * 3 + [SamplingParams(max_tokens=40)]
    found = []
    for joint in (True, False):
        passes = Passes()
        with LLM(str(folder), Policy(4, percent=percent), budget, observer=passes, **OPTIONS) as llm:
            with pytest.MonkeyPatch.context() as patch:
                if not joint:
                    patch.setattr(Masks, "advance", lambda self, s: self._matchers[s].consume_token(s.tokens[-1]))
                found.append([each.outputs[0] for each in llm.generate(["a", "Say it.", "b c d", "e"], params)])
        count = max(len(each.token_ids) for each in found[-1][:3])
        streams = percent[0] == 0  # weights in RAM make a pass cheap
        assert (sum(rows > 1 for rows in passes.rows) < 0.75 * count) == (joint and streams)
    for together, alone in zip(*found):
        assert (together.text, together.token_ids) == (alone.text, alone.token_ids)
        assert together.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        assert re.fullmatch(shape.regex, together.text) or len(together.token_ids) == 40
        assert together.top_logprobs is None or len(together.top_logprobs) == len(together.token_ids)


def test_a_choice_of_single_tokens_takes_one_pass(folder):
    passes = Passes()
    params = SamplingParams(max_tokens=50, structured=Structured(choice=["a", "b", "c"]))
    with LLM(str(folder), Policy(4), observer=passes, **OPTIONS) as llm:
        outputs = llm.generate(TEXTS, params)
    assert passes.rows == [4] and all(output.outputs[0].text in "abc" for output in outputs)


def test_the_length_that_cuts_json_short_is_told(folder):
    params = SamplingParams(max_tokens=4, structured=SHAPES[0])
    with LLM(str(folder), Policy(1), **OPTIONS) as llm:
        (output,) = llm.generate("Say ab.", params)
    assert output.outputs[0].finish_reason == "length"


def test_answers_share_their_prompt_and_are_drawn_apart(folder, monkeypatch):
    prompt = " ".join(TEXTS) * 4
    params = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, n=5, seed=7)
    meters = []
    monkeypatch.setattr(runner, "Meter", lambda transport: meters.append(Meter(transport)) or meters[-1])
    with LLM(str(folder), Policy(8), **OPTIONS) as llm:
        several, one = llm.generate([prompt, "b"], [params, SamplingParams(max_tokens=3, ignore_eos=True)])
        read = len(several.prompt_token_ids) + len(one.prompt_token_ids)
        assert meters[-1].computed_tokens == read - 1 + 5  # each answer reads the last token itself
        (alone,) = llm.generate([prompt], SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, seed=7))
        best = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, n=2, best_of=5, seed=7)
        (kept,) = llm.generate([prompt], best)
    assert [each.index for each in several.outputs] == list(range(5)) and len(one.outputs) == 1
    assert several.outputs[0].token_ids == alone.outputs[0].token_ids
    assert len({tuple(each.token_ids) for each in several.outputs}) > 1
    mean = lambda each: sum(each.logprobs) / len(each.logprobs)
    means = sorted(map(mean, several.outputs), reverse=True)
    assert list(map(mean, kept.outputs)) == pytest.approx(means[:2], abs=1e-5)


def test_prompt_logprobs_are_those_of_score(folder):
    params = SamplingParams(max_tokens=2, prompt_logprobs=2, top_logprobs=3)
    with LLM(str(folder), Policy(4), **OPTIONS) as llm:
        outputs = llm.generate(TEXTS, params)
        scores = llm.score([output.prompt_token_ids for output in outputs])
    for output, score in zip(outputs, scores):
        if len(output.prompt_token_ids) > 1:
            own = [each[token] for token, each in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])]
            assert own == pytest.approx(score.token_logprobs, abs=1e-4)
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
        for token, logprob, top in zip(*(getattr(output.outputs[0], x) for x in FIELDS)):
            assert len(top) == 3 and top[token] == logprob  # greedy


FIELDS = ("token_ids", "logprobs", "top_logprobs")


@pytest.mark.parametrize(
    "given, say",
    [
        (dict(), "needs exactly one of"),
        (dict(json={}, regex="a"), "needs exactly one of"),
        (dict(json="{"), "the JSON schema cannot be read"),
        (dict(json=[1]), "a JSON schema is an object"),
        (dict(json={"type": "string", "minLength": 5, "maxLength": 2}), "Unsatisfiable schema"),
        (dict(json={"type": "array", "uniqueItems": True}), "uniqueItems"),
        (dict(json={"type": "colour"}), "Invalid type: colour"),
        (dict(regex="(a|b"), "unclosed group"),
        (dict(regex="a(?=b)"), "look-around"),
        (dict(grammar="root ::= (a"), "grammar"),
        (dict(choice=[]), "1 to 10000 texts"),
        (dict(choice=["a"] * 10_001), "1 to 10000 texts"),
        (dict(choice=["a", ""]), "not empty"),
    ],
)
def test_what_cannot_be_used_is_named(given, say):
    with pytest.raises(UserError, match=re.escape(say)):
        Structured(**given).check()


def test_a_row_that_cannot_go_on_fails_alone(folder):
    """A grammar that explodes, one that the vocabulary cannot meet, an empty text, and options that allow nothing."""
    explodes = Structured(regex=r"(([a-z ]{1,300}|[b-y ]{2,299}){1,300}x){1,300}")
    params = [
        SamplingParams(max_tokens=200, structured=explodes, temperature=1.0),
        SamplingParams(max_tokens=5, structured=Structured(grammar='start: <[299]> <[999999]> "a"')),
        SamplingParams(max_tokens=5, structured=Structured(regex="")),
        SamplingParams(max_tokens=5, allowed_token_ids=[2], min_tokens=2),
        SamplingParams(max_tokens=5, ignore_eos=True),
    ]
    with LLM(str(folder), Policy(5), **OPTIONS) as llm:
        outputs = llm.generate(["a"] * 5, params)
    errors = [output.error for output in outputs]
    assert all("structured output" in error for error in errors[:2]) and "allow no token" in errors[3]
    assert outputs[2].outputs[0].text == "" and outputs[2].outputs[0].finish_reason == "stop"
    assert len(outputs[4].outputs[0].token_ids) == 5


@pytest.mark.parametrize(
    "given",
    [dict(json={"title": "\ud800"}), dict(regex="\ud800"), dict(choice=["\ud800"]), dict(grammar="start: /\ud800/")],
    ids=lambda given: next(iter(given)),
)
def test_text_that_is_not_unicode_is_refused(given):
    with pytest.raises(UserError):
        Structured(**given).check()


def test_any_json_is_a_schema():
    Structured(json=True).check()


def test_a_stream_has_each_token_once(folder):
    params = SamplingParams(max_tokens=60, structured=Structured(regex="<[ab]: and nothing else than this>"))
    with LLM(str(folder), Policy(1, percent=(0, 0, 100, 0, 100, 0)), **OPTIONS) as llm, llm.session() as session:
        prompt = llm.tokenizer.encode("Say it.")
        output = session.generate("Say it.", params)
        session.generate("And", SamplingParams(max_tokens=1))
        after = llm.tokenizer.encode("And", add_special_tokens=False)
        assert session.lengths() == len(prompt) + len(output.token_ids) + len(after) + 1


def test_stop_strings_count_from_min_tokens_on(folder):
    params = SamplingParams(max_tokens=30, structured=Structured(regex="(ab){20}"))
    with LLM(str(folder), Policy(1), **OPTIONS) as llm:
        assert llm.generate("x", params)[0].outputs[0].text[:10] == "ab" * 5
        bias = {llm.tokenizer.encode(c, add_special_tokens=False)[0]: 100 for c in "a"}
        late = SamplingParams(max_tokens=9, stop=["a"], min_tokens=4, logit_bias=bias)
        output = llm.generate("x", late)[0].outputs[0]
    assert output.text == "aaaa" and len(output.token_ids) == 5 and output.finish_reason == "stop"
