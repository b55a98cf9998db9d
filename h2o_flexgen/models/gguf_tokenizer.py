"""The tokenizer and the chat template of a GGUF file, made by transformers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from h2o_flexgen.errors import UserError, reason

if TYPE_CHECKING:
    from h2o_flexgen.models.gguf import GGUFFile

#: names of ways to split text before byte pairs are merged that transformers follows; others it takes for GPT-2's
PRE_TOKENIZERS = ("default", "gpt-2", "smollm", "llama3", "llama-v3", "llama-bpe", "tekken", "qwen2")
#: llama.cpp's names for a model without a tokenizer
NO_TOKENIZER = ("none", "no_vocab")

log = logging.getLogger(__name__)


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Write the files of the tokenizer, if there is one, into a folder.

    Raises:
        UserError: transformers cannot read the tokenizer, or it cannot be written.
    """
    model = file.field("tokenizer.ggml.model", "none")
    if model in NO_TOKENIZER:
        return
    split = file.field("tokenizer.ggml.pre", "default")
    if model == "gpt2" and split not in PRE_TOKENIZERS:
        log.warning("%s: transformers may split text into other tokens than %r does", file.path, split)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name)
    except Exception as e:
        raise UserError(f"cannot read the tokenizer of {file.path}: {reason(e)}") from None
    try:
        tokenizer.save_pretrained(folder)
    except Exception as e:  # an OSError, or one of Rust's
        raise UserError(f"cannot write the tokenizer of {file.path} into {folder}: {reason(e)}") from None
