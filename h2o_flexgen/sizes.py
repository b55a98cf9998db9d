"""Constants and size arithmetic that the engine and the planner share. Pure Python, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt

from h2o_flexgen.policy import Policy

#: bytes of a page of memory, which direct disk requests are made of
PAGE = 4096
#: bytes of a disk request: larger ones are read no faster, smaller ones cost CPU time (docs/benchmarks/disk.json)
REQUEST = 4 << 20
LEAST_REQUEST = 1 << 20
#: threads that keep the disk's queue full
THREADS = 4
#: the most KV blocks that are staged on the device at once
KV_BUFFERS = 3
#: slots by which a full cache grows behind the prompt: an eighth of what it holds, in multiples of the least. What is
#: still empty in the last segment is moved like the rest, and on a GPU attended to; each takes two more matmuls there.
SEGMENT = 32
LARGEST_SEGMENT = 128
#: bytes of a generated token, in Python: a number, its logprob, and their places in two lists
TOKEN = 72
#: and of one of a prompt
PROMPT_TOKEN = 36
#: rows of a job that are read ahead at least, and at least so many times the places of a block
WINDOW = 4096
WINDOW_BLOCKS = 4
#: micro-batches whose hidden states may be in write-back at once
WRITE_BACKS = 2
#: rows that go through the head at once, and of their logits those that are turned into tokens at once
HEAD_ROWS = 128
SAMPLE_ROWS = 16
#: bytes for each logit that is sorted
SORTING = {"cpu": 30, "cuda": 50}
#: rows that go through the matmuls of a decode step together, if their batches are smaller: the rate of a matmul grows
#: up to about this many (docs/benchmarks/engine_gemm.json)
GROUP_ROWS = 128
#: attention over prompts: probabilities held at once (what stays in a CPU's cache, or fills a GPU), and queries
#: of one chunk; measured on 2 cores, prompts of 64 to 2048 tokens: with 128 queries, which waste few pairs, up to a
#: quarter less time than with 256, and at 2048 tokens up to a sixth more; on CUDA not measured
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
QUERY_CHUNK = {"cpu": 128, "cuda": 256}
#: elements that are widened to fp32, or rotated, at once: of K where positions roll, of hidden states in a norm
WIDENED_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}
#: tokens of a stream that are read at once
STREAM_CHUNK = 256
#: rows of a matmul in int8 at once, whose sums are in int32
INT8_ROWS = 512
#: columns with outliers that a matmul in int8 is planned with
OUTLIER_COLUMNS = 64
#: bytes of weights and rows of tokens in float32 at once, where matmuls in 16 bits go through float32
WIDEN_BYTES = 4 << 20
WIDEN_ROWS = 512
#: bytes of a quantised head that are decoded at once
SLICE_BYTES = 16 << 20
#: which divides the rows of such a slice
SLICE_MULTIPLE = 16


@dataclass(frozen=True)
class Workload:
    """What a job asks for.

    Attributes:
        prompt_lens: tokens of each prompt, the longest first.
        gen_len: the most tokens of an output; with 1 nothing is decoded.
        held: tokens that the caches hold already when a prompt comes; 0 but for streams.
        mean_len: tokens of the average output, as far as is known; None: all are as long as they may be.
        path: the most tokens that prompts have in common; shared: tokens of all prompts that are computed with another.
        output_tokens: the most of all outputs together; None where that is not known.
        window: rows that are in memory at once; None: all of them, and their outputs to the end.
    """

    prompt_lens: Sequence[int]
    gen_len: int
    held: int = 0
    mean_len: float | None = None
    path: int = 0
    shared: int = 0
    output_tokens: int | None = None
    window: int | None = None

    @property
    def longest(self) -> int:
        return int(self.prompt_lens[0])

    @property
    def output_bytes(self) -> int:
        """RAM for the outputs, and for prompts that are read while the job runs."""
        rows = len(self.prompt_lens)
        if self.window is None:
            return TOKEN * rows * self.gen_len
        rows = min(rows, self.window)
        return rows * self.longest * PROMPT_TOKEN + TOKEN * max(1, rows // WINDOW_BLOCKS) * self.gen_len


def full_segments(prompt_len: int, gen_len: int) -> tuple[int, ...]:
    """Slots of a full cache, by segment: the prompt's, and what it grows by."""
    sizes, left = [prompt_len], gen_len - 1  # the last token is never attended to
    while left > 0:
        size = max(SEGMENT, sum(sizes) // 8 // SEGMENT * SEGMENT)
        sizes.append(min(size, LARGEST_SEGMENT, left))
        left -= sizes[-1]
    return tuple(sizes)


def wal_rows(segments: Sequence[int]) -> int:
    """Tokens per sequence that the write-ahead log of a KV block holds. A cache that grows is compacted by whole
    segments, one of fixed size all at once: reading n/2 rows a step and writing slots/n balance at sqrt(2 slots)."""
    return max(segments[1:], default=max(1, isqrt(2 * segments[0])))


def kv_buffers(overlap: bool, on_disk: bool) -> int:
    """Staging buffers for KV blocks: one in use, one being loaded or written back; with blocks on disk one more, so
    that the disk has something to read during the matmuls of a layer, which use none."""
    if not overlap:
        return 1
    return KV_BUFFERS if on_disk else 2


def double_buffers(overlap: bool) -> int:
    """Staging buffers of weights and of activations: one is computed with while the other is filled."""
    return 2 if overlap else 1


def micro_tokens(prefill_tokens: int, longest: int, batch: int) -> int:
    """The most tokens, padding included, of a prefill micro-batch of prompts of up to `longest` tokens; a single
    sequence may exceed `prefill_tokens`."""
    return max(longest, min(prefill_tokens, batch * longest))


def batch_sizes(num_prompts: int, policy: Policy) -> list[int]:
    """Sequences per batch of the first, largest block."""
    left = min(num_prompts, policy.block_size)
    sizes = []
    while left > 0:
        sizes.append(min(left, policy.gpu_batch_size))
        left -= sizes[-1]
    return sizes


def matmul_groups(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Which batches go through the matmuls of a decode step together: (begin, end) of each group, of one batch or of at
    most GROUP_ROWS sequences. A larger group saves less compute than it costs: fewer KV blocks are staged beside it.

    Args:
        sizes: sequences of each batch.
    """
    groups = []
    rows = 0
    for n, size in enumerate(sizes):
        if groups and rows + size <= GROUP_ROWS:
            groups[-1] = groups[-1][0], n + 1
            rows += size
        else:
            groups.append((n, n + 1))
            rows = size
    return groups


def matmul_rows(sizes: Sequence[int]) -> list[int]:
    """Sequences of each group."""
    return [sum(sizes[begin:end]) for begin, end in matmul_groups(sizes)]


def prefill_pairs(length: int, device: str, held: int = 0) -> int:
    """Pairs of query and key that attention over a prompt behind `held` tokens computes for one head: chunks of
    queries, each over all keys up to its end. `device`: "cpu" or "cuda"."""
    chunk = QUERY_CHUNK[device]
    ends = [min(begin + chunk, length) for begin in range(0, length, chunk)]
    return sum((end - begin) * (held + end) for begin, end in zip([0, *ends], ends))


def slice_rows(width: int, itemsize: int) -> int:
    """Rows of a quantised matrix that are decoded at once: a multiple of what kernels in int8 want."""
    return max(SLICE_MULTIPLE, SLICE_BYTES // (width * itemsize) // SLICE_MULTIPLE * SLICE_MULTIPLE)


def aligned(nbytes: int) -> int:
    """Up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def request_bytes(nbytes: int, most: int = REQUEST, threads: int = THREADS) -> int:
    """How large the requests are in which so many bytes are read or written: cut so that every thread has a part, but
    not smaller than LEAST_REQUEST."""
    return min(most, max(LEAST_REQUEST, aligned(-(-nbytes // threads))))


def requests(nbytes: int) -> int:
    """How many requests that is."""
    return -(-nbytes // request_bytes(nbytes))


def staging_span(nbytes: int) -> int:
    """Room for a tensor at any phase within a page, in whole pages."""
    return aligned(nbytes) + PAGE
