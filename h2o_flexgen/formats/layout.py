"""How the elements of a block lie in its bytes, as data, by which torch's operators and compiled loops both decode it.

    element = code * scale of its group + minimum of its group

A code is made of bits from one or two bytes. The codes of a run come from neighbouring bytes, and differ in nothing
else; so a run is what one vector instruction decodes. A scale is a float of the block, in some formats times a whole
number of few bits for each group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

#: the kinds of a block's scale: in fp16, in fp32, or 2^(byte - 128)
HALF, SINGLE, EXPONENT = range(3)


class Bits(NamedTuple):
    """Part of a number: (byte >> shift & mask) << left."""

    at: int  # the byte, counted from the start of the block; in a run that of the first element
    shift: int = 0
    mask: int = 255
    left: int = 0
    per_byte: int = 1  # elements of a run whose bits, one of each, are in a byte: 1 or 8


class Numbers(NamedTuple):
    """Whole numbers: codes, or a number for each group."""

    bits: tuple[tuple[Bits, ...], ...]  # one or two parts of each run
    offset: int = 0  # is subtracted
    is_signed: bool = False  # a byte is a signed number
    table: tuple[int, ...] = ()  # what each code stands for

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the largest number."""
        if self.table:
            return min(self.table), max(self.table)
        if self.is_signed:
            return -127, 127  # -128 never occurs
        return -self.offset, sum(part.mask << part.left for part in self.bits[0]) - self.offset

    def read(self, raw: Tensor, length: int) -> Tensor:
        """The numbers of blocks raw (..., bytes), uint8, in runs of `length`: (..., runs * length) int8 or int16."""
        found = torch.cat([_run(raw, parts, length) for parts in self.bits], -1)
        if self.table:
            return looked_up(torch.tensor(self.table, dtype=torch.int16, device=raw.device), found)
        return found.view(torch.int8) if self.is_signed else found.to(torch.int16) - self.offset

    def array(self) -> np.ndarray:
        """(runs, 8) for compiled loops: at, shift and mask of the first part, and all fields of the second one, whose
        mask is 0 if there is none."""
        rows = []
        for low, *others in self.bits:
            high = others[0] if others else Bits(low.at, mask=0)
            rows.append((*low[:3], *high))
        return np.array(rows, np.int64).reshape(-1, 8)


def halves(at: int, offset: int = 0, high: int | None = None, table: tuple[int, ...] = ()) -> Numbers:
    """Codes of 4 bits from byte `at` on: the first half in the lower bits, the second in the upper ones. `high`: for 32
    codes, the first of 4 bytes with a fifth bit of each."""
    runs = []
    for n in (0, 1):
        fifth = () if high is None else (Bits(high + 2 * n, mask=1, left=4, per_byte=8),)
        runs.append((Bits(at, 4 * n, 15), *fifth))
    return Numbers(tuple(runs), offset, table=table)


def looked_up(table: Tensor, codes: Tensor) -> Tensor:
    """table[codes], of any shape, by indices of 32 bits: those of 64 take twice the memory."""
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def _run(raw: Tensor, parts: tuple[Bits, ...], length: int) -> Tensor:
    found = 0
    for part in parts:
        taken = raw[..., part.at : part.at + max(1, length // part.per_byte)]
        if part.per_byte > 1:
            taken = (taken[..., None] >> torch.arange(8, dtype=torch.uint8, device=raw.device)).flatten(-2)
        found = found | ((taken >> part.shift & part.mask) << part.left)
    return found


@dataclass(frozen=True)
class Layout:
    """The bytes of a block."""

    size: int  # elements
    nbytes: int
    codes: Numbers
    group: int  # elements that have a scale of their own
    scale_at: int  # the byte of the block's scale
    scale_kind: int = HALF
    minimum_at: int | None = None  # of the block's minimum, in fp16
    scales: Numbers | None = None  # of the groups: times the block's scale
    minima: Numbers | None = None  # of the groups: times the block's minimum, and subtracted
    floats: tuple[float, ...] = ()  # what each code stands for, if these are no whole numbers; by its 4 or 8 bits

    @property
    def run(self) -> int:
        """Elements of a run."""
        return self.size // len(self.codes.bits)

    @property
    def groups(self) -> int:
        return self.size // self.group

    @property
    def bounds(self) -> tuple[float, float]:
        """What the values of codes are between; NaN counts as nothing."""
        known = [value for value in self.floats if value == value]
        return (min(known), max(known)) if known else self.codes.bounds

    def values(self, raw: Tensor) -> Tensor:
        """What the codes of blocks raw (..., bytes) stand for: (..., elements of a block), floats or whole numbers."""
        codes = self.codes.read(raw, self.run)
        if not self.floats:
            return codes
        return looked_up(torch.tensor(self.floats, device=raw.device), codes)

    def scales_and_minima(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and minimum of each group of rows of blocks, raw (R, blocks, bytes): both (R, groups of a row) fp32."""
        if self.scale_kind == EXPONENT:
            scale = _exponent(raw[..., self.scale_at])
        else:
            dtype = torch.float16 if self.scale_kind == HALF else torch.float32
            scale = _float(raw, self.scale_at, dtype)
        minimum = torch.zeros_like(scale) if self.minimum_at is None else _float(raw, self.minimum_at, torch.float16)
        scale = scale[..., None].expand(*scale.shape, self.groups)
        minimum = minimum[..., None].expand_as(scale)
        if self.scales is not None:
            scale = scale * self.scales.read(raw, self.groups // len(self.scales.bits))
        if self.minima is not None:
            minimum = -(minimum * self.minima.read(raw, self.groups // len(self.minima.bits)))
        return scale.flatten(1), minimum.flatten(1)

    @cached_property
    def arrays(self) -> tuple:
        """`compiled.blocks.Arrays` in a plain tuple."""
        none = Numbers(())
        scales = self.scales or none
        table = np.array(self.codes.table, np.int8)
        head = [self.size, self.nbytes, self.run, self.group, self.codes.offset, self.scale_at, self.scale_kind]
        head += [-1 if self.minimum_at is None else self.minimum_at, scales.offset, scales.is_signed]
        values = np.array(self.floats, np.float32)
        return (*map(int, head), table, values, self.codes.array(), scales.array(), (self.minima or none).array())


def _float(raw: Tensor, at: int, dtype: torch.dtype) -> Tensor:
    taken = raw[..., at : at + dtype.itemsize].clone(memory_format=torch.contiguous_format)  # no view at odd ones
    return taken.view(dtype)[..., 0].float()


def _exponent(byte: Tensor) -> Tensor:
    """2^(byte - 128) as ggml computes it: exact, and without a special value for 255."""
    e = byte.int()
    return torch.where(e < 2, 0x00200000 << e, (e - 1) << 23).view(torch.float32)
