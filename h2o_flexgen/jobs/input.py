"""Prompts of a job: from an input file, JSON lines with a prompt each, or built in."""

from __future__ import annotations

import importlib
import inspect
import json
import random
import re
from pathlib import Path

from h2o_flexgen.errors import UserError

#: modules of the standard library whose source text makes the built-in prompts
PROMPT_MODULES = (
    "textwrap heapq json.decoder shlex fnmatch statistics calendar csv difflib queue sched string bisect "
    "tempfile zipfile argparse ast base64 cmd code codecs colorsys configparser contextlib copy dataclasses "
    "decimal dis enum filecmp fileinput fractions functools getpass glob gzip hashlib hmac imaplib inspect"
).split()


def read_prompts(path: str) -> list[str | list[int] | UserError]:
    """The prompts of an input file: texts or lists of token ids. A row that is no prompt becomes a UserError that
    says why.

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


def _parse_row(line: bytes) -> str | list[int] | UserError:
    try:
        row = json.loads(line)
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


def builtin_prompts(tokenizer, vocab: int, count: int, length: int) -> list[list[int]]:
    """`count` prompts of exactly `length` tokens: the source text before the body of a function of the standard
    library, repeated if it is too short; without a tokenizer random ids below `vocab`."""
    if tokenizer is None:
        rng = random.Random(0)
        return [[rng.randrange(4, vocab) for _ in range(length)] for _ in range(count)]
    first = tokenizer("")["input_ids"][:length]  # what the tokenizer puts before every text
    left = length - len(first)
    prompts = []
    for n in range(count):
        function, module = divmod(n, len(PROMPT_MODULES))
        text = _source_before_a_body(PROMPT_MODULES[module], function, 4 * length)[-8 * length - 2000 :]
        ids = tokenizer(text, verbose=False)["input_ids"][len(first) :]
        ids *= 1 + left // len(ids)
        prompts.append(first + ids[len(ids) - left :])
    return prompts


def _source_before_a_body(module: str, function: int, least: int) -> str:
    """The text of a module up to the body of one of its functions, at least `least` characters long if it can be."""
    text = inspect.getsource(importlib.import_module(module))
    # up to the colon: the line's end and the indentation behind it may be one token, which is the model's to choose
    ends = [match.end() for match in re.finditer(r"^ *def [^\n]*:$", text, re.MULTILINE) if match.end() >= least]
    ends = ends or [len(text)]
    rounds, index = divmod(function, len(ends))
    return text[: ends[index] - 7 * rounds]  # more prompts than functions: end a little earlier
