"""Harmony, the format of gpt-oss: an answer is a sequence of messages, each in a channel.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"key": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>content<|return|>

https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from h2o_flexgen.engine.answers.calls import Answer, ToolCall, call_of, json_at

MARKERS = tuple(f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "call", "return"))
SIGN = r"to=functions\.NAME"
#: in a template that writes reasoning
REASONING = "<|channel|>analysis"
_MESSAGE = "<|message|>"
_END = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"to=functions\.([^\s<]+)")


class Message(NamedTuple):
    header: str
    body: str
    whole: str


def _messages(text: str) -> Iterator[Message]:
    begin = 0
    while (mark := text.find(_MESSAGE, begin)) >= 0:
        end = _END.search(text, mark + len(_MESSAGE))
        yield Message(text[begin:mark], text[mark + len(_MESSAGE) : end.start()], text[begin : end.end()])
        begin = end.end()


def parse(text: str, has_tools: bool) -> Answer:
    """The parts of an answer. Calls stay in the content without tools, or if their JSON is broken."""
    reasoning = []
    content = []
    calls = []
    for message in _messages(text):
        function = _FUNCTION.search(message.header)
        call = _call(function[1], message.body) if function and has_tools else None
        if call is not None:
            calls.append(call)
        elif function is None and _channel(message.header) == "analysis":
            reasoning.append(message.body)
        else:
            content.append(message.whole if function else message.body)
    if not (reasoning or content or calls) and not text.startswith("<|channel|>"):
        content = [text]  # not in this format
    return Answer("\n".join(content) or None, "\n".join(reasoning) or None, tuple(calls))


def opening_of(turn: str) -> str:
    """The header of the message that a prompt leaves open; `turn`: the prompt from its last turn on."""
    header, message, body = turn[turn.rfind("<|channel|>") :].rpartition("<|message|>")
    is_open = header.startswith("<|channel|>") and "<|end|>" not in body
    return header + message if is_open else ""


def _channel(header: str) -> str | None:
    found = _CHANNEL.search(header)
    return found and found[1]


def _call(name: str, body: str) -> ToolCall | None:
    found = json_at(body, 0)
    return call_of(name, found.value) if found and not body[found.end :].strip() else None
