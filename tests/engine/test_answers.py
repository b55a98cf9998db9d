"""An answer is split as the chat template of its model writes one: whatever the template makes of a message, the parser
finds again in it."""

from __future__ import annotations

import json
import string

import chat_templates as templates
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from h2o_flexgen.engine.answers import AnswerParser
from h2o_flexgen.engine.answers.calls import Answer, ToolCall
from h2o_flexgen.engine.chat import ChatTemplate
from h2o_flexgen.engine.messages import Conversation
from h2o_flexgen.engine.tools import MOST_TOOLS, ToolsError, checked_tools
from h2o_flexgen.errors import UserError

ASK = [{"role": "user", "content": "Rain in Bern?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name}.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("rain", "wind")
]
NAMES = ("rain", "wind")
RAIN = ToolCall("rain", '{"city": "Bern"}')
WIND = ToolCall("wind", "{}")


def tokenizer_of(template: str):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def parser_of(template: str, messages: list = ASK, tools: list = TOOLS, **options) -> AnswerParser | None:
    return ChatTemplate(tokenizer_of(template)).answer_parser(Conversation(messages, tools=tools, **options))


def called(*calls: ToolCall, **others) -> dict:
    """The assistant's message with these calls."""
    functions = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls]
    found = [{"id": f"call0000{n}", "type": "function", "function": function} for n, function in enumerate(functions)]
    return {"role": "assistant", "content": "", "tool_calls": found} | others


def written(template: str, message: dict) -> str:
    """What transformers makes of an answer with the template, after the beginning of the answer."""
    tokenizer = tokenizer_of(template)
    begun = tokenizer.apply_chat_template(ASK, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*ASK, message], tools=TOOLS, tokenize=False)
    # what Mistral's templates write before the last question is gone once it is answered
    return whole[len(begun) :] if whole.startswith(begun) else whole[whole.rindex("[/INST]") + len("[/INST]") :]


def answered(text: str) -> str:
    """Without the token that ends the answer, and what follows."""
    for end in ("<|im_end|>", "<|eot_id|>", "<|call|>", "<|return|>", "</s>"):
        text = text.partition(end)[0]
    return text


@pytest.mark.parametrize(
    "template, reasoning, calls",
    [
        (templates.QWEN, None, "hermes"),
        (templates.THINKING_QWEN, "<think>", "hermes"),
        (templates.ALWAYS_THINKS, "<think>", "hermes"),
        (templates.LLAMA, None, "llama"),
        (templates.MISTRAL, None, "mistral"),
        (templates.NAMED_MISTRAL, "[THINK]", "mistral"),
        (templates.HARMONY, "harmony", "harmony"),
    ],
)
def test_the_template_decides_the_format(template, reasoning, calls):
    found = parser_of(template)
    assert (found.reasoning, found.calls, found.tools) == (reasoning, calls, NAMES)
    without = parser_of(template, tools=[])
    assert without is None if reasoning is None else (without.reasoning, without.calls) == (reasoning, None)


def test_calls_in_an_unknown_format_stay_text(caplog):
    assert parser_of(templates.OTHER_CALLS) is None
    assert "in a format that is not known" in caplog.text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"\\{}[]</>: é😀\n', max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(st.text(string.ascii_letters, min_size=1, max_size=3), VALUES, max_size=3)
SEVERAL = (templates.QWEN, templates.THINKING_QWEN, templates.MISTRAL, templates.NAMED_MISTRAL)


@pytest.mark.parametrize("template", [*SEVERAL, templates.LLAMA, templates.HARMONY])
def test_the_calls_that_a_template_writes_are_found(template):
    parser = parser_of(template)

    @given(st.lists(ARGUMENTS, min_size=1, max_size=3 if template in SEVERAL else 1))
    def check(arguments):
        calls = [ToolCall("wind", json.dumps(each, ensure_ascii=False)) for each in arguments]
        assert parser.parse(answered(written(template, called(*calls)))) == Answer(None, None, tuple(calls))

    check()


@pytest.mark.parametrize("template", [templates.QWEN, templates.NAMED_MISTRAL])
def test_text_beside_calls(template):
    text = answered(written(template, called(RAIN, WIND, content="I look.")))
    assert parser_of(template).parse(text) == Answer("I look.", None, (RAIN, WIND))
    first = parser_of(template, parallel_tool_calls=False).parse(text)
    assert first == Answer("I look.", None, (RAIN,))


HERMES_RAIN = '<tool_call>\n{"name": "rain", "arguments": {"city": "Bern"}}\n</tool_call>'


