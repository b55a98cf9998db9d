"""`stop_token_ids` end a text as the model's own end-of-sequence token does, and are left out of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from command_tools import FP32, read_rows, write_rows

from h2o_flexgen import LLM, Policy, SamplingParams, UserError
from h2o_flexgen.engine.sampling import Choice

pytest_plugins = ["command_tools"]

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def llm(talker):
    with LLM(str(talker), Policy(2), device="cpu", dtype="float32", progress=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def tokens(llm) -> list[int]:
    """The output if nothing ends it early."""
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=12, ignore_eos=True))
    return output.outputs[0].token_ids


def up_to(tokens: list[int], stop: int) -> list[int]:
    return tokens[: tokens.index(stop) + 1]


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_a_text_ends_at_the_first_of_them(llm, tokens, ignore_eos):
    params = SamplingParams(max_tokens=12, ignore_eos=ignore_eos, stop_token_ids=[tokens[7], tokens[4]])
    (output,) = llm.generate([PROMPT], params)
    done = output.outputs[0]
    assert done.token_ids == min(up_to(tokens, tokens[4]), up_to(tokens, tokens[7]), key=len)
    assert done.finish_reason == "stop" and len(done.logprobs) == len(done.token_ids)
    assert done.text == llm.tokenizer.decode(done.token_ids[:-1])  # though the last is no special token


def test_the_text_of_an_eos_token_that_is_not_special_is_left_out(llm, tokens, monkeypatch):
    monkeypatch.setattr(llm, "eos_ids", frozenset({tokens[4]}))
    done = llm.generate([PROMPT], SamplingParams(max_tokens=12))[0].outputs[0]
    assert done.token_ids == up_to(tokens, tokens[4])
    assert done.text == llm.tokenizer.decode(done.token_ids[:-1])


def test_an_earlier_stop_string_wins(llm, tokens):
    text = llm.tokenizer.decode(tokens[:2])
    params = SamplingParams(max_tokens=12, ignore_eos=True, stop=text, stop_token_ids=[tokens[8]])
    done = llm.generate([PROMPT], params)[0].outputs[0]
    assert done.text == "" and len(done.token_ids) <= 2


def test_a_stream_ends_there_too(llm, tokens):
    pieces = []
    with llm.session() as session:
        params = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=[tokens[4]])
        done = session.generate(PROMPT, params, lambda _, piece: pieces.append(piece))
        assert done.token_ids == up_to(tokens, tokens[4]) and done.finish_reason == "stop"
        assert "".join(pieces) == done.text
        with pytest.raises(UserError, match="below 300"):
            session.generate(PROMPT, SamplingParams(stop_token_ids=[300]))


def test_the_end_of_an_answer_is_not_written_twice(llm, monkeypatch):
    """If the model ends its answer as the template does."""
    monkeypatch.setattr(llm.model.tokenizer, "chat_template", "{% for m in messages %}{{ m.content }};{% endfor %}")
    (end,) = llm.tokenizer(";", add_special_tokens=False)["input_ids"]
    lengths = {}
    for stop in ((), (end,)):
        monkeypatch.setattr("h2o_flexgen.engine.sampling.sample", lambda logits, *rest: always(end, len(logits)))
        with llm.session() as session:
            session.chat("a", SamplingParams(max_tokens=1, stop_token_ids=stop))
            before = session.lengths()
            session.chat("b", SamplingParams(max_tokens=1, stop_token_ids=stop))
            lengths[stop] = session.lengths() - before
    assert lengths[end,] == lengths[()] - 1


def always(token: int, rows: int) -> Choice:
    import torch

    return Choice(torch.full((rows,), token), torch.zeros(rows))


@pytest.mark.parametrize(
    "given, kept",
    [
        ([7, 3, 7], (3, 7)),
        ((), ()),
        (None, ()),
        (np.array([4]), (4,)),
        ([np.int64(5), np.uint8(2)], (2, 5)),
    ],
)
def test_they_are_kept_as_a_tuple(given, kept):
    params = SamplingParams(stop_token_ids=given)
    assert params.stop_token_ids == kept and hash(params)
    assert all(type(token) is int for token in params.stop_token_ids)


@pytest.mark.parametrize("given", [5, "5", [-1], [True], [1.0], ["5"], [None], [[5]], {5: 1}, {5}, b"5"])
def test_anything_but_a_list_of_ids_is_refused(given):
    with pytest.raises(UserError, match="stop_token_ids must be a"):
        SamplingParams(stop_token_ids=given)


def test_one_outside_the_vocabulary_would_end_nothing(llm):
    for token in (300, 10**30):
        with pytest.raises(UserError, match="stop_token_ids must be below 300, the vocabulary"):
            llm.generate([PROMPT], SamplingParams(stop_token_ids=[1, token]))


def test_rows_and_requests_and_the_option(cli, talker, tokens, tmp_path):
    stop = [tokens[4]]
    body = {"prompt": PROMPT, "stop_token_ids": stop}
    rows = [
        {"prompt_token_ids": PROMPT, "stop_token_ids": stop},
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body},
        {"prompt_token_ids": PROMPT},
        {"prompt_token_ids": PROMPT, "stop_token_ids": [tokens[6]]},
        {"prompt_token_ids": PROMPT, "stop_token_ids": [300]},
        {"prompt_token_ids": PROMPT, "stop_token_ids": ["a"]},
    ]
    files = ("--input-file", write_rows(tmp_path / "in.jsonl", rows), "--output-file", tmp_path / "out.jsonl")
    job = ("--model", talker, *FP32, "--gen-len", 12, "--ignore-eos", *files)
    code, _, err = cli(*job, "--stop-token-ids", tokens[4], 5)
    assert code == 0, err
    plain, request, by_option, own, outside, wrong = read_rows(tmp_path / "out.jsonl")
    expected = up_to(tokens, tokens[4])
    assert plain["token_ids"] == by_option["token_ids"] == expected and plain["finish_reason"] == "stop"
    answer = request["response"]["body"]
    assert answer["usage"]["completion_tokens"] == len(expected)
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["choices"][0]["text"] == plain["text"]
    assert own["token_ids"] == up_to(tokens, tokens[6])
    assert "below 300" in outside["error"] and "whole number" in wrong["error"]
    code, _, err = cli(*job)
    assert code == 2 and "--stop-token-ids" in err and "now None" in err
    assert json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["settings"]["stop_token_ids"]
