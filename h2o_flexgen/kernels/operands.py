"""The operands of matmuls in int8: weights and activations.

Every row of x (a token) has a scale of its own, so a token does not depend on its neighbours. A few elements far above
the others of their row would cost these their precision: they stay floats (LLM.int8(), arXiv 2208.07339). Which they
are is also decided row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.compiled.threads import compiled, float_array, in_threads
from h2o_flexgen.formats import Quantised
from h2o_flexgen.formats.codes import quantise_rows
from h2o_flexgen.formats.matrix import stored_rows

#: an outlier is more than this many times the mean absolute value of its row
OUTLIER_RATIO = 8.0
#: most outliers of a row
MAX_OUTLIERS = 16


@dataclass
class Int8Weight:
    """A matrix (O, I)."""

    codes: Tensor  # (O, I), int8, or those from `int8.pack`
    scale: Tensor  # (O,), fp32

    @property
    def is_cuda(self) -> bool:
        return self.scale.is_cuda

    @property
    def nbytes(self) -> int:
        return self.codes.numel() + self.scale.nbytes

    @property
    def height(self) -> int:
        """Its outputs, O."""
        return len(self.scale)


def split_rows(weight: Tensor | Quantised | Int8Weight, count: int) -> list[Tensor | Quantised | Int8Weight]:
    """A matrix in `count` parts of equally many rows, without a copy."""
    if isinstance(weight, Int8Weight):
        return [Int8Weight(*part) for part in zip(weight.codes.chunk(count), weight.scale.chunk(count))]
    if isinstance(weight, Tensor):
        return list(weight.chunk(count))
    shape = (weight.height // count, weight.shape[1])
    return [replace(weight, raw=raw, shape=shape) for raw in weight.raw.chunk(count)]


@dataclass
class Grouped:
    """Matrices (O, I), or biases (O,), of one shape, each for some of the rows of x."""

    members: list[Tensor | Quantised | Int8Weight]
    counts: list[int]  # rows of x for each, behind those of the one before

    @property
    def height(self) -> int:
        """The outputs of each, O."""
        first = self.members[0]
        return len(first) if isinstance(first, Tensor) else first.height

    @property
    def is_cuda(self) -> bool:
        return self.members[0].is_cuda

    def blocks(self) -> tuple[tuple, tuple]:
        """Quantised matrices that matmuls read as stored, on the CPU: `block_rows.Blocks` and its layout in plain
        tuples. They hold addresses: the matrices must outlive them."""
        first = self.members[0]
        addresses = np.array([each.raw.data_ptr() for each in self.members])
        stored = stored_rows(first.height, first.format.heads)
        row_bytes = first.nbytes // first.height
        blocks = (addresses, np.cumsum(self.counts), row_bytes, stored, *first.format.tile)
        return blocks, first.format.layout.arrays


class SlicedWeight:
    """A matrix (O, I) that arrives a slice at a time while it is multiplied with."""

    height: int  # O

    def slices(self) -> Iterator[tuple[int, Tensor | Quantised | Int8Weight]]:
        """(first row, rows as a kernel reads them), in order; asking for a slice frees the one before."""
        raise NotImplementedError


@dataclass
class Int8Activations:
    """R rows of I activations."""

    codes: Tensor  # (R, I) int8
    scale: Tensor  # (R,) fp32
    kept: Tensor  # (R, U) fp32, the outliers, and 0 for other elements of their columns
    places: Tensor  # (U,), the columns that hold outliers

    @classmethod
    def of(cls, codes: Tensor) -> Int8Activations:
        """Integers, without outliers."""
        return cls(codes, torch.ones(len(codes)), torch.empty(len(codes), 0), torch.arange(0))

    @cached_property
    def row_floats(self) -> tuple[np.ndarray, ...]:
        """`tiles.RowFloats` as a plain tuple."""
        return self.scale.numpy(), self.kept.numpy(), self.places.numpy()

    @cached_property
    def for_tiles(self) -> np.ndarray:
        """The codes as `tiles` reads them. numpy is as fast as torch here, without waking torch's threads."""
        tiles = compiled().tiles
        codes = self.codes.numpy()
        return codes.view(np.uint8) ^ tiles.OFFSET if tiles.CODES == np.uint8 else codes.astype(tiles.CODES)

    def for_blocks(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The codes, and sums of them, as `block_tiles` reads them for chunks of `size` elements."""
        loops = compiled().block_tiles
        (rows, width) = self.codes.shape
        chunks = loops.padded(width // size)
        codes = np.zeros((rows, chunks * size // 4), np.int32)
        sums = np.zeros((rows, chunks), np.int16)
        words = self.codes.numpy().view(np.int32)
        in_threads(lambda a, b: loops.arrange(words, size, a, b, codes, sums), rows, self.codes.numel())
        return codes.view(np.int8), sums


def quantise(x: Tensor, outliers: bool = True) -> Int8Activations:
    """x (R, I), contiguous, in int8; without `outliers` no element stays a float."""
    loops = None if x.is_cuda else compiled()
    if loops is None:
        return _quantise_by_torch(x.float(), outliers)
    (rows, width) = x.shape
    array = float_array(x)
    codes = torch.empty(rows, width, dtype=torch.int8)
    limit = torch.empty(rows)
    scale = torch.empty(rows)
    targets = [t.numpy() for t in (codes, limit, scale)]
    most = MAX_OUTLIERS if outliers else 0
    columns = []  # of the rows of each part: which hold an outlier

    def part(begin: int, end: int) -> None:
        columns.append(loops.codes.quantise(array, OUTLIER_RATIO, most, begin, end, *targets))

    in_threads(part, rows, x.numel())
    # with few rows, torch's operators would take longer than the loops
    places = torch.from_numpy(np.flatnonzero(reduce(np.bitwise_or, columns)))
    kept = torch.empty(rows, len(places))
    if len(places):
        loops.codes.outliers(array, limit.numpy(), places.numpy(), kept.numpy())
    return Int8Activations(codes, scale, kept, places)


def _quantise_by_torch(x: Tensor, outliers: bool) -> Int8Activations:
    size = x.abs()
    limit = OUTLIER_RATIO * size.mean(dim=1, keepdim=True)
    if not outliers:
        limit = torch.full_like(limit, torch.inf)
    elif x.shape[1] > MAX_OUTLIERS:  # it doubles until no more than MAX_OUTLIERS are above it
        next_one = size.topk(MAX_OUTLIERS + 1, dim=1).values[:, -1:]
        limit = limit * (next_one / limit).log2().ceil().clamp(min=0).nan_to_num().exp2()
    is_outlier = size > limit
    places = is_outlier.any(dim=0).nonzero()[:, 0]
    codes = torch.empty_like(x, dtype=torch.int8)
    scale = torch.empty_like(x[:, 0])
    quantise_rows(x.masked_fill(is_outlier, 0.0), codes, scale)
    return Int8Activations(codes, scale, torch.where(is_outlier, x, 0.0)[:, places], places)
