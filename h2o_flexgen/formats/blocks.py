"""Rows cut into blocks of codes of 8 or 4 bits: int4, types of GGUF files, and vectors of a cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.compiled import INT4, INT8, threads
from h2o_flexgen.compiled.threads import float_array, in_threads
from h2o_flexgen.formats.base import Format, Shape
from h2o_flexgen.formats.codes import MOST, Codes
from h2o_flexgen.formats.matrix import Quantised

#: elements of a cache that are encoded at once: what stays in a CPU's cache, or keeps a GPU busy
ENCODED_PART = {"cpu": 1 << 16, "cuda": 1 << 20}


@dataclass(frozen=True)
class Blocks(Format):
    """A row is a sequence of blocks, one per group of neighbours: its scale in fp16, its minimum in fp16 if it has one,
    and its codes in int8, or in 4 bits with the first half of the group in the lower nibbles and the second half in the
    upper ones. Without a minimum codes of 4 bits stand for code - 8.

    With groups of 32 these are GGUF's Q8_0, Q4_0 and Q4_1:
    https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
    """

    name: str
    bits: int
    group: int
    has_minimum: bool
    heads: int = 0

    alignment = 2

    @property
    def _head(self) -> int:
        """The bytes of a block before its codes."""
        return 4 if self.has_minimum else 2

    @property
    def _block(self) -> int:
        return self._head + self.group * self.bits // 8

    @property
    def layout(self) -> tuple[int, int]:
        """For codes of 4 bits: the bytes of a block before its codes, and of its codes."""
        return self._head, self.group // 2

    @property
    def loop_kind(self) -> int:
        return INT8 if self.bits == 8 else INT4

    def row_bytes(self, width: int) -> tuple[int, ...]:
        return (width // self.group * self._block,)

    def codes(self, buffer: Tensor, shape: Shape, begin: int, end: int) -> Codes:
        rows, width = shape
        raw = buffer[: self.nbytes(shape)].view(rows, width // self.group, self._block)[begin:end]
        centre = -8.0 if self.bits == 4 else 0.0
        loops = None if raw.is_cuda else threads.compiled()
        if loops is not None:
            # torch's threads would go on waiting for work, on the cores that the decoder's threads need
            scale, minimum = torch.empty(2, *raw.shape[:2])
            blocks = raw.numpy().view(np.int16)
            rest = (np.float32(centre), scale.numpy(), minimum.numpy())
            in_threads(
                lambda a, b: loops.codes.scales(blocks, a, b, self.has_minimum, *rest), len(raw), len(raw) * width
            )
        else:
            scale = raw[..., :2].view(torch.float16)[..., 0].float()
            minimum = raw[..., 2:4].view(torch.float16)[..., 0].float() if self.has_minimum else scale * centre
        codes = raw.view(len(raw), -1)
        return Codes(codes if self.bits == 4 else codes.view(torch.int8), scale, minimum, self._head)

    def encode(self, tensor: Tensor, buffer: Tensor) -> None:
        """For 4 bits with a minimum, and for 8 bits without; other blocks come from files."""
        raw = buffer[: self.nbytes(tensor.shape)].view(-1, self._block)
        x = tensor.reshape(-1, self.group).contiguous()
        loops = None if x.is_cuda else threads.compiled()
        if loops is not None:
            array = float_array(x)
            halves = raw.numpy().view(np.int16)
            encode = loops.codes.encode4 if self.has_minimum else loops.codes.encode8
            codes = raw.numpy() if self.has_minimum else raw.view(torch.int8).numpy()
            in_threads(lambda a, b: encode(array, a, b, halves, codes), len(x), x.numel())
            return
        x = x.float()
        least, most = x.aminmax(dim=-1, keepdim=True)
        if not self.has_minimum:
            scale = (torch.maximum(most, -least) / MOST).half()
            raw[..., :2].view(torch.float16).copy_(scale)
            raw[..., 2:].view(torch.int8).copy_(x.div(scale.float()).nan_to_num_(0.0).round_().clamp_(-MOST, MOST))
            return
        scale = ((most - least) / 15).half()
        least = least.half()
        raw[..., :2].view(torch.float16).copy_(scale)
        raw[..., 2:4].view(torch.float16).copy_(least)
        q = x.sub(least.float()).div_(scale.float()).nan_to_num_(0.0).round_().clamp_(0, 15).to(torch.uint8)
        low, high = q.split(self.group // 2, dim=-1)
        raw[..., 4:].copy_(low | (high << 4))

    def stored(self, x: Tensor) -> Tensor:
        vectors = x.reshape(-1, x.shape[-1])
        found = torch.empty(len(vectors), *self.row_bytes(x.shape[-1]), dtype=torch.uint8, device=x.device)
        by_loops = not x.is_cuda and threads.compiled() is not None  # they need no buffers
        step = max(1, (vectors.numel() if by_loops else ENCODED_PART[x.device.type]) // x.shape[-1])
        for few, target in zip(vectors.split(step), found.split(step)):
            self.encode(few, target.view(-1))
        return found.view(*x.shape[:-1], -1)

    def floats(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        width = stored.shape[-1] // self._block * self.group
        vectors = Quantised(self, stored.reshape(-1), (stored[..., 0].numel(), width))
        return vectors.to(dtype).view(*stored.shape[:-1], width)


def Int4(group: int) -> Blocks:  # noqa: N802  a format like the others
    """Codes of 4 bits with a scale and a minimum per group of 64 or 32 inputs: 4.5 or 5 bits per element."""
    return Blocks("int4", 4, group, True)


#: by their names in GGUF
GGUF = {f.name: f for f in (Blocks("Q8_0", 8, 32, False), Blocks("Q4_0", 4, 32, False), Blocks("Q4_1", 4, 32, True))}
