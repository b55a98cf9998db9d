"""x @ W.T + b in int8: codes times codes add up to int32 exactly, by torch's own operators.

Every row of x (a token) gets a scale of its own, so a token does not depend on its neighbours. A few elements far above
the others of their row would take the precision of all: they stay floats (LLM.int8(), arXiv 2208.07339). Which they are
is also decided row by row. The columns of W that they need come out of the same matmul, as what it makes of unit
vectors below the rows of x, so that a W that was packed, or streams, has them too:

            I                   O
         | codes |           | sums        |   R rows       out = scale * sums + kept @ columns
         | 0 1 0 | @ W.T  =  | columns of W|   U outliers   and all times the scales of W's rows
         | 0 0 1 |

These columns are whole numbers, and a row adds them up in order, those it has: in whatever block a row is, its result
is the same to the bit.

    native   `torch._int_mm`
    packed   oneDNN's, on a W that was laid out for it beforehand, with codes + 128 in uint8: on signed ones it is slow

Both are tried out first; where one is wrong or missing, floats take its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.formats import MOST, compiled, in_threads
from h2o_flexgen.sizes import INT8_ROWS, WIDEN_BYTES

#: what is more than so many times the mean absolute value of its row is an outlier
TIMES = 12.0
#: outliers of a row at most
FEW = 16
#: CUDA's `_int_mm` wants more rows than this, and multiples of 8 of the rest
CUDA_ROWS, CUDA_MULTIPLE = 16, 8


@dataclass
class Int8Weight:
    """A matrix (O, I) for matmuls in int8.

    Attributes:
        codes: (O, I), int8, or those from `pack`.
        scale: (O,), fp32.
    """

    codes: Tensor
    scale: Tensor

    @property
    def is_cuda(self) -> bool:
        return self.scale.is_cuda

    @property
    def nbytes(self) -> int:
        return self.codes.numel() + self.scale.nbytes


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None = None, outliers: bool = True) -> Tensor:
    """As `linear`, with the rows of x in int8: INT8_ROWS at a time.

    Args:
        outliers: keep a few elements of a row as floats.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_empty(len(rows), len(weight.scale))
    for part, part_out in zip(rows.split(INT8_ROWS), out.split(INT8_ROWS)):
        codes, scale, kept = quantise(part.float().contiguous(), outliers)
        part_out.copy_(_scaled_back(multiply(codes, weight.codes), scale, kept, weight.scale, bias))
    return out.view(*x.shape[:-1], -1)


