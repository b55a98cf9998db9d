"""How the elements of a tensor lie in bytes. Only this file and `codes`, which decodes, know bits.

    Dense(dtype)        floats
    Int8()              of a matrix: int8 codes, one fp32 scale for each row
    Int4(group)         blocks along a row: fp16 scale and minimum of a group, then its codes of 4 bits (as Q4_1)
    Q8_0, Q4_0, Q4_1    GGUF's blocks of 32 elements, as they lie in the file

A code stands for code * scale + minimum. Scale and minimum are of a row, or of a group of neighbours in a row, so that
rows can be read and decoded alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.codes import MOST, Codes, quantise_rows
from h2o_flexgen.loops.threads import compiled, float_array, in_threads

Shape = tuple[int, ...]

#: elements that are decoded at once: by threads, and where that takes buffers of several times their size
PART, BUFFERED_PART = 1 << 24, 1 << 22
#: elements of a cache that are encoded at once: what stays in a CPU's cache, or is worth a GPU's kernels
ENCODED_PART = {"cpu": 1 << 16, "cuda": 1 << 20}


class Format:
    """Of the tensors of one kind.

    Attributes:
        name: for people and files.
        dtype: of the bytes as they are moved: a float type, or uint8.
        alignment: of the address of the first byte.
        heads: of queries or keys whose rows are in llama.cpp's order (`Quantised.order`); 0 for any other tensor.
    """

    name: str
    dtype: torch.dtype = torch.uint8
    alignment: int = 1
    heads: int = 0

    def row_bytes(self, width: int) -> tuple[int, ...]:
        """A tensor is one or several arrays, one after the other: bytes of a row of `width` elements in each."""
        raise NotImplementedError

    def nbytes(self, shape: Shape) -> int:
        """Of a tensor."""
        return prod(shape[:-1]) * sum(self.row_bytes(shape[-1]))

    def arrays(self, shape: Shape) -> list[tuple[int, int]]:
        """[(offset, bytes of a row)] of each array of a tensor."""
        sizes = self.row_bytes(shape[-1])
        return list(zip(accumulate((prod(shape[:-1]) * size for size in sizes), initial=0), sizes))

    def codes(self, buffer: Tensor, shape: Shape, begin: int, end: int) -> Codes:
        """Rows `begin` to `end` of the matrix in a buffer, for a decoder."""
        raise NotImplementedError

    def view(self, buffer: Tensor, shape: Shape) -> Tensor | Quantised:
        """The tensor whose bytes begin a buffer (uint8, aligned)."""
        return Quantised(self, buffer[: self.nbytes(shape)], shape)

    def encode(self, tensor: Tensor, buffer: Tensor) -> None:
        """Write a float tensor into a buffer of its bytes (uint8, aligned)."""
        raise NotImplementedError

    def decode(self, buffer: Tensor, shape: Shape, out: Tensor) -> None:
        """Write the tensor in a buffer into `out`, of any float type, on the same device."""
        self.view(buffer, shape).decode(out)

    # vectors of a cache

    def stored(self, x: Tensor) -> Tensor:
        """Floats x (..., D) as a cache stores them: (..., W) of `dtype`, each vector by itself."""
        return x

    def floats(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """What `stored` stands for: (..., D)."""
        return stored.to(dtype)


@dataclass(frozen=True)
class Dense(Format):
    """Floats as they are."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def alignment(self) -> int:
        return self.dtype.itemsize

    def row_bytes(self, width: int) -> tuple[int, ...]:
        return (width * self.dtype.itemsize,)

    def view(self, buffer: Tensor, shape: Shape) -> Tensor:
        return buffer[: self.nbytes(shape)].view(self.dtype).view(shape)

    def encode(self, tensor: Tensor, buffer: Tensor) -> None:
        self.view(buffer, tensor.shape).copy_(tensor)

    def decode(self, buffer: Tensor, shape: Shape, out: Tensor) -> None:
        convert(out, self.view(buffer, shape))

    def dots(self, q: Tensor, stored: Tensor, out: Tensor) -> None:
        """As `Blocks.dots`, of keys (n, S, D) in 16 bits."""
        _by_heads(compiled().attention.dots, [float_array(stored)], q, out)

    def mix(self, p: Tensor, stored: Tensor, out: Tensor) -> None:
        """As `Blocks.mix`, of values in 16 bits."""
        _by_heads(compiled().attention.mix, [float_array(stored)], p, out)


