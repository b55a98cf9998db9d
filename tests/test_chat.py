"""Conversations go through the model's chat template, which alone decides the tokens around their texts."""

from __future__ import annotations

import json
import shutil

import pytest
from command_tools import FP32, read_rows, write_rows

from h2o_flexgen import LLM, Policy, SamplingParams, UserError

pytest_plugins = ["command_tools"]

#: writes the token with which the tokenizer begins every text; refuses two consecutive messages of one role
TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
  {%- if not loop.first and message.role == loop.previtem.role %}
    {{- raise_exception("roles must alternate") }}
  {%- endif %}
  {{- "[" + message.role + "]" + message.content + "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "[assistant]" }}{% endif %}"""
ASK = [{"role": "user", "content": "What is a list?"}]
LONGER = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Grüße 😀"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "And\na tuple?"},
]
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="session")
def talks(texts, tmp_path_factory):
    """The tiny model with a tokenizer, and with a chat template."""
    folder = tmp_path_factory.mktemp("talks") / "model"
    shutil.copytree(texts, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def llm(talks):
    with LLM(str(talks), Policy(2), device="cpu", dtype="float32", progress=False) as llm:
        yield llm


def by_hand(llm, messages):
    text = "".join(f"[{m['role']}]{m['content']}\n" for m in messages) + "[assistant]"
    return [2, *llm.tokenizer(text, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("messages", [ASK, LONGER, LONGER[:3]], ids=["one", "several", "the assistant's is the last"])
def test_a_conversation_is_rendered_by_the_template(llm, messages):
    """With one beginning token, though both template and tokenizer write it, and a new turn at the end."""
    assert llm.tokenizer("a")["input_ids"][0] == 2
    assert llm.model.encode(messages) == by_hand(llm, messages)
    assert llm.model.encode(tuple(messages)) == by_hand(llm, messages)


def test_chat_is_generate_of_conversations(llm):
    answers = llm.chat([ASK, LONGER[:3]], GREEDY)
    expected = llm.generate([by_hand(llm, ASK), by_hand(llm, LONGER[:3])], GREEDY)
    assert [a.outputs for a in answers] == [e.outputs for e in expected]
    assert [a.prompt_token_ids for a in answers] == [e.prompt_token_ids for e in expected]
    assert [a.prompt for a in answers] == [ASK, LONGER[:3]]
    assert [e.prompt for e in expected] == [None, None]


def test_conversations_have_parameters_and_keys_of_their_own(llm):
    params = [GREEDY, SamplingParams(temperature=1.5, max_tokens=6, ignore_eos=True)]
    answers = llm.chat([ASK, LONGER[:1]], params, keys=[8, 9])
    alone = [*llm.chat(ASK, GREEDY), *llm.chat(LONGER[:1], params[1:], keys=[9])]
    assert [a.outputs[0].token_ids for a in answers] == [a.outputs[0].token_ids for a in alone]
    with pytest.raises(UserError, match="`sampling_params` has 2 for 1"):
        llm.chat(ASK, params)


def test_prompts_of_all_kinds_in_one_job(llm):
    prompts = ["a list", by_hand(llm, ASK), ASK]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.prompt for o in outputs] == ["a list", None, ASK]
    assert outputs[1].prompt_token_ids == outputs[2].prompt_token_ids
    assert outputs[1].outputs[0].token_ids == outputs[2].outputs[0].token_ids


#: conversations that cannot be run, and a word of the error each gets
BAD = [
    ([], "one or more"),
    ([{}], "role"),
    ([{"role": "user"}], "content"),
    ([{"content": "a"}], "role"),
    ([{"role": "user", "content": None}], 'message 0: "content" must be a text'),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "of type text, not 'image_url'",
    ),
    ([{"role": 5, "content": "a"}], 'message 0: "role" must be a text'),
    ([*ASK, {"role": "assistant"}], "message 1"),
    ([{"role": "user", "content": "half \ud800 a pair"}], "surrogate"),
    ([{"role": "\udc00", "content": "a"}], "surrogate"),
    ([*ASK, *ASK], "roles must alternate"),
    ([{"role": "user", "content": "word " * 200}], "64 positions"),
    ([*ASK, "a"], "with role and content"),
    ([5], "with role and content"),
    ("text", "with role and content"),
    (5, "with role and content"),
    (None, "with role and content"),
    (ASK[0], "with role and content"),
]


def test_a_conversation_that_cannot_be_run_does_not_stop_the_others(llm):
    outputs = llm.chat([ASK, *(messages for messages, _ in BAD), ASK], GREEDY, skip_errors=True)
    assert outputs[0].outputs and outputs[0].outputs == outputs[-1].outputs
    assert len(outputs) == len(BAD) + 2
    for output, (messages, say) in zip(outputs[1:], BAD):
        assert say in output.error and "\n" not in output.error and not output.outputs, messages
    for messages, _ in BAD:
        with pytest.raises(UserError, match="prompt 1: "):
            llm.chat([ASK, messages], GREEDY)


def test_anything_but_a_conversation_is_refused(llm):
    for given in ("text", ["text"], [[5, 6]], ASK[0]):
        with pytest.raises(UserError, match="a conversation is a list of messages"):
            llm.chat(given, GREEDY)
    with pytest.raises(UserError, match="not dict"):
        llm.generate(ASK, GREEDY)  # one conversation, and not a list of them
    assert llm.chat([], GREEDY) == []


def test_rows_of_messages(cli, talks, tmp_path):
    """Equal to their token ids; a bad row gets its error, and the others are unaffected."""
    bad = [(messages, say) for messages, say in BAD if isinstance(messages, list)] + [("text", "list")]
    rows = [{"messages": ASK}, *({"messages": messages} for messages, _ in bad), {"messages": LONGER[:2]}]
    files = ("--input-file", write_rows(tmp_path / "in.jsonl", rows), "--output-file", tmp_path / "out.jsonl")
    code, _, err = cli("--model", talks, *FP32, *files, "--gen-len", 4, "--ignore-eos")
    assert code == 0, err
    found = read_rows(tmp_path / "out.jsonl")
    assert [row["index"] for row in found] == list(range(len(rows)))
    for row, (messages, say) in zip(found[1:], bad):
        assert say in row["error"], messages
    with LLM(str(talks), Policy(), device="cpu", dtype="float32", progress=False) as llm:
        good = [o.outputs[0].token_ids for o in llm.chat([ASK, LONGER[:2]], GREEDY)]
    assert [found[0]["token_ids"], found[-1]["token_ids"]] == good


@pytest.mark.parametrize("kind, say", [("texts", "no chat template: give a prompt instead"), ("model", "no tokenizer")])
def test_a_model_that_does_not_chat(request, cli, tmp_path, kind, say):
    rows = write_rows(tmp_path / "in.jsonl", [{"messages": ASK}, {"prompt_token_ids": [5, 6]}])
    job = ("--model", request.getfixturevalue(kind), *FP32, "--gen-len", 2)
    code, _, err = cli(*job, "--input-file", rows, "--output-file", tmp_path / "out.jsonl")
    assert code == 0, err
    bad, good = read_rows(tmp_path / "out.jsonl")
    assert say in bad["error"] and good["token_ids"]


def test_without_an_output_file_questions_and_answers_are_on_stdout(cli, talks, tmp_path):
    rows = write_rows(tmp_path / "in.jsonl", [{"messages": LONGER[:2]}, {"messages": LONGER[:1]}, {"prompt": "a b"}])
    code, out, err = cli("--model", talks, *FP32, "--gen-len", 2, "--ignore-eos", "--input-file", rows)
    assert code == 0, err
    assert "--- prompt 0 asks, and the model answers:\nGrüße 😀\n⟦" in out
    assert "--- prompt 1 asks, and the model answers:\nBe short.\n⟦" in out
    assert "--- prompt 2 ends, and the model goes on:\na b⟦" in out
    assert "[user]" not in out


#: supports tool calls, and a switch for thinking
AGENT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}"
    "[assistant]{% if enable_thinking is false %}<think></think>{% endif %}"
)
HISTORY = [
    {"role": "user", "content": [{"type": "text", "text": "Rain in"}, {"type": "text", "text": "Bern?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "rain", "arguments": '{"in": "Bern"}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "name": "rain", "content": "no"},
]
RENDERED = '[user]Rain in\nBern?\n[assistant]rain{"in": "Bern"}\n[tool]no\n[assistant]'


@pytest.fixture(scope="module")
def agent(talker, tmp_path_factory):
    """With an agent's template."""
    folder = tmp_path_factory.mktemp("agent") / "model"
    shutil.copytree(talker, folder)
    (folder / "chat_template.jinja").write_text(AGENT)
    return folder


@pytest.fixture
def ids_of(agent):
    from h2o_flexgen.models.tokenizer import load_tokenizer

    return lambda text: load_tokenizer(agent)(text, add_special_tokens=False)["input_ids"]


@pytest.fixture
def job(cli, tmp_path):
    """Run a job on rows: its output rows."""

    def run(folder, rows: list, *options, code: int = 0) -> list[dict] | str:
        files = ("--input-file", write_rows(tmp_path / "in.jsonl", rows), "--output-file", tmp_path / "out.jsonl")
        found, _, err = cli("--model", folder, *FP32, *files, "--gen-len", 4, "--ignore-eos", *options)
        assert found == code, err
        return read_rows(tmp_path / "out.jsonl") if code == 0 else err

    return run


def request(**body) -> dict:
    return {"custom_id": f"{body}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_a_history_with_tool_calls_is_the_same_in_rows_requests_and_python(agent, job, ids_of):
    rows = [{"messages": HISTORY}, request(messages=HISTORY), {"prompt_token_ids": ids_of(RENDERED)}]
    plain, answer, by_ids = job(agent, rows)
    assert plain["token_ids"] == by_ids["token_ids"]
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == by_ids["text"]
    assert answer["response"]["body"]["usage"]["prompt_tokens"] == len(ids_of(RENDERED))
    with LLM(str(agent), Policy(), device="cpu", dtype="float32", progress=False) as llm:
        (output,) = llm.chat(HISTORY, GREEDY)
    assert output.outputs[0].token_ids == by_ids["token_ids"] and output.prompt == HISTORY


def test_a_history_that_the_template_does_not_show_is_refused(talker, job):
    plain, answer, _ = job(talker, [{"messages": HISTORY}, request(messages=HISTORY), {"prompt": "a"}])
    assert "leaves out the tool calls of message 1" in plain["error"]
    assert answer["response"]["status_code"] == 400
    assert "leaves out the tool calls of message 1" in answer["response"]["body"]["error"]["message"]


def test_the_variables_of_the_template(agent, job, ids_of):
    """Those of a row override the option's."""
    off = {"enable_thinking": False}
    on = {"enable_thinking": True}
    rows = [
        {"messages": ASK},
        {"messages": ASK, "chat_template_kwargs": off},
        request(messages=ASK, chat_template_kwargs=off),
        {"messages": ASK, "chat_template_kwargs": on},
        {"messages": ASK, "chat_template_kwargs": None},
        {"messages": ASK, "chat_template_kwargs": {"tokenize": False}},
        {"messages": ASK, "chat_template_kwargs": "off"},
        {"prompt_token_ids": ids_of("[user]What is a list?\n[assistant]")},
        {"prompt_token_ids": ids_of("[user]What is a list?\n[assistant]<think></think>")},
    ]
    found = job(agent, rows)
    thinks = found[7]["token_ids"]
    does_not = found[8]["token_ids"]
    assert thinks != does_not
    assert [found[n]["token_ids"] for n in (0, 1, 3, 4)] == [thinks, does_not, thinks, thinks]
    assert found[2]["response"]["body"]["choices"][0]["message"]["content"] == found[8]["text"]
    assert "not a variable of a chat template" in found[5]["error"] and "must be an object" in found[6]["error"]
    err = job(agent, rows, "--chat-template-kwargs", json.dumps(off), code=2)
    assert "--chat-template-kwargs None, now {'enable_thinking': False}" in err and "--restart" in err
    found = job(agent, rows, "--chat-template-kwargs", json.dumps(off), "--restart")
    assert [found[n]["token_ids"] for n in (0, 1, 3, 4)] == [does_not, does_not, thinks, does_not]


def test_the_variables_of_the_template_in_python(agent, ids_of):
    off = {"enable_thinking": False}
    asked = "[user]What is a list?\n[assistant]"
    with LLM(str(agent), Policy(), device="cpu", dtype="float32", progress=False, chat_template_kwargs=off) as llm:
        outputs = [
            *llm.chat(ASK, GREEDY),
            *llm.chat([ASK], GREEDY, chat_template_kwargs={"enable_thinking": True}),
            *llm.generate([ASK], GREEDY),
        ]
        assert [output.prompt_token_ids for output in outputs] == [
            ids_of(asked + "<think></think>"),
            ids_of(asked),
            ids_of(asked + "<think></think>"),
        ]
        with llm.session() as session:
            session.chat("What is a list?", GREEDY)
            assert session.lengths() == len(ids_of(asked + "<think></think>")) + 4
        for wrong in ("off", [1], {1: 2}):
            with pytest.raises(UserError, match="chat_template_kwargs must be an object"):
                llm.chat(ASK, GREEDY, chat_template_kwargs=wrong)


@pytest.mark.parametrize(
    "value, say",
    [
        ("enable_thinking=false", "must be a JSON object, not 'enable_thinking=false'"),
        ("[1]", "must be a JSON object"),
        ("null", "must be a JSON object"),
        ('{"tokenize": false}', "tokenize is not a variable of a chat template"),
    ],
)
def test_an_option_that_is_no_object_of_variables(refused, agent, value, say):
    message = refused("--model", agent, "--num-prompts", 1, "--prompt-len", 4, "--chat-template-kwargs", value)
    assert say in message


def test_content_parts_are_shown_as_the_question(cli, agent, tmp_path):
    rows = write_rows(tmp_path / "in.jsonl", [{"messages": HISTORY}])
    code, out, err = cli("--model", agent, *FP32, "--gen-len", 2, "--ignore-eos", "--input-file", rows)
    assert code == 0, err
    assert "--- prompt 0 asks, and the model answers:\nRain in\nBern?\n⟦" in out
