"""The zig-zag block schedule (FlexGen, arXiv 2303.06865, section 4.1, algorithm 1). Pure Python, no torch.

For each token i, for each layer j, for each batch k: a layer's weights serve every batch before the next layer's
are needed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple


class Step(NamedTuple):
    """Token step (0 is prefill), layer, batch."""

    i: int
    j: int
    k: int


class ZigZag:
    """The steps of one block. A batch that has finished takes part in no later token step; when all have, the
    block ends."""

    def __init__(self, num_tokens: int, num_layers: int, num_batches: int):
        self.num_tokens, self.num_layers = num_tokens, num_layers
        self.batches = list(range(num_batches))

    def finish(self, batch: int) -> None:
        """Call at a batch's last layer."""
        self.batches = [k for k in self.batches if k != batch]

    def layers(self) -> Iterator[tuple[int, int, list[int]]]:
        """(i, j, the batches that go through layer j) in order."""
        for i in range(self.num_tokens):
            active = self.batches
            if not active:
                return
            for j in range(self.num_layers):
                yield i, j, active

    def first_at(self, pieces: list[tuple[int, int]], since: Step) -> Step | None:
        """The first step, from `since` on, at one of `pieces`: (layer, batch), sorted, of batches that still run."""
        at = bisect_left(pieces, since[1:])
        if at < len(pieces) and since.i < self.num_tokens:
            return Step(since.i, *pieces[at])
        if pieces and since.i + 1 < self.num_tokens:
            return Step(since.i + 1, *pieces[0])
        return None
