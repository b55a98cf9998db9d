"""A text cut into windows, each a prompt and its continuation."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from h2o_flexgen.errors import UserError
from h2o_flexgen.utils.files import read_text
from h2o_flexgen.utils.texts import BUILTIN, builtin_text, evenly


def read(path: str | None) -> tuple[str, str]:
    """(text, its name) of a file, or of the built-in prose. Raises UserError if the file cannot be read."""
    return (builtin_text(), BUILTIN) if path is None else (read_text(path, path), os.path.basename(path))


def cut(text: str, tokenizer, count: int, length: int) -> Tensor:
    """(count, length) token ids: passages, evenly spaced and without overlap, each behind the tokens that the tokenizer
    puts before every text. Raises UserError if there is no tokenizer, or the text is too short."""
    if tokenizer is None:
        raise UserError("this model has no tokenizer, so that no text can be analysed with it")
    first = tokenizer("")["input_ids"][:length]
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    left = length - len(first)
    if len(ids) < count * left:
        raise UserError(
            f"the text has {len(ids)} tokens, too few for {count} windows of {length}: give a longer one, or smaller "
            "`windows`, `prompt_len` or `gen_len`"
        )
    return torch.tensor([first + passage for passage in evenly(ids, count, left)])
