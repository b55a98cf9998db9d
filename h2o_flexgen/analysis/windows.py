"""A text cut into windows, each a prompt and what follows it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.input import builtin_text

#: what stands for the built-in text among the names of files
BUILTIN = "Python's language reference"


def read_text(path: str | None) -> str:
    """What a file holds, or the built-in text. Raises UserError if that is no text."""
    if path is None:
        return builtin_text()
    try:
        return Path(path).read_text("utf-8")
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text in UTF-8") from None


def windows_of(text: str, tokenizer, count: int, length: int) -> Tensor:
    """(count, length) token ids: passages at even distances, which do not overlap, each behind what the tokenizer puts
    before every text.

    Raises:
        UserError: no tokenizer, or the text is too short.
    """
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
    begins = [n * (len(ids) - left) // max(1, count - 1) for n in range(count)]
    return torch.tensor([first + ids[begin : begin + left] for begin in begins])
