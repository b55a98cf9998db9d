"""Sequences, and how the tokens of a pass are cut into chunks, which go through the matmuls of a layer one by one.

    chunk 0   | prompts of batch 0                           |
    chunk 1   | prompts of batch 0 (the rest)                |
    chunk 2   | steps of batch 0 | prompt | steps of batch 1 |   a few prompts join the decode steps

A piece is a group of rows that attend together: a decode step of a batch, or a few prompts of one batch with the same
prefix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from h2o_flexgen.engine.answers import AnswerParser
from h2o_flexgen.engine.params import SamplingParams
from h2o_flexgen.engine.prefixes import Node
from h2o_flexgen.kv_cache.rule import Rows
from h2o_flexgen.models.rope import Positions
from h2o_flexgen.planning.workload import FORCED


@dataclass(eq=False)
class Sequence:
    """One row of a job: a prompt, and the tokens generated for it.

    Attributes:
        index: place of the prompt in the job.
        params: how its tokens are chosen, and when it ends.
        key: selects its random numbers, below 2**64; default: `index`.
        prompt, tokens: token ids. The last of `tokens` is the input of the next decode step.
        logprobs: log-probability of each of `tokens`.
        finish_reason: None while it runs; then "length", "stop" or "error".
        text: the output before the stop string that ended it; None if none did.
        answer_parser: splits the answer to a conversation; None for other texts.
        wanted: the first token of the prompt whose logits are wanted; default: the last one.
        task: what its states or logits are for, if it is not continued: as in `engine.tasks`.
        length: tokens that its cache has seen.
        prompt_end: of those, up to the end of the last prompt.
        path: the last node of the prefix that it shares.
        rank: how many rows of the job began before it.
        answer: which of the answers to the prompt it is.
        is_whole: nothing follows the last of `tokens`, which is no input then.
        error: why it ended with finish_reason "error".
        top_logprobs: for each of `tokens`, if wanted, the most likely ones with their log-probabilities.
        prompt_logprobs: the same for the prompt's tokens after `wanted`, with their own.
    """

    index: int
    prompt: list[int]
    params: SamplingParams = SamplingParams()
    key: int | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    text: str | None = None
    answer_parser: AnswerParser | None = None
    wanted: int | None = None
    task: object | None = None
    length: int = 0
    prompt_end: int = 0
    path: Node | None = None
    rank: int = 0
    answer: int = 0
    is_whole: bool = False
    error: str = "the model's hidden states overflowed for this prompt"
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)

    ahead = 0  # tokens of the prompt after those that are computed

    def __post_init__(self):
        self.key = self.index if self.key is None else self.key
        self.wanted = len(self.prompt) - 1 if self.wanted is None else self.wanted

    @property
    def will_end(self) -> bool:
        """Whether it is known to end with its next token."""
        done = self.length - self.prompt_end + 2 + self.pending if self.tokens else 1
        return done >= self.params.max_tokens and len(self.inputs) <= FORCED  # what a pass takes of every row

    @property
    def pending(self) -> int:
        """How many of `tokens` were known ahead, and are not scored yet."""
        return len(self.tokens) - len(self.logprobs)

    @property
    def inputs(self) -> list[int]:
        """Tokens that have not been inputs yet; the logits after each score the next one, or choose it."""
        return self.tokens[len(self.logprobs) - 1 : len(self.tokens) - self.is_whole]

    def append(self, token: int, logprob: float) -> bool:
        """Append a token, or score one that was known, unless the sequence has ended; returns whether it did. A
        `logprob` that is not finite ends the sequence with an error."""
        if self.finish_reason is None and not math.isfinite(logprob):
            self.finish_reason = "error"
            del self.tokens[len(self.logprobs) :]
        if self.finish_reason is not None:
            return False
        if not self.pending:
            self.tokens.append(token)
        self.logprobs.append(logprob)
        return True

    def fail(self, why: str) -> None:
        """End with an error."""
        self.error = why
        self.finish_reason = "error"


class Round(NamedTuple):
    """A token of some rows of a piece."""

    tokens: list[int]  # of the piece
    places: list[int]  # of the rows in the KV block
    lengths: Rows


@dataclass(eq=False)
class Piece:
    """Rows that attend together.

    Attributes:
        batch: the batch of their KV block.
        rows: each a `Sequence`, or a `prefixes.Node` that is computed for the rows that share it.
        places: of the rows in the KV block; a node has none.
        path: the last node of the prefix that all rows share; None if they share none.
        frees: nodes that neither a later piece of the pass nor a waiting row needs.
        counts: tokens of each row: its newest one, or several that are known. Default: 1 each.
    """

    batch: int
    rows: list
    places: list[int]
    path: Node | None = None
    frees: list[Node] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    is_prompt = False

    def __post_init__(self):
        self.counts = self.counts or [1] * len(self.rows)

    @cached_property
    def size(self) -> int:
        """Tokens."""
        return sum(self.counts)

    def ids(self) -> list[int]:
        return [token for s, count in zip(self.rows, self.counts) for token in s.inputs[:count]]

    @cached_property
    def rounds(self) -> list[Round]:
        """The tokens of all rows that attend together, the first of each row first. Rows of a round are neighbours, so
        that none of their KV block is copied."""
        begins = [0, *accumulate(self.counts)]
        found = []
        for n in range(max(self.counts)):
            for rows in runs([row for row, count in enumerate(self.counts) if count > n]):
                length = torch.tensor([self.rows[row].length + n for row in rows])
                ends = torch.tensor([self.rows[row].prompt_end for row in rows])
                places = [self.places[row] for row in rows]
                found.append(Round([begins[row] + n for row in rows], places, Rows.steps(length, ends)))
        return found

    @cached_property
    def prompt_ends(self) -> torch.Tensor:
        """(B,) int64, tokens of each text up to the end of the last prompt."""
        return torch.tensor([s.prompt_end for s in self.rows])

    @cached_property
    def positions(self) -> Positions:
        at = torch.tensor([s.length + n for s, count in zip(self.rows, self.counts) for n in range(count)])
        return Positions(at, at + 1)

    def logits(self) -> list[tuple]:
        """(row, index among the piece's tokens) of all logits that are wanted."""
        rows = [s for s, count in zip(self.rows, self.counts) for _ in range(count)]
        return [(s, n) for n, s in enumerate(rows)]

    def texts_after(self) -> list[tuple[int, int]]:
        """(tokens, tokens up to the end of the prompt) of each text after this piece."""
        return [(s.length + count, s.prompt_end) for s, count in zip(self.rows, self.counts)]

    def advance(self) -> None:
        """Count the tokens of this piece as cached."""
        for s, count in zip(self.rows, self.counts):
            s.length += count


def runs(rows: list[int]) -> list[list[int]]:
    """Ascending numbers, cut where one is missing."""
    found: list[list[int]] = []
    for row in rows:
        if found and row == found[-1][-1] + 1:
            found[-1].append(row)
        else:
            found.append([row])
    return found


class PromptPiece(Piece):
    """Prompts, without the prefix that they share."""

    is_prompt = True

    @cached_property
    def shared(self) -> int:
        return 0 if self.path is None else self.path.end

    @cached_property
    def texts(self) -> list[list[int]]:
        """The tokens to compute of each row."""
        return [s.prompt[self.shared :] for s in self.rows]

    @cached_property
    def size(self) -> int:
        return sum(map(len, self.texts))

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.texts))

    def ids(self) -> list[int]:
        return [token for text in self.texts for token in text]

    @cached_property
    def lengths(self) -> Rows:
        length = torch.tensor([s.length + self.shared for s in self.rows])
        new = torch.tensor([len(text) for text in self.texts])
        return Rows(length, new, length + new + torch.tensor([s.ahead for s in self.rows]))

    @cached_property
    def positions(self) -> Positions:
        rows = self.lengths
        ends = (rows.length + rows.new).repeat_interleave(rows.new)
        at = [torch.arange(first, first + count) for first, count in zip(rows.length.tolist(), rows.new.tolist())]
        return Positions(torch.cat(at), ends)

    def logits(self) -> list[tuple]:
        found = []
        begin = 0
        for s, text in zip(self.rows, self.texts):
            first = max(0, s.wanted - self.shared)
            found += [(s, begin + n) for n in range(first, len(text))]
            begin += len(text)
        return found

    def texts_after(self) -> list[tuple[int, int]]:
        return [(s.length + len(s.prompt),) * 2 for s in self.rows]

    def advance(self) -> None:
        for s in self.rows if self.places else ():
            s.length = s.prompt_end = s.length + len(s.prompt)

    @cached_property
    def at(self) -> torch.Tensor:
        """(N,) int64, the tokens' indices when all rows are padded to the longest."""
        begins = range(0, len(self.rows) * self.longest, self.longest)
        return torch.cat([torch.arange(begin, begin + len(text)) for begin, text in zip(begins, self.texts)])

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """(N, H, D) of all tokens -> (B, H, T, D), padded with 0, since masked elements must be finite."""
        B = len(self.rows)
        T = self.longest
        if len(x) < B * T:
            x = x.new_zeros(B * T, *x.shape[1:]).index_copy_(0, self.at.to(x.device, non_blocking=True), x)
        return x.unflatten(0, (B, T)).transpose(1, 2)

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        """(B, H, T, D) -> (N, H, D), without the padding."""
        x = x.transpose(1, 2).flatten(0, 1)
        return x if len(x) == self.size else x.index_select(0, self.at.to(x.device, non_blocking=True))


