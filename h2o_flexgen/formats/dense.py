"""Plain floats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_flexgen import compiled
from h2o_flexgen.formats.base import Format, Shape

#: how compiled loops denote float types
LOOP_KINDS = {torch.float32: compiled.FP32, torch.float16: compiled.FP16, torch.bfloat16: compiled.BF16}


@dataclass(frozen=True)
class Dense(Format):
    """Floats one after another, row by row."""

    dtype: torch.dtype

    is_dense = True

    @property
    def name(self) -> str:
        return dtype_name(self.dtype)

    @property
    def alignment(self) -> int:
        return self.dtype.itemsize

    def row_bytes(self, width: int) -> tuple[int, ...]:
        return (width * self.dtype.itemsize,)

    @property
    def loop_kind(self) -> int:
        return LOOP_KINDS[self.dtype]

    def view(self, buffer: Tensor, shape: Shape) -> Tensor:
        return buffer[: self.nbytes(shape)].view(self.dtype).view(shape)

    def encode(self, tensor: Tensor, buffer: Tensor) -> None:
        self.view(buffer, tensor.shape).copy_(tensor)


#: elements that `convert` takes from fp16 to bf16 at once, through fp32
_CONVERT_ELEMENTS = 1 << 18


def convert(dst: Tensor, src: Tensor) -> None:
    """Copy to another dtype or device, with all threads; both tensors contiguous and of the same shape."""
    if dst.dtype == src.dtype or torch.float32 in (dst.dtype, src.dtype):
        dst.copy_(src)
        return
    for target, part in zip(dst.view(-1).split(_CONVERT_ELEMENTS), src.view(-1).split(_CONVERT_ELEMENTS)):
        target.copy_(part.float())  # twice as fast as directly


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
