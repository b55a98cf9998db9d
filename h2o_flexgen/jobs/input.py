"""Prompts of a job: from an input file, JSON lines with a prompt each, or built in."""

from __future__ import annotations

import json
import random
from pathlib import Path

from h2o_flexgen.errors import UserError


def read_prompts(path: str) -> list[str | list[int] | list[dict] | UserError]:
    """The prompts of an input file: texts, lists of token ids, or conversations. A row that is no prompt becomes a
    UserError that says why.

    Raises:
        UserError: the file cannot be read, or holds no prompts.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as e:
        raise UserError(f"cannot read `input_file` {path}: {e.strerror}") from None
    lines = [line for line in content.splitlines() if line.strip()]  # of bytes: a text may hold other line separators
    if not lines:
        raise UserError(f"`input_file` {path} holds no prompts")
    return [_parse_row(line) for line in lines]


def _parse_row(line: bytes) -> str | list[int] | list[dict] | UserError:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        return UserError(f"not JSON: {e}")
    if not isinstance(row, dict):
        return UserError("not a JSON object")
    if "prompt_token_ids" in row:
        ids = row["prompt_token_ids"]
        return ids if isinstance(ids, list) else UserError("prompt_token_ids must be a list of token ids")
    if "prompt" in row:
        return row["prompt"] if isinstance(row["prompt"], str) else UserError("prompt must be a text")
    if "messages" not in row:
        return UserError('no "prompt", "prompt_token_ids" or "messages"')
    messages = row["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return UserError("messages must be a list of objects with role and content")
    return messages or UserError("messages is an empty list: a conversation has one or more")


def builtin_text() -> str:
    """English prose that comes with Python: its language reference, by topic.

    Raises:
        UserError: this Python lacks it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError("this Python comes without the text of the built-in prompts: give an `input_file`") from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def builtin_prompts(tokenizer, vocab: int, count: int, length: int) -> list[list[int]]:
    """`count` prompts of exactly `length` tokens: passages of `builtin_text` that begin at even distances, and go on at
    its beginning where it ends; without a tokenizer random ids below `vocab`."""
    if tokenizer is None:
        rng = random.Random(0)
        return [[rng.randrange(4, vocab) for _ in range(length)] for _ in range(count)]
    first = tokenizer("")["input_ids"][:length]  # what the tokenizer puts before every text
    ids = tokenizer(builtin_text(), add_special_tokens=False, verbose=False)["input_ids"]
    left = length - len(first)
    begins = [n * len(ids) // count for n in range(count)]
    ids *= 2 + left // len(ids)
    return [first + ids[begin : begin + left] for begin in begins]
