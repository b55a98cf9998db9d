"""Prompts for a job without an input file."""

from __future__ import annotations

import importlib
import inspect
import random
import re

#: modules of the standard library whose source text makes the built-in prompts
_PROMPT_MODULES = (
    "textwrap heapq json.decoder shlex fnmatch statistics calendar csv difflib queue sched string bisect "
    "tempfile zipfile argparse ast base64 cmd code codecs colorsys configparser contextlib copy dataclasses "
    "decimal dis enum filecmp fileinput fractions functools getpass glob gzip hashlib hmac imaplib inspect"
).split()


def builtin_prompts(tokenizer, vocab: int, count: int, length: int) -> list[list[int]]:
    """`count` prompts of exactly `length` tokens: the source text before the body of a function of the standard
    library, repeated if it is too short; without a tokenizer random ids below `vocab`."""
    if tokenizer is None:
        rng = random.Random(0)
        return [[rng.randrange(4, vocab) for _ in range(length)] for _ in range(count)]
    first = tokenizer("")["input_ids"][:length]  # what the tokenizer puts before every text
    prompts, seen = [], set()
    for n in range(count):
        again, module = divmod(n, len(_PROMPT_MODULES))
        text = _source_before_a_body(_PROMPT_MODULES[module], again, 4 * length)
        ids = tokenizer(text[-8 * length - 2000 :], verbose=False)["input_ids"][len(first) :]
        left = length - len(first)
        for end in range(len(ids), max(0, len(ids) - 32), -1):  # earlier, if another prompt is the same
            body = ids[:end]
            prompt = first + (body * (1 + left // end))[-left:] if left else first
            if tuple(prompt) not in seen:
                break
        seen.add(tuple(prompt))
        prompts.append(prompt)
    return prompts


def _source_before_a_body(module: str, which: int, least: int) -> str:
    """The text of a module up to the body of one of its functions, at least `least` characters long if it can be."""
    text = inspect.getsource(importlib.import_module(module))
    # up to the colon: the line's end and the indentation behind it may be one token, which is the model's to choose
    ends = [match.end() for match in re.finditer(r"^ *def [^\n]*:$", text, re.MULTILINE)]
    ends = [end for end in ends if end >= least] or ends or [len(text)]
    again, at = divmod(which, len(ends))
    return text[: ends[at] - 7 * again]  # more prompts than functions: end a little earlier