def quantise(x: Tensor, outliers: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """x (R, I) fp32 -> codes (R + U, I) int8, of which the last U rows are unit vectors, scale (R,) and kept (R, U)
    fp32: the outliers, of U columns; 0 where an element is none."""
    loops = None if x.is_cuda else compiled()
    if loops is None:
        return _quantise_by_torch(x, outliers)
    (rows, width), few = x.shape, FEW if outliers else 0
    limit, scale = torch.empty(rows), torch.empty(rows)
    is_outlier = torch.zeros(width, dtype=torch.uint8)
    numbers = [t.numpy() for t in (x, limit, scale, is_outlier)]
    in_threads(lambda a, b: loops.row_limits(numbers[0], TIMES, few, a, b, *numbers[1:]), rows, x.numel())
    columns = is_outlier.nonzero()[:, 0]
    codes, kept = _with_units(rows, width, columns), torch.empty(rows, len(columns))
    arrays = [t.numpy() for t in (x, limit, scale, columns)], [codes.numpy(), kept.numpy()]
    in_threads(lambda a, b: loops.row_codes(*arrays[0], a, b, *arrays[1]), rows, x.numel())
    return codes, scale, kept


def _with_units(rows: int, width: int, columns: Tensor) -> Tensor:
    codes = torch.empty(rows + len(columns), width, dtype=torch.int8, device=columns.device)
    codes[rows:] = 0
    codes[torch.arange(rows, len(codes), device=columns.device), columns] = 1
    return codes


def _quantise_by_torch(x: Tensor, outliers: bool) -> tuple[Tensor, Tensor, Tensor]:
    size = x.abs()
    limit = TIMES * size.mean(dim=1, keepdim=True)
    if not outliers:
        limit = torch.full_like(limit, torch.inf)
    while bool((many := (size > limit).sum(dim=1, keepdim=True) > FEW).any()):
        limit = torch.where(many, 2 * limit, limit)
    is_outlier = size > limit
    columns = is_outlier.any(dim=0).nonzero()[:, 0]
    scale = size.masked_fill_(is_outlier, 0.0).amax(dim=1) / MOST
    codes = _with_units(len(x), x.shape[1], columns)
    rounded = (x / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_()
    codes[: len(x)] = rounded.masked_fill_(is_outlier, 0.0)
    return codes, scale, torch.where(is_outlier, x, 0.0)[:, columns]


def _scaled_back(sums: Tensor, scale: Tensor, kept: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """(R, O), fp32, as unpack.scale_back says."""
    rows, loops = len(scale), None if sums.is_cuda else compiled()
    if loops is None:
        out = scale[:, None] * sums[:rows]
        if kept.shape[1]:
            out += kept @ sums[rows : rows + kept.shape[1]].float()
        out *= weight_scale
        return out if bias is None else out.add_(bias)
    bias = torch.zeros_like(weight_scale) if bias is None else bias.float()
    out = torch.empty(rows, sums.shape[1])
    arrays = [t.numpy() for t in (sums, scale, kept, weight_scale, bias)]
    in_threads(lambda a, b: loops.scale_back(*arrays, a, b, out.numpy()), rows, out.numel())
    return out


def prepare() -> None:
    """Compile the loops, or read them from numba's cache: once, before memory is measured."""
    weight = torch.ones(8, 8, dtype=torch.int8)
    for codes in (weight, pack(weight)) if can_pack() else (weight,):
        int8_linear(torch.ones(1, 8), Int8Weight(codes, torch.ones(8)))


# the kernels


def multiply(codes: Tensor, weight: Tensor) -> Tensor:
    """codes (R, I) int8 @ weight.T, (O, I) or from `pack` -> (R, O), or more rows on CUDA: int32, or floats that hold
    whole numbers."""
    if weight.is_mkldnn:
        return packed(codes, weight)
    if codes.is_cuda:
        return _on_cuda(codes, weight)
    return torch._int_mm(codes, weight.t()) if is_exact() else by_floats(codes, weight)


def _on_cuda(codes: Tensor, weight: Tensor) -> Tensor:
    if any(size % CUDA_MULTIPLE for size in weight.shape):
        return by_floats(codes, weight)
    missing = max(CUDA_ROWS + CUDA_MULTIPLE - len(codes), -len(codes) % CUDA_MULTIPLE)
    return torch._int_mm(F.pad(codes, (0, 0, 0, missing)), weight.t())


def by_floats(codes: Tensor, weight: Tensor) -> Tensor:
    """In fp32, a slice of the weight at a time. Sums beyond 2^24 are rounded."""
    step, x = max(1, WIDEN_BYTES // (4 * weight.shape[1])), codes.float()
    return torch.cat([F.linear(x, part.float()) for part in weight.split(step)], dim=1)


def packed(codes: Tensor, weight: Tensor) -> Tensor:
    """Of a weight from `pack`."""
    x = codes.view(torch.uint8) ^ 128  # codes + 128
    out = weight.shape[1]  # it is transposed
    ones, zeros = _ones(out)
    return torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 128, weight, ones, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )


@cache
def _ones(size: int) -> tuple[Tensor, Tensor]:
    return torch.ones(size), torch.zeros(size, dtype=torch.int32)


def pack(weight: Tensor) -> Tensor:
    """A matrix (O, I) of int8 in RAM as oneDNN wants it; good for `multiply` only. Holds as many bytes."""
    return torch.ops.onednn.qlinear_prepack(weight, None)


def _extremes() -> tuple[Tensor, Tensor]:
    """Of which 16-bit sums would overflow, as those of some older CPUs do."""
    codes = torch.full((24, 136), 127, dtype=torch.int8)
    codes[::2] = -127
    weight = torch.arange(72 * 136).remainder(255).sub(127).to(torch.int8).view(72, 136)
    weight[::3] = 127
    return codes, weight


def _works(kernel) -> bool:
    codes, weight = _extremes()
    try:
        return torch.equal(kernel(codes, weight).double(), codes.double() @ weight.double().t())
    except (AttributeError, RuntimeError):
        return False


@cache
def is_exact() -> bool:
    """Whether `torch._int_mm` is right here."""
    return _works(lambda codes, weight: torch._int_mm(codes, weight.t()))


@cache
def can_pack() -> bool:
    """Whether `pack` and `packed` work here: their operators are those of torch's compiler, not public ones."""
    return _works(lambda codes, weight: packed(codes, pack(weight)))
