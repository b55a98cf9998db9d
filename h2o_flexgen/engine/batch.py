"""Sequences, and how a block of them is cut into batches and prefill micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from h2o_flexgen.engine.params import SamplingParams


@dataclass
class Sequence:
    """One prompt and what has been generated for it.

    Attributes:
        index: place of the prompt in the job.
        params: how its tokens are chosen, and when it ends.
        key: its place among the random numbers, below 2**64: `index` unless another is given.
        prompt, tokens: token ids. The last of `tokens` is the input of the next decode step.
        logprobs: log-probability of each of `tokens`.
        finish_reason: None while it runs; then "length", "stop" or "error".
        text: what was generated before the stop string that ended it; None if none did.
    """

    index: int
    prompt: list[int]
    params: SamplingParams = SamplingParams()
    key: int | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    text: str | None = None

    def __post_init__(self):
        self.key = self.index if self.key is None else self.key

    def append(self, token: int, logprob: float) -> bool:
        """Whether the token was appended. A sequence that has ended takes none; a `logprob` that is not finite ends it
        in an error."""
        if self.finish_reason is None and not math.isfinite(logprob):
            self.finish_reason = "error"
        if self.finish_reason is not None:
            return False
        self.tokens.append(token)
        self.logprobs.append(logprob)
        return True


@dataclass
class Batch:
    """Sequences whose KV block of a layer moves, and is attended to, at once.

    Attributes:
        micro: rows begin..end of each prefill micro-batch.
        lengths: (B,) int64, tokens of each prompt; longest: the most.
    """

    sequences: list[Sequence]
    micro: list[tuple[int, int]]

    def __post_init__(self):
        self.lengths = torch.tensor([len(s.prompt) for s in self.sequences])
        self.longest = int(self.lengths.max())

    def prompt_ids(self, begin: int, end: int) -> Tensor:
        """(end - begin, T) token ids, padded on the right to the longest of these rows.

        A row is padded with its own last token. Padding is masked, but 0 * NaN is NaN: the hidden state of another
        token might overflow where this prompt's do not.
        """
        rows = [s.prompt for s in self.sequences[begin:end]]
        width = max(map(len, rows))
        return torch.tensor([row + row[-1:] * (width - len(row)) for row in rows])


def make_batches(sequences: list[Sequence], batch_size: int, prefill_tokens: int) -> list[Batch]:
    """Cut a block into batches, and those into micro-batches of at most `prefill_tokens` tokens, padding included."""
    batches = []
    for at in range(0, len(sequences), batch_size):
        rows = sequences[at : at + batch_size]
        micro, begin = [], 0
        while begin < len(rows):
            count = max(1, prefill_tokens // max(len(s.prompt) for s in rows[begin:]))
            micro.append((begin, min(begin + count, len(rows))))
            begin = micro[-1][1]
        batches.append(Batch(rows, micro))
    return batches


def prompt_positions(lengths: Tensor, width: int) -> Tensor:
    """(B, width) positions of prompts. Padding repeats a prompt's last position, so that no prompt looks longer."""
    return torch.minimum(torch.arange(width), lengths[:, None] - 1)
