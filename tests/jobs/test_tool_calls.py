"""Tools, reasoning and continued messages in rows, requests and Python, with a model whose answers are given."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import chat_templates as templates
import pytest
from command_tools import TINY, read_rows, write_model, write_rows
from tokenizers import Tokenizer

from h2o_flexgen import LLM, SamplingParams, UserError
from h2o_flexgen.jobs.input import read_rows as read_input
from h2o_flexgen.jobs.job import Job

pytest_plugins = ["command_tools"]

ASK = [{"role": "user", "content": "Rain in Bern?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "rain", "description": "It rains.", "parameters": PARAMETERS}}]
CALL = '<tool_call>\n{"name": "rain", "arguments": {"city": "Bern"}}\n</tool_call>'
BERN = {"name": "rain", "arguments": '{"city": "Bern"}'}
SPECIAL = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "[TOOL_CALLS]"]
ANSWER = SamplingParams(max_tokens=1000)


class Speaker(LLM):
    """Answers each conversation with the next of `answers`, to its end or up to `max_tokens`."""

    answers: list[str]

    def _run(self, job, writer):
        writer.on_plan(SimpleNamespace(compress_cache=None, kv_budget=None))
        writer.on_begin()
        for s, answer in zip(job.rows, self.answers):
            tokens = [*self.tokenizer(answer, add_special_tokens=False)["input_ids"], 2]
            s.tokens = tokens[: s.params.max_tokens]
            s.logprobs = [-1.0] * len(s.tokens)
            s.finish_reason = "stop" if s.tokens == tokens else "length"
            writer.on_finished([s])


@pytest.fixture(scope="module")
def speaker(talker, tmp_path_factory):
    """speaker(template) -> a model with that chat template, whose markers are special tokens."""
    made = {}

    def get(template: str) -> Speaker:
        if template not in made:
            folder = tmp_path_factory.mktemp("speaker") / "model"
            shutil.copytree(talker, folder)
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            tokenizer.add_special_tokens(SPECIAL)
            tokenizer.save(str(folder / "tokenizer.json"))
            (folder / "chat_template.jinja").write_text(template)
            write_model(folder, config=TINY | {"vocab_size": 320, "max_position_embeddings": 4000})
            made[template] = Speaker(str(folder), device="cpu", dtype="float32", progress=False)
        return made[template]

    yield get
    for llm in made.values():
        llm.close()


@pytest.fixture
def run(speaker, tmp_path):
    """run(template, rows, answers of those that can be run) -> output rows."""

    def job(template: str, rows: list[dict], answers: list[str]) -> list[dict]:
        llm = speaker(template)
        llm.answers = answers
        source = write_rows(tmp_path / "in.jsonl", rows)
        with Job(str(tmp_path / "out.jsonl"), restart=True) as job:
            job.run(llm, read_input(str(source)), ANSWER)
        return read_rows(tmp_path / "out.jsonl")

    return job


def request(custom_id: str = "a", messages: list = ASK, **body) -> dict:
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions"}
    return request | {"body": {"messages": messages} | body}


def choice_of(line: dict) -> dict:
    assert line["response"]["status_code"] == 200, line
    return line["response"]["body"]["choices"][0]


def test_a_call_in_a_request_a_row_and_in_python(run, speaker):
    rows = [request(tools=TOOLS), {"messages": ASK, "tools": TOOLS}]
    answer, plain = run(templates.QWEN, rows, [CALL, f"I look.\n{CALL}"])
    choice = choice_of(answer)
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert call == {"id": call["id"], "type": "function", "function": BERN}
    assert plain["text"] == f"I look.\n{CALL}" and plain["content"] == "I look." and plain["finish_reason"] == "stop"
    assert [each["function"] for each in plain["tool_calls"]] == [BERN] and "reasoning_content" not in plain
    llm = speaker(templates.QWEN)
    llm.answers = [CALL, "No."]
    first, second = (output.outputs[0] for output in llm.chat([ASK, ASK], ANSWER, tools=TOOLS))
    assert [each["function"] for each in first.tool_calls] == [BERN] and (first.text, first.content) == (CALL, None)
    assert second.text == "No." and not second.is_split


def test_a_response_with_calls_is_what_the_openai_package_reads(run):
    types = pytest.importorskip("openai.types")
    answer = run(templates.THINKING_QWEN, [request(tools=TOOLS)], [f"<think>\nHm.\n</think>\n\n{CALL}"])[0]
    made = types.chat.ChatCompletion.model_validate(answer["response"]["body"], strict=True)
    assert made.to_dict(exclude_unset=True) == answer["response"]["body"]
    assert made.choices[0].message.tool_calls[0].function.name == "rain"


def test_ids_of_calls_are_the_same_in_each_run_and_differ_in_a_job(run):
    rows = [request("a", tools=TOOLS), request("b", tools=TOOLS), {"messages": ASK, "tools": TOOLS}]
    answers = [CALL + CALL, CALL, CALL]

    def ids(found):
        messages = [choice_of(found[0])["message"], choice_of(found[1])["message"], found[2]]
        return [call["id"] for message in messages for call in message["tool_calls"]]

    first = ids(run(templates.QWEN, rows, answers))
    assert len(set(first)) == 4 and first == ids(run(templates.QWEN, rows, answers))
    moved = ids(run(templates.QWEN, [rows[1], rows[0], rows[2]], [CALL, CALL + CALL, CALL]))
    assert moved == [first[2], *first[:2], first[3]]


def test_calls_in_several_answers_to_a_prompt(run):
    """Each answer has calls, with ids of their own."""
    row = request(tools=TOOLS, n=2, temperature=1.0)
    (line,) = run(templates.QWEN, [row, {"messages": ASK, "tools": TOOLS}], [CALL, CALL, CALL])[:1]
    choices = line["response"]["body"]["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls"] * 2
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 2


def test_a_conversation_goes_on_with_the_calls_of_an_answer(run, speaker):
    """Also with Mistral's template, which takes only ids of nine letters."""
    call = '[TOOL_CALLS][{"name": "rain", "arguments": {"city": "Bern"}}]'
    (answer,) = run(templates.MISTRAL, [request(tools=TOOLS)], [call])
    message = choice_of(answer)["message"]
    assert message["content"] is None and len(message["tool_calls"][0]["id"]) == 9
    result = {"role": "tool", "content": "no", "tool_call_id": message["tool_calls"][0]["id"]}
    llm = speaker(templates.MISTRAL)
    llm.answers = ["No."]
    (output,) = llm.chat([*ASK, message, result], ANSWER)
    assert call[:-2] in llm.tokenizer.decode(output.prompt_token_ids) and output.outputs[0].text == "No."


