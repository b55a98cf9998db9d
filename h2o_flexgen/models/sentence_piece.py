"""SentencePiece's byte pairs, from a tokenizer.model or a GGUF file, as a tokenizer of the library `tokenizers`."""

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
    """The kind of a token, in tokenizer.model and in GGUF files; other kinds do not matter."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


def is_control(kind: int) -> bool:
    """Whether a token of this kind stands for no text."""
    return kind in (Kind.UNKNOWN, Kind.CONTROL)


def read_pieces(path: Path, scheme: str) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of a tokenizer.model, and its special tokens by their names in a tokenizer_config.json.

    Args:
        scheme: as in `pieces_tokenizer`; only used for a file that puts a blank before a text.

    Raises:
        UserError: a damaged file, or one of an unsupported kind, which transformers tokenizes wrongly too.
    """
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as e:  # its class depends on the version of protobuf
        raise UserError(
            f"{path} is not a whole SentencePiece model ({reason(e)}): it or a tokenizer.json is needed"
        ) from None
    trainer = model.trainer_spec
    normalizer = model.normalizer_spec
    unknown = {
        "is not made of byte pairs": trainer.model_type != trainer.BPE,
        "replaces characters of a text": normalizer.precompiled_charsmap,
        "removes blanks from a text": normalizer.remove_extra_whitespaces,
        "puts blanks after words": trainer.treat_whitespace_as_suffix,
    }
    for trait, is_present in unknown.items():
        if is_present:
            raise UserError(f"{path} {trait}, which is not supported: a tokenizer.json beside it is needed")
    tokens = [piece.piece for piece in model.pieces]
    scores = [piece.score for piece in model.pieces]
    kinds = [piece.type for piece in model.pieces]
    ids = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "unk_token": trainer.unk_id}
    special = {name: tokens[token] for name, token in ids.items() if token >= 0}
    scheme = scheme if normalizer.add_dummy_prefix else "never"
    numbers = {text: token for token, text in enumerate(tokens)}
    merges = merges_by_score(numbers, scores)
    tokenizer = pieces_tokenizer(numbers, merges, special.get("unk_token"), scheme)
    add_tokens(tokenizer, tokens, kinds, lambda token: is_control(kinds[token]))
    return tokenizer, special


def pieces_tokenizer(ids: dict[str, int], merges: list[tuple[str, str]], unknown: str | None, scheme: str) -> Tokenizer:
    """A tokenizer that merges pairs of pieces in this order.

    Args:
        scheme: where a blank is inserted: "first": before a text that does not begin with one; "always": before each
            text and after each added token; or "never".
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    if scheme == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, scheme, split=False)
    else:
        blanks = normalizers.Replace(" ", BLANK)
        prepend = normalizers.Prepend(BLANK)
        tokenizer.normalizer = normalizers.Sequence([prepend, blanks]) if scheme == "always" else blanks
    parts = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if scheme != "never":
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def merges_by_score(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that together form a token, the one with the highest score first."""
    merges = []
    for text, token in ids.items():
        halves = ((text[:at], text[at:]) for at in range(1, len(text)))
        merges += [(-scores[token], *pair) for pair in halves if pair[0] in ids and pair[1] in ids]
    merges.sort(key=lambda merge: merge[0])
    return [merge[1:] for merge in merges]


def add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int], is_special: Callable[[int], bool]) -> None:
    """Make special and user-defined tokens count as tokens wherever they occur in a text. Decoded texts omit special
    ones."""
    from tokenizers import AddedToken

    added = [token for token in range(len(tokens)) if is_special(token) or kinds[token] == Kind.USER_DEFINED]
    tokenizer.add_tokens([AddedToken(tokens[token], special=is_special(token), normalized=False) for token in added])


def surround(tokenizer: Tokenizer, start: str | None, end: str | None) -> None:
    """Put the token `start`, if any, before each text and `end`, if any, after it."""
    from tokenizers import processors

    # the template uses aliases, since a token may contain its syntax
    edges = {"start": start, "end": end}
    present = {name: text for name, text in edges.items() if text is not None}
    special = [{"id": name, "ids": [tokenizer.token_to_id(text)], "tokens": [text]} for name, text in present.items()]
    template = [name for name in ("start", "$A", "end") if name == "$A" or name in present]
    processor = processors.TemplateProcessing(single=template, special_tokens=special)
    tokenizer.post_processor = processor if present else None
