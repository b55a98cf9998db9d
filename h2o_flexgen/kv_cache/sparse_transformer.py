"""Keep columns of a lattice over the text: the patterns of the Sparse Transformer (arXiv 1904.10509, section 4.3).

There, a query attends to a local window and to columns of the attention matrix, whatever it contains: every s-th token
behind it (strided), or the last c of every block (fixed). H2O (arXiv 2306.14048, table 2) compares with both, alone and
with heavy hitters. A cache must say which tokens no later query will need, so here the columns are counted from the
start of the text, and a lattice only ever gets coarser: what is on it now has been on it from the start.

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
    """The last `recent` tokens, and every s-th token of the text, where s is the smallest power of two for which they
    have room in the `heavy` slots. Slots that are left over go to the newest tokens."""

    name = "strided"
    has_heavy_hitters: ClassVar[bool] = False

    @property
    def share(self) -> int:
        """Slots for the lattice: with heavy hitters half of those that no other token is sure of."""
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
    """The last `recent` tokens, and the last c of every block of `recent` tokens, where c is the `heavy` slots over the
    number of blocks. If there are more blocks than slots, c is 1 and blocks are joined, in powers of two. Slots that
    are left over go to the newest tokens."""

    name = "fixed"

    def on_lattice(self, position: Tensor, length: Tensor) -> Tensor:
        size = max(1, self.recent)
        blocks = (length // size).clamp_(min=1)  # whole ones; the tokens of another are in the window
        columns = (self.share // blocks).clamp_(min=1)
        size = size * _power_of_two(blocks, self.share)
        # exact in fp32 up to position 2^23, and a third of the time of an integer remainder
        return ((position + 0.5) / size).frac_() > 1 - columns / size


@dataclass(frozen=True)
class StridedHeavyHitterCache(StridedCache):
    """As `StridedCache` with half of the `heavy` slots, and the highest scores of H2O in those that are left over."""

    name = "strided_h2o"
    has_heavy_hitters = True


@dataclass(frozen=True)
class FixedColumnsHeavyHitterCache(FixedColumnsCache):
    """As `FixedColumnsCache` with half of the `heavy` slots, and the highest scores of H2O in those that are left
    over."""

    name = "fixed_h2o"
    has_heavy_hitters = True


def _power_of_two(count: Tensor, share: int) -> Tensor:
    """The smallest by which `count` (int32, 1 or more) can be divided to be at most `share`."""
    most = (count - 1) // share  # as many bits as the power has zeros
    return torch.bitwise_left_shift(1, torch.frexp(most.float()).exponent)
