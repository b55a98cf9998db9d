"""Rows that generate nothing: embeddings and scored answers, as plain rows and as requests, mixed with others."""

from __future__ import annotations

import json
import signal
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
from command_tools import FP32, read_rows, write_rows

from h2o_flexgen import LLM
from h2o_flexgen.commands.main import main
from h2o_flexgen.errors import Interrupted
from h2o_flexgen.jobs.output import OutputFile

pytest_plugins = ["command_tools"]

HELLO = [{"role": "user", "content": "Hello"}]
PLAIN = [{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7], "custom_id": "b"}, {"prompt_token_ids": [400]}]


@pytest.fixture
def run(capfd, talker, tmp_path):
    """The output lines of a file, by `generate`, which generates 3 tokens a row, or by another command."""

    def batch(lines: list, *options, of: Path = talker, command: str = "generate", code: int = 0) -> list[dict]:
        files = ("--input-file", write_rows(tmp_path / "in.jsonl", lines), "--output-file", tmp_path / "out.jsonl")
        short = ("--gen-len", 3, "--ignore-eos") if command == "generate" else ()
        found = main([command, *map(str, ("--model", of, *FP32, *short, *files, *options))])
        assert found == code, capfd.readouterr().err
        return read_rows(tmp_path / "out.jsonl")

    return batch


@pytest.fixture
def llm(talker):
    with LLM(str(talker), device="cpu", dtype="float32", progress=False) as found:
        yield found


def request(url: str, custom_id: str, **body) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": f"/v1/{url}", "body": body}


def embeddings(custom_id: str = "e", **body) -> dict:
    return request("embeddings", custom_id, **{"input": "Hello"} | body)


def score(custom_id: str = "s", **body) -> dict:
    return request("score", custom_id, **{"prompt": "Hello", "answers": [" yes", " no"]} | body)


def body_of(line: dict) -> dict:
    assert line["error"] is None and line["response"]["status_code"] == 200, line
    return line["response"]["body"]


def test_requests_to_embed_are_answered_as_openai_does(run, llm):
    types = pytest.importorskip("openai.types")
    texts = ["Hello", "Hello world"]
    lines = [
        embeddings("one", model="mine"),
        embeddings("two", input=texts, encoding_format="base64", dimensions=32, user="me"),
        embeddings("ids", input=[5, 6]),
        embeddings("lists", input=[[5, 6], [7]], pooling="last", normalize=False),
        embeddings("chat", input=None, messages=HELLO),
    ]
    one, two, ids, lists, chat = [body_of(line) for line in run(lines)]
    for found in (one, ids, lists, chat):
        made = types.CreateEmbeddingResponse.model_validate(found, strict=True)
        assert made.to_dict(exclude_unset=True) == found
    assert one["model"] == "mine"
    wanted = [output.embedding for output in llm.embed([*texts, [5, 6]])]
    assert one["data"][0]["embedding"] == pytest.approx(wanted[0], abs=1e-6)
    unpacked = [np.frombuffer(b64decode(each["embedding"]), "<f4") for each in two["data"]]
    np.testing.assert_allclose(unpacked, wanted[:2], atol=1e-6)
    assert ids["data"][0]["embedding"] == pytest.approx(wanted[2], abs=1e-6)
    assert ids["usage"] == {"prompt_tokens": 2, "total_tokens": 2} and lists["usage"]["total_tokens"] == 3
    last = [output.embedding for output in llm.embed([[5, 6], [7]], "last", normalize=False)]
    np.testing.assert_allclose([each["embedding"] for each in lists["data"]], last, rtol=1e-5, atol=1e-6)
    assert chat["data"][0]["embedding"] == pytest.approx(llm.embed([HELLO])[0].embedding, abs=1e-6)


