"""The tool calls of Hermes and Qwen: <tool_call>{"name": "f", "arguments": {}}</tool_call>

https://github.com/NousResearch/Hermes-Function-Calling
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from h2o_flexgen.engine.answers.calls import Span, calls_of, json_at

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
MARKERS = (OPEN, CLOSE)
SIGN = r'<tool_call>\s*\{"name": "NAME"'
#: broken calls of a text, behind which it is not searched
MOST_BROKEN = 100
#: after a call; a last tag that is missing is forgiven
_END = re.compile(rf"\s*(?:{CLOSE}|\Z)")


def spans(text: str, tools: Sequence[str]) -> Iterator[Span]:
    """The calls in a text; one whose JSON is broken is none."""
    end = 0
    broken = 0
    while broken < MOST_BROKEN and (begin := text.find(OPEN, end)) >= 0:
        end = begin + len(OPEN)
        found = json_at(text, end)
        calls = calls_of(found.value) if found else []
        after = _END.match(text, found.end) if calls else None
        broken += after is None
        if after:
            end = after.end()
            yield Span(begin, end, calls)
