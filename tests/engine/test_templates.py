"""A chat template loses no part of a conversation: it shows in some form, or the row is refused."""

from __future__ import annotations

import json
import logging

import pytest

from h2o_flexgen.engine.chat import ChatTemplate
from h2o_flexgen.engine.messages import Conversation
from h2o_flexgen.errors import UserError
from h2o_flexgen.models.tokenizer import load_tokenizer

pytest_plugins = ["command_tools"]

#: expects a text as content; prints a list of parts as Python does
TEXT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
#: expects a text as content, and fails on a list
STRICT_TEXT = "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}"
#: expects a list of parts, as Llama Guard's does: reads one of them, or all
FIRST_PART = "{% for m in messages %}[{{ m.role }}]{{ m['content'][0]['text'] }}{% endfor %}"
EACH_PART = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% for c in m.content %}{% if c.type == 'text' %}<{{ c.text }}>{% endif %}{% endfor %}{% endfor %}"
)
#: accepts both, as those of vision models do
EITHER = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}<{{ c.text }}>{% endfor %}{% endif %}{% endfor %}"
)
#: expects a text from the system, and a list of parts from others
MIXED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'system' %}{{ m.content | trim }}{% else %}"
    "{{ m['content'][0]['text'] }}{% endif %}{% endfor %}"
)
#: knows two roles, and no tool calls
TWO_ROLES = "{% for m in messages if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}{% endfor %}"
#: writes the arguments of tool calls as JSON, as Qwen's and Llama's do, without the text beside them
OBJECTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
#: concatenates them as a text, as DeepSeek's does; or prints them as they are
JSON_TEXTS = OBJECTS.replace(
    "{{ c.function.name }}{{ c.function.arguments | tojson }}", "{{ c.function.name + c.function.arguments }}"
)
PRINTED = OBJECTS.replace("arguments | tojson", "arguments")
#: shows only the first of several tool calls
ONE_CALL = OBJECTS.replace("in m.tool_calls %}", "in m.tool_calls[:1] %}")

PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.fixture
def render(texts):
    def text(template: str, messages: list[dict], template_kwargs: dict | None = None) -> str:
        tokenizer = load_tokenizer(texts)
        tokenizer.chat_template = template
        return ChatTemplate(tokenizer).render(Conversation(messages, template_kwargs or {}))

    return text


def user(content) -> dict:
    return {"role": "user", "content": content}


def calls(*functions: dict, **others) -> dict:
    found = [{"id": f"call{n}", "type": "function", "function": function} for n, function in enumerate(functions)]
    return {"role": "assistant", "tool_calls": found} | others


@pytest.mark.parametrize(
    "template, content, expected",
    [
        (TEXT, "a", "a"),
        (TEXT, PARTS, "a\nb"),
        (STRICT_TEXT, "a", "a"),
        (STRICT_TEXT, PARTS, "a\nb"),
        (FIRST_PART, "a", "a"),
        (FIRST_PART, PARTS[:1], "a"),
        (FIRST_PART, PARTS, "a\nb"),
        (EACH_PART, "a", "<a>"),
        (EACH_PART, PARTS, "<a><b>"),
        (EITHER, "a", "a"),
        (EITHER, PARTS, "<a><b>"),
        (TEXT, "", ""),
        (EACH_PART, "", ""),
        (TEXT, [], ""),
    ],
)
def test_content_has_the_form_that_the_template_reads(render, template, content, expected):
    assert render(template, [user(content)]) == f"[user]{expected}"


def test_each_role_has_a_form_of_its_own(render):
    messages = [{"role": "system", "content": "s"}, user("u"), {"role": "assistant", "content": "a"}, user(PARTS)]
    assert render(MIXED, messages) == "[system]s[user]u[assistant]a[user]a\nb"


def test_a_form_is_found_once_for_messages_of_one_shape(texts):
    """The form of one conversation must not be used for another: here a system message changes everything."""
    tokenizer = load_tokenizer(texts)
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}" + FIRST_PART + "{% else %}" + TEXT + "{% endif %}"
    template = ChatTemplate(tokenizer)
    system = {"role": "system", "content": "s"}
    for _ in range(2):
        assert template.render(Conversation([user("u")])) == "[user]u"
        assert template.render(Conversation([system, user("u")])) == "[system]s[user]u"


@pytest.mark.parametrize("role", ["system", "developer", "tool"])
def test_a_role_that_the_template_leaves_out(render, role):
    with pytest.raises(UserError, match=f"leaves out the content of message 0, whose role is '{role}'"):
        render(TWO_ROLES, [{"role": role, "content": "be short"}, user("a")])