def test_answers_are_scored_in_plain_rows_and_requests(run, llm):
    answers = [" yes", " no", " perhaps"]
    lines = [
        {"prompt": "Hello", "answers": answers},
        {"messages": HELLO, "answers": answers, "custom_id": "chat"},
        {"prompt_token_ids": [5], "answers": [[6], [7, 8]]},
        score(answers=answers),
        score("chat 2", prompt=None, messages=HELLO, answers=answers),
        {"prompt": "Hello", "answers": {"text": ["a label, as SQuAD has it"]}},
    ]
    plain, chat, ids, found, chat_2, label = run(lines)
    texts = llm.score_answers(["Hello", HELLO], answers)
    for row, output in ((plain, texts[0]), (chat, texts[1])):
        assert row["answer"] == output.answer
        for scored, expected in zip(row["scores"], output.scores, strict=True):
            assert (scored["answer"], scored["num_tokens"]) == (expected.answer, len(expected.token_ids))
            assert scored["logprob"] == pytest.approx(expected.logprob, abs=1e-4)
            assert scored["probability"] == pytest.approx(expected.probability, abs=1e-4)
    assert [scored["answer"] for scored in ids["scores"]] == [[6], [7, 8]]
    for line, row, output in ((found, plain, texts[0]), (chat_2, chat, texts[1])):
        body = body_of(line)
        heads = [{"object": "score", "index": n} for n in range(3)]
        assert body["data"] == [head | scored for head, scored in zip(heads, row["scores"])]
        assert body["answer"] == row["answer"]
        tokens = len(output.prompt_token_ids) + sum(len(scored.token_ids) for scored in output.scores)
        assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert "text" in label


def test_a_file_may_mix_all_kinds_of_rows(run):
    """Under a KV budget, which acts in rows that generate."""
    text = {"prompt": "Hello world, this is a text"}
    lines = [text, score(), embeddings(), request("completions", "c", **text)]
    options = ("--hh-size", 2, "--recent-size", 2)
    mixed = run(lines, *options)
    (alone,) = run([text], *options, "--restart")
    assert mixed[0] == alone and len(alone["token_ids"]) == 3
    assert body_of(mixed[3])["choices"][0]["text"] == alone["text"]
    for line, found in zip(lines[1:3], mixed[1:]):
        (alone,) = run([line], *options, "--restart")
        for key in ("logprob", "embedding"):
            values = [body_of(each)["data"][0].get(key, 0) for each in (alone, found)]
            assert values[0] == pytest.approx(values[1], abs=1e-5)


#: requests and rows, the parameter that the error names, and what it says
BAD = [
    (embeddings(input=[]), "input", "input must be a text"),
    (embeddings(input=None), "input", "input must be a text"),
    (embeddings(input=""), None, "empty"),
    (embeddings(input=["a", ""]), None, "empty"),
    (embeddings(input=["a", 5]), "input", "of one kind"),
    (embeddings(input=[5, 4000]), None, "vocabulary"),
    (embeddings(input=[0.5]), None, "token ids are whole numbers"),
    (embeddings(input={"text": "a"}), "input", "input must be a text"),
    (embeddings(input=["a"] * 2049), "input", "at most 2048 texts, not 2049"),
    (embeddings(input=[5] * 1281), None, "1281 tokens, more than the model's 1280 positions"),
    (embeddings(messages=HELLO), "input", "messages or input, not both"),
    (embeddings(dimensions=16), "dimensions", "dimensions must be 32"),
    (embeddings(dimensions="32"), "dimensions", "a whole number"),
    (embeddings(encoding_format="int8"), "encoding_format", "one of float, base64"),
    (embeddings(encoding_format=["float"]), "encoding_format", "one of float, base64"),
    (embeddings(pooling="max"), "pooling", "one of mean, last"),
    (embeddings(pooling=[]), "pooling", "one of mean, last"),
    (embeddings(normalize=1), "normalize", "True or False"),
    (embeddings(temperature=0.5), "temperature", "for requests that generate text"),
    (embeddings(truncate_prompt_tokens=5), "truncate_prompt_tokens", "not supported"),
    (embeddings(chat_template_kwargs={"a": 1}), "chat_template_kwargs", "is for messages"),
    (score(answers=None), "answers", "answers must be a list"),
    (score(answers="yes"), "answers", "answers must be a list"),
    (score(answers=[]), "answers", "1 to 1000 answers, not 0"),
    (score(answers=[f"{n}" for n in range(10_000)]), "answers", "1 to 1000 answers, not 10000"),
    (score(answers=["yes", 5]), "answers", "answer 1 must be a text"),
    (score(answers=["yes", "yes"]), "answers", "given twice"),
    (score(answers=["yes", ""]), None, "answer 1: it has no tokens"),
    (score(answers=[[4000]]), None, "answer 0: token ids are whole numbers"),
    (score(prompt=None), "prompt", "prompt must be one text"),
    (score(prompt=[5] * 1280, answers=[[5], [6, 7]]), None, "1282 tokens, more than the model's 1280 positions"),
    (score(messages=HELLO), "prompt", "messages or prompt, not both"),
    (score(max_tokens=5), "max_tokens", "for requests that generate text"),
    (score(n=2), "n", "for requests that generate text"),
    (score(text_1="a"), "text_1", "not supported"),
]


