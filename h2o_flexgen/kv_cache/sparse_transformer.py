"""Keep columns of a lattice over the text: the patterns of the Sparse Transformer (arXiv 1904.10509, section 4.3).

There, a query attends to a local window and to fixed columns of the attention matrix: every s-th token before it
(strided), or the last c of every block (fixed). H2O (arXiv 2306.14048, table 2) compares with both, alone and combined
with heavy hitters. A cache must know which tokens no later query will need, so here columns are counted from the start
of the text, and the lattice only ever gets coarser: a token on it now has been on it from the start.

    strided, s = 4             X . . . X . . . X . . . X R R R
    fixed, blocks of 3, c = 1  . . X . . X . . X . . X . R R R      X on the lattice, R recent
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from h2o_flexgen.kv_cache.fixed_rule import FixedRule
from h2o_flexgen.kv_cache.rule import Tokens


@dataclass(frozen=True)
class StridedCache(FixedRule):
    """Strided pattern of the Sparse Transformer.

    Keeps the last `recent` tokens and every s-th token of the text, where s is the smallest power of two for which
    these fit in the `heavy` slots. Left-over slots go to the newest other tokens.
    Why: it is a baseline that ignores attention, but covers the whole text evenly.
    """

    name = "strided"
    has_heavy_hitters: ClassVar[bool] = False

    @property
    def share(self) -> int:
        """Slots for the lattice: those that protect no other token, or half of them with heavy hitters."""
        return (self.slots - self.recent_window - self.first - self.last) // (2 if self.has_heavy_hitters else 1)

    def on_lattice(self, position: Tensor, length: Tensor) -> Tensor:
        """(B, KV, N) bool: at most `share` tokens outside the recent window. length (B, 1, 1) int32 of the text."""
        return (position & (_power_of_two(length, self.share) - 1)).logical_not()

    def protects(self, tokens: Tokens) -> Tensor:
        stays = super().protects(tokens)
        if self.share:
            stays.logical_or_(self.on_lattice(tokens.position, tokens.newest + 1))
        return stays

    def rank(self, tokens: Tokens) -> Tensor:
        return tokens.score if self.has_heavy_hitters else tokens.position.float()


@dataclass(frozen=True)
class FixedColumnsCache(StridedCache):
    """Fixed pattern of the Sparse Transformer.

    Keeps the last `recent` tokens and the last c of every block of `recent` tokens, where c is the number of `heavy`
    slots per block. With more blocks than slots, c is 1 and blocks are joined in powers of two. Left-over slots go to
    the newest other tokens.
    Why: as in `StridedCache`; the end of a block is where the paper expects a summary of it.
    """

    name = "fixed"

    def on_lattice(self, position: Tensor, length: Tensor) -> Tensor:
        size = max(1, self.recent)
        blocks = (length // size).clamp_(min=1)  # whole ones: the rest is in the window
        columns = (self.share // blocks).clamp_(min=1)
        size = size * _power_of_two(blocks, self.share)
        # exact in fp32 up to position 2^23, and a third of the time of an integer remainder
        return ((position + 0.5) / size).frac_() > 1 - columns / size


@dataclass(frozen=True)
class StridedHeavyHitterCache(StridedCache):
    """Keeps the columns of `StridedCache` in half of the `heavy` slots, and H2O's highest scores in the rest."""

    name = "strided_h2o"
    has_heavy_hitters = True


@dataclass(frozen=True)
class FixedColumnsHeavyHitterCache(FixedColumnsCache):
    """Keeps the columns of `FixedColumnsCache` in half of the `heavy` slots, and H2O's highest scores in the rest."""

    name = "fixed_h2o"
    has_heavy_hitters = True


def _power_of_two(count: Tensor, share: int) -> Tensor:
    """The smallest power of two that `count` (int32, 1 or more) must be divided by to be at most `share`."""
    most = (count - 1) // share  # as many bits as the power has zeros
    return torch.bitwise_left_shift(1, torch.frexp(most.float()).exponent)