@pytest.mark.parametrize("template", ["", "hello", "{{ messages | length }}", "{{ messages[0].content[0].txt }}"])
def test_a_template_that_shows_nothing(render, template):
    with pytest.raises(UserError, match="leaves out the content of message 0"):
        render(template, [user("a")])


def test_earlier_answers_may_be_left_out_but_not_all(render):
    """Templates of reasoning models drop earlier reasoning, but none drops every answer."""
    turns = [user("a"), {"role": "assistant", "content": "b"}, user("c"), {"role": "assistant", "content": "d"}]
    last = "{% for m in messages %}{% if loop.index0 != 1 %}{{ m.content }}{% endif %}{% endfor %}"
    assert render(last, turns) == "acd"
    with pytest.raises(UserError, match="message 1, whose role is 'assistant'"):
        render("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", turns[:3])


@pytest.mark.parametrize("role", ["system", "user", "tool", "developer"])
def test_no_message_but_an_answer_may_be_left_out(render, role):
    """DeepSeek's template keeps only the last system message."""
    last = "{% for m in messages if m.role != ROLE %}{{ m.content }}{% endfor %}{{ messages[2].content }}"
    turns = [{"role": role, "content": "a"}, {"role": "assistant", "content": "b"}, {"role": role, "content": "c"}]
    with pytest.raises(UserError, match=f"leaves out the content of message 0, whose role is '{role}'"):
        render(last.replace("ROLE", f"'{role}'"), turns)


WEATHER = {"name": "weather", "arguments": '{"city":  "Zürich"}'}


@pytest.mark.parametrize(
    "template, expected",
    [
        (OBJECTS, 'weather{"city": "Zürich"}'),
        (JSON_TEXTS, 'weather{"city":  "Zürich"}'),
        (PRINTED, 'weather{"city":  "Zürich"}'),
    ],
    ids=["objects", "JSON", "printed"],
)
def test_arguments_of_tool_calls_are_what_the_template_reads(render, template, expected):
    """OpenAI writes them as JSON, transformers as objects."""
    messages = [user("a"), calls(WEATHER, content=None), {"role": "tool", "tool_call_id": "call0", "content": "9"}]
    assert render(template, messages) == f"[user]a[assistant]{expected}[tool]9"
    as_object = calls(WEATHER | {"arguments": {"city": "Zürich"}}, content="")
    assert render(template, [user("a"), as_object]).replace("  ", " ") == f"[user]a[assistant]{expected}".replace(
        "  ", " "
    )


@pytest.mark.parametrize("arguments", ["", "{}", None, {}])
def test_a_tool_call_without_arguments(render, arguments):
    messages = [user("a"), calls({"name": "now", "arguments": arguments})]
    assert render(OBJECTS, messages) == "[user]a[assistant]now{}"
    assert render(JSON_TEXTS, messages) == "[user]a[assistant]now{}"


def test_the_template_gets_all_other_keys_of_a_message(render):
    template = (
        "{% for m in messages %}{{ m.content }}{{ m.tool_call_id }}{{ m.name }}{{ m.refusal is defined }}{% endfor %}"
    )
    message = {"role": "tool", "content": "9", "tool_call_id": "call0", "name": "weather", "refusal": None}
    assert render(template, [message]) == "9call0weatherFalse"


@pytest.mark.parametrize(
    "template, message, say",
    [
        (TEXT, calls(WEATHER), "leaves out the tool calls of message 1"),
        (TEXT, calls(WEATHER, content="I look"), "leaves out the tool calls of message 1"),
        (STRICT_TEXT, calls(WEATHER), "leaves out the tool calls of message 1"),
        (TWO_ROLES, calls(WEATHER), "leaves out the tool calls of message 1"),
        (ONE_CALL, calls(WEATHER, WEATHER), "leaves out the tool calls of message 1"),
        (OBJECTS, calls(WEATHER, content="I look"), "leaves out the content of message 1"),
        (OBJECTS, calls(WEATHER | {"arguments": "[1]"}), "arguments of a tool call must be a JSON object"),
        (OBJECTS, calls(WEATHER | {"arguments": "{"}), "arguments of a tool call must be a JSON object"),
        (OBJECTS, calls(WEATHER | {"arguments": "[" * 100_000}), "arguments of a tool call must be a JSON object"),
        (OBJECTS, calls(WEATHER | {"arguments": 5}), "arguments of a tool call must be a JSON object"),
        (OBJECTS, calls({"arguments": "{}"}), "a function with a name"),
        (OBJECTS, calls({"name": None}), "a function with a name"),
        (OBJECTS, {"role": "assistant", "tool_calls": ["weather"]}, "a function with a name"),
        (OBJECTS, {"role": "assistant", "tool_calls": {"name": "weather"}}, '"tool_calls" must be a list'),
        (OBJECTS, {"role": "assistant", "tool_calls": [], "content": None}, '"content" must be a text'),
        (OBJECTS, {"role": "assistant", "content": None}, '"content" must be a text'),
        (OBJECTS, {"role": "assistant", "content": "a", "function_call": WEATHER}, '"function_call" is not supported'),
        (OBJECTS, {"role": "assistant", "content": "a", "audio": {"id": "x"}}, '"audio" is not supported'),
        (EITHER, user([{"type": "image_url", "image_url": {"url": "x"}}]), "of type text, not 'image_url'"),
        (EITHER, user([{"type": "refusal", "refusal": "no"}]), "of type text, not 'refusal'"),
        (EITHER, user(["a"]), "of type text, not 'str'"),
        (EITHER, user([{"type": "text"}]), "lacks its text"),
        (EITHER, user({"type": "text", "text": "a"}), '"content" must be a text or a list'),
        (EITHER, user(5), '"content" must be a text or a list'),
    ],
)
def test_what_a_template_cannot_take_is_refused(render, template, message, say):
    with pytest.raises(UserError, match="message 1") as error:
        render(template, [user("a"), message])
    assert say in str(error.value) and len(str(error.value)) < 200


