"""Structured output: texts that match a JSON schema, a regular expression, one of several choices, or a grammar.

llguidance (github.com/guidance-ai/llguidance) reads them all, and says which tokens may come next (`masks.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import import_module

from h2o_flexgen.errors import UserError

#: the most choices
MOST_CHOICES = 10_000
#: JSON is written as Python writes it: small models that may write any blanks write them without end
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Structured:
    """What an output must match, by vLLM's names: exactly one of these. The output ends as soon as it cannot go on.

    Attributes:
        json: a JSON schema, an object or its JSON. Stored as JSON. Blanks are as in Python's `json.dumps`.
        json_object: any JSON object.
        regex: a regular expression that the whole text matches, without look-around.
        choice: one of these texts. Stored as a tuple.
        grammar: a context-free grammar in GBNF, as llama.cpp has it, or in Lark's syntax.

    Raises:
        UserError: none of them, or several, or a value of a wrong type.
    """

    json: str | Mapping | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Seq[str] | None = None
    grammar: str | None = None

    def __post_init__(self):
        given = [each.name for each in fields(self) if getattr(self, each.name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(each.name for each in fields(self))
            raise UserError(f"structured output needs exactly one of {names}, not {', '.join(given) or 'none'}")
        name = given[0]
        value = getattr(self, name)
        if name == "json":
            object.__setattr__(self, "json", _schema(value))
        elif name == "choice":
            object.__setattr__(self, "choice", _choices(value))
        elif name == "json_object" and value is not True:
            raise UserError(f"json_object must be true, not {value!r:.60}")
        elif name in ("regex", "grammar") and not isinstance(value, str):
            raise UserError(f"{name} must be a text, not {type(value).__name__}")

    @property
    def source(self) -> str:
        """The grammar as llguidance reads it. Raises UserError without llguidance, or for a grammar in a wrong form."""
        try:
            return self._source()
        except ValueError as e:  # also for text that is not valid Unicode
            raise UserError(f"structured output cannot be read: {one_line(str(e))}") from None

    def _source(self) -> str:
        guidance = llguidance()
        if self.json is not None or self.json_object:
            schema = self.json or '{"type": "object"}'
            return guidance.LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE)
        if self.regex is not None:
            return guidance.LLMatcher.grammar_from_regex(self.regex)
        if self.choice is not None:
            return guidance.grammar_from("choice", json.dumps(self.choice))
        return guidance.grammar_from("grammar", self.grammar)

    def check(self) -> None:
        """Raises UserError for what nothing can match, what is not supported, such as a keyword of a schema, and what
        is too complex."""
        if error := _error_of(self):
            raise UserError(error)


def _schema(value) -> str:
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, Mapping) and schema is not True:
            raise UserError(f"a JSON schema is an object, not {type(schema).__name__}")
        return json.dumps({} if schema is True else schema)
    except (ValueError, TypeError, RecursionError) as e:
        raise e if isinstance(e, UserError) else UserError(f"the JSON schema cannot be read: {e}") from None


def _choices(value) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) and text for text in value):
        raise UserError("choice must be a list of texts that are not empty")
    if not 0 < len(value) <= MOST_CHOICES:
        raise UserError(f"choice must have 1 to {MOST_CHOICES} texts, not {len(value)}")
    return tuple(value)


@lru_cache(maxsize=4096)  # a job's rows mostly share one
def _error_of(structured: Structured) -> str:
    found = llguidance().LLMatcher.validate_grammar(structured.source)
    if not found or found.startswith("WARNING"):
        return ""
    kind = "JSON schema" if structured.json else next(f.name for f in fields(structured) if getattr(structured, f.name))
    return f"the {kind} cannot be used: {one_line(found)}"


def one_line(text: str) -> str:
    """The beginning of a message of llguidance, without the parser's state."""
    return " ".join(text.partition("<state>")[0].split())[:300]


def llguidance():
    """The package. Raises UserError if it is not installed."""
    try:
        return import_module("llguidance")
    except ImportError:
        raise UserError("structured output needs llguidance: pip install llguidance") from None