class Home(NamedTuple):
    """The place of a chunk's hidden states between stages, among the other hidden states of its batch."""

    batch: int
    number: int  # of the chunk
    before: int  # tokens of the chunks before it


@dataclass
class Chunk:
    """Pieces whose tokens go through matmuls together. `home`: None keeps hidden states on the device."""

    pieces: list[Piece]
    home: Home | None = None

    @cached_property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def is_prompts(self) -> bool:
        """Whether it has only prompts, of one batch."""
        return all(piece.is_prompt and piece.batch == self.pieces[0].batch for piece in self.pieces)

    @property
    def is_joint(self) -> bool:
        """Whether its pieces may share matmuls: prompts of one batch, or any pieces with a decode step."""
        return self.is_prompts or not all(piece.is_prompt for piece in self.pieces)

    @cached_property
    def sizes(self) -> list[int]:
        return [piece.size for piece in self.pieces]

    @cached_property
    def prompt_share(self) -> float:
        """The fraction of its tokens that belong to prompts."""
        return sum(piece.size for piece in self.pieces if piece.is_prompt) / self.size

    def ids(self) -> torch.Tensor:
        """(N,) int64."""
        return torch.tensor([token for piece in self.pieces for token in piece.ids()])

    @cached_property
    def positions(self) -> Positions:
        parts = [piece.positions for piece in self.pieces]
        return Positions(torch.cat([part.at for part in parts]), torch.cat([part.ends for part in parts]))


