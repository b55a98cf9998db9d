"""How the tokens of a sequence are chosen, and when it ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from numbers import Real

from h2o_flexgen.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Hashable: prompts of one job may have different ones.

    Attributes:
        temperature: 0 takes the most likely token; higher flattens the distribution.
        top_k: sample among the k most likely tokens (0: all).
        top_p: sample among the fewest tokens whose probabilities reach p (nucleus sampling,
            arXiv 1904.09751, section 3.1); 1: all.
        max_tokens: output length.
        ignore_eos: go on after the end-of-sequence token.
        seed: random numbers depend on it, on a prompt's key (its place in the job, if none is given) and on the step,
            and on nothing else.
        stop: a text or several; a sequence ends as soon as what it generates contains one, and its text is what is
            before it. Kept as a tuple.

    Raises:
        UserError: a value of another type or out of range, or a stop string that is empty or no text.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 16
    ignore_eos: bool = False
    seed: int = 0
    stop: str | Seq[str] | None = ()

    def __post_init__(self):
        for name, least in {"top_k": 0, "max_tokens": 1, "seed": 0}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UserError(f"{name} must be a whole number, {least} or more, not {value!r}")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise UserError(f"{name} must be a number, not {value!r}")
        if not 0 <= self.temperature <= sys.float_info.max:
            raise UserError(f"temperature must be 0 or more, and finite, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must lie in (0, 1], not {self.top_p}")
        if not isinstance(self.ignore_eos, bool):
            raise UserError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        if self.seed >= 1 << 64:
            raise UserError(f"seed must be less than 2**64, not {self.seed}")
        for name in ("temperature", "top_p"):
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "stop", self._checked_stop())

    def _checked_stop(self) -> tuple[str, ...]:
        stop = [self.stop] if isinstance(self.stop, str) else [] if self.stop is None else self.stop
        if not isinstance(stop, (list, tuple)):
            raise UserError(f"stop must be a text or a list of texts, not {stop!r}")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise UserError(f"a stop string must be a text that is not empty, not {text!r}")
        return tuple(stop)


def check_stop(params: SamplingParams, tokenizer) -> None:
    """Raises UserError for stop strings that no tokenizer can show."""
    if params.stop and tokenizer is None:
        raise UserError("`stop` needs a tokenizer, and this model has none: leave it out")


def params_of_each(given: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """The parameters of each of `count` prompts. Raises UserError for another number of them, or something else."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if not isinstance(given, (list, tuple)) or not all(isinstance(params, SamplingParams) for params in given):
        raise UserError("`sampling_params` must be one SamplingParams for all prompts, or a list with one for each")
    if len(given) != count:
        raise UserError(f"`sampling_params` has {len(given)} for {count} prompts: give one for each, or one for all")
    return list(given)


def prompt_lens_of_each(given: int | Seq[int] | None, count: int) -> list[int | None]:
    """How many tokens of each of `count` texts are its prompt. Raises UserError for another number of them, or one that
    is none."""
    lens = list(given) if isinstance(given, (list, tuple)) else [given] * count
    if len(lens) != count:
        raise UserError(f"`prompt_len` has {len(lens)} for {count} texts: give one for each, or one for all")
    for n in lens:
        if given is not None and (type(n) is not int or n < 1):
            raise UserError(f"`prompt_len` must be a whole number, 1 or more, not {n!r}")
    return lens


def keys_of_each(given: Seq[int] | None, count: int) -> Seq[int]:
    """The keys of `count` prompts, by default their places. Raises UserError for another number of them, or one that is
    none."""
    if given is None:
        return range(count)
    if len(given) != count:
        raise UserError(f"`keys` has {len(given)} for {count} prompts: give one for each")
    for key in given:
        if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < 1 << 64:
            raise UserError(f"each of `keys` must be a whole number from 0 to 2**64 - 1, not {key!r}")
    return given
