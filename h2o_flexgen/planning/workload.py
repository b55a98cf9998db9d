"""What a job asks for, and how its rows are cut into batches. Pure Python, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from h2o_flexgen.models.spec import ModelSpec
from h2o_flexgen.policy import Policy

#: bytes of a generated token in Python: an int, its logprob, and a place in each of two lists
TOKEN_BYTES = 72
#: bytes of a prompt's token in Python
PROMPT_TOKEN_BYTES = 36
#: rows of a job that are read ahead: at least WINDOW, and at least WINDOW_BLOCKS times the places of a block
WINDOW = 4096
WINDOW_BLOCKS = 4
#: rows that go through the head at once
HEAD_ROWS = 128
#: rows of logits that are turned into tokens at once
SAMPLE_ROWS = 16
#: where tokens are expected to go through this share of a layer's experts or more, all are read: ahead of the router's
#: answer, which costs less than waiting for it
ALL_EXPERTS = 0.9
#: rows that go through the matmuls of a decode step together, if their batches are smaller: the rate of a matmul grows
#: up to about this many (docs/benchmarks/engine_gemm.json)
GROUP_ROWS = 128


#: bytes of what structured output knows of a row: its place in a grammar, and states that it has seen
GRAMMAR_BYTES = 512 << 10
#: where tokens are known ahead, the most tokens of a pass of decode steps are this many times the places
FORCED = 4


@dataclass(frozen=True)
class Workload:
    """What a job asks for.

    Attributes:
        prompt_lens: tokens of each prompt, the longest first.
        gen_len: the most tokens of an output; with 1 nothing is decoded.
        cached_len: tokens that the caches already hold when a prompt arrives; above 0 only in streams.
        mean_len: tokens of the average output, if known; None: all outputs have `gen_len`.
        path: tokens of the longest prefix that prompts share.
        shared: tokens, summed over all prompts, that are computed with another prompt.
        output_tokens: the most tokens of all outputs together, if known.
        window: rows that are in memory at once; None: all of them, and their outputs to the end.
        logits: the most tokens of a prompt whose logits are wanted.
        is_structured, is_known: some outputs are structured, or all are given: decode steps may have several tokens of
            a row.
    """

    prompt_lens: Sequence[int]
    gen_len: int
    cached_len: int = 0
    mean_len: float | None = None
    path: int = 0
    shared: int = 0
    output_tokens: int | None = None
    window: int | None = None
    logits: int = 1
    is_structured: bool = False
    is_known: bool = False

    def row_tokens(self, policy: Policy, cuda: bool) -> int:
        """The most tokens of a pass of decode steps, as a multiple of its rows. Several known ones of a row go together
        where a pass is expensive, but not if the cache streams: they would write back whole rows."""
        is_cached = policy.fractions("cache")[0] == 1
        streams = policy.fractions("weights")[0] < 1
        is_expensive = streams or (cuda and self.is_structured)
        return FORCED if (self.is_structured or self.is_known) and is_cached and is_expensive else 1

    @property
    def longest(self) -> int:
        return int(self.prompt_lens[0])

    @property
    def output_bytes(self) -> int:
        """RAM for the outputs, and for prompts that are read while the job runs."""
        rows = len(self.prompt_lens)
        if self.window is None:
            return rows * self.gen_len * TOKEN_BYTES
        rows = min(rows, self.window)
        running = max(1, rows // WINDOW_BLOCKS)
        return rows * self.longest * PROMPT_TOKEN_BYTES + running * self.gen_len * TOKEN_BYTES


def grammar_bytes(workload: Workload, places: int) -> int:
    """RAM for the grammars of rows with structured output, which run in so many places."""
    return places * GRAMMAR_BYTES * workload.is_structured


class Batch(NamedTuple):
    """The sequences of a batch, and the tokens of its longest prompt."""

    size: int
    longest: int


def batch_sizes(num_prompts: int, policy: Policy) -> list[int]:
    """Sequences of each batch of the first, largest block."""
    full, rest = divmod(min(num_prompts, policy.block_size), policy.gpu_batch_size)
    sizes = [policy.gpu_batch_size] * full
    return [*sizes, rest] if rest else sizes


def batches_of(policy: Policy, prompt_lens: Sequence[int]) -> tuple[Batch, ...]:
    """Batches of a block of these prompts, the longest first."""
    sizes = batch_sizes(len(prompt_lens), policy)
    return tuple(map(Batch, sizes, prompt_lens[:: policy.gpu_batch_size]))


def micro_tokens(prefill_tokens: int, longest: int, batch: int) -> int:
    """The most tokens, padding included, of a prefill micro-batch of prompts of up to `longest` tokens; a single
    sequence may exceed `prefill_tokens`."""
    return max(longest, min(prefill_tokens, batch * longest))


def group_rows(spec: ModelSpec) -> int:
    """Rows that go through the matmuls of a decode step together: enough for GROUP_ROWS of each expert, if there are
    experts."""
    return GROUP_ROWS * spec.experts // spec.active if spec.experts else GROUP_ROWS


def read_share(spec: ModelSpec, tokens: int) -> float:
    """The fraction of its experts that a pass of so many tokens reads."""
    touched = spec.touched(tokens) if spec.experts else 1.0
    return touched if touched < ALL_EXPERTS else 1.0


def matmul_rows(sizes: Sequence[int], most: int) -> list[int]:
    """Rows of each group of batches whose decode steps share matmuls: of one batch, or of several with at most `most`
    rows together (`group_rows`). A larger group saves less compute than it costs: fewer KV blocks are staged beside
    it. `sizes`: sequences of each batch."""
    groups: list[int] = []
    for size in sizes:
        if groups and groups[-1] + size <= most:
            groups[-1] += size
        else:
            groups.append(size)
    return groups
