"""The tool calls of Mistral: [TOOL_CALLS][{"name": "f", "arguments": {}}], and since 2025 [TOOL_CALLS]f[ARGS]{}

https://github.com/mistralai/mistral-common, tokenizers v3 and v11
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from h2o_flexgen.engine.answers.calls import Span, call_of, calls_of, json_at

OPEN = "[TOOL_CALLS]"
MARKERS = (OPEN, "[CALL_ID]", "[ARGS]")
SIGN = r'\[TOOL_CALLS\]\s*(\[\{"name": ")?NAME'
_NAMED = re.compile(r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\][^\[\]{}]*)?\[ARGS\]")


def spans(text: str, tools: Sequence[str]) -> Iterator[Span]:
    """The calls in a text; one whose JSON is broken is none."""
    end = 0
    while (begin := text.find(OPEN, end)) >= 0:
        end = begin + len(OPEN)
        named = _NAMED.match(text, end)
        found = json_at(text, named.end() if named else end)
        if found is None:
            continue
        calls = [call_of(named[1], found.value)] if named else calls_of(found.value)
        if calls and None not in calls:
            end = found.end
            yield Span(begin, end, calls)