def test_special_tokens_that_mark_a_call_are_seen(run):
    """The text, as always, is without them."""
    analysis = "<|channel|>analysis<|message|>Look.<|end|>"
    call = '<|start|>assistant<|channel|>commentary to=functions.rain json<|message|>{"city": "Bern"}'
    plain = {"messages": ASK}
    rows = [request("a", tools=TOOLS), plain, request("b")]
    final = f"{analysis}<|start|>assistant<|channel|>final<|message|>No."
    called, row, answer = run(templates.HARMONY, rows, [analysis + call, final, "<|channel|>final<|message|>No."])
    message = choice_of(called)["message"]
    assert message["reasoning_content"] == "Look." and message["content"] is None
    assert [each["function"] for each in message["tool_calls"]] == [BERN]
    assert (row["reasoning_content"], row["content"]) == ("Look.", "No.")
    assert row["text"] == "analysisLook.assistantfinalNo." and "tool_calls" not in row
    assert choice_of(answer)["message"] == {"role": "assistant", "content": "No.", "refusal": None}


def test_a_stop_string_ends_the_parts_too(speaker):
    llm = speaker(templates.HARMONY)
    llm.answers = ["<|channel|>final<|message|>Yes, no"]

    class Stopped(Speaker):
        def _run(self, job, writer):
            for s in (rows := list(job.rows)):
                s.text = "finalYes"
            super()._run(SimpleNamespace(rows=rows), writer)

    llm.__class__ = Stopped
    try:
        (output,) = llm.chat(ASK, ANSWER)
    finally:
        llm.__class__ = Speaker
    assert (output.outputs[0].text, output.outputs[0].content) == ("finalYes", "Yes")


