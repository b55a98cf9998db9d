"""SentencePiece's byte pairs as a tokenizer of the library `tokenizers`, from a tokenizer.model or a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

from h2o_flexgen.errors import UserError, reason

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: stands for a blank in a piece
BLANK = "▁"


class Kind(IntEnum):
    """Of a token, in tokenizer.model and in GGUF files alike; others do not matter."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


def is_control(kind: int) -> bool:
    """Whether a token of this kind stands for no text."""
    return kind in (Kind.UNKNOWN, Kind.CONTROL)


def read_pieces(path: Path) -> tuple[Tokenizer, dict[str, str]] | None:
    """The tokenizer of a tokenizer.model and its special tokens, named as in a tokenizer_config.json: with BOS in front
    of a text. None for another algorithm than byte pairs, or one that changes texts first. Raises UserError for a file
    that is damaged."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as e:  # of a class that depends on the version of protobuf
        raise UserError(
            f"{path} is not a whole SentencePiece model ({reason(e)}): it or a tokenizer.json is needed"
        ) from None
    how = model.trainer_spec
    before = model.normalizer_spec
    if how.model_type != how.BPE or before.precompiled_charsmap or before.remove_extra_whitespaces:
        return None
    tokens = [piece.piece for piece in model.pieces]
    scores = [piece.score for piece in model.pieces]
    kinds = [piece.type for piece in model.pieces]
    ids = {"bos_token": how.bos_id, "eos_token": how.eos_id, "unk_token": how.unk_id}
    special = {name: tokens[token] for name, token in ids.items() if token >= 0}
    tokenizer = pieces_tokenizer(tokens, scores, special.get("unk_token"), before.add_dummy_prefix)
    add_tokens(tokenizer, tokens, kinds, lambda token: is_control(kinds[token]))
    surround(tokenizer, [special["bos_token"]] if "bos_token" in special else [], [])
    return tokenizer, special


def pieces_tokenizer(tokens: list[str], scores: list[float], unknown: str | None, prefix: bool) -> Tokenizer:
    """A tokenizer that merges two pieces in the order of the scores of what they make.

    Args:
        prefix: put a blank before a text, and before what follows a special token.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids = {text: token for token, text in enumerate(tokens)}
    merges = merges_by_score(ids, scores)
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    blanks = normalizers.Replace(" ", BLANK)
    parts = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        blanks = normalizers.Sequence([normalizers.Prepend(BLANK), blanks])
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = blanks
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def merges_by_score(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a third one, the best of these first."""
    merges = []
    for text, token in ids.items():
        halves = ((text[:at], text[at:]) for at in range(1, len(text)))
        merges += [(-scores[token], *pair) for pair in halves if pair[0] in ids and pair[1] in ids]
    merges.sort(key=lambda merge: merge[0])
    return [merge[1:] for merge in merges]


def add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int], is_special: Callable[[int], bool]) -> None:
    """Take control tokens and those that a user has defined as they are, before a text is split. Special tokens are
    left out of decoded texts."""
    from tokenizers import AddedToken

    added = [token for token in range(len(tokens)) if is_control(kinds[token]) or kinds[token] == Kind.USER_DEFINED]
    tokenizer.add_tokens([AddedToken(tokens[token], special=is_special(token), normalized=False) for token in added])


def surround(tokenizer: Tokenizer, before: list[str], behind: list[str]) -> None:
    """Put tokens before and behind each text."""
    from tokenizers import processors

    around = {*before, *behind}
    if around:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *behind], special_tokens=[(text, tokenizer.token_to_id(text)) for text in around]
        )