def test_the_reason_of_a_template_that_refuses_is_its_own(render):
    template = "{{ raise_exception('roles must alternate') }}"
    for content in ("a", PARTS):
        with pytest.raises(UserError, match="refuses these messages: roles must alternate"):
            render(template, [user(content), calls(WEATHER)])


# variables of the template

THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is false %}<think></think>{% endif %}"


def test_variables_of_a_conversation_override_those_of_the_llm(texts, caplog):
    tokenizer = load_tokenizer(texts)
    tokenizer.chat_template = THINKS
    template = ChatTemplate(tokenizer)
    assert template.render(Conversation([user("a")])) == "a"
    assert template.render(Conversation([user("a")], {"enable_thinking": False})) == "a<think></think>"
    template.set_kwargs({"enable_thinking": False})
    assert template.render(Conversation([user("a")])) == "a<think></think>"
    assert template.render(Conversation([user("a")], {"enable_thinking": True})) == "a"
    assert caplog.records == []


def test_a_variable_may_change_how_content_is_read(texts):
    tokenizer = load_tokenizer(texts)
    tokenizer.chat_template = "{% if in_parts %}" + EACH_PART + "{% else %}" + TEXT + "{% endif %}"
    template = ChatTemplate(tokenizer)
    assert template.render(Conversation([user("a")])) == "[user]a"
    assert template.render(Conversation([user("a")], {"in_parts": True})) == "[user]<a>"


@pytest.mark.parametrize(
    "name",
    ["messages", "conversation", "tokenize", "add_generation_prompt", "continue_final_message", "chat_template"],
)
def test_a_name_that_cannot_be_a_variable_is_refused(render, name):
    with pytest.raises(UserError, match=f"{name} is not a variable of a chat template"):
        render(THINKS, [user("a")], {name: False})


@pytest.mark.parametrize("name", ["documents", "tools"])
def test_arguments_that_transformers_passes_to_the_template_are_variables(render, name):
    template = THINKS + "{% for one in " + name + " %}{{ one.text }}{% endfor %}"
    assert render(template, [user("a")], {name: [{"title": "b", "text": "c"}]}) == "ac"


def test_a_variable_that_the_template_does_not_read_is_logged_once(texts, caplog):
    tokenizer = load_tokenizer(texts)
    tokenizer.chat_template = THINKS
    template = ChatTemplate(tokenizer)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            template.render(Conversation([user("a")], {"enable_thinkin": False}))
    assert [record.getMessage() for record in caplog.records] == [
        "chat_template_kwargs: the model's chat template does not read enable_thinkin"
    ]


def test_the_next_turn_is_in_the_form_of_the_template(texts):
    tokenizer = load_tokenizer(texts)
    tokenizer.chat_template = EACH_PART.replace(">{% endif", ">;{% endif")
    assert ChatTemplate(tokenizer).render_next("b") == ">;[user]<b>;"
    tokenizer.chat_template = TWO_ROLES.replace("'assistant'", "'nobody'")
    with pytest.raises(UserError, match="leaves out .*; use `feed` and `generate`"):
        ChatTemplate(tokenizer).render_next("b")


def test_json_in_a_message_is_not_taken_for_wrong_arguments(render):
    text = json.dumps(json.dumps({"h2oname": "h2ovalue"}))
    assert text in render(OBJECTS, [user(text), calls(WEATHER)])
