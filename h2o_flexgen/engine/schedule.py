"""The zig-zag block schedule (FlexGen, arXiv 2303.06865, section 4.1, algorithm 1). Pure Python, no torch.

For each token i, for each layer j, for each batch k: a layer's weights serve every batch before the next layer's
are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Step(NamedTuple):
    """Token step (0 is prefill), layer, batch."""

    i: int
    j: int
    k: int


class ZigZag:
    """The steps of one block. A batch that has finished takes no part in later token steps; the block ends when all
    have finished.

    Drawn for 2 layers and 2 batches; batch 1 finishes in step 1:

        i = 0   layer 0: k = 0, 1   layer 1: k = 0, 1
        i = 1   layer 0: k = 0, 1   layer 1: k = 0, 1
        i = 2   layer 0: k = 0      layer 1: k = 0
    """

    def __init__(self, num_tokens: int, num_layers: int, batches: Iterable[int]):
        self.num_tokens, self.num_layers = num_tokens, num_layers
        self.batches = list(batches)

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

    def cache_steps(self, blocks: list[tuple[int, int]], first: int = 1) -> Iterator[Step]:
        """Every step that needs one of these KV blocks, (layer, batch) in order, of batches that still run; the first
        is token step `first`: 0 if the prompts follow what the caches hold."""
        for i in range(first, self.num_tokens):
            for j, k in blocks:
                if k in self.batches:
                    yield Step(i, j, k)
