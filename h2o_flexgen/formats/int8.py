"""Codes of 8 bits with one scale per row of a matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_flexgen.formats.base import Format, Shape
from h2o_flexgen.formats.codes import Codes, quantise_rows


@dataclass(frozen=True)
class Int8(Format):
    """A matrix (O, I) is O scales in fp32, then O x I codes in int8, where the largest of a row is 127 or -127."""

    name = "int8"
    bits = 8
    alignment = 4

    def row_bytes(self, width: int) -> tuple[int, ...]:
        return 4, width

    def parts(self, buffer: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        """(codes, scale), views of a buffer."""
        rows, width = shape
        scale, codes = buffer[: self.nbytes(shape)].split([4 * rows, rows * width])
        return codes.view(torch.int8).view(shape), scale.view(torch.float32)

    def codes(self, buffer: Tensor, shape: Shape, begin: int, end: int) -> Codes:
        codes, scale = (x[begin:end] for x in self.parts(buffer, shape))
        return Codes(codes, scale[:, None], torch.zeros_like(scale)[:, None])

    def encode(self, tensor: Tensor, buffer: Tensor) -> None:
        codes, scale = self.parts(buffer, tuple(tensor.shape))
        quantise_rows(tensor, codes, scale)
