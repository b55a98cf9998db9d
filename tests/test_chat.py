"""Conversations go through the model's chat template, which alone decides the tokens around their texts."""

from __future__ import annotations

import json
import shutil

import pytest
from cli_tools import FP32, read_rows, write_rows

from h2o_flexgen import LLM, Policy, SamplingParams, UserError

pytest_plugins = ["cli_tools"]

#: begins with the token that the tokenizer puts before every text too; refuses two messages in a row of one role
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
def test_a_conversation_is_what_the_template_makes_of_it(llm, messages):
    """With one token at the beginning, though both template and tokenizer write it, and a new turn at the end."""
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


def test_one_conversation_alone(llm):
    announced = []
    answers = llm.chat(ASK, GREEDY, on_output=announced.append)
    assert announced == answers and answers[0].prompt == ASK
    (again,) = llm.chat([ASK], GREEDY)
    assert answers[0].outputs == again.outputs


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


def test_a_conversation_that_cannot_be_run_stops_no_other(llm):
    outputs = llm.chat([ASK, *(messages for messages, _ in BAD), ASK], GREEDY, skip_errors=True)
    assert outputs[0].outputs and outputs[0].outputs == outputs[-1].outputs
    assert len(outputs) == len(BAD) + 2
    for output, (messages, say) in zip(outputs[1:], BAD):
        assert say in output.error and "\n" not in output.error and not output.outputs, messages
    for messages, _ in BAD:
        with pytest.raises(UserError, match="prompt 1: "):
            llm.chat([ASK, messages], GREEDY)


def test_what_is_no_conversation_is_not_chatted_about(llm):
    for given in ("text", ["text"], [[5, 6]], ASK[0]):
        with pytest.raises(UserError, match="a conversation is a list of messages"):
            llm.chat(given, GREEDY)
    with pytest.raises(UserError, match="not dict"):
        llm.generate(ASK, GREEDY)  # one conversation, and not a list of them
    assert llm.chat([], GREEDY) == []


def test_rows_of_messages(cli, talks, tmp_path):
    """As good as their token ids; a bad row gets its error, and the others come out as they would."""
    bad = [(messages, say) for messages, say in BAD if isinstance(messages, list)] + [("text", "list"), (None, "list")]
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
