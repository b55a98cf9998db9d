"""OpenAI batch files: requests in, responses out, in the form that the openai package reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_tools import FP32, read_rows, write_rows

pytest_plugins = ["command_tools"]

#: the example of vLLM's documentation (offline inference with the OpenAI batch file format)
VLLM = [
    {
        "custom_id": f"request-{n}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "meta-llama/Meta-Llama-3-8B-Instruct",
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": "Hello world!"}],
            "max_completion_tokens": 1000,
        },
    }
    for n, system in ((1, "You are a helpful assistant."), (2, "You are an unhelpful assistant."))
]
#: the example of OpenAI's guide
OPENAI = [
    {**request, "body": {**request["body"], "model": "gpt-3.5-turbo-0125", "max_tokens": 1000}} for request in VLLM
]
for request in OPENAI:
    del request["body"]["max_completion_tokens"]
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def run(cli, talker, tmp_path):
    """The output lines of a batch; each generates 4 tokens unless it asks for a number."""

    def batch(lines: list, *options, of: Path = talker) -> list[dict]:
        files = ("--input-file", write_rows(tmp_path / "in.jsonl", lines), "--output-file", tmp_path / "out.jsonl")
        code, _, err = cli("--model", of, *FP32, "--gen-len", 4, "--ignore-eos", *files, "--restart", *options)
        assert code == 0, err
        return read_rows(tmp_path / "out.jsonl")

    return batch


def chat(custom_id: str = "a", **body) -> dict:
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions"}
    return request | {"body": {"messages": HELLO} | body}


def completion(custom_id: str = "c", **body) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello"} | body}


def body_of(line: dict) -> dict:
    assert line["error"] is None and line["response"]["status_code"] == 200, line
    return line["response"]["body"]


@pytest.mark.parametrize("lines", [VLLM, OPENAI], ids=["vLLM's", "OpenAI's"])
def test_the_documented_example(run, lines):
    """With 8 tokens instead of 1000."""
    text = json.dumps(lines).replace("1000", "8")
    found = run(json.loads(text))
    assert [line["custom_id"] for line in found] == ["request-1", "request-2"]
    for line, request in zip(found, lines):
        body = body_of(line)
        assert body["object"] == "chat.completion" and body["model"] == request["body"]["model"]
        assert body["usage"]["completion_tokens"] == 8 and body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 8
        assert body["choices"][0]["message"]["role"] == "assistant"


def test_responses_are_what_the_openai_package_reads(run):
    types = pytest.importorskip("openai.types")
    lines = [chat("a", logprobs=True), completion("b", logprobs=0), completion("c"), chat("d", tools=[{}])]
    found = run(lines)
    for line in found[:3]:
        kind = types.chat.ChatCompletion if line["custom_id"] == "a" else types.Completion
        made = kind.model_validate(body_of(line), strict=True)
        assert made.to_dict(exclude_unset=True) == body_of(line)
    assert types.ErrorObject.model_validate(found[3]["response"]["body"]["error"]).param == "tools"


def test_a_request_gives_the_text_of_the_same_plain_row(run):
    lines = [{"messages": HELLO}, chat(), {"prompt": "Hello"}, completion(), completion("ids", prompt=[5, 6])]
    messages, answer, prompt, text, ids = run([*lines, {"prompt_token_ids": [5, 6]}])[:5]
    assert body_of(answer)["choices"][0]["message"]["content"] == messages["text"]
    assert body_of(text)["choices"][0]["text"] == prompt["text"]
    assert body_of(ids)["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}


def test_each_request_is_sampled_as_it_says(run, talker):
    found = run(
        [
            chat("default"),
            chat("long", max_completion_tokens=9),
            chat("older name", max_tokens=9),
            chat("drawn", max_tokens=9, temperature=1.5, top_p=0.9, seed=7),
            chat("nulls", max_tokens=None, temperature=None, stop=None, n=1, stream=False, tools=[], logit_bias={}),
        ]
    )
    texts = [body_of(line)["choices"][0]["message"]["content"] for line in found]
    assert [body_of(line)["usage"]["completion_tokens"] for line in found] == [4, 9, 9, 9, 4]
    assert texts[0] == texts[4] and texts[1] == texts[2] != texts[3]
    assert texts[1].startswith(texts[0])
    stopped = run([chat(max_tokens=9, stop=[texts[1][2:4]])])[0]
    assert body_of(stopped)["choices"][0]["finish_reason"] == "stop"
    assert texts[1][2:4] not in body_of(stopped)["choices"][0]["message"]["content"]


def test_logprobs_are_those_of_the_tokens(run):
    answer, text = run([chat(logprobs=True), completion(logprobs=0)])
    content = body_of(answer)["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    for token in content:
        assert token["logprob"] < 0 and token["top_logprobs"] == []
        assert token["bytes"] is None or bytes(token["bytes"]).decode() == token["token"]
    found = body_of(text)["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["text_offset"]) == 4


def test_several_answers_with_what_else_was_likely(run):
    types = pytest.importorskip("openai.types")
    drawn = dict(temperature=1.0, seed=3)
    lines = [chat("a", n=3, logprobs=True, top_logprobs=2, **drawn), completion("b", n=2, logprobs=2, **drawn)]
    lines += [{"prompt": "Hello", "n": 2, "logprobs": True, "top_logprobs": 1, **drawn}]
    several, text, plain = run(lines)
    (alone,) = run([chat("a", **drawn)])
    for line, kind in ((several, types.chat.ChatCompletion), (text, types.Completion)):
        made = kind.model_validate(body_of(line), strict=True)
        assert made.to_dict(exclude_unset=True) == body_of(line)
    choices = body_of(several)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert choices[0]["message"] == body_of(alone)["choices"][0]["message"]
    assert len({choice["message"]["content"] for choice in choices}) > 1
    assert body_of(several)["usage"]["completion_tokens"] == 12
    assert all(len(token["top_logprobs"]) == 2 for token in choices[0]["logprobs"]["content"])
    assert all(0 < len(top) <= 3 for top in body_of(text)["choices"][1]["logprobs"]["top_logprobs"])
    assert [len(each["top_logprobs"]) for each in plain["outputs"]] == [4, 4]


def test_answers_that_must_match(run):
    """By each name that says so."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    lines = [
        chat(str(n), max_tokens=99, **wish)
        for n, wish in enumerate(
            [
                dict(response_format=json_schema(schema)),
                dict(guided_json=schema),
                dict(structured_outputs={"json": json.dumps(schema)}),
                dict(guided_choice=['{"a": 1}', '{"a": 2}']),
                dict(guided_regex='[{]"a": [12]}'),
                dict(guided_grammar='root ::= "{\\"a\\": " [12] "}"'),
            ]
        )
    ]
    for line in run(lines):
        (choice,) = body_of(line)["choices"]
        assert json.loads(choice["message"]["content"])["a"] in (1, 2) and choice["finish_reason"] == "stop"
    (plain,) = run([{"prompt": "Hello", "guided_choice": ["x", "y"]}])
    assert plain["text"] in ("x", "y") and plain["finish_reason"] == "stop"


