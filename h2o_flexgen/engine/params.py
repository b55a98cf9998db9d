"""Sampling parameters: how the tokens of a sequence are chosen, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np

from h2o_flexgen.errors import UserError

#: how hidden states become one vector
POOLINGS = ("mean", "last")
#: answers of one prompt
MOST_ANSWERS = 1000
#: to a prompt: a text, or token ids
Answer = str | Seq[int]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Prompts of one job may have different ones.

    Attributes:
        temperature: 0 takes the most likely token; higher values flatten the distribution.
        top_k: sample among the k most likely tokens (all if 0, or -1 as in vLLM).
        top_p: sample among the fewest tokens whose probabilities reach p (nucleus sampling, arXiv 1904.09751, section
            3.1); 1: all.
        max_tokens: the most tokens of the output.
        ignore_eos: continue after the end-of-sequence token.
        seed: random numbers depend only on it, on a prompt's key (by default its place in the job) and on the step.
        stop: a text or several; a sequence ends as soon as its output contains one, and its text ends before it.
            Stored as a tuple.
        stop_token_ids: ids of tokens that end a sequence as the end-of-sequence token does, even with `ignore_eos`.
            Stored as a sorted tuple.

    NumPy's numbers are accepted.

    Raises:
        UserError: a value of another type or out of range, or a stop string that is empty or not a text.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 16
    ignore_eos: bool = False
    seed: int = 0
    stop: str | Seq[str] | None = ()
    stop_token_ids: Seq[int] | None = ()

    def __post_init__(self):
        for name, least in {"top_k": -1, "max_tokens": 1, "seed": 0}.items():
            self._set(name, whole_number(name, getattr(self, name), least))
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise UserError(f"{name} must be a number, not {value!r}")
            try:
                self._set(name, float(value))
            except OverflowError:  # a whole number of hundreds of digits
                self._set(name, math.inf)
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature must be 0 or more, and finite, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must lie in (0, 1], not {self.top_p}")
        if not isinstance(self.ignore_eos, (bool, np.bool_)):
            raise UserError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        if self.seed >= 1 << 64:
            raise UserError(f"seed must be less than 2**64, not {self.seed}")
        self._set("top_k", max(0, self.top_k))
        self._set("ignore_eos", bool(self.ignore_eos))
        self._set("stop", self._checked_stop())
        self._set("stop_token_ids", self._checked_stop_token_ids())

    def _set(self, name: str, value) -> None:
        object.__setattr__(self, name, value)  # since it is frozen

    def _checked_stop(self) -> tuple[str, ...]:
        stop = [self.stop] if isinstance(self.stop, str) else [] if self.stop is None else self.stop
        if not isinstance(stop, (list, tuple)):
            raise UserError(f"stop must be a text or a list of texts, not {stop!r}")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise UserError(f"a stop string must be a text that is not empty, not {text!r}")
        return tuple(stop)

    def _checked_stop_token_ids(self) -> tuple[int, ...]:
        given = () if self.stop_token_ids is None else self.stop_token_ids
        ids = list_of("stop_token_ids must be a list of token ids", given)
        return tuple(sorted({whole_number("each of stop_token_ids", token, 0) for token in ids}))


@dataclass(frozen=True)
class PoolingParams:
    """How the hidden states of a text become one vector.

    Attributes:
        pooling: the "mean" of all its tokens, special ones included, or the "last" one.
        normalize: scale the vector to length 1.

    Raises:
        UserError: another value.
    """

    pooling: str = "mean"
    normalize: bool = True

    def __post_init__(self):
        if self.pooling not in POOLINGS:
            raise UserError(f"pooling must be one of {', '.join(POOLINGS)}, not {self.pooling!r:.60}")
        if not isinstance(self.normalize, bool):
            raise UserError(f"normalize must be True or False, not {self.normalize!r:.60}")


def check_answers(given) -> list[Answer]:
    """A user's answers to a prompt. Raises UserError unless they are a list of up to MOST_ANSWERS different texts or
    lists of token ids."""
    answers = list_of("answers must be a list of texts, or of lists of token ids", given)
    if not 0 < len(answers) <= MOST_ANSWERS:
        raise UserError(f"a prompt has 1 to {MOST_ANSWERS} answers, not {len(answers)}")
    seen = set()
    for n, answer in enumerate(answers):
        if not isinstance(answer, (str, list, tuple)):
            raise UserError(f"answer {n} must be a text or a list of token ids, not {answer!r:.60}")
        key = answer if isinstance(answer, str) else repr(answer)
        if key in seen:
            raise UserError(f"answer {n}, {answer!r:.60}, is given twice")
        seen.add(key)
    return answers


def whole_number(name: str, value, least: int) -> int:
    """The value as an int. Raises UserError, which calls it `name`, unless it is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise UserError(f"{name} must be a whole number, {least} or more, not {value!r:.60}")
    return int(value)


def check_stop(params: SamplingParams, tokenizer, vocab: int) -> None:
    """Raises UserError for stop strings without a tokenizer, and for stop tokens outside the vocabulary."""
    if params.stop and tokenizer is None:
        raise UserError("`stop` needs a tokenizer, and this model has none: leave it out")
    if params.stop_token_ids and params.stop_token_ids[-1] >= vocab:
        raise UserError(f"stop_token_ids must be below {vocab}, the vocabulary, not {params.stop_token_ids[-1]}")


def params_of_each(given: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """The parameters of each of `count` prompts. Raises UserError for another number of them, or another type."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if not isinstance(given, (list, tuple)) or not all(isinstance(params, SamplingParams) for params in given):
        raise UserError("`sampling_params` must be one SamplingParams for all prompts, or a list with one for each")
    if len(given) != count:
        raise UserError(f"`sampling_params` has {len(given)} for {count} prompts: give one for each, or one for all")
    return list(given)


def numbers_of_each(name: str, given: int | Seq[int] | None, count: int) -> Seq[int | None]:
    """A number of tokens for each of `count` texts. Raises UserError for a wrong count, or anything but whole
    numbers."""
    if given is None or isinstance(given, Integral):
        return [given if given is None else whole_number(f"`{name}`", given, 1)] * count
    return _numbers_of_each(name, "texts", given, count, 1)


def keys_of_each(given: Seq[int] | None, count: int) -> Seq[int]:
    """The keys of `count` prompts, by default their places. Raises UserError for a wrong count, or anything but whole
    numbers below 2**64."""
    if given is None:
        return range(count)
    keys = _numbers_of_each("keys", "prompts", given, count, 0)
    for key in keys:
        if key >= 1 << 64:
            raise UserError(f"each of `keys` must be a whole number from 0 to 2**64 - 1, not {key!r}")
    return keys


def _numbers_of_each(name: str, of: str, given, count: int, least: int) -> list[int]:
    given = list_of(f"`{name}` must be a list of whole numbers", given)
    if len(given) != count:
        raise UserError(f"`{name}` has {len(given)} for {count} {of}: give one for each")
    return [whole_number(f"each of `{name}`", value, least) for value in given]


def list_of(what: str, given) -> list:
    """A user's list, or other ordered collection, as a list. Raises UserError, whose message begins with `what`."""
    if isinstance(given, (str, bytes, dict, set, frozenset)):
        raise UserError(f"{what}, not {type(given).__name__}")
    try:
        return list(given)
    except TypeError:
        raise UserError(f"{what}, not {type(given).__name__}") from None
