"""The tool calls of Llama 3: an answer that is {"name": "f", "parameters": {}} and nothing else, or what follows
<|python_tag|>: the same, or f.call(key="value"), which built-in tools have.

https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from h2o_flexgen.engine.answers.calls import Span, ToolCall, calls_of, json_at

TAG = "<|python_tag|>"
MARKERS = (TAG,)
SIGN = r'\{"name": "NAME", "parameters": '
_BETWEEN = re.compile(r"[\s;,]*")
_ARGUMENT = r'(\w+)="((?:[^"\\]|\\.)*)"'
_BUILT_IN = re.compile(rf"\s*(\w+)\.call\(((?:{_ARGUMENT}(?:, )?)*)\)\s*")


def spans(text: str, tools: Sequence[str]) -> Iterator[Span]:
    """The calls in a text. Without the tag it must call one of `tools`, since a JSON object may be the answer."""
    tag = text.find(TAG)
    calls = _calls(text[tag + len(TAG) :]) if tag >= 0 else _calls(text)
    if calls and (tag >= 0 or all(call.name in tools for call in calls)):
        yield Span(max(tag, 0), len(text), calls)


def _calls(text: str) -> list[ToolCall]:
    """The calls of a text that holds nothing else; none otherwise."""
    if built_in := _BUILT_IN.fullmatch(text):
        arguments = dict(re.findall(_ARGUMENT, built_in[2]))
        return [ToolCall(built_in[1], json.dumps(arguments, ensure_ascii=False))]
    calls = []
    end = 0
    while end < len(text):
        found = json_at(text, end)
        these = calls_of(found.value) if found else []
        if not these:
            return []
        calls += these
        end = _BETWEEN.match(text, found.end).end()
    return calls