def test_content_parts_of_text_are_joined(run):
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "world"}]
    found = run([chat("a", messages=[{"role": "user", "content": part}]) for part in (parts,)])
    whole = run([chat("a", messages=[{"role": "user", "content": "Hello\nworld"}])])
    assert body_of(found[0])["choices"] == body_of(whole[0])["choices"]


def json_schema(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]


#: requests, the parameter that the error names, and what it says
BAD = [
    (chat(tools=[{"type": "function"}]), "tools", 'tool 0 lacks its "function"'),
    (chat(n=2), "n", "n 2 at temperature 0"),
    (chat(n=0), "n", "n must be a whole number, 1 or more"),
    (chat(stream=True), "stream", "stream is not"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs", "must be 20 or less"),
    (chat(top_logprobs=5), "top_logprobs", "needs logprobs"),
    (chat(response_format=json_schema({"not": {}})), "response_format", "not"),
    (chat(frequency_penalty=5), "frequency_penalty", "frequency_penalty must lie"),
    (chat(logit_bias={"300": 5}), "logit_bias", "below 300, the vocabulary"),
    (chat(guided_choice=["a"], guided_regex="b"), "guided_choice", "leave one out"),
    (chat(messages=[{"role": "user", "content": IMAGE}]), "messages", "of type text, not 'image_url'"),
    (chat(messages=[]), "messages", "empty"),
    (chat(messages=None), "messages", "list"),
    (chat(messages=[{"role": "user"}]), "messages", '"content" must be a text'),
    (chat(max_tokens=5000), None, "1280 positions"),
    (chat(temperature="hot"), "temperature", "temperature"),
    (chat(temperature=-1), "temperature", "temperature"),
    (completion(echo=True), "echo", "echo is not"),
    (completion(logprobs=True), "logprobs", "must be a number"),
    (completion(prompt=["a", "b"]), "prompt", "one text"),
    (completion(prompt=None), "prompt", "one text"),
    (completion(prompt=""), None, "empty"),
    (chat() | {"url": "/v1/responses"}, "url", "url must be one of /v1/chat/completions, /v1/completions"),
    (chat() | {"url": ["x"]}, "url", "url must be"),
    (chat() | {"method": "GET"}, "method", "method must be POST, not 'GET'"),
    (chat() | {"body": "text"}, "body", "body must be an object"),
]


def test_requests_that_cannot_be_run_fail_alone_as_openais_do(run):
    requests = [request | {"custom_id": f"bad {n}"} for n, (request, *_) in enumerate(BAD)]
    *found, good = run([*requests, chat("good")])
    for n, (line, (_, param, say)) in enumerate(zip(found, BAD, strict=True)):
        assert (line["custom_id"], line["error"], line["response"]["status_code"]) == (f"bad {n}", None, 400)
        error = line["response"]["body"]["error"]
        assert list(error) == ["message", "type", "param", "code"]
        assert say in error["message"] and (error["type"], error["param"]) == ("invalid_request_error", param)
    body_of(good)


@pytest.mark.parametrize("custom_id", [None, 7])
def test_a_request_without_a_name_fails_as_a_plain_row(run, custom_id):
    bad, good = run([chat() | {"custom_id": custom_id}, chat("good")])
    assert bad["index"] == 0 and "custom_id" in bad["error"]
    body_of(good)


def test_a_chat_with_a_model_that_has_no_template(run, texts):
    bad, good = run([chat(), completion()], of=texts)
    assert "no chat template" in bad["response"]["body"]["error"]["message"]
    body_of(good)


def test_a_model_without_a_tokenizer_completes_ids(run, model):
    (line,) = run([completion(prompt=[5, 6], logprobs=0)], of=model)
    assert body_of(line)["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
    assert body_of(line)["model"] == str(model)
