"""Rows cut into blocks of codes: int4, types of GGUF files (`ggml.py`), and vectors of a cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.compiled import INT4, INT8, threads
from h2o_flexgen.compiled.threads import float_array, in_threads
from h2o_flexgen.formats.base import Format, Shape
from h2o_flexgen.formats.codes import MOST, Codes
from h2o_flexgen.formats.layout import Bits, Layout, Numbers, halves
from h2o_flexgen.formats.matrix import Quantised

#: types of GGUF files that matrices are quantised to
GGML_ENCODED = ("Q4_0",)
#: elements of a cache that are encoded at once: what stays in a CPU's cache, or keeps a GPU busy
ENCODED_PART = {"cpu": 1 << 16, "cuda": 1 << 20}


@dataclass(frozen=True)
class Blocks(Format):
    """A row is a sequence of blocks, each of which is laid out as `layout` says."""

    name: str
    layout: Layout
    heads: int = 0

    @property
    def alignment(self) -> int:
        return 1 if self.layout.nbytes % 2 else 2

    @property
    def bits(self) -> float:
        """Of an element, with its share of scales."""
        return 8 * self.layout.nbytes / self.layout.size

    @property
    def loop_kind(self) -> int:
        return INT8 if self.layout.codes.is_signed else INT4

    @cached_property
    def tile(self) -> tuple[int, int, int] | None:
        """The last fields of `block_rows.Blocks`; None: matmuls in int8 do not read this format as stored."""
        codes = self.layout.codes
        needs_halves = bool(codes.table) or codes.bits[0][-1].per_byte > 1
        if self.layout.floats or self.layout.run % 16 or (needs_halves and self.layout.size != 32):
            return None
        lowest, highest = codes.bounds
        loops = threads.compiled()
        kind = loops and loops.block_rows.kind_of(self.layout.group, highest - lowest)
        return None if kind is None else (kind, lowest, highest - lowest)

    @property
    def chunk(self) -> int:
        """Elements that such matmuls scale at once."""
        return threads.compiled().block_rows.CHUNKS[self.tile[0]]

    def row_bytes(self, width: int) -> tuple[int, ...]:
        return (width // self.layout.size * self.layout.nbytes,)

    def codes(self, buffer: Tensor, shape: Shape, begin: int, end: int) -> Codes:
        rows, width = shape
        raw = buffer[: self.nbytes(shape)].view(rows, -1)[begin:end]
        loops = None if raw.is_cuda else threads.compiled()
        if loops is None:
            return Codes(raw, *self.layout.scales_and_minima(raw.unflatten(1, (-1, self.layout.nbytes))), self.layout)
        # torch's threads would go on waiting for work, on the cores that the decoder's threads need
        floats = torch.empty(2, len(raw), width // self.layout.group)
        arrays = [x.numpy() for x in (raw, *floats)]
        in_threads(lambda a, b: loops.blocks.scales(*arrays, a, b, self.layout.arrays), len(raw), len(raw) * width)
        return Codes(raw, *floats, self.layout)

    def encode(self, tensor: Tensor, buffer: Tensor) -> None:
        """For `Int4`, `Codes8`, and the types that the package gguf can quantise to."""
        if self.name in GGML_ENCODED:
            import gguf

            kind = gguf.GGMLQuantizationType[self.name]
            buffer.copy_(torch.from_numpy(gguf.quantize(tensor.float().numpy(), kind)).flatten())
            return
        has_minimum = self.layout.minimum_at is not None
        raw = buffer[: self.nbytes(tensor.shape)].view(-1, self.layout.nbytes)
        x = tensor.reshape(-1, self.layout.size).contiguous()
        loops = None if x.is_cuda else threads.compiled()
        if loops is not None:
            array = float_array(x)
            halves = raw.numpy().view(np.int16)
            encode = loops.codes.encode4 if has_minimum else loops.codes.encode8
            codes = raw.numpy() if has_minimum else raw.view(torch.int8).numpy()
            in_threads(lambda a, b: encode(array, a, b, halves, codes), len(x), x.numel())
            return
        x = x.float()
        least, most = x.aminmax(dim=-1, keepdim=True)
        if not has_minimum:
            scale = (torch.maximum(most, -least) / MOST).half()
            raw[..., :2].view(torch.float16).copy_(scale)
            raw[..., 2:].view(torch.int8).copy_(x.div(scale.float()).nan_to_num_(0.0).round_().clamp_(-MOST, MOST))
            return
        scale = ((most - least) / 15).half()
        least = least.half()
        raw[..., :2].view(torch.float16).copy_(scale)
        raw[..., 2:4].view(torch.float16).copy_(least)
        q = x.sub(least.float()).div_(scale.float()).nan_to_num_(0.0).round_().clamp_(0, 15).to(torch.uint8)
        low, high = q.chunk(2, dim=-1)
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
        width = stored.shape[-1] // self.layout.nbytes * self.layout.size
        vectors = Quantised(self, stored.reshape(-1), (stored[..., 0].numel(), width))
        return vectors.to(dtype).view(*stored.shape[:-1], width)


@cache
def Int4(group: int) -> Blocks:  # noqa: N802  a format like the others
    """Codes of 4 bits with a scale and a minimum per group of 64 or 32 inputs: 4.5 or 5 bits per element. The first
    half of a group is in the lower 4 bits of its bytes."""
    return Blocks("int4", Layout(group, 4 + group // 2, halves(4), group, 0, minimum_at=2))


@cache
def Codes8(group: int) -> Blocks:  # noqa: N802
    """Symmetric codes of 8 bits with a scale per group."""
    return Blocks("int8", Layout(group, 2 + group, Numbers(((Bits(2),),), is_signed=True), group, 0))
