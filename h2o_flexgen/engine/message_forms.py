"""The form in which a chat template reads messages, found with probes.

A template may read content as a text or as parts, and the arguments of tool calls as an object or as JSON. It silently
drops what it does not expect. So messages are rendered once with marks in place of their texts, in one form after the
other, until every mark shows in the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from h2o_flexgen.engine.messages import arguments_json, arguments_object, content_text
from h2o_flexgen.errors import UserError

#: in each part of a probe: if it shows, the template printed the part itself instead of its text
CANARY = "h2ocanary"
#: the arguments of a probe's tool calls
ARGUMENTS = {"h2oname": "h2ovalue"}
#: how a template prints arguments in the wrong form: as Python, and as JSON within JSON
WRONG_ARGUMENTS = (str(ARGUMENTS), json.dumps(json.dumps(ARGUMENTS))[1:-1])


@dataclass(frozen=True)
class Form:
    """The form in which a template reads messages.

    Attributes:
        content: "given", as the user gave it; "text", one text, with parts joined; "part", a list of one part for
            `roles`, a text for the others.
        json_arguments: the arguments of tool calls are JSON, not objects.
    """

    content: str
    roles: frozenset[str]
    json_arguments: bool

    def of(self, message: dict) -> dict:
        found = dict(message)
        if self.content != "given":
            text = content_text(message["content"])
            is_part = self.content == "part" and message["role"] in self.roles
            found["content"] = [{"type": "text", "text": text}] if is_part else text
        if "tool_calls" in message:
            found["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        return found

    def _call(self, call: dict) -> dict:
        convert = arguments_json if self.json_arguments else arguments_object
        function = call["function"]
        return call | {"function": function | {"arguments": convert(function["arguments"])}}


@dataclass(frozen=True)
class Problem:
    """Why a template cannot read messages in a form; `roles`: of the messages that it leaves out, all if it refuses."""

    text: str
    roles: frozenset[str]
    is_refusal: bool = False


@dataclass(frozen=True)
class Probe:
    """Message `n` with marks in place of its texts; `marks`: those of its content and of its tool calls."""

    n: int
    message: dict
    marks: dict[str, list[str]]

    @property
    def role(self) -> str:
        return self.message["role"]

    def shows(self, what: str, text: str) -> bool:
        return all(mark in text for mark in self.marks[what])


def find_form(messages: list[dict], render: Callable[[list[dict]], str]) -> Form:
    """The first form in which the whole content of the messages shows. Raises UserError if there is none.

    Args:
        messages: as from `checked_message`.
        render: the text that the template makes of messages; raises UserError if it refuses them.
    """
    probes = [probe_of(n, message) for n, message in enumerate(messages)]
    has_calls = any("tool_calls" in message for message in messages)
    problems = []
    for json_arguments in (False, True) if has_calls else (False,):
        lost = frozenset()
        for content in ("given", "text", "part"):
            form = Form(content, lost, json_arguments)
            problem = problem_of(form, probes, render)
            if problem is None:
                return form
            problems.append(problem)
            lost = problem.roles
    # a refusal may be due to the form alone; what the best form leaves out is for the user to fix
    raise UserError(min(problems, key=lambda problem: (problem.is_refusal, len(problem.roles))).text)


def problem_of(form: Form, probes: list[Probe], render: Callable[[list[dict]], str]) -> Problem | None:
    """What the template leaves out of messages in this form; None if it shows everything."""
    messages = [form.of(probe.message) for probe in probes]
    in_parts = [n for n, message in enumerate(messages) if isinstance(message["content"], list)]
    for n in in_parts:
        messages[n]["content"] = [part | {CANARY: CANARY} for part in messages[n]["content"]]
    try:
        text = render(messages)
    except UserError as e:
        return Problem(str(e), frozenset(probe.role for probe in probes), is_refusal=True)
    needed = what_must_show(probes)
    lost = [(what, probe) for what, probe in needed if not probe.shows(what, text)]
    if CANARY in text:
        lost += [("content", probes[n]) for n in in_parts]
    if any(wrong in text for wrong in WRONG_ARGUMENTS):
        lost += [(what, probe) for what, probe in needed if what == "tool calls"]
    if not lost:
        return None
    what, probe = lost[0]
    found = f"the model's chat template leaves out the {what} of message {probe.n}, whose role is {probe.role!r}"
    return Problem(found, frozenset(probe.role for _, probe in lost))


def probe_of(n: int, message: dict) -> Probe:
    """Mark the texts of a message. An empty text stays, since nothing of it can be lost."""
    found = dict(message)
    marks = {}
    content = message["content"]
    if isinstance(content, list):
        marks["content"] = [f"h2otext{n}x{k}mark" for k in range(len(content))]
        found["content"] = [part | {"text": mark} for part, mark in zip(content, marks["content"])]
    elif content:
        marks["content"] = [f"h2otext{n}mark"]
        found["content"] = marks["content"][0]
    if "tool_calls" in message:
        names = [f"h2ocall{n}x{k}mark" for k in range(len(message["tool_calls"]))]
        marks["tool calls"] = [*names, *ARGUMENTS.values()]
        in_call = [{"name": name, "arguments": ARGUMENTS} for name in names]
        found["tool_calls"] = [with_marks(call, own) for call, own in zip(message["tool_calls"], in_call)]
    return Probe(n, found, marks)


def what_must_show(probes: list[Probe]) -> list[tuple[str, Probe]]:
    """What must show of each message: everything but the assistant's earlier answers."""
    needed = {}
    for probe in probes:
        for what in probe.marks:
            needed[what, "assistant" if probe.role == "assistant" else probe.n] = (what, probe)
    return list(needed.values())


def with_marks(tool: dict, marks: dict) -> dict:
    """A tool, or a call of one, with marks in its function."""
    return tool | {"function": tool["function"] | marks}


def shape_of(message: dict) -> tuple:
    """All that a template may branch on, apart from the content of texts."""
    content = message["content"]
    parts = len(content) if isinstance(content, list) else bool(content)
    return (message["role"], type(content), parts, len(message.get("tool_calls", ())), *sorted(message))
