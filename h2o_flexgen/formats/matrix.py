"""A quantised matrix, decoded a part at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.compiled import threads
from h2o_flexgen.formats.codes import Codes

if TYPE_CHECKING:
    from h2o_flexgen.formats.base import Format, Shape

#: elements that are decoded at once: by compiled loops, and by torch, which takes buffers of several times their size
PART = 1 << 24
BUFFERED_PART = 1 << 22
#: bytes for each element of what torch decodes: codes, places in a table, and floats up to three times
BUFFERED_BYTES = 15


@dataclass
class Quantised:
    """A matrix (O, I) in its stored format."""

    format: Format
    raw: Tensor  # its bytes (uint8), on any device
    shape: Shape
    operand: Format | None = None  # what its matmul reads, if that multiplies in int8; else it reads floats

    @property
    def nbytes(self) -> int:
        return self.raw.nbytes

    @property
    def height(self) -> int:
        """Its rows, O."""
        return self.shape[0]

    @property
    def device(self) -> torch.device:
        return self.raw.device

    @property
    def is_cuda(self) -> bool:
        return self.raw.is_cuda

    @property
    def order(self) -> Tensor:
        """Which row of the matrix each stored row is: llama.cpp puts the two elements of a head that RoPE rotates
        together side by side, while a checkpoint has them half a head apart."""
        return _order(self.shape[0], self.format.heads)

    def take(self, ids: Tensor) -> Quantised:
        """The rows `ids` (n,), on the same device, of a matrix without heads."""
        arrays = self.format.arrays(self.shape)
        rows = [self.raw[at : at + self.shape[0] * size].view(-1, size)[ids] for at, size in arrays]
        return Quantised(self.format, torch.cat([x.view(-1) for x in rows]), (len(ids), self.shape[1]))

    def is_finite(self) -> bool:
        """Whether all that its codes can stand for is finite: MXFP4 has finite scales of values that are not."""
        parts = self._parts(0, self.shape[0], BUFFERED_PART)
        return all(bool(codes.largest.isfinite().all()) for _, codes in parts)

    def _parts(self, begin: int, count: int, size: int) -> Iterator[tuple[slice, Codes]]:
        """`count` rows from `begin` on, about `size` elements at a time: (which of these rows, their codes)."""
        step = max(1, size // self.shape[1])
        for at in range(0, count, step):
            end = min(at + step, count)
            yield slice(at, end), self.format.codes(self.raw, self.shape, begin + at, begin + end)

    def decode(self, out: Tensor, begin: int = 0) -> None:
        """Write rows from `begin` on into `out`, (rows, I) contiguous, of any float type, on the same device; all rows
        of a matrix with `heads`."""
        by_loops = not out.is_cuda and threads.compiled() is not None
        has_heads = self.format.heads > 0
        order = self.order[: len(out)] if by_loops or has_heads else None
        for rows, codes in self._parts(begin, len(out), PART if by_loops else BUFFERED_PART):
            if by_loops:
                codes.decode_by_loops(order[rows], out)
                continue
            part = torch.empty_like(out[rows]) if has_heads else out[rows]
            codes.decode(part)
            if has_heads:
                out[order[rows].to(out.device)] = part

    def to(self, dtype: torch.dtype) -> Tensor:
        """The matrix in a float type."""
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        self.decode(out)
        return out

    def decode_into(self, out: Tensor | Quantised, begin: int = 0) -> None:
        """Fill `out` with rows from `begin` on, as `decode` or `to_int8`."""
        if isinstance(out, Quantised):
            self.to_int8(out, begin)
        else:
            self.decode(out, begin)

    def to_int8(self, out: Quantised, begin: int = 0) -> None:
        """Write rows from `begin` on into `out`, in `Int8` on the same device, as `Codes.to_int8`; all rows of a matrix
        with `heads`."""
        by_loops = not self.is_cuda and threads.compiled() is not None
        order = self.order[: out.shape[0]]
        target = out.format.parts(out.raw, out.shape)
        for rows, codes in self._parts(begin, len(order), PART if by_loops else BUFFERED_PART):
            (codes.to_int8_by_loops if by_loops else codes.to_int8)(order[rows], *target)


def _order(count: int, heads: int) -> Tensor:
    rows = torch.arange(count)
    return rows.view(heads, 2, -1).transpose(1, 2).reshape(-1) if heads else rows


@lru_cache(maxsize=256)  # it takes longer than a matmul of few rows
def stored_rows(count: int, heads: int) -> np.ndarray:
    """Which stored row each row of a matrix is: the inverse of `Quantised.order`."""
    return _order(count, heads).argsort().numpy()


def decode_bytes(formats: Iterable[Format], dtype: torch.dtype, cuda: bool) -> int:
    """The bytes that decoding takes besides its result in `dtype`: BUFFERED_BYTES for each element of a part, and for a
    matrix with heads also the part before its rows are reordered. Compiled loops need only scales and minima, which are
    not counted."""
    quantised = [form for form in formats if not form.is_dense]
    if not quantised or (not cuda and threads.compiled()):
        return 0
    return BUFFERED_PART * (BUFFERED_BYTES + dtype.itemsize * any(form.heads for form in quantised))
