"""Chat templates: conversations as the text that a model expects, with nothing left out.

A template is a program. It may read content as a text or as parts, and the arguments of tool calls as an object or as
JSON, and it silently drops what it does not expect. So messages of each shape are rendered once with marks in place of
their texts, in one form after the other, until every mark shows in the text.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from dataclasses import dataclass
from functools import cached_property

from h2o_flexgen.engine.messages import Conversation, arguments_json, arguments_object, checked_message, content_text
from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.models.tokenizer import ANSWER

log = logging.getLogger(__name__)

#: in each part of a probe: if it shows, the template printed the part itself instead of its text
CANARY = "h2ocanary"
#: the arguments of a probe's tool calls
ARGUMENTS = {"h2oname": "h2ovalue"}
#: how a template prints arguments in the wrong form: as Python, and as JSON within JSON
WRONG_ARGUMENTS = (str(ARGUMENTS), json.dumps(json.dumps(ARGUMENTS))[1:-1])


class ChatTemplate:
    """The chat template of a tokenizer, which is None for a model without one.

    Attributes:
        template_kwargs: variables of the template for all conversations; those of a conversation override them.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.template_kwargs: dict = {}
        self._forms: dict[tuple, Form] = {}  # by the shape of a conversation
        self._known: set[str] = set()  # names of variables

    def set_kwargs(self, template_kwargs: dict) -> None:
        """Set variables for all conversations. Raises UserError for names that cannot be variables."""
        if self.tokenizer is not None and self.tokenizer.chat_template is not None:
            self._check_kwargs(template_kwargs)
        self.template_kwargs = template_kwargs

    def render(self, conversation: Conversation) -> str:
        """The text of a conversation, special tokens included, and the beginning of an answer. A last message of the
        assistant's is not continued, but followed by a new answer.

        Raises:
            UserError: messages of a wrong shape, no tokenizer, no template, or one that refuses the messages or leaves
                out some of their content. It may leave out earlier messages of the assistant's: many templates drop
                earlier reasoning.
        """
        messages = [checked_message(n, message) for n, message in enumerate(conversation.messages)]
        if self.tokenizer is None:
            raise UserError("this model has no tokenizer: give prompt_token_ids instead of messages")
        if self.tokenizer.chat_template is None:
            raise UserError("the model has no chat template: give a prompt instead of messages")
        template_kwargs = self.template_kwargs | conversation.template_kwargs
        self._check_kwargs(template_kwargs)
        shape = (*map(_shape, messages), repr(sorted(template_kwargs.items())))
        if shape not in self._forms:
            self._forms[shape] = self._find_form(messages, template_kwargs)
        return self._apply([self._forms[shape].of(message) for message in messages], template_kwargs)

    def render_next(self, question: str) -> str:
        """The text that the template writes after an answer: its end, the user's next question, and the beginning of
        the next answer. Raises UserError as `render`, or if the template does not print an answer unchanged."""
        turns = (("user", "?"), ("assistant", ANSWER), ("user", question))
        try:
            text = self.render(Conversation([{"role": role, "content": content} for role, content in turns]))
        except UserError as e:
            raise UserError(f"{e}; use `feed` and `generate`") from None
        if ANSWER not in text:
            raise UserError("the model's chat template changes earlier answers: use `feed` and `generate`")
        return text.partition(ANSWER)[2]

    def _check_kwargs(self, template_kwargs: dict) -> None:
        """Warn about variables that the template does not read. Raises UserError for names that cannot be variables."""
        for name in template_kwargs.keys() - self._known:
            if name in self._reserved:
                raise UserError(f"chat_template_kwargs: {name} is not a variable of a chat template: leave it out")
            if not re.search(rf"\b{re.escape(name)}\b", str(self.tokenizer.chat_template)):
                log.warning("chat_template_kwargs: the model's chat template does not read %s", name)
            self._known.add(name)

    @cached_property
    def _reserved(self) -> set[str]:
        """Arguments that the tokenizer does not pass on to the template."""
        parameters = inspect.signature(self.tokenizer.apply_chat_template).parameters
        return {"messages", "self", *parameters} - {"tools", "documents"}

    def _apply(self, messages: list[dict], template_kwargs: dict) -> str:
        options = {"add_generation_prompt": True, "tokenize": False}
        try:
            return self.tokenizer.apply_chat_template(messages, **options, **template_kwargs)
        except Exception as e:  # a template is a program, and may raise anything
            raise UserError(f"the model's chat template refuses these messages: {reason(e)}") from None

    def _find_form(self, messages: list[dict], template_kwargs: dict) -> Form:
        """The first form in which the whole content of the messages shows. Raises UserError if there is none."""
        probes = [_probe(n, message) for n, message in enumerate(messages)]
        has_calls = any("tool_calls" in message for message in messages)
        problems = []
        for json_arguments in (False, True) if has_calls else (False,):
            lost = frozenset()
            for content in ("given", "text", "part"):
                form = Form(content, lost, json_arguments)
                problem = self._problem(form, probes, template_kwargs)
                if problem is None:
                    return form
                problems.append(problem)
                lost = problem.roles
        # a refusal may be due to the form alone; what the best form leaves out is for the user to fix
        raise UserError(min(problems, key=lambda problem: (problem.is_refusal, len(problem.roles))).text)

    def _problem(self, form: Form, probes: list[Probe], template_kwargs: dict) -> Problem | None:
        """What the template leaves out of messages in this form; None if it shows everything."""
        messages = [form.of(probe.message) for probe in probes]
        in_parts = [n for n, message in enumerate(messages) if isinstance(message["content"], list)]
        for n in in_parts:
            messages[n]["content"] = [part | {CANARY: CANARY} for part in messages[n]["content"]]
        try:
            text = self._apply(messages, template_kwargs)
        except UserError as e:
            return Problem(str(e), frozenset(probe.role for probe in probes), is_refusal=True)
        needed = _needed(probes)
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


def _probe(n: int, message: dict) -> Probe:
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
        found["tool_calls"] = [_marked_call(call, name) for call, name in zip(message["tool_calls"], names)]
    return Probe(n, found, marks)


def _needed(probes: list[Probe]) -> list[tuple[str, Probe]]:
    """What must show of each message: everything but the assistant's earlier answers."""
    needed = {}
    for probe in probes:
        for what in probe.marks:
            needed[what, "assistant" if probe.role == "assistant" else probe.n] = (what, probe)
    return list(needed.values())


def _marked_call(call: dict, name: str) -> dict:
    return call | {"function": call["function"] | {"name": name, "arguments": ARGUMENTS}}


def _shape(message: dict) -> tuple:
    """All that a template may branch on, apart from the content of texts."""
    content = message["content"]
    parts = len(content) if isinstance(content, list) else bool(content)
    return (message["role"], type(content), parts, len(message.get("tool_calls", ())), *sorted(message))
