"""Tool calls in a text: what all formats share."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

#: keys under which models write the arguments of a call
_ARGUMENTS = ("arguments", "parameters")
_BLANK = re.compile(r"\s*")


@dataclass(frozen=True)
class ToolCall:
    """A call of a function; `arguments`: a JSON object, as text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """The parts of an answer.

    Attributes:
        content: the text beside the others; None if there is none.
        reasoning_content: None if there is none.
    """

    content: str | None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Span:
    """Tool calls that are text[begin:end]."""

    begin: int
    end: int
    calls: list[ToolCall]


@dataclass(frozen=True)
class Parsed:
    """A JSON value that ends before text[end]."""

    value: Any
    end: int


def json_at(text: str, begin: int) -> Parsed | None:
    """The JSON value at text[begin:], after blanks; None if there is none, or a broken one."""
    try:
        return Parsed(*_DECODER.raw_decode(text, _BLANK.match(text, begin).end()))
    except (ValueError, RecursionError):
        return None


def call_of(name, arguments) -> ToolCall | None:
    """None unless the name is a text and the arguments are an object, or absent."""
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (RecursionError, ValueError):  # a number so large that it became Infinity
        return None


def calls_of(value) -> list[ToolCall]:
    """The calls in an object with a name and arguments, or in a list of such; none if one of them is malformed."""
    objects = value if isinstance(value, list) else [value]
    calls = [_call(each) for each in objects]
    return [] if None in calls else calls


def _call(value) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    arguments = next((value[key] for key in _ARGUMENTS if key in value), None)
    return call_of(value.get("name"), arguments)


def _refuse(constant: str) -> None:
    """Python's NaN and Infinity are not JSON."""
    raise ValueError(constant)


_DECODER = json.JSONDecoder(parse_constant=_refuse)
