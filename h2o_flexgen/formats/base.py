"""The base class of formats."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from h2o_flexgen.formats.codes import Codes
from h2o_flexgen.formats.matrix import Quantised

Shape = tuple[int, ...]


class Format:
    """How the elements of a tensor are laid out in bytes."""

    name: str  # in files and messages
    dtype: torch.dtype = torch.uint8  # of the tensor that holds the bytes: a float type, or uint8
    alignment: int = 1  # of the first byte's address, in bytes
    is_dense: bool = False  # the elements are plain floats
    heads: int = 0  # of queries or keys whose rows are in llama.cpp's order (`Quantised.order`); 0 for other tensors

    def row_bytes(self, width: int) -> tuple[int, ...]:
        """The bytes of a row of `width` elements in each of the arrays that a tensor consists of, in their order."""
        raise NotImplementedError

    def nbytes(self, shape: Shape) -> int:
        """The bytes of a tensor."""
        return prod(shape[:-1]) * sum(self.row_bytes(shape[-1]))

    def arrays(self, shape: Shape) -> list[tuple[int, int]]:
        """[(offset, bytes of a row)] for each array of a tensor."""
        sizes = self.row_bytes(shape[-1])
        return list(zip(accumulate((prod(shape[:-1]) * size for size in sizes), initial=0), sizes))

    def codes(self, buffer: Tensor, shape: Shape, begin: int, end: int) -> Codes:
        """Rows `begin` to `end` of the matrix in a buffer, for a decoder."""
        raise NotImplementedError

    def view(self, buffer: Tensor, shape: Shape) -> Tensor | Quantised:
        """The tensor whose bytes begin a buffer (uint8, aligned)."""
        return Quantised(self, buffer[: self.nbytes(shape)], shape)

    def encode(self, tensor: Tensor, buffer: Tensor) -> None:
        """Write a float tensor into a buffer (uint8, aligned) in this format."""
        raise NotImplementedError

    def encode_parts(self, shape: Shape, parts: Iterable[tuple[int, Tensor]], buffer: Tensor) -> None:
        """Write a matrix into a buffer in this format, part by part: (first row, rows)."""
        for begin, part in parts:
            encoded = torch.empty(self.nbytes(tuple(part.shape)), dtype=torch.uint8)
            self.encode(part, encoded)
            for (offset, size), (at, _) in zip(self.arrays(shape), self.arrays(tuple(part.shape))):
                nbytes = len(part) * size
                buffer[offset + begin * size :][:nbytes] = encoded[at : at + nbytes]

    # vectors of a cache

    @property
    def loop_kind(self) -> int:
        """The number of this format in `compiled.attention`."""
        raise NotImplementedError

    def stored(self, x: Tensor) -> Tensor:
        """Floats x (..., D) as a cache stores them: (..., W) of `dtype`, every vector on its own."""
        return x

    def floats(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """The inverse of `stored`, in a float type: (..., D)."""
        return stored.to(dtype)
