"""Answers to conversations, split into reasoning, tool calls and the text beside them.

Which format a model speaks is decided by its chat template. A format of tool calls is a file here with `SIGN`,
`MARKERS` and `spans`, and a line in `CALL_FORMATS`. Harmony frames reasoning as well, so it parses whole answers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from h2o_flexgen.engine.answers import harmony, hermes, llama, mistral, thinking
from h2o_flexgen.engine.answers.calls import Answer, Span

#: name of a function whose call shows the format of a template
PROBE = "h2oprobe"
#: modules that find tool calls in a text
CALL_FORMATS = {"hermes": hermes, "mistral": mistral, "llama": llama}


@dataclass(frozen=True)
class AnswerParser:
    """Splits an answer, as the template of its conversation defines it.

    Attributes:
        reasoning: "harmony", or the tag that opens reasoning, of `thinking.TAGS`; None if the template defines none.
        opening: the part of the answer's frame that the prompt holds already, such as "<think>".
        calls: the format of tool calls, "harmony" or of `CALL_FORMATS`; None if they stay text.
        tools: names of the functions that may be called.
        is_parallel: the answer may hold several tool calls; otherwise only the first is kept.
    """

    reasoning: str | None = None
    opening: str = ""
    calls: str | None = None
    tools: tuple[str, ...] = ()
    is_parallel: bool = True

    @property
    def markers(self) -> frozenset[str]:
        """Names of tokens that mark the parts of an answer."""
        found = set(CALL_FORMATS[self.calls].MARKERS) if self.calls in CALL_FORMATS else set()
        if self.reasoning in thinking.TAGS:
            found |= {self.reasoning, thinking.TAGS[self.reasoning]}
        elif self.reasoning is not None:
            found |= set(harmony.MARKERS)
        return frozenset(found)

    def parse(self, text: str) -> Answer:
        """Split the text of an answer, in which the tokens of `markers` show."""
        if self.reasoning == "harmony":
            found = harmony.parse(self.opening + text, has_tools=self.calls is not None)
        elif self.reasoning is not None:
            found = thinking.split(self.opening + text, self.reasoning)
        else:
            found = Answer(text)
        if self.calls in CALL_FORMATS and found.content is not None:
            spans = list(CALL_FORMATS[self.calls].spans(found.content, self.tools))
            found = _without(found, spans) if spans else found
        return found if self.is_parallel else replace(found, tool_calls=found.tool_calls[:1])


def reasoning_of(template: str) -> str | None:
    """`AnswerParser.reasoning` of a chat template, by the tags in its source."""
    if harmony.REASONING in template:
        return "harmony"
    return next((tag for tag, end in thinking.TAGS.items() if end in template), None)


def opening_of(reasoning: str, turn: str) -> str:
    """`AnswerParser.opening` of a prompt that ends with `turn`, the beginning of an answer."""
    return harmony.opening_of(turn) if reasoning == "harmony" else thinking.opening_of(turn, reasoning)


def call_format_of(text: str) -> str | None:
    """The format in which a template has written a call of the function `PROBE`; None if it is not a known one."""
    signs = {name: module.SIGN for name, module in {**CALL_FORMATS, "harmony": harmony}.items()}
    return next((name for name, sign in signs.items() if re.search(sign.replace("NAME", PROBE), text)), None)


def _without(answer: Answer, spans: Seq[Span]) -> Answer:
    """The answer with the tool calls taken out of its content."""
    rest = []
    calls = []
    end = 0
    for span in spans:
        rest.append(answer.content[end : span.begin])
        calls += span.calls
        end = span.end
    rest.append(answer.content[end:])
    return replace(answer, content="".join(rest).strip() or None, tool_calls=tuple(calls))