class ChunkLimits(NamedTuple):
    """How many tokens are joined in a chunk."""

    prefill_tokens: int  # of prompts alone, padding included; a single prompt may exceed it
    group_rows: int  # of decode steps (`planning.workload.group_rows`)
    joint: int  # of prompts and decode steps

    def of(self, chunk: Chunk) -> int:
        if chunk.is_prompts:
            return self.prefill_tokens
        return self.joint if any(piece.is_prompt for piece in chunk.pieces) else self.group_rows


def cut(pieces: Iterable[Piece], limits: ChunkLimits) -> list[Chunk]:
    """Cut pieces, in the order of their batches, into chunks: prompts of one batch, or prompts and decode steps."""
    chunks: list[Chunk] = []
    homes: dict[int, Home] = {}  # of the next chunk of each batch
    for piece in pieces:
        joined = Chunk([*chunks[-1].pieces, piece]) if chunks else None
        if joined and joined.is_joint and joined.size <= limits.of(joined):
            chunks[-1] = joined
        else:
            chunks.append(Chunk([piece]))
    for chunk in chunks:
        if chunk.is_prompts:
            k = chunk.pieces[0].batch
            chunk.home = homes.get(k, Home(k, 0, 0))
            homes[k] = Home(k, chunk.home.number + 1, chunk.home.before + chunk.size)
    return chunks
