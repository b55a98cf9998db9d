"""Texts to measure on, cut into prompts and continuations."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.errors import UserError
from h2o_flexgen.utils.texts import BUILTIN, builtin_text, evenly

Item = TypeVar("Item")


@dataclass(frozen=True)
class Passage:
    """Token ids of a text, named `source`: the first `prompt_len` are the prompt, the others are scored."""

    token_ids: list[int]
    prompt_len: int
    source: str = ""


@dataclass(frozen=True)
class Source:
    """The contents of a file: a text, or rows, each with the number of its line."""

    name: str
    text: str | None = None
    rows: list[tuple[int, dict | UserError]] | None = None

    def each(self, read: Callable[[dict], Item]) -> tuple[list[Item], list[str]]:
        """What `read` makes of the rows, and an error for each row that cannot be read."""
        items = []
        errors = []
        for number, row in self.rows:
            try:
                if isinstance(row, UserError):
                    raise row
                items.append(read(row))
            except UserError as e:
                errors.append(f"{self.name} line {number}: {e}")
        return items, errors


def read_source(path: str) -> Source:
    """Read a text file, or JSON lines if the name ends in .jsonl. Raises UserError if that fails."""
    try:
        text = Path(path).read_bytes().decode()
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UserError(f"{path} is not a text in UTF-8: give plain text, or JSON lines in a file that ends in .jsonl")
    if not path.endswith(".jsonl"):
        return Source(path, text=text)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"{path} holds no rows")
    return Source(path, rows=[(number, _parse(line)) for number, line in lines])


def builtin_source() -> Source:
    return Source(BUILTIN, text=builtin_text())


def _parse(line: str) -> dict | UserError:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        return UserError(f"not JSON: {e}")
    return row if isinstance(row, dict) else UserError("not a JSON object")


def passages_of(
    source: Source, model: LoadedModel, prompt_len: int, gen_len: int, windows: int
) -> tuple[list[Passage], list[str]]:
    """The passages of a source, and an error for each row that gives none. Raises UserError if the text is too short,
    or the model has no tokenizer or too few positions.

    A text gives up to `windows` passages of `prompt_len` + `gen_len` tokens, evenly spaced and without overlap. A row
    {"prompt", "completion"} is one passage, with up to `gen_len` tokens of the completion; the prompt of a row {"text"}
    is its first `prompt_len` tokens.
    """
    if model.tokenizer is None:
        raise UserError("this model has no tokenizer, so that texts cannot be measured with it")
    if source.rows is None:
        model.spec.check_length(prompt_len, gen_len)
        return _windows(source, model, prompt_len, gen_len, windows), []
    return source.each(lambda row: _of_row(row, model, prompt_len, gen_len))


def _windows(source: Source, model: LoadedModel, prompt_len: int, gen_len: int, windows: int) -> list[Passage]:
    first = model.tokenizer("")["input_ids"][:prompt_len]  # the tokens that the tokenizer puts before every text
    ids = _tokens(model, source.text)
    length = prompt_len + gen_len - len(first)
    count = min(windows, len(ids) // length)
    if count == 0:
        half = (len(ids) + len(first)) // 2
        fits = f": `prompt_len` {half} and `gen_len` {half} would fit" if half else ""
        raise UserError(
            f"{source.name} has {len(ids)} tokens, too few for a prompt of {prompt_len} and {gen_len} behind it{fits}"
        )
    return [Passage(first + ids, prompt_len, source.name) for ids in evenly(ids, count, length)]


def _of_row(row: dict, model: LoadedModel, prompt_len: int, gen_len: int) -> Passage:
    """Raises UserError if the row is not of such a form, is too long, or has no token to score."""
    prompt, completion, text = (row.get(name) for name in ("prompt", "completion", "text"))
    if isinstance(prompt, str) and isinstance(completion, str):
        ids = model.encode(prompt)
        prompt_len = len(ids)
        ids += _tokens(model, completion)[:gen_len]
        if len(ids) == prompt_len:
            raise UserError("the completion is empty")
    elif isinstance(text, str):
        ids = model.encode(text)[: prompt_len + gen_len]
        if len(ids) <= prompt_len:
            raise UserError(f"the text has {len(ids)} tokens, none behind the {prompt_len} of `prompt_len`")
    else:
        raise UserError('no texts "prompt" and "completion", and no "text"')
    model.spec.check_length(len(ids))
    return Passage(ids, prompt_len)


def _tokens(model: LoadedModel, text: str) -> list[int]:
    return model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
