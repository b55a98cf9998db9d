"""How full a block is from pass to pass, for rows that take each other's places (`engine.scheduler`). Pure Python."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from math import ceil, inf, log1p
from typing import NamedTuple

#: rows of a job that are simulated at most, and levels of occupancy that are told apart
_ROWS = 8192
_LEVELS = 16
#: the golden ratio, whose multiples spread evenly
_GOLDEN = 0.618033988749895


class Stretch(NamedTuple):
    """Passes that are alike, on average: rows that decode, and rows that prefill, in each."""

    passes: float
    decoding: float
    entering: float


def stretches(lengths: Sequence[int], places: int) -> list[Stretch]:
    """The passes of a job whose outputs have these lengths, in the order in which rows run; those in which nothing
    decodes come first."""
    scale = max(1.0, len(lengths) / max(_ROWS, places))
    lengths = lengths[: max(_ROWS, places)]
    entering: dict[int, int] = defaultdict(int)
    leaving: dict[int, int] = defaultdict(int)
    free = [0] * min(places, len(lengths))  # the pass from which on each place is
    for length in lengths:
        begin = heapq.heappop(free)
        entering[begin] += 1
        leaving[begin + length] += 1
        heapq.heappush(free, begin + length)
    levels: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    running = 0
    for n in range(max(free)):
        running -= leaving[n]
        level = levels[ceil(_LEVELS * running / places)]
        for at, count in enumerate((1, running, entering[n])):
            level[at] += count
        running += entering[n]
    # what is simulated begins and ends once, however many rows there are
    return [Stretch(scale * n, rows / n, new / n) for _, (n, rows, new) in sorted(levels.items())]


def expected(rows: int, most: int, mean: float | None) -> list[int]:
    """Lengths of outputs that end by chance after `mean` tokens on average, or at `most`; None: all have those."""
    rows = min(rows, _ROWS)
    if mean is None or mean >= most:
        return [most] * rows
    # quantiles of the geometric distribution, in an order that mixes them
    quantiles = ((n * _GOLDEN + 0.5) % 1.0 for n in range(rows))
    scale = log1p(-1 / mean) if mean > 1 else -inf
    return [min(most, max(1, ceil(log1p(-each) / scale))) for each in quantiles]
