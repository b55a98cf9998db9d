"""Changes of logits before a token is chosen, by vLLM's formulas and in its order: allowed tokens, bad words, the least
number of tokens, biases, penalties."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.engine.batch import Sequence


class Pairs(NamedTuple):
    """Tokens that rows have, each once a row."""

    rows: Tensor  # (N,) int64
    tokens: Tensor  # (N,) int64
    counts: Tensor  # (N,) fp32, how often the output has them


class LogitChanges:
    """What the parameters of rows ask for, other than structured output.

    Args:
        eos_ids: token ids that end a sequence.
        tokenizer: for bad words; None if no sequence has any.
    """

    def __init__(self, eos_ids: frozenset[int], tokenizer=None):
        self.eos_ids = eos_ids
        self._bad_ids = lru_cache(maxsize=1024)(lambda words: bad_word_ids(words, tokenizer))

    def are_wanted(self, s: Sequence) -> bool:
        p = s.params
        is_short = len(s.tokens) < p.min_tokens
        return bool(is_short or p.logit_bias or p.bad_words or p.allowed_token_ids is not None or p.has_penalties)

    def apply(self, logits: Tensor, sequences: list[Sequence]) -> None:
        """Change logits (R, V) fp32 in place."""
        for row, s in zip(logits, sequences):
            self._forbid(row, s)
            if s.params.logit_bias:
                tokens, biases = zip(*s.params.logit_bias)
                row[list(tokens)] += torch.tensor(biases, device=row.device)
        penalised = [n for n, s in enumerate(sequences) if s.params.has_penalties]
        if penalised:
            _penalise(logits, penalised, sequences)

    def _forbid(self, row: Tensor, s: Sequence) -> None:
        p = s.params
        if p.allowed_token_ids is not None:
            allowed = row[list(p.allowed_token_ids)]
            row.fill_(-torch.inf)[list(p.allowed_token_ids)] = allowed
        for *before, last in self._bad_ids(p.bad_words) if p.bad_words else ():
            if s.tokens[len(s.tokens) - len(before) :] == before and len(before) <= len(s.tokens):
                row[last] = -torch.inf
        if len(s.tokens) < p.min_tokens:
            row[sorted(self.eos_ids.union(p.stop_token_ids))] = -torch.inf


def bad_word_ids(words: tuple[str, ...], tokenizer) -> list[list[int]]:
    """The token ids of each text at the beginning of a word and, where that makes other tokens, after a blank."""
    found = []
    for word in words:
        plain, spaced = (tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False) for prefix in ("", " "))
        found.append(plain)
        if spaced[:1] != plain[:1] and len(spaced) == len(plain):
            found.append(spaced)
    return [ids for ids in found if ids]


def _penalise(logits: Tensor, rows: list[int], sequences: list[Sequence]) -> None:
    """Repetition, then frequency and presence penalties, of some rows of logits (R, V) fp32."""
    pairs = _pairs(rows, sequences, logits.device)

    def penalty(name: str) -> Tensor:
        """Of each pair."""
        values = [getattr(s.params, name) for s in sequences]
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[pairs.rows]

    found = logits[pairs.rows, pairs.tokens]
    repetition = penalty("repetition_penalty")
    found *= torch.where(found > 0, 1 / repetition, repetition)
    found -= penalty("frequency_penalty") * pairs.counts
    found -= penalty("presence_penalty") * (pairs.counts > 0)
    logits[pairs.rows, pairs.tokens] = found


def _pairs(rows: list[int], sequences: list[Sequence], device: torch.device) -> Pairs:
    places: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    for n in rows:
        found = Counter(dict.fromkeys(sequences[n].prompt, 0))
        found.update(sequences[n].tokens)
        places += [n] * len(found)
        tokens += found.keys()
        counts += found.values()
    return Pairs(
        torch.tensor(places, device=device),
        torch.tensor(tokens, device=device),
        torch.tensor(counts, dtype=torch.float32, device=device),
    )
