"""The tokenizer of a model folder."""

from __future__ import annotations

from pathlib import Path

from h2o_flexgen.errors import UserError, reason

_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


def load_tokenizer(folder: Path):
    """The folder's tokenizer, padding on the left, or None if there is none."""
    if not has_tokenizer(folder):
        return None
    from transformers import AutoTokenizer

    try:
        # code that comes with a model is never run, and never asked about
        return AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
    except Exception as e:
        raise UserError(f"cannot load the tokenizer of {folder}: {reason(e)}") from None


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in _FILES)