@pytest.mark.parametrize(
    "text, content, calls",
    [
        ("No.", "No.", ()),
        ("", "", ()),
        (HERMES_RAIN, None, (RAIN,)),
        ('<tool_call>{"arguments":{"city": "Bern"},"name":"rain"}</tool_call>', None, (RAIN,)),
        ('<tool_call>{"name": "wind"}', None, (WIND,)),  # it ended before the tag
        ('<tool_call>{"name": "other"}</tool_call>', None, (ToolCall("other", "{}"),)),
        ('<tool_call>{"name": "rain", "arguments": {</tool_call>', ..., ()),
        ('<tool_call>{"name": "rain", "arguments": {"city": NaN}}</tool_call>', ..., ()),
        ('<tool_call>{"name": "rain", "arguments": [1]}</tool_call>', ..., ()),
        ('<tool_call>{"name": "rain"}}</tool_call>', ..., ()),
        ('<tool_call>{"name": 5}</tool_call>', ..., ()),
        ('<tool_call>["rain"]</tool_call>', ..., ()),
        ("<tool_call>" + "[" * 100_000, ..., ()),
        ("<tool_call>", ..., ()),
        (f"<tool_call>{{</tool_call>{HERMES_RAIN}", "<tool_call>{</tool_call>", (RAIN,)),
        (f"a\n{HERMES_RAIN}\nb", "a\n\nb", (RAIN,)),
    ],
)
def test_hermes(text, content, calls):
    """A call whose JSON is broken stays in the content."""
    parser = AnswerParser(calls="hermes", tools=NAMES)
    assert parser.parse(text) == Answer(text if content is ... else content, None, calls)


@pytest.mark.parametrize(
    "text, content, calls",
    [
        ('{"name": "rain", "parameters": {"city": "Bern"}}', None, (RAIN,)),
        ('{"name": "rain", "arguments": {"city": "Bern"}}\n', None, (RAIN,)),
        ('{"name": "rain", "parameters": {"city": "Bern"}}; {"name": "wind"}', None, (RAIN, WIND)),
        ('<|python_tag|>{"name": "other"}', None, (ToolCall("other", "{}"),)),
        ('I look.<|python_tag|>rain.call(city="Bern")', "I look.", (RAIN,)),
        ("<|python_tag|>wind.call()", None, (WIND,)),
        ('{"name": "other", "parameters": {}}', ..., ()),  # the JSON that was asked for
        ('{"name": "rain", "parameters": {"city": "Bern"}} is it.', ..., ()),
        ('See {"name": "rain", "parameters": {}}', ..., ()),
        ("<|python_tag|>print(5)", ..., ()),
        ("[1]", ..., ()),
        (" ", ..., ()),
    ],
)
def test_llama(text, content, calls):
    parser = AnswerParser(calls="llama", tools=NAMES)
    assert parser.parse(text) == Answer(text if content is ... else content, None, calls)


@pytest.mark.parametrize(
    "text, content, calls",
    [
        ('[TOOL_CALLS] [{"name": "rain", "arguments": {"city": "Bern"}}, {"name": "wind"}]', None, (RAIN, WIND)),
        ('[TOOL_CALLS]{"name": "wind", "arguments": {}}', None, (WIND,)),
        ('I look.[TOOL_CALLS]rain[ARGS]{"city": "Bern"}[TOOL_CALLS]wind[ARGS]{}', "I look.", (RAIN, WIND)),
        ('[TOOL_CALLS]rain[CALL_ID]abcdefghi[ARGS]{"city": "Bern"}', None, (RAIN,)),
        ('[TOOL_CALLS][{"name": "rain"}, {"nam": "wind"}]', ..., ()),
        ("[TOOL_CALLS]rain[ARGS]{", ..., ()),
        ("[TOOL_CALLS]rain[ARGS][1]", ..., ()),
        ("[TOOL_CALLS][]", ..., ()),
    ],
)
def test_mistral(text, content, calls):
    parser = AnswerParser(calls="mistral", tools=NAMES)
    assert parser.parse(text) == Answer(text if content is ... else content, None, calls)


ANALYSIS = "<|channel|>analysis<|message|>Look it up.<|end|>"
HARMONY_RAIN = 'commentary to=functions.rain <|constrain|>json<|message|>{"city": "Bern"}'


