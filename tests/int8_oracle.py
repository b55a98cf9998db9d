"""Matmuls in int8 as they are defined: row by row, in plain arithmetic, written without a look at the engine."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: modules of transformers whose input is no norm's output: it has no outliers
INNER = ("o_proj", "out_proj", "dense", "down_proj", "fc2", "dense_4h_to_h")


def to_codes(row: Tensor) -> tuple[Tensor, float]:
    """Whole numbers from -127 to 127, and what one of them stands for."""
    largest = row.abs().max()
    return torch.round(row * torch.tensor(127.0).div(largest.clamp(min=1e-30))), float(largest) / 127


def int8_linear(x: Tensor, w: Tensor, b: Tensor | None, times: float, few: int) -> Tensor:
    """x (..., I) @ w.T + b in fp64, with w (O, I) and each row of x in whole numbers, but for elements of x that are
    more than `times` the mean absolute value: of these at most `few` of a row, else the larger ones."""
    w = torch.stack([codes.double() * step for codes, step in map(to_codes, w)])
    out = []
    for row in x.reshape(-1, x.shape[-1]).float():
        limit = times * row.abs().mean() if few else torch.inf
        while (row.abs() > limit).sum() > few:
            limit = 2 * limit
        kept = torch.where(row.abs() > limit, row, 0.0)
        codes, step = to_codes(row - kept)
        out.append(F.linear(codes.double() * step + kept.double(), w, None if b is None else b.double()))
    return torch.stack(out).view(*x.shape[:-1], -1).to(x.dtype)


def patch(model, times: float, few: int) -> None:
    """Let the linear layers of a model of transformers multiply so."""

    def forward(name: str, module):
        count = 0 if name.rpartition(".")[2] in INNER else few
        return lambda x: int8_linear(x, module.weight.detach(), module.bias, times, count)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = forward(name, module)
