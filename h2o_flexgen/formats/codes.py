"""Codes of 8 and 4 bits with scales and minima, to floats and to int8: by compiled loops on a CPU, elsewhere by torch's
operators. Their layout in bytes is up to each format."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.compiled.threads import compiled, float_array, in_threads

#: codes in int8 go from -127 to 127
MOST = 127
#: rows whose largest element is below this count as 0
LEAST = 1e-30


class Codes(NamedTuple):
    """A matrix of R rows with G groups each, as a decoder reads it."""

    codes: Tensor  # (R, bytes of a row); int8, or uint8 with two codes per byte
    scale: Tensor  # (R, G), fp32
    minimum: Tensor  # (R, G), fp32
    first: int  # the bytes of a group before its codes

    @property
    def largest(self) -> Tensor:
        """(R,): the largest absolute value that the codes of a row can stand for."""
        most = MOST if self.codes.dtype == torch.int8 else 15
        return torch.maximum(self.minimum.abs(), (most * self.scale + self.minimum).abs()).amax(dim=1)

    def decode(self, out: Tensor) -> None:
        """Write the floats into `out` (R, I), of any float type, on the same device, by torch's operators."""
        rows, groups = self.scale.shape
        q = self.codes.view(rows, groups, -1)[..., self.first :]
        out = out.view(rows, groups, -1)
        parts = (q,) if q.dtype == torch.int8 else (q & 15, q >> 4)
        for part, target in zip(parts, out.chunk(len(parts), -1)):
            torch.add(part * self.scale[..., None], self.minimum[..., None], out=target)

    def decode_by_loops(self, order: Tensor, out: Tensor) -> None:
        """Write the floats into the rows `order` of `out`, of any float type, by compiled loops."""
        self._in_loops(compiled().codes.to_floats, order, float_array(out))

    def to_int8(self, order: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Write the matrix into the rows `order` of codes (O, I) in int8, with one scale per row (O,), by torch's
        operators: 127 stands for the largest value that the row's codes can stand for, whether or not one of them
        does."""
        order = order.to(scale.device)
        largest = self.largest
        wide = torch.empty(len(order), codes.shape[1], device=scale.device)
        self.decode(wide)
        codes[order] = wide.mul_(_factor(largest)[:, None]).round_().to(torch.int8)
        scale[order] = largest / MOST

    def to_int8_by_loops(self, order: Tensor, codes: Tensor, scale: Tensor) -> None:
        """The same by compiled loops."""
        self._in_loops(compiled().codes.to_int8, order, codes.numpy(), scale.numpy())

    def _in_loops(self, kernel, order: Tensor, *targets) -> None:
        """Run a compiled loop over rows, in all threads."""
        arrays = [x.contiguous().numpy() for x in (self.codes, self.scale, self.minimum, order)]

        def part(begin: int, end: int) -> None:
            kernel(*(x[begin:end] for x in arrays), self.first, *targets)

        in_threads(part, len(order), len(order) * targets[0].shape[1])


def quantise_rows(x: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Symmetric int8 codes (R, I) and fp32 scales (R,) of the rows of x (R, I)."""
    x = x.float()
    largest = x.abs().amax(dim=1)
    scale.copy_(largest).div_(MOST)
    codes.copy_(x.mul(_factor(largest)[:, None]).round_())  # dividing takes four times as long


def _factor(largest: Tensor) -> Tensor:
    """MOST / largest, rounded once; torch would multiply by a reciprocal."""
    return torch.full_like(largest, MOST).div_(largest.clamp(min=LEAST))
