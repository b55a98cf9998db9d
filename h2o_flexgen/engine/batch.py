"""Sequences, and how a block of them is cut into batches and prefill micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from h2o_flexgen.engine.params import SamplingParams
from h2o_flexgen.kv_cache.rule import Past


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
        seen: tokens of its stream before the prompt; last_prompt: of those, up to the end of the prompt before.
    """

    index: int
    prompt: list[int]
    params: SamplingParams = SamplingParams()
    key: int | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    text: str | None = None
    seen: int = 0
    last_prompt: int = 0

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
        micro: sequences begin..end of each prefill micro-batch.
        rows: their places in the KV block.
        is_stream: the KV block has been there before and will be there after this batch, and may have other rows.
        lengths: (B,) int64, tokens of each prompt; longest: the most.
        ends: (B,) int64, tokens of each text up to the end of the prompt.
    """

    sequences: list[Sequence]
    micro: list[tuple[int, int]]
    rows: list[int]
    is_stream: bool = False

    def __post_init__(self):
        self.lengths = torch.tensor([len(s.prompt) for s in self.sequences])
        self.longest = int(self.lengths.max())
        self.ends = self.lengths + torch.tensor([s.seen for s in self.sequences])

    def past(self, begin: int, end: int) -> Past:
        few = self.sequences[begin:end]
        return Past(*(torch.tensor([getattr(s, name) for s in few]) for name in ("seen", "last_prompt")))

    def running(self) -> Batch:
        """The batch of the next decode step: of streams without those that have ended, whose caches must take nothing
        more."""
        left = [n for n, s in enumerate(self.sequences) if s.finish_reason is None]
        if not self.is_stream or len(left) == len(self.sequences):
            return self
        return Batch([self.sequences[n] for n in left], [], [self.rows[n] for n in left], is_stream=True)

    def positions(self, begin: int, end: int) -> Tensor:
        """(end - begin, T) positions of prompts. Padding repeats a prompt's last one, so that no text looks longer."""
        lengths, ends = self.lengths[begin:end, None], self.ends[begin:end, None]
        return torch.minimum(ends - lengths + torch.arange(int(lengths.max())), ends - 1)

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
        batches.append(Batch(rows, micro_batches(rows, prefill_tokens), list(range(len(rows)))))
    return batches


def stream_batches(sequences: list[Sequence], batch_size: int, prefill_tokens: int) -> dict[int, Batch]:
    """The batches of a block of streams, by their place in the block; those without a sequence are left out. The
    `index` of a sequence is its place in the block."""
    found = {}
    for s in sequences:
        found.setdefault(s.index // batch_size, []).append(s)
    return {
        k: Batch(few, micro_batches(few, prefill_tokens), [s.index % batch_size for s in few], is_stream=True)
        for k, few in found.items()
    }


def micro_batches(sequences: list[Sequence], prefill_tokens: int) -> list[tuple[int, int]]:
    """(begin, end) of micro-batches of at most `prefill_tokens` tokens, padding included, or of one sequence."""
    micro, begin = [], 0
    while begin < len(sequences):
        count = max(1, prefill_tokens // max(len(s.prompt) for s in sequences[begin:]))
        micro.append((begin, min(begin + count, len(sequences))))
        begin = micro[-1][1]
    return micro
