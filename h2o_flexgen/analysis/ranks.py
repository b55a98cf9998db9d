"""How unevenly attention is distributed: accumulated score over rank (section 3.2 of the H2O paper, figure 2)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: ranks of the fit: from the second on (the first is the beginning of the text, whatever it says) up to this fraction
#: of the tokens (the last ones have received attention from few queries)
FIRST_RANK = 2
LAST_PART = 0.5


def curve(received: Tensor) -> Tensor:
    """(N,) mean share of attention by rank: of the attention that N tokens `received` (..., N) in a head and text, the
    share of the first, the second, and so on."""
    ranked = received.sort(-1, descending=True).values
    return (ranked / ranked.sum(-1, keepdim=True)).flatten(0, -2).mean(0)


class PowerLaw(NamedTuple):
    """share = share_at_1 * rank ** -exponent."""

    exponent: float
    share_at_1: float
    r2: float


def fit_power_law(shares: Tensor) -> PowerLaw:
    """Least-squares fit of the logarithms of shares (N,) by rank, from FIRST_RANK up to LAST_PART of all ranks."""
    last = max(FIRST_RANK + 1, int(LAST_PART * len(shares)))
    rank = torch.arange(FIRST_RANK, last + 1)
    x = rank.double().log()
    y = shares[FIRST_RANK - 1 : last].double().log()
    dx = x - x.mean()
    dy = y - y.mean()
    slope = (dx * dy).sum() / dx.square().sum()
    left = (dy - slope * dx).square().sum() / dy.square().sum()
    return PowerLaw(-float(slope), float((y.mean() - slope * x.mean()).exp()), 1 - float(left))


def log_spaced(count: int, most: int) -> list[int]:
    """Up to `count` ranks from 1 to `most`, evenly spaced on a logarithmic scale."""
    return sorted({round(most ** (n / (count - 1))) for n in range(count)})
