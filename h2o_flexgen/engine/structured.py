"""Structured output: texts that match a JSON schema, a regular expression, one of several choices, or a grammar.

llguidance (github.com/guidance-ai/llguidance) says which tokens may come next: about 50 microseconds a row on one core.
It does so in a thread of its own while the layers run, so that no pass waits for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.errors import UserError

if TYPE_CHECKING:
    from h2o_flexgen.engine.batch import Sequence

#: the most choices
MOST_CHOICES = 10_000
#: JSON is written as Python writes it: small models that may write any blanks write them without end
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: bits of a word of a mask
WORD = 32


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
        guidance = _llguidance()
        if self.json is not None or self.json_object:
            schema = self.json or '{"type": "object"}'
            return guidance.LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE)
        if self.regex is not None:
            return guidance.LLMatcher.grammar_from_regex(self.regex)
        if self.choice is not None:
            return guidance.grammar_from("choice", json.dumps(self.choice))
        try:
            return guidance.grammar_from("grammar", self.grammar)
        except ValueError as e:
            raise UserError(f"the grammar cannot be read: {_one_line(str(e))}") from None

    def check(self) -> None:
        """Raises UserError for what nothing can match, what is not supported, such as a keyword of a schema, and what
        is too complex."""
        if error := _error_of(self):
            raise UserError(error)


def _schema(value) -> str:
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, (Mapping, bool)):
            raise UserError(f"a JSON schema is an object, not {type(schema).__name__}")
        return json.dumps(schema)
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
    found = _llguidance().LLMatcher.validate_grammar(structured.source)
    if not found or found.startswith("WARNING"):
        return ""
    kind = "JSON schema" if structured.json else next(f.name for f in fields(structured) if getattr(structured, f.name))
    return f"the {kind} cannot be used: {_one_line(found)}"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _llguidance():
    try:
        import llguidance
    except ImportError:
        raise UserError("structured output needs llguidance: pip install llguidance") from None
    return llguidance


class Masks:
    """Which tokens may come next of each row with structured output.

    Args:
        tokenizer: a fast one of transformers. Raises UserError for another.
        vocab: logits of a row.
        eos_ids: token ids that end a text.
    """

    def __init__(self, tokenizer, vocab: int, eos_ids: frozenset[int]):
        self.tokenizer = tokenizer
        self.vocab = vocab
        self.eos_ids = eos_ids
        self._matchers: dict[Sequence, object] = {}
        self._bits: dict[Sequence, np.ndarray] = {}  # (words,) int32, of the rows of the pass
        self._forced: dict[Sequence, list[int]] = {}  # of these, the tokens after the next one, if only they fit
        self._work: Future | None = None

    def expect(self, rows: list[Sequence]) -> None:
        """Begin to compute the masks of rows that will have logits in this pass."""
        wanted = [s for s in rows if s.params.structured is not None and s.finish_reason is None]
        self._work = self._pool.submit(self._compute, wanted) if wanted else None

    def _compute(self, rows: list[Sequence]) -> None:
        self._bits = {}
        self._forced = {}
        words = -(-self.vocab // WORD)
        for s in rows:
            bits = self._bits[s] = np.zeros(words, np.int32)
            matcher = self._matcher(s)
            if matcher.is_error():  # which `advance` reports
                continue
            only, *self._forced[s] = matcher.compute_ff_tokens() or [None]
            if only is None:
                matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            else:
                bits.view(np.uint32)[only // WORD] = 1 << only % WORD

    def _matcher(self, s: Sequence):
        if s not in self._matchers:
            found = _llguidance().LLMatcher(self._guided_tokenizer, s.params.structured.source)
            self._matchers[s] = found
            found.consume_tokens(s.tokens)
        return self._matchers[s]

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "masks")

    @cached_property
    def _guided_tokenizer(self):
        _llguidance()
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self.tokenizer, self.vocab, sorted(self.eos_ids) or None)

    def apply(self, logits: Tensor, rows: list[Sequence]) -> None:
        """Set the logits (R, V), floats, of tokens that must not come next to minus infinity."""
        self._work.result()
        bits = np.stack([self._bits[s] for s in rows]).view(np.uint8)
        allowed = np.unpackbits(bits, axis=1, bitorder="little")[:, : logits.shape[1]]
        logits.masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), -torch.inf)

    def advance(self, s: Sequence) -> None:
        """Take the newest token of a row into account, and append those that must follow it. A row that has become too
        complex ends with an error."""
        matcher = self._matchers[s]
        matcher.consume_token(s.tokens[-1])
        forced = [] if s.params.stop else self._forced.get(s, [])[: max(0, s.params.max_tokens - len(s.tokens) - 1)]
        ends = self.eos_ids.union(s.params.stop_token_ids)
        forced = forced[: next((n for n, token in enumerate(forced) if token in ends), None)]
        if forced and matcher.consume_tokens(forced):
            s.tokens += forced
        if matcher.is_error():
            s.fail(f"structured output: {_one_line(matcher.get_error())}")

    def is_complete(self, s: Sequence) -> bool:
        """Whether the text of a row with structured output cannot go on."""
        if s.params.structured is None:
            return False
        self._work.result()
        return self._matchers[s].is_stopped()

    def forget(self, s: Sequence) -> None:
        """Free what a row that has ended needed."""
        self._matchers.pop(s, None)
