"""Sampling parameters: how the tokens of a sequence are chosen, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from numbers import Integral, Real

import numpy as np

from h2o_flexgen.engine.structured import Structured
from h2o_flexgen.errors import UserError

#: the most outputs of a prompt, and other tokens whose log-probabilities are given
MOST_OUTPUTS = 128
MOST_LOGPROBS = 20
#: whole numbers, with the least of each
WHOLE = {"top_k": -1, "max_tokens": 1, "min_tokens": 0, "seed": 0, "n": 1, "top_logprobs": 0}
#: other numbers, with their ranges: in words, and as a check
NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("be 0 or more, and finite", lambda x: 0 <= x < math.inf),
    "top_p": ("lie in (0, 1]", lambda x: 0 < x <= 1),
    "min_p": ("lie in [0, 1]", lambda x: 0 <= x <= 1),
    "presence_penalty": ("lie in [-2, 2]", lambda x: -2 <= x <= 2),
    "frequency_penalty": ("lie in [-2, 2]", lambda x: -2 <= x <= 2),
    "repetition_penalty": ("be more than 0, and finite", lambda x: 0 < x < math.inf),
}
#: how hidden states become one vector
POOLINGS = ("mean", "last")
#: answers of one prompt
MOST_ANSWERS = 1000
#: to a prompt: a text, or token ids
Answer = str | Seq[int]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Prompts of one job may have different ones. Names and formulas are vLLM's.

    Attributes:
        temperature: 0 takes the most likely token; higher values flatten the distribution.
        top_k: sample among the k most likely tokens (all if 0, or -1 as in vLLM).
        top_p: sample among the fewest tokens whose probabilities reach p (nucleus sampling, arXiv 1904.09751, section
            3.1); 1: all.
        max_tokens: the most tokens of the output.
        ignore_eos: continue after the end-of-sequence token.
        seed: random numbers depend only on it, on a prompt's key (by default its place in the job), on which of its
            answers it is, and on the step.
        stop: a text or several; a sequence ends as soon as its output contains one, and its text ends before it.
            Stored as a tuple.
        stop_token_ids: ids of tokens that end a sequence as the end-of-sequence token does, even with `ignore_eos`.
            Stored as a sorted tuple.
        min_p: sample among tokens that are at least this many times as likely as the most likely one (arXiv
            2407.01082).
        min_tokens: nothing ends an output before it has as many.
        presence_penalty: subtracted from the logits of tokens that the output has.
        frequency_penalty: the same, times how often it has them.
        repetition_penalty: divides the logits of tokens that prompt or output have, if they are positive, and
            multiplies them if not (arXiv 1909.05858, section 4.1).
        logit_bias: {token id: what is added to its logit}, from -100 to 100. Stored as a sorted tuple of pairs.
        bad_words: texts, or one, that an output must not contain. Stored as a tuple.
        allowed_token_ids: the only tokens that an output may have; None: all. Stored as a sorted tuple.
        structured: what the text must match, and when it ends.
        n: answers to a prompt. Each is drawn by itself, and their prompt is read once.
        best_of: so many answers are generated, and the `n` with the highest mean log-probability of a token are kept;
            None: `n`.
        top_logprobs: for each token, give the log-probabilities of so many of the most likely ones.
        prompt_logprobs: the same for the tokens of the prompt, and their own; None: of none.

    NumPy's numbers are accepted.

    Raises:
        UserError: a value of another type or out of range, values that contradict each other, or a text that is empty
            where it must not be.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 16
    ignore_eos: bool = False
    seed: int = 0
    stop: str | Seq[str] | None = ()
    stop_token_ids: Seq[int] | None = ()
    min_p: float = field(default=0.0, kw_only=True)
    min_tokens: int = field(default=0, kw_only=True)
    presence_penalty: float = field(default=0.0, kw_only=True)
    frequency_penalty: float = field(default=0.0, kw_only=True)
    repetition_penalty: float = field(default=1.0, kw_only=True)
    logit_bias: Mapping[int, float] | Seq[tuple[int, float]] | None = field(default=(), kw_only=True)
    bad_words: str | Seq[str] | None = field(default=(), kw_only=True)
    allowed_token_ids: Seq[int] | None = field(default=None, kw_only=True)
    structured: Structured | None = field(default=None, kw_only=True)
    n: int = field(default=1, kw_only=True)
    best_of: int | None = field(default=None, kw_only=True)
    top_logprobs: int = field(default=0, kw_only=True)
    prompt_logprobs: int | None = field(default=None, kw_only=True)

    def __post_init__(self):
        for name, least in WHOLE.items():
            self._set(name, whole_number(name, getattr(self, name), least))
        for name, (words, fits) in NUMBERS.items():
            value = _number(name, getattr(self, name))
            if not fits(value):
                raise UserError(f"{name} must {words}, not {value}")
            self._set(name, value)
        for name in ("best_of", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, whole_number(name, getattr(self, name), 0))
        if not isinstance(self.ignore_eos, (bool, np.bool_)):
            raise UserError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        if self.seed >= 1 << 64:
            raise UserError(f"seed must be less than 2**64, not {self.seed}")
        if self.structured is not None and not isinstance(self.structured, Structured):
            raise UserError(f"structured must be a Structured, not {type(self.structured).__name__}")
        self._set("top_k", max(0, self.top_k))
        self._set("ignore_eos", bool(self.ignore_eos))
        self._set("stop", _texts("stop", "a stop string", self.stop))
        self._set("bad_words", _texts("bad_words", "a bad word", self.bad_words))
        if any(0xD800 <= ord(c) < 0xE000 for word in self.bad_words for c in word):
            raise UserError("bad_words must be valid Unicode: one holds half a surrogate pair")
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids or ()))
        self._set("logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
        self._check_together()

    def _set(self, name: str, value) -> None:
        object.__setattr__(self, name, value)  # since it is frozen

    def _check_together(self) -> None:
        for name, most in {"n": MOST_OUTPUTS, "best_of": MOST_OUTPUTS}.items():
            if (getattr(self, name) or 0) > most:
                raise UserError(f"{name} must be {most} or less, not {getattr(self, name)}")
        for name in ("top_logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > MOST_LOGPROBS:
                raise UserError(f"{name} must be {MOST_LOGPROBS} or less, not {getattr(self, name)}")
        if self.best_of is not None and self.best_of < self.n:
            raise UserError(f"best_of must be n or more, not {self.best_of} with n {self.n}")
        if self.answers > 1 and self.temperature == 0:
            raise UserError(
                f"n {self.answers} at temperature 0 would give the same answer several times: give a higher one"
            )
        if self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if self.allowed_token_ids == ():
            raise UserError("allowed_token_ids is empty: name at least one token")
        if self.structured is not None and (self.allowed_token_ids or self.min_tokens or self.bad_words):
            raise UserError("structured output cannot be joined with allowed_token_ids, min_tokens or bad_words")

    @property
    def answers(self) -> int:
        """How many answers are generated."""
        return self.best_of or self.n

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


def _number(name: str, value) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UserError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf


def _texts(name: str, one: str, given) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(texts, (list, tuple)):
        raise UserError(f"{name} must be a text or a list of texts, not {texts!r}")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise UserError(f"{one} must be a text that is not empty, not {text!r}")
    return tuple(texts)


def _token_ids(name: str, given) -> tuple[int, ...]:
    ids = list_of(f"{name} must be a list of token ids", given)
    return tuple(sorted({whole_number(f"each of {name}", token, 0) for token in ids}))


def _token(given) -> int:
    """Raises ValueError for anything but a whole number or its digits."""
    if isinstance(given, Integral) and not isinstance(given, bool):
        return int(given)
    if isinstance(given, str) and given.isascii() and given.isdecimal():
        return int(given)
    raise ValueError


def _biases(given) -> tuple[tuple[int, float], ...]:
    """Sorted by token. JSON's objects have their tokens as texts."""
    pairs = given.items() if isinstance(given, Mapping) else given or ()
    try:
        found = {_token(token): _number("a logit_bias", bias) for token, bias in pairs}
    except (TypeError, ValueError):
        raise UserError(f"logit_bias must have a number for each token id, not {given!r:.60}") from None
    for token, bias in found.items():
        if token < 0 or not -100 <= bias <= 100:
            raise UserError(f"logit_bias must lie in [-100, 100] for a token id, not {bias} for {token}")
    return tuple(sorted(found.items()))


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


def check_params(params: SamplingParams, tokenizer, vocab: int) -> None:
    """Raises UserError for texts without a tokenizer, and for tokens outside the vocabulary."""
    for name in ("stop", "bad_words", "structured"):
        if getattr(params, name) and tokenizer is None:
            raise UserError(f"`{name}` needs a tokenizer, and this model has none: leave it out")
    tokens = {
        "stop_token_ids": params.stop_token_ids[-1:],
        "allowed_token_ids": (params.allowed_token_ids or ())[-1:],
        "logit_bias": [token for token, _ in params.logit_bias[-1:]],
    }
    for name, largest in tokens.items():
        if largest and largest[0] >= vocab:
            raise UserError(f"{name} must be below {vocab}, the vocabulary, not {largest[0]}")
    if params.structured is not None:
        params.structured.check()
        if not getattr(tokenizer, "is_fast", False):
            raise UserError("structured output needs a model with a fast tokenizer, a tokenizer.json")


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