@pytest.mark.parametrize(
    "text, expected",
    [
        (f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>No.", Answer("No.", "Look it up.")),
        ("<|channel|>final<|message|>No.<|return|>", Answer("No.")),
        ("<|channel|>analysis<|message|>Look it", Answer(None, "Look it")),
        (f"{ANALYSIS}<|start|>assistant<|channel|>{HARMONY_RAIN}", Answer(None, "Look it up.", (RAIN,))),
        (f"<|channel|>{HARMONY_RAIN}<|call|>", Answer(None, None, (RAIN,))),
        (f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>{HARMONY_RAIN}",
         Answer("I look.", None, (RAIN,))),
        (" to=functions.rain<|channel|>commentary json<|message|>{}", Answer(None, None, (ToolCall("rain", "{}"),))),
        (f"<|channel|>{HARMONY_RAIN} or so", Answer(f"<|channel|>{HARMONY_RAIN} or so")),
        ("<|channel|>ana", Answer(None)),
        ("Out of form", Answer("Out of form")),
        ("", Answer(None)),
    ],
)  # fmt: skip
def test_harmony(text, expected):
    assert AnswerParser("harmony", calls="harmony", tools=NAMES).parse(text) == expected


def test_harmony_without_tools():
    text = f"{ANALYSIS}<|start|>assistant<|channel|>{HARMONY_RAIN}"
    expected = f"<|start|>assistant<|channel|>{HARMONY_RAIN}"
    assert AnswerParser("harmony").parse(text) == Answer(expected, "Look it up.")


@pytest.mark.parametrize(
    "text, opening, expected",
    [
        ("<think>\nHm.\n</think>\n\nNo.", "", Answer("No.", "Hm.")),
        ("\n<think>Hm.", "", Answer(None, "Hm.")),  # it ended before the tag
        ("Hm.\n</think>\n\nNo.", "<think>", Answer("No.", "Hm.")),
        ("Hm.", "<think>", Answer(None, "Hm.")),
        ("<think>\n\n</think>\n\nNo.", "", Answer("No.")),
        ("No.", "", Answer("No.")),
        ("Write <think>, then </think>.", "", Answer("Write <think>, then </think>.")),
        (f"<think>{HERMES_RAIN}?</think>{HERMES_RAIN}", "", Answer(None, f"{HERMES_RAIN}?", (RAIN,))),
    ],
)
def test_thinking(text, opening, expected):
    assert AnswerParser("<think>", opening, "hermes", NAMES).parse(text) == expected


def test_reasoning_that_a_template_writes_is_found():
    text = answered(written(templates.NAMED_MISTRAL, called(RAIN, thinking="Hm.")))
    assert parser_of(templates.NAMED_MISTRAL).parse(text) == Answer(None, "Hm.", (RAIN,))
    text = written(templates.HARMONY, called(RAIN, thinking="Hm."))
    assert parser_of(templates.HARMONY).parse(text) == Answer(None, "Hm.", (RAIN,))


TAGGED = [{"role": "user", "content": "Why <think> and no <|channel|>final<|message|>?"}]
NO = {"role": "assistant", "content": "No"}


@pytest.mark.parametrize(
    "template, messages, options, opening",
    [
        (templates.THINKING_QWEN, TAGGED, {}, ""),
        (templates.THINKING_QWEN, TAGGED, {"template_kwargs": {"enable_thinking": False}}, ""),
        (templates.ALWAYS_THINKS, ASK, {}, "<think>"),
        (templates.ALWAYS_THINKS, TAGGED, {}, "<think>"),
        (templates.ALWAYS_THINKS, TAGGED, {"add_generation_prompt": False}, ""),
        (templates.ALWAYS_THINKS, [*TAGGED, NO], {"continue_final_message": True}, ""),
        (templates.THINKING_QWEN, [*ASK, NO | {"content": "<think>\nHm"}], {"continue_final_message": True}, "<think>"),
        (templates.THINKING_QWEN, [NO | {"content": "<think>Hm</think>N"}], {"continue_final_message": True}, ""),
        (templates.HARMONY, TAGGED, {}, ""),
        (templates.HARMONY, [*ASK, NO], {"continue_final_message": True}, "<|channel|>final<|message|>"),
    ],
)
def test_the_prompt_may_hold_the_beginning_of_reasoning(template, messages, options, opening):
    for tools in ([], TOOLS):
        assert parser_of(template, messages, tools, **options).opening == opening


EVERY = [value for name, value in sorted(vars(templates).items()) if name.isupper()]


@pytest.mark.parametrize("template", EVERY)
@pytest.mark.parametrize(
    "messages, options",
    [
        (ASK, {}),
        (ASK, {"tools": TOOLS}),
        (ASK, {"add_generation_prompt": False}),
        ([*ASK, NO], {"continue_final_message": True}),
        ([*ASK, NO | {"content": " The\nanswer  "}], {"continue_final_message": True, "add_generation_prompt": False}),
        ([*ASK, NO, *ASK], {"continue_final_message": True}),
        ([*ASK, NO | {"content": [{"type": "text", "text": "No"}]}], {"continue_final_message": True}),
    ],
)
def test_prompts_are_those_of_transformers(template, messages, options):
    begins = {"add_generation_prompt": not options.get("continue_final_message")}
    texts = [{} if isinstance(message["content"], str) else {"content": "No"} for message in messages]
    plain = [message | text for message, text in zip(messages, texts)]  # copies, since transformers 5.17 changes them
    try:
        expected = tokenizer_of(template).apply_chat_template(plain, tokenize=False, **(begins | options))
    except ValueError:  # transformers 4.45 cannot continue a message that the template trims
        pytest.skip("this version of transformers cannot")
    assert ChatTemplate(tokenizer_of(template)).render(Conversation(messages, **options)) == expected


@pytest.mark.parametrize(
    "messages, options, say",
    [
        (ASK, {"continue_final_message": True, "add_generation_prompt": True}, "cannot both be true"),
        ([*ASK, called(RAIN)], {"continue_final_message": True}, "a message with tool calls cannot be continued"),
        (ASK, {"tools": TOOLS, "template_kwargs": {"tools": TOOLS}}, "in chat_template_kwargs too"),
    ],
)
def test_conversations_that_cannot_be_rendered(messages, options, say):
    with pytest.raises(UserError, match=say):
        ChatTemplate(tokenizer_of(templates.QWEN)).render(Conversation(messages, **options))


def test_a_template_that_changes_the_message_to_be_continued():
    template = ChatTemplate(tokenizer_of("{% for m in messages %}{{ m.content | upper }}{% endfor %}"))
    with pytest.raises(UserError, match="leaves out|refuses these messages"):
        template.render(Conversation([*ASK, NO], continue_final_message=True))


@pytest.mark.parametrize("template", ["{{ messages }}", "{{ messages }}{{ tools[0].function.name }}"])
def test_a_template_without_tools_or_with_the_first_only(template):
    conversation = Conversation(ASK, tools=TOOLS)
    for _ in range(2):
        with pytest.raises(ToolsError, match="leaves out tools"):
            ChatTemplate(tokenizer_of(template.replace("}}", "| tojson }}", 1))).render(conversation)


def test_deeply_nested_tools_are_refused_or_rendered():
    nested = {}
    for _ in range(5000):
        nested = {"properties": nested}
    tools = checked_tools([{"function": {"name": "f", "parameters": nested}}])
    with pytest.raises(UserError, match="nested too deeply"):
        ChatTemplate(tokenizer_of(templates.QWEN)).render(Conversation(ASK, tools=tools))


def tool(**function) -> dict:
    return {"type": "function", "function": {"name": "f"} | function}


@pytest.mark.parametrize(
    "tools, say",
    [
        ("rain", "must be a list of objects, not 'rain'"),
        ({"name": "f"}, "must be a list"),
        (["rain"], "tool 0 must be of type function, not 'str'"),
        ([tool(), {"type": "web_search"}], "tool 1 must be of type function, not 'web_search'"),
        ([{}], 'tool 0 lacks its "function"'),
        ([{"type": "function", "function": "f"}], 'tool 0 lacks its "function"'),
        ([{"type": "function", "name": "f"}], 'tool 0 lacks its "function"'),
        ([tool(name=None)], 'tool 0: "name" must be'),
        ([tool(name="")], 'tool 0: "name" must be'),
        ([tool(name="a b")], 'tool 0: "name" must be'),
        ([tool(name="f" * 65)], 'tool 0: "name" must be'),
        ([tool(name=5)], 'tool 0: "name" must be'),
        ([tool(description=5)], 'tool 0, f: "description" must be a text'),
        ([tool(parameters=[])], 'tool 0, f: "parameters" must be an object'),
        ([tool(strict=True)], 'tool 0, f: "strict" is not supported'),
        ([tool(), tool()], "two tools have the name 'f'"),
        ([tool(name=f"f{n}") for n in range(MOST_TOOLS + 1)], "129 tools are more than the 128"),
    ],
)
def test_malformed_tools(tools, say):
    with pytest.raises(ToolsError) as error:
        checked_tools(tools)
    assert say in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 200


def test_tools_without_null_keys():
    assert checked_tools(None) == []
    assert checked_tools([tool(description=None, strict=False)]) == [tool(strict=False)]
    assert checked_tools([{"function": {"name": "f"}}]) == [tool()]
