"""From logits to tokens: sampled ones, or those of a text that is scored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.stop import StopStrings
from h2o_flexgen.errors import UserError
from h2o_flexgen.sizes import SAMPLE_ROWS

#: below this temperature only the most likely token has a chance, and dividing by it would overflow
GREEDY_BELOW = 1e-6


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen.

    Attributes:
        temperature: 0 takes the most likely token; higher flattens the distribution.
        top_k: sample among the k most likely tokens (0: all).
        top_p: sample among the fewest tokens whose probabilities reach p (nucleus sampling,
            arXiv 1904.09751, section 3.1); 1: all.
        max_tokens: output length.
        ignore_eos: go on after the end-of-sequence token.
        seed: random numbers depend on it, on a prompt's place in the job and on the step, and on nothing else.
        stop: a text or several; a sequence ends as soon as what it generates contains one, and its text is what is
            before it. Kept as a tuple.

    Raises:
        UserError: a value out of range, or a stop string that is empty or no text.
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
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise UserError(f"temperature must be 0 or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must lie in (0, 1], not {self.top_p}")
        if self.seed >= 1 << 64:
            raise UserError(f"seed must be less than 2**64, not {self.seed}")
        object.__setattr__(self, "stop", self._checked_stop())

    def _checked_stop(self) -> tuple[str, ...]:
        stop = [self.stop] if isinstance(self.stop, str) else [] if self.stop is None else self.stop
        if not isinstance(stop, (list, tuple)):
            raise UserError(f"stop must be a text or a list of texts, not {stop!r}")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise UserError(f"a stop string must be a text that is not empty, not {text!r}")
        return tuple(stop)


class Sampler:
    """Appends the tokens of each step to the sequences that still run.

    Args:
        eos_ids: token ids that end a sequence, unless `params` ignores them.
        tokenizer: for stop strings.

    Raises:
        UserError: stop strings without a tokenizer.
    """

    every_position = False

    def __init__(self, params: SamplingParams, eos_ids: frozenset[int], tokenizer=None):
        if params.stop and tokenizer is None:
            raise UserError("`stop` needs a tokenizer, and this model has none: leave it out")
        self.params = params
        self.stop = StopStrings(tokenizer, params.stop) if params.stop else None
        self.eos_ids = frozenset() if params.ignore_eos else eos_ids

    def take(self, i: int, sequences: list[Sequence], logits: Tensor) -> None:
        """As `step.LogitsSink`. A sequence with a row that is not finite ends in an error."""
        tokens, logprobs = sample(logits, self.params, [s.index for s in sequences], i)
        for s, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist()):
            if s.append(token, logprob):
                self._end(s)

    def _end(self, s: Sequence) -> None:
        """Set `finish_reason` if the newest token ends the sequence."""
        if s.tokens[-1] in self.eos_ids:
            s.finish_reason = "stop"
            return
        if self.stop is not None:
            s.text = self.stop.text_before(s.tokens)
        if s.text is not None:
            s.finish_reason = "stop"
        elif len(s.tokens) == self.params.max_tokens:
            s.finish_reason = "length"


class TeacherForcing:
    """A sink of logits that continues each sequence with the tokens of its text, and scores them.

    Args:
        targets: the tokens to score by the index of the sequence; each is also the input of the next step.
        every_position: the logits behind every token of the prompt are wanted, not only those behind the last.
    """

    def __init__(self, targets: dict[int, list[int]], every_position: bool):
        self.targets, self.every_position = targets, every_position
        self._next = {index: iter(tokens) for index, tokens in targets.items()}
        self.is_greedy: dict[int, list[bool]] = defaultdict(list)

    def take(self, i: int, sequences: list[Sequence], logits: Tensor) -> None:
        """As `step.LogitsSink`; with `every_position` a sequence stands once for each row that is its."""
        targets = [next(self._next[s.index], 0) for s in sequences]  # 0: one that has ended runs until its batch leaves
        logprobs, greedy = score_rows(logits, torch.tensor(targets))
        for s, target, logprob, is_greedy in zip(sequences, targets, logprobs, greedy):
            if s.append(target, logprob):
                self.is_greedy[s.index].append(is_greedy)
                if len(s.tokens) == len(self.targets[s.index]):
                    s.finish_reason = "length"


def sample(logits: Tensor, params: SamplingParams, indices: list[int], step: int) -> tuple[Tensor, Tensor]:
    """Choose one token per row.

    Args:
        logits: (B, V) of any float type.
        indices: each row's place in the job, which with the seed and the step decides its random number, so that
            batch sizes and neighbours do not.

    Returns:
        tokens (B,) int64, and their log-probabilities under the model (B,) fp32, NaN where a row's logits are
        broken. Both on the CPU.
    """
    chosen, logprobs = [], []
    # a few rows at a time: they stay in the caches of a CPU, which takes half the time
    for at in range(0, len(logits), SAMPLE_ROWS):
        rows = logits[at : at + SAMPLE_ROWS].float()
        if params.temperature < GREEDY_BELOW:
            tokens = rows.argmax(-1)
        else:
            tokens = _draw(rows / params.temperature, params, indices[at : at + SAMPLE_ROWS], step)
        chosen.append(tokens)
        logprobs.append(_logprobs(rows, tokens))
    return torch.cat(chosen).cpu(), torch.cat(logprobs).cpu()


def _draw(logits: Tensor, params: SamplingParams, indices: list[int], step: int) -> Tensor:
    if 0 < params.top_k < logits.shape[1]:
        order = logits.topk(params.top_k).indices
        logits = logits.gather(1, order)
    else:
        logits, order = logits.sort(dim=-1, descending=True, stable=True)
    p = torch.softmax(logits, -1)
    before = p.cumsum(-1) - p
    p = p.masked_fill(before >= params.top_p, 0.0)  # the most likely token always stays
    cumulative = p.cumsum(-1)
    u = torch.tensor([_uniform(params.seed, index, step) for index in indices], device=p.device)
    chosen = torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True)
    last = (p > 0).sum(-1, keepdim=True) - 1
    return order.gather(1, chosen.minimum(last.clamp(min=0)))[:, 0]


def _uniform(seed: int, index: int, step: int) -> float:
    """A number in [0, 1) from a counter: the same for the same three arguments, whatever was drawn before."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, index, step])).random(dtype=np.float32))


def score_rows(logits: Tensor, targets: Tensor) -> tuple[list[float], list[bool]]:
    """For each row of logits (B, V) the log-probability of its target (B,), in fp32, and whether no token has more."""
    logprobs, greedy = [], []
    for rows, target in zip(logits.split(SAMPLE_ROWS), targets.to(logits.device).split(SAMPLE_ROWS)):
        rows = rows.float()
        logprobs += _logprobs(rows, target).tolist()
        greedy += (rows.argmax(-1) == target).tolist()
    return logprobs, greedy


def _logprobs(rows: Tensor, tokens: Tensor) -> Tensor:
    """Of a token (B,) for each row of logits (B, V) fp32."""
    return rows.gather(1, tokens[:, None])[:, 0] - rows.logsumexp(-1)