@dataclass(frozen=True)
class Int8(Format):
    """A matrix (O, I) as `scale` (O,) in fp32 and then `codes` (O, I) in int8; the largest of a row is 127 or -127."""

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
        return Codes(codes, scale[:, None], torch.zeros_like(scale)[:, None], 0, 0)

    def encode(self, tensor: Tensor, buffer: Tensor) -> None:
        codes, scale = self.parts(buffer, tuple(tensor.shape))
        quantise_rows(tensor, codes, scale)


@dataclass(frozen=True)
class Blocks(Format):
    """Each row is cut into groups of neighbours, each a block: its scale in fp16, its minimum in fp16 if it has one,
    and its codes. Of 4 bits the first half of a group are the lower ones of its bytes. Without a minimum the codes are
    centred: those of 4 bits stand for code - 8.

    The types Q8_0, Q4_0 and Q4_1 of GGUF; https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h."""

    name: str
    bits: int
    group: int
    has_minimum: bool
    heads: int = 0

    alignment = 2

    @property
    def _head(self) -> int:
        """Bytes of a block before its codes."""
        return 4 if self.has_minimum else 2

    @property
    def _block(self) -> int:
        return self._head + self.group * self.bits // 8

    @property
    def layout(self) -> tuple[int, int, int, bool]:
        """Of 4 bits: bytes of a row before its first codes, from those of one block to the next, and of the codes of a
        block; whether there are minima."""
        return self._head, self._block, self.group // 2, self.has_minimum

    def row_bytes(self, width: int) -> tuple[int, ...]:
        return (width // self.group * self._block,)

    def codes(self, buffer: Tensor, shape: Shape, begin: int, end: int) -> Codes:
        rows, width = shape
        raw = buffer[: self.nbytes(shape)].view(rows, width // self.group, self._block)[begin:end]
        centre, loops = -8.0 if self.bits == 4 else 0.0, None if raw.is_cuda else compiled()
        if loops is not None:
            # torch's threads would go on waiting for work, on the cores that those of the decoder need
            scale, minimum = torch.empty(2, *raw.shape[:2])
            blocks, rest = raw.numpy().view(np.int16), (np.float32(centre), scale.numpy(), minimum.numpy())
            in_threads(
                lambda a, b: loops.codes.scales(blocks, a, b, self.has_minimum, *rest), len(raw), len(raw) * width
            )
        else:
            scale = raw[..., :2].view(torch.float16)[..., 0].float()
            minimum = raw[..., 2:4].view(torch.float16)[..., 0].float() if self.has_minimum else scale * centre
        codes = raw.view(len(raw), -1)
        return Codes(codes if self.bits == 4 else codes.view(torch.int8), scale, minimum, self._head, self._block)

    def encode(self, tensor: Tensor, buffer: Tensor) -> None:
        """Of 4 bits with a minimum, and of 8 bits without; the others come from files."""
        raw, x = buffer[: self.nbytes(tensor.shape)].view(-1, self._block), tensor.reshape(-1, self.group).contiguous()
        loops = None if x.is_cuda else compiled()
        if loops is not None:
            array, halves = float_array(x), raw.numpy().view(np.int16)
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
        scale, least = ((most - least) / 15).half(), least.half()
        raw[..., :2].view(torch.float16).copy_(scale)
        raw[..., 2:4].view(torch.float16).copy_(least)
        q = x.sub(least.float()).div_(scale.float()).nan_to_num_(0.0).round_().clamp_(0, 15).to(torch.uint8)
        low, high = q.split(self.group // 2, dim=-1)
        raw[..., 4:].copy_(low | (high << 4))

    def stored(self, x: Tensor) -> Tensor:
        vectors = x.reshape(-1, x.shape[-1])
        found = torch.empty(len(vectors), *self.row_bytes(x.shape[-1]), dtype=torch.uint8, device=x.device)
        by_loops = not x.is_cuda and compiled() is not None  # which need no buffers
        step = max(1, (vectors.numel() if by_loops else ENCODED_PART[x.device.type]) // x.shape[-1])
        for few, target in zip(vectors.split(step), found.split(step)):
            self.encode(few, target.view(-1))
        return found.view(*x.shape[:-1], -1)

    def dots(self, q: Tensor, stored: Tensor, out: Tensor) -> None:
        """Queries (n, G, D) times keys in 8 bits (n, S, W) into `out` (n, G, S), by compiled loops in fp32."""
        self._attend(compiled().attention.dots8, q, stored, out)

    def mix(self, p: Tensor, stored: Tensor, out: Tensor) -> None:
        """Values (n, S, W) with the weights (n, G, S), summed into `out` (n, G, D), by compiled loops in fp32."""
        self._attend(compiled().attention.mix8 if self.bits == 8 else compiled().attention.mix4, p, stored, out)

    def _attend(self, kernel, x: Tensor, stored: Tensor, out: Tensor) -> None:
        codes = stored.view(torch.int8) if self.bits == 8 else stored
        _by_heads(kernel, [stored.view(torch.int16).numpy(), codes.numpy()], x, out)

    def floats(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        width = stored.shape[-1] // self._block * self.group
        out = torch.empty(*stored.shape[:-1], width, dtype=dtype, device=stored.device)
        rows = out.numel() // width
        Quantised(self, stored.reshape(-1), (rows, width)).decode(out.view(rows, width))
        return out


class KVFormat(NamedTuple):
    """Of K and of V in a cache."""

    k: Format
    v: Format

    @classmethod
    def dense(cls, dtype: torch.dtype) -> KVFormat:
        """Floats."""
        return cls(Dense(dtype), Dense(dtype))

    @property
    def is_dense(self) -> bool:
        return isinstance(self.k, Dense)

    @property
    def is_compiled(self) -> bool:
        """Whether `dots` and `mix` can be had."""
        return compiled() is not None and self.k.dtype in (torch.uint8, torch.bfloat16, torch.float16)

    def stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Both, as `Format.stored`."""
        return self.k.stored(k), self.v.stored(v)


def Int4(group: int) -> Blocks:  # noqa: N802  a format, as the others
    """Codes of 4 bits with scale and minimum for each group of 64 or 32 inputs: 4.5 or 5 bits an element."""
    return Blocks("int4", 4, group, True)


#: by GGUF's names
GGUF = {f.name: f for f in (Blocks("Q8_0", 8, 32, False), Blocks("Q4_0", 4, 32, False), Blocks("Q4_1", 4, 32, True))}


@dataclass
class Quantised:
    """A matrix (O, I) as it is stored.

    Attributes:
        raw: its bytes (uint8), on any device.
        in_int8: whether its matmul is one in int8; in_blocks: with its codes as they are.
    """

    format: Format
    raw: Tensor
    shape: Shape
    in_int8: bool = False
    in_blocks: bool = False

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
        """Which row of the matrix each stored row is: llama.cpp lays the two elements of a head that RoPE rotates
        together side by side, where a checkpoint has them half a head apart."""
        return _order(self.shape[0], self.format.heads)

    def take(self, ids: Tensor) -> Quantised:
        """Some of the rows, of a matrix without heads; `ids` (n,), on the same device."""
        arrays = self.format.arrays(self.shape)
        rows = [self.raw[at : at + self.shape[0] * size].view(-1, size)[ids] for at, size in arrays]
        return Quantised(self.format, torch.cat([x.view(-1) for x in rows]), (len(ids), self.shape[1]))

    def blocks(self) -> tuple:
        """Of a matrix in blocks of 4 bits on the CPU, what `tiles4.multiply` reads: its bytes twice, which stored row
        each one is, and how a row lies in bytes."""
        raw = self.raw.view(self.shape[0], -1).numpy()
        return raw, raw.view(np.int16), _stored_rows(self.shape[0], self.format.heads), *self.format.layout

    def is_finite(self) -> bool:
        parts = self._parts(0, self.shape[0], BUFFERED_PART)
        return all(bool(x.isfinite().all()) for _, codes in parts for x in (codes.scale, codes.minimum))

    def _parts(self, begin: int, count: int, size: int) -> Iterator[tuple[slice, Codes]]:
        """Of `count` rows from `begin` on, some `size` elements at once: (which of these rows, their codes)."""
        step = max(1, size // self.shape[1])
        for at in range(0, count, step):
            end = min(at + step, count)
            yield slice(at, end), self.format.codes(self.raw, self.shape, begin + at, begin + end)

    def decode(self, out: Tensor, begin: int = 0) -> None:
        """Write rows from `begin` on into `out`, (rows, I) contiguous, of any float type, on the same device; of a
        matrix with `heads` all of them."""
        by_loops, has_heads = not out.is_cuda and compiled() is not None, self.format.heads > 0
        order = self.order[: len(out)] if by_loops or has_heads else None
        for rows, codes in self._parts(begin, len(out), PART if by_loops else BUFFERED_PART):
            if by_loops:
                codes.decode_by_loops(order[rows], out)
                continue
            part = torch.empty_like(out[rows]) if has_heads else out[rows]
            codes.decode(part)
            if has_heads:
                out[order[rows].to(out.device)] = part

    def into(self, out: Tensor | Quantised, begin: int = 0) -> None:
        """Write as many rows as `out` has, from `begin` on, into it, as `decode` or `to_int8`."""
        if isinstance(out, Quantised):
            self.to_int8(out, begin)
        else:
            self.decode(out, begin)

    def to_int8(self, out: Quantised, begin: int = 0) -> None:
        """Write rows from `begin` on into `out`, in `Int8` on the same device, as `Codes.to_int8`; of a matrix with
        `heads` all of them."""
        by_loops = not self.is_cuda and compiled() is not None
        order, target = self.order[: out.shape[0]], out.format.parts(out.raw, out.shape)
        for rows, codes in self._parts(begin, len(order), PART if by_loops else BUFFERED_PART):
            (codes.to_int8_by_loops if by_loops else codes.to_int8)(order[rows], *target)


def _order(count: int, heads: int) -> Tensor:
    rows = torch.arange(count)
    return rows.view(heads, 2, -1).transpose(1, 2).reshape(-1) if heads else rows


@lru_cache(maxsize=256)  # a matmul of few rows takes less time than this
def _stored_rows(count: int, heads: int) -> np.ndarray:
    """Which stored row each row of a matrix is: the inverse of `Quantised.order`."""
    return _order(count, heads).argsort().numpy()


def _by_heads(kernel, arrays: list[np.ndarray], x: Tensor, out: Tensor) -> None:
    """A compiled loop over the heads of a cache, shared among all threads."""
    size, arrays = arrays[-1].size, [*arrays, x.numpy(), out.numpy()]

    def part(begin: int, end: int) -> None:
        kernel(*(each[begin:end] for each in arrays))

    in_threads(part, len(out), size)


def prepare_cache(form: KVFormat, dtype: torch.dtype) -> None:
    """Compile what stores floats of `dtype` in a cache on a CPU and attends to it, or read it from numba's cache: once,
    before memory is measured."""
    if form.is_compiled:
        width = 64 if form.is_dense else form.k.group
        k, v = form.stored(*torch.zeros(2, 2, 1, width, dtype=dtype))
        queries = torch.zeros(2, 2, width)
        for part in torch.zeros(2, 2, 1), torch.zeros(2, 2, 2)[..., :1]:  # of a cache in several segments, a part
            form.k.dots(queries, k, part)
            form.v.mix(part, v, torch.empty_like(queries))


def prepare(dtype: torch.dtype) -> None:
    """Compile what decodes into `dtype` and into int8 on a CPU, or read it from numba's cache: once, before memory is
    measured."""
    shape = 1, 32
    for form in (Int8(), Int4(32)):
        matrix = form.view(torch.zeros(form.nbytes(shape), dtype=torch.uint8), shape)
        matrix.decode(torch.empty(shape, dtype=dtype))
        matrix.to_int8(Int8().view(torch.zeros(Int8().nbytes(shape), dtype=torch.uint8), shape))


def encode_parts(form: Format, shape: Shape, parts: Iterable[tuple[int, Tensor]], buffer: Tensor) -> None:
    """Write a matrix into a buffer of its bytes, part by part: (first row, rows)."""
    for begin, part in parts:
        piece = torch.empty(form.nbytes(tuple(part.shape)), dtype=torch.uint8)
        form.encode(part, piece)
        for (offset, size), (at, _) in zip(form.arrays(shape), form.arrays(tuple(part.shape))):
            nbytes = len(part) * size
            buffer[offset + begin * size :][:nbytes] = piece[at : at + nbytes]


def decode_bytes(formats: Iterable[Format], dtype: torch.dtype, cuda: bool) -> int:
    """What decoding takes besides its result in `dtype`: codes and floats of a part, these twice where they become
    codes of 8 bits, and of a matrix with heads also the part before its rows are in order. Compiled loops take
    scales and minima only, which are not counted."""
    quantised = [form for form in formats if not isinstance(form, Dense)]
    if not quantised or (not cuda and compiled()):
        return 0
    return BUFFERED_PART * (9 + dtype.itemsize * any(form.heads for form in quantised))


#: elements that `convert` turns from fp16 into bf16 at once, through fp32
_CONVERT_ELEMENTS = 1 << 18


def convert(dst: Tensor, src: Tensor) -> None:
    """Copy to another dtype or device on the compute device, with all threads; both contiguous, of the same shape."""
    if dst.dtype == src.dtype or torch.float32 in (dst.dtype, src.dtype):
        dst.copy_(src)
        return
    for target, part in zip(dst.view(-1).split(_CONVERT_ELEMENTS), src.view(-1).split(_CONVERT_ELEMENTS)):
        target.copy_(part.float())  # twice as fast as directly between fp16 and bf16