def test_reasoning_is_split_from_the_content(run):
    rows = [request("a"), {"messages": ASK}, request("b"), request("c", max_tokens=20)]
    thought = "<think>\nHm.\n</think>\n\nNo."
    first, plain, direct, short = run(templates.THINKING_QWEN, rows, [thought, thought, "No.", "<think>" + "Hm. " * 9])
    message = choice_of(first)["message"]
    assert (message["content"], message["reasoning_content"]) == ("No.", "Hm.")
    assert (plain["text"], plain["content"], plain["reasoning_content"]) == (thought, "No.", "Hm.")
    assert choice_of(direct)["message"] == {"role": "assistant", "content": "No.", "refusal": None}
    message = choice_of(short)["message"]
    assert choice_of(short)["finish_reason"] == "length" and message["content"] is None
    assert message["reasoning_content"].startswith("Hm.")


def test_reasoning_that_begins_in_the_prompt(run):
    answer, plain = run(templates.ALWAYS_THINKS, [request(), {"messages": ASK}], ["Hm.</think>No."] * 2)
    assert choice_of(answer)["message"]["reasoning_content"] == "Hm." == plain["reasoning_content"]
    assert choice_of(answer)["message"]["content"] == "No." and plain["text"] == "Hm.</think>No."


def test_without_tools_or_with_tool_choice_none_a_call_is_text(run, speaker):
    rows = [request("a"), request("b", tools=TOOLS, tool_choice="none"), request("c", tools=TOOLS, tool_choice="auto")]
    without, none, auto = run(templates.QWEN, rows, [CALL] * 3)
    assert choice_of(without) == choice_of(none) != choice_of(auto)
    assert choice_of(none)["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    used = [line["response"]["body"]["usage"]["prompt_tokens"] for line in (without, none, auto)]
    assert used[0] == used[1] < used[2]


def test_one_call_at_most_without_parallel_tool_calls(run):
    rows = [request("a", tools=TOOLS, parallel_tool_calls=False), request("b", tools=TOOLS, parallel_tool_calls=True)]
    one, two = run(templates.QWEN, rows, [CALL + CALL] * 2)
    assert [len(choice_of(line)["message"]["tool_calls"]) for line in (one, two)] == [1, 2]


def test_a_broken_call_and_one_that_was_cut_short_are_text(run):
    rows = [request("a", tools=TOOLS), request("b", tools=TOOLS, max_tokens=12)]
    broken, short = run(templates.QWEN, rows, [CALL.replace("}}", "}"), CALL])
    assert choice_of(broken)["message"]["content"] == CALL.replace("}}", "}")
    assert choice_of(broken)["finish_reason"] == "stop" and choice_of(short)["finish_reason"] == "length"
    assert CALL.startswith(choice_of(short)["message"]["content"]) and "tool_calls" not in choice_of(short)["message"]


@pytest.mark.parametrize(
    "options", [{"tools": TOOLS}, {"continue_final_message": True}, {"add_generation_prompt": False}]
)
def test_prompts_are_those_of_transformers(run, speaker, options):
    messages = [*ASK, {"role": "assistant", "content": "It does"}]
    llm = speaker(templates.QWEN)
    begins = {"add_generation_prompt": "tools" in options}
    text = llm.tokenizer.apply_chat_template(messages, tokenize=False, **(begins | options))
    ids = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
    llm.answers = ["."]
    (output,) = llm.chat(messages, ANSWER, **options)
    assert output.prompt_token_ids == ids and output.outputs[0].text == "."
    rows = [request("a", messages, **options), {"messages": messages} | options]
    answer, plain = run(templates.QWEN, rows, ["."] * 2)
    assert answer["response"]["body"]["usage"]["prompt_tokens"] == len(ids)
    assert choice_of(answer)["message"]["content"] == "." == plain["text"]


#: keys of a request that cannot be run, the key at fault, and a part of its error
BAD = [
    ({"tools": "rain"}, "tools", "must be a list of objects"),
    ({"tools": [{}]}, "tools", 'lacks its "function"'),
    ({"tools": TOOLS * 2}, "tools", "two tools have the name 'rain'"),
    ({"tools": [{"type": "code_interpreter"}]}, "tools", "of type function, not 'code_interpreter'"),
    ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice", "cannot be made to call a function, not 'required'"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rain"}}}, "tool_choice", "cannot be"),
    ({"tools": TOOLS, "tool_choice": 5}, "tool_choice", "cannot be made"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "must be true or false, not 'no'"),
    ({"continue_final_message": "yes"}, "continue_final_message", "must be true or false, not 'yes'"),
    ({"add_generation_prompt": 1}, "add_generation_prompt", "must be true or false, not 1"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "cannot both be true: leave one out",
    ),
]


