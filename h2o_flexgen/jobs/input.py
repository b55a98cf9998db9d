"""Input files: JSON lines with a prompt each."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

from h2o_flexgen.errors import UserError


def read_prompts(path: str) -> list[str | list[int] | UserError]:
    """The prompts of an input file: texts or lists of token ids. A row that is no prompt becomes a UserError that
    says why.

    Raises:
        UserError: the file cannot be read, is not UTF-8, or holds no prompts.
    """
    try:
        text = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as e:
        raise UserError(f"cannot read `input_file` {path}: {e.strerror}") from None
    lines = [line for line in text.splitlines() if line.strip()]  # of bytes: a text may hold other line separators
    if not lines:
        raise UserError(f"`input_file` {path} holds no prompts")
    if not any(map(_decode, lines)):
        raise UserError(f"cannot read `input_file` {path}: it is not UTF-8 text")
    return [_parse_row(line) for line in lines]


def _decode(line: bytes) -> str | None:
    try:
        return line.decode()
    except UnicodeDecodeError:
        return None


def _parse_row(line: bytes) -> str | list[int] | UserError:
    if (text := _decode(line)) is None:
        return UserError("not UTF-8 text")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as e:
        return UserError(f"not JSON: {e}")
    if not isinstance(row, dict):
        return UserError("not a JSON object")
    if "prompt_token_ids" in row:
        ids = row["prompt_token_ids"]
        return ids if isinstance(ids, list) else UserError("prompt_token_ids must be a list of token ids")
    if "prompt" not in row:
        return UserError('neither "prompt" nor "prompt_token_ids"')
    return row["prompt"] if isinstance(row["prompt"], str) else UserError("prompt must be a text")
