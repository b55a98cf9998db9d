"""A text cut into windows, each a prompt and what follows it."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.errors import UserError
from h2o_flexgen.evaluation.passages import evenly


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
    return torch.tensor([first + passage for passage in evenly(ids, count, left)])
