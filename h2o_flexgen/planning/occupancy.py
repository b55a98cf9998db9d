"""How full a block is from pass to pass, for rows that take each other's places (`engine.scheduler`). Pure Python."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from math import ceil, inf, log1p
from typing import NamedTuple

#: the most rows of a job that are simulated
_ROWS = 8192
#: levels of occupancy; passes of one level are averaged
_LEVELS = 16
#: the golden ratio's fraction, whose multiples spread evenly over [0, 1)
_GOLDEN = 0.618033988749895


class Stretch(NamedTuple):
    """Passes that are alike, with the average rows that decode and that prefill in each."""

    passes: float
    decoding: float
    entering: float


def stretches(lengths: Sequence[int], places: int) -> list[Stretch]:
    """The passes of a job whose outputs have these lengths, in the order in which rows run; passes in which nothing
    decodes come first."""
    simulated = max(_ROWS, places)
    scale = max(1.0, len(lengths) / simulated)
    lengths = lengths[:simulated]
    entering: Counter[int] = Counter()  # rows by pass
    leaving: Counter[int] = Counter()
    free = [0] * min(places, len(lengths))  # the first pass in which each place is free
    for length in lengths:
        begin = heapq.heappop(free)
        entering[begin] += 1
        leaving[begin + length] += 1
        heapq.heappush(free, begin + length)
    levels: dict[int, Stretch] = {}  # sums over passes
    decoding = 0
    for n in range(max(free)):
        decoding -= leaving[n]
        level = ceil(_LEVELS * decoding / places)
        passes, decoded, entered = levels.get(level, Stretch(0, 0, 0))
        levels[level] = Stretch(passes + 1, decoded + decoding, entered + entering[n])
        decoding += entering[n]
    # scaled to all rows, as if the first and the last passes came again with each part of the job
    found = [levels[level] for level in sorted(levels)]
    return [Stretch(scale * n, decoded / n, entered / n) for n, decoded, entered in found]


def expected(rows: int, most: int, mean: float | None) -> list[int]:
    """Lengths of outputs that end by chance after `mean` tokens on average, or at `most`; None: all have `most`."""
    rows = min(rows, _ROWS)
    if mean is None or mean >= most:
        return [most] * rows
    # quantiles of the geometric distribution, in an order that mixes them
    quantiles = ((n * _GOLDEN + 0.5) % 1.0 for n in range(rows))
    scale = log1p(-1 / mean) if mean > 1 else -inf
    return [min(most, max(1, ceil(log1p(-each) / scale))) for each in quantiles]
