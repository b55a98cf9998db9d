"""Codes with scales and minima, to floats and to int8: by compiled loops on a CPU, elsewhere by torch's operators."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.compiled.threads import compiled, float_array, in_threads
from h2o_flexgen.formats.layout import Bits, Layout, Numbers

#: codes in int8 go from -127 to 127
MOST = 127
#: codes of 8 bits without blocks
PLAIN = Layout(1, 1, Numbers(((Bits(0),),), is_signed=True), 1, 0)
#: rows whose largest element is below this count as 0
LEAST = 1e-30


class Codes(NamedTuple):
    """A matrix of R rows with G groups each, as a decoder reads it."""

    raw: Tensor  # (R, bytes of a row): blocks in uint8, or codes in int8
    scale: Tensor  # (R, G), fp32
    minimum: Tensor  # (R, G), fp32
    layout: Layout = PLAIN  # of the blocks

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.raw.shape[1] // self.layout.nbytes * self.layout.size

    @property
    def largest(self) -> Tensor:
        """(R,): the largest absolute value that the codes of a row can stand for."""
        ends = [(end * self.scale + self.minimum).abs() for end in self.layout.bounds]
        return torch.maximum(*ends).amax(dim=1)

    def decode(self, out: Tensor) -> None:
        """Write the floats into `out` (R, I), of any float type, on the same device, by torch's operators."""
        q = self.raw
        if self.layout is not PLAIN:
            blocks = q.unflatten(1, (-1, self.layout.nbytes))
            q = self.layout.values(blocks).flatten(1)
        q = q.unflatten(1, (self.scale.shape[1], -1))
        torch.add(q * self.scale[..., None], self.minimum[..., None], out=out.view(q.shape))

    def decode_by_loops(self, order: Tensor, out: Tensor) -> None:
        """Write the floats into the rows `order` of `out`, of any float type, by compiled loops."""
        self._in_loops(compiled().blocks.to_floats, order, float_array(out))

    def to_int8(self, order: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Write the matrix into the rows `order` of codes (O, I) in int8, with one scale per row (O,), by torch's
        operators: 127 stands for the largest value that the row's codes can stand for, whether or not one of them
        does. Codes of floats, as in FP8, may have scales far above their rows: there it is the largest value."""
        order = order.to(scale.device)
        wide = torch.empty(len(order), self.width, device=scale.device)
        self.decode(wide)
        largest = torch.stack(wide.aminmax(dim=1)).abs().amax(0) if self.layout.floats else self.largest
        codes[order] = wide.mul_(_factor(largest)[:, None]).round_().to(torch.int8)
        scale[order] = largest / MOST

    def to_int8_by_loops(self, order: Tensor, codes: Tensor, scale: Tensor) -> None:
        """The same by compiled loops."""
        self._in_loops(
            compiled().blocks.to_int8, order, codes.numpy(), scale.numpy(), tuple(map(np.float32, self.layout.bounds))
        )

    def _in_loops(self, kernel, order: Tensor, *targets) -> None:
        """Run a compiled loop over rows, in all threads."""
        arrays = [x.contiguous().numpy() for x in (self.raw.view(torch.uint8), self.scale, self.minimum, order)]
        layout = self.layout.arrays

        def part(begin: int, end: int) -> None:
            kernel(*(x[begin:end] for x in arrays), layout, *targets)

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
