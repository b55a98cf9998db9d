"""Matmuls in int8 as they are defined: row by row, in plain arithmetic, written without a look at the engine."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

#: modules of transformers whose input is no norm's output: it has no outliers
INNER = ("o_proj", "out_proj", "dense", "down_proj", "fc2", "dense_4h_to_h")


def activations(rows: int = 37, width: int = 200, seed: int = 0) -> torch.Tensor:
    """Rows of all sizes, some with outliers: in a column that most have, in one of their own, in too many, and beside
    elements that are just at the limit."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    x *= torch.logspace(-4, 1, rows)[:, None]
    x[:, 5] *= 40
    x[3 % rows, 7] *= 1000
    x[8 % rows, ::5] *= 300
    x[9 % rows] = 0
    x[10 % rows] = 0
    x[10 % rows, : width // 8 - 4] = 1  # 8 times the mean
    x[10 % rows, :1] = 5
    return x


def to_codes(row: Tensor) -> tuple[Tensor, float]:
    """Whole numbers from -127 to 127, and what one of them stands for."""
    largest = row.abs().max()
    return torch.round(row * torch.tensor(127.0).div(largest.clamp(min=1e-30))), float(largest) / 127


def int8_linear(x: Tensor, w: Tensor, b: Tensor | None, times: float, few: int, rounds: bool = True) -> Tensor:
    """x (..., I) @ w.T + b in fp64, with each row of x, and if `rounds` of w (O, I), in whole numbers, but for elements
    of x that are more than `times` the mean absolute value: of these at most `few` of a row, else the larger ones."""
    w = torch.stack([codes.double() * step for codes, step in map(to_codes, w)]) if rounds else w.double()
    out = []
    for row in x.reshape(-1, x.shape[-1]).float():
        limit = times * row.abs().mean() if few else torch.inf
        while (row.abs() > limit).sum() > few:
            limit = 2 * limit
        kept = torch.where(row.abs() > limit, row, 0.0)
        codes, step = to_codes(row - kept)
        out.append(F.linear(codes.double() * step + kept.double(), w, None if b is None else b.double()))
    return torch.stack(out).view(*x.shape[:-1], -1).to(x.dtype)


def whole(scale: Tensor, minimum: Tensor, most: int, segment: int, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scales and minima (O, G) of codes from 0 to `most` in whole numbers, and what 1 stands for in each (O, G): of
    `segment` groups together the largest absolute value that their codes can stand for is `largest`. Minima are such
    that the middle of the codes is nearest to what it was."""
    found = []
    for s, m in zip(scale.split(segment, dim=1), minimum.split(segment, dim=1)):
        highest = torch.maximum(m.abs(), (m + most * s).abs()).amax(dim=1, keepdim=True)
        factor = torch.full_like(highest, largest).div(highest.clamp(min=1e-30))
        rounded = torch.round(s * factor)
        middle = m * factor + most / 2 * (s * factor - rounded)
        found.append((rounded, torch.round(middle), (highest / largest).expand(s.shape)))
    return tuple(torch.cat(each, dim=1) for each in zip(*found))


def in_blocks(weight) -> Tensor:
    """What a quantised matrix (O, I) in blocks is in matmuls, in fp64: 2,048 inputs have scales together."""
    out, width = weight.shape
    layout = weight.format.layout
    lowest, highest = layout.codes.bounds
    raw = weight.raw.view(out, -1, layout.nbytes)
    scale, minimum = layout.scales_and_minima(raw)
    scale, minimum, ones = whole(scale, minimum + lowest * scale, highest - lowest, 2048 // layout.group, 8000)
    codes = layout.codes.read(raw, layout.run).reshape(*scale.shape, -1).double() - lowest
    found = ((codes * scale[..., None] + minimum[..., None]) * ones[..., None].double()).view(out, width)
    return torch.empty_like(found).index_copy_(0, weight.order, found)


def multiplying(oracle, times: float, few: int, rounds: bool = True):
    """An `oracle.Oracle` with the same weights whose linear layers multiply so."""
    found = copy.copy(oracle)

    def linear(name: str, x: Tensor) -> Tensor:
        count = 0 if name.rpartition(".")[2] in INNER else few
        w, bias = found.w[f"{name}.weight"].float(), found.w.get(f"{name}.bias")
        return int8_linear(x, w, bias, times, count, rounds)

    found.linear = linear
    return found


def patch(model, times: float, few: int, rounds: bool = True, noise: int | None = None) -> None:
    """Let the linear layers of a model of transformers multiply so; `noise`: a seed for changes in the
    last bits of inputs."""

    def forward(name: str, module):
        count = 0 if name.rpartition(".")[2] in INNER else few
        factors = torch.ones(module.in_features)
        if noise is not None:
            factors += 3e-7 * torch.randn(len(factors), generator=torch.Generator().manual_seed(noise))
        return lambda x: int8_linear(x * factors, module.weight.detach(), module.bias, times, count, rounds)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = forward(name, module)
