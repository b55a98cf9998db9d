"""How unevenly tokens receive attention: their accumulated scores over their rank (section 3.2 of the H2O paper, figure
2).
"""

from __future__ import annotations

import torch
from torch import Tensor

#: ranks of the fit: from the second on (the first is the beginning of the text, whatever stands there) to this part of
#: all tokens (the last ones have hardly been seen)
FIRST_RANK, LAST_PART = 2, 0.5


def curve(received: Tensor) -> Tensor:
    """(N,) Of the attention that N tokens received (..., N), the share of all that goes to the first, second, ... of
    each head and text, on average."""
    ranked = received.sort(-1, descending=True).values
    return (ranked / ranked.sum(-1, keepdim=True)).flatten(0, -2).mean(0)


def fit_power_law(shares: Tensor) -> tuple[float, float]:
    """Exponent a and R2 of shares (N,) ~ rank ** -a: least squares of the logarithms over FIRST_RANK and the ranks behind
    it, up to LAST_PART of all."""
    last = max(FIRST_RANK + 1, int(LAST_PART * len(shares)))
    rank = torch.arange(FIRST_RANK, last + 1)
    x, y = rank.double().log(), shares[FIRST_RANK - 1 : last].double().log()
    x, y = x - x.mean(), y - y.mean()
    slope = (x * y).sum() / (x * x).sum()
    left = (y - slope * x).square().sum() / y.square().sum()
    return -float(slope), 1 - float(left)


def log_spaced(count: int, most: int) -> list[int]:
    """Up to `count` ranks from 1 to `most`, evenly spaced on a logarithmic scale."""
    return sorted({round(most ** (n / (count - 1))) for n in range(count)})