def test_requests_that_cannot_be_run_fail_alone_as_openais_do(run):
    lines = [line | {"custom_id": f"bad {n}"} for n, (line, *_) in enumerate(BAD)]
    *found, good, plain, sampled = run(
        [*lines, score("good"), {"prompt": "a", "answers": []}, PLAIN[0] | {"answers": ["a"], "top_k": 2}]
    )
    for line, (_, param, say) in zip(found, BAD, strict=True):
        assert line["error"] is None and line["response"]["status_code"] == 400, say
        error = line["response"]["body"]["error"]
        assert list(error) == ["message", "type", "param", "code"]
        assert say in error["message"] and (error["type"], error["param"]) == ("invalid_request_error", param)
    body_of(good)
    assert plain["error"] == "a prompt has 1 to 1000 answers, not 0"
    assert sampled["error"].startswith("top_k is not for a row with answers")


def test_rows_to_score_need_an_output_file(capfd, talker, tmp_path):
    path = write_rows(tmp_path / "in.jsonl", [score()])
    assert main(["generate", "--model", str(talker), *FP32, "--input-file", str(path)]) == 2
    assert "needs an --output-file" in capfd.readouterr().err


# the command embed


def test_the_command_embeds_plain_rows_and_requests(run, llm, tmp_path, capfd):
    lines = [*PLAIN, {"prompt": "Hello", "answers": ["a label"]}, embeddings(), score(), PLAIN[0] | {"max_tokens": 5}]
    report = tmp_path / "report.json"
    found = run(lines, "--pooling", "last", "--no-normalize", "--report", report, command="embed")
    wanted = llm.embed([[5, 6], [7], "Hello"], "last", normalize=False)
    places = {0: 0, 1: 1, 3: 2}
    for place, n in places.items():
        assert found[place]["embedding"] == pytest.approx(wanted[n].embedding, rel=1e-5, abs=1e-6)
    assert found[1]["custom_id"] == "b" and "vocabulary" in found[2]["error"]
    assert body_of(found[4])["data"][0]["embedding"] == pytest.approx(wanted[2].embedding, rel=1e-5, abs=1e-6)
    assert found[5]["response"]["status_code"] == 400 and "/v1/embeddings" in str(found[5])
    assert found[6]["error"].startswith("max_tokens is not for a row to embed")
    out = capfd.readouterr().out
    assert "workload   4 texts of up to" in out and "tokens/s" in out
    assert json.loads(report.read_text())["workload"]["num_prompts"] == 4


@pytest.mark.parametrize("command", ["embed", "generate"])
def test_a_job_that_was_interrupted_resumes_to_the_same_file(run, tmp_path, monkeypatch, command):
    lines = [embeddings(f"e{n}", input=[[5, n], [6, n]]) for n in range(4)]
    lines += [score(f"s{n}", answers=[" yes", f" no {n}"]) for n in range(3)] if command == "generate" else PLAIN
    options = ("--gpu-batch-size", 2, "--num-gpu-batches", 1)
    whole = run(lines, *options, command=command)
    real = OutputFile.add
    seen = iter(range(99))

    def add(self, index, row):
        if next(seen) == 3:
            raise Interrupted(signal.SIGINT)
        real(self, index, row)

    with monkeypatch.context() as patch:
        patch.setattr(OutputFile, "add", add)
        assert 0 < len(run(lines, *options, "--restart", command=command, code=130)) < len(whole)
    assert run(lines, *options, command=command) == whole
    assert run(lines, *options, command=command) == whole  # nothing is left to do


def test_another_pooling_is_another_job(run, tmp_path, capfd):
    run(PLAIN, command="embed")
    run(PLAIN, "--pooling", "last", command="embed", code=2)
    assert "--pooling 'mean', now 'last'" in capfd.readouterr().err
    run(PLAIN, command="generate", code=2)