def test_bad_keys_of_a_conversation_fail_alone(run):
    rows = [request(f"bad {n}", **keys) for n, (keys, *_) in enumerate(BAD)]
    rows += [{"messages": ASK} | keys for keys, *_ in BAD]
    *found, good = run(templates.QWEN, [*rows, request("good")], ["No."])
    assert choice_of(good)["message"]["content"] == "No."
    for n, (_, param, say) in enumerate(BAD):
        error = found[n]["response"]["body"]["error"]
        assert found[n]["response"]["status_code"] == 400 and error["param"] == param, error
        assert say in error["message"] and say in found[len(BAD) + n]["error"]


def test_a_template_without_tools_refuses_them(run):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    found = run(template, [request("a", tools=TOOLS), {"messages": ASK, "tools": TOOLS}, request("b")], ["No."])
    error = found[0]["response"]["body"]["error"]
    assert found[0]["response"]["status_code"] == 400 and error["param"] == "tools"
    assert error["message"] == "the model's chat template leaves out tools: give none" == found[1]["error"]
    assert choice_of(found[2])["message"]["content"] == "No."


@pytest.mark.parametrize("form", ["prompt", "completion"])
@pytest.mark.parametrize(
    "key, value",
    [("tools", TOOLS), ("tool_choice", "required"), ("continue_final_message", True), ("add_generation_prompt", False)],
)
def test_keys_of_conversations_are_refused_without_messages(tmp_path, form, key, value):
    def row_of(**keys):
        data = {"prompt": "a"} | keys
        if form == "completion":
            data = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": data}
        (row,) = read_input(str(write_rows(tmp_path / "in.jsonl", [data])))
        return row.prompt

    error = row_of(**{key: value})
    assert str(error) == f"{key} is for messages: leave it out" and error.param == key
    harmless = {"tools": [], "tool_choice": "auto", "continue_final_message": False, "add_generation_prompt": True}
    assert row_of(**harmless) == "a"


def test_bad_arguments_in_python(speaker):
    llm = speaker(templates.QWEN)
    llm.answers = []
    for options, say in (
        ({"tools": [{}]}, 'lacks its "function"'),
        ({"continue_final_message": True, "add_generation_prompt": True}, "cannot both be true"),
    ):
        with pytest.raises(UserError, match=say):
            llm.chat(ASK, ANSWER, **options)
    called = [*ASK, {"role": "assistant", "tool_calls": [{"function": BERN}]}]
    (output,) = llm.chat(called, ANSWER, continue_final_message=True, skip_errors=True)
    assert "cannot be continued" in output.error


def test_a_resumed_job_gives_the_lines_of_one_that_never_stopped(run, speaker, tmp_path):
    rows = [request(name, tools=TOOLS) for name in "abc"]
    whole = run(templates.QWEN, rows, [CALL] * 3)
    llm = speaker(templates.QWEN)
    source = write_rows(tmp_path / "again.jsonl", rows[:1])
    for lines in (rows[:1], rows):
        write_rows(source, lines)
        llm.answers = [CALL] * 3
        with Job(str(tmp_path / "again.out.jsonl")) as job:
            job.run(llm, read_input(str(source)), ANSWER)
    again = read_rows(tmp_path / "again.out.jsonl")
    for line in (*whole, *again):
        del line["response"]["body"]["created"]
    assert json.dumps(again) == json.dumps(whole)
