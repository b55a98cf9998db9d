"""What methods share: which matrices are quantised, and the arrangement of codes and scales in blocks.

O outputs, I inputs, G groups of inputs. All codes and scales are those of the checkpoint: nothing is rounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from math import gcd

import torch
from torch import Tensor

from h2o_flexgen.formats import Blocks, Dense, Format, Shape
from h2o_flexgen.formats.forms import names_of
from h2o_flexgen.formats.layout import HALF, SINGLE, Bits, Layout, Numbers, halves
from h2o_flexgen.models.spec import Config, Layer, shortened

#: the largest block: it divides the inputs that int8 matmuls scale at once
MOST_BLOCK = 128


class Method:
    """How one method stores a matrix (O, I), by the name of its module: module + suffix for each tensor.

    Attributes:
        name: `quant_method`.
        key: the suffix of the tensor with the codes.
        quantises_head: whether the head is quantised too, unless `skipped` names it.
        is_in_place: whether matrices are read as stored, and not from a copy.
        is_declared: whether the config names the method.
        is_fused: whether experts lie in one tensor for all of a layer, as `storage.fused` describes.
        targets: patterns for the start of the names of modules that are quantised, unless `skipped` names them.
        skipped: modules that stay floats: patterns or ends of names, as in transformers' `should_convert_module`.
    """

    key = ".weight"
    quantises_head = False
    is_in_place = False
    is_declared = True
    is_fused = False
    targets: Sequence[str] = ("",)

    def __init__(self, config: Config, skipped: Sequence[str] = ()):
        self.config = config
        self.name = str(config.data.get("quant_method", "bitsandbytes"))
        self.skipped = check_patterns(config, skipped)

    def format(self, name: str, shape: Shape) -> Format:
        """The format of a matrix. Raises UserError if it cannot have the method's."""
        raise NotImplementedError

    def parts(self, shape: Shape, has: Callable[[str], bool]) -> dict[str, Shape | None]:
        """{suffix: shape} of the tensors of a matrix; None stands for a shape that `encode` checks. `has`: whether the
        checkpoint has the tensor with a suffix."""
        raise NotImplementedError

    def encode(self, shape: Shape, parts: dict[str, Tensor]) -> Tensor:
        """The bytes of a matrix in its format; or the matrix in floats, if that format cannot hold it exactly. Raises
        ValueError for tensors that are broken."""
        raise NotImplementedError

    def expected(self, name: str, shape: Shape) -> Format:
        """The format of a matrix as far as the config tells."""
        return self.format(name, shape)

    def formats(self, layers: Sequence[Layer]) -> dict[str, Format]:
        """{name: format} of the matrices of a model that are quantised, as far as the config tells. Routers are not:
        no method counts them as linear layers."""
        kept = layers[0].shapes
        found = {}
        for layer in layers[1:] if self.quantises_head else layers[1:-1]:
            for name, shape in layer.compressible.items():
                module = module_of((names_of(name) or [name])[0])
                if len(shape) == 2 and name not in kept and self._quantises(module):
                    found[name] = self.expected(name, shape)
        return found

    def _quantises(self, module: str) -> bool:
        boundary = r"(?:(?<=\.)|(?=\.|$))"
        if any(re.match(f"(?:{key}){boundary}", module) or module.endswith(key) for key in self.skipped):
            return False
        return any(re.match(key, module) for key in self.targets)


def module_of(name: str) -> str:
    """The module of a matrix."""
    return name.removesuffix(".weight")


# reading configs


def texts(config: Config, *keys: str) -> list[str]:
    """The lists of texts under any of the keys, which may be missing or null, as one."""
    found = []
    for key in keys:
        value = config.data.get(key) or []
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise config.error(f"{key} must be a list of texts, not {shortened(value)}")
        found += value
    return found


def check_patterns(config: Config, patterns: Sequence[str]) -> Sequence[str]:
    """The patterns of names of modules. Raises UserError for one that is invalid."""
    try:
        [*map(re.compile, patterns)]
    except re.error as e:
        raise config.error(f"a pattern of modules is invalid: {e}") from None
    return patterns


# formats


def block_size(*sizes: int) -> int:
    """Elements of a block: the most that divide each of `sizes`."""
    return gcd(*sizes, MOST_BLOCK)


@cache
def zeroed(name: str, size: int) -> Blocks:
    """(code - zero) * scale: an fp16 scale and a zero of 8 bits for `size` codes of 4 bits."""
    zero = Numbers(((Bits(2, mask=31),),))
    return Blocks(name, Layout(size, 3 + size // 2, halves(3), size, 0, HALF, minimum_at=0, minima=zero))


@cache
def looked_up(name: str, size: int, table: tuple[float, ...]) -> Blocks:
    """table[code] * scale: an fp32 scale for `size` codes of 4 or 8 bits."""
    is_byte = len(table) == 256
    codes = Numbers(((Bits(4),),)) if is_byte else halves(4)
    return Blocks(name, Layout(size, 4 + size * (8 if is_byte else 4) // 8, codes, size, 0, SINGLE, floats=table))


# arranging codes and scales


def nibbles(words: Tensor) -> Tensor:
    """Codes of 4 bits, the lowest first: (..., n) int32 -> (..., 8n) uint8, or (..., n) uint8 -> (..., 2n)."""
    if words.dtype not in (torch.int32, torch.uint8):
        raise ValueError(f"the codes are in {words.dtype}, not packed into int32 or uint8")
    raw = words.contiguous().view(torch.uint8)
    return torch.stack((raw & 15, raw >> 4), -1).flatten(-2)


def packed(codes: Tensor, size: int) -> Tensor:
    """Codes of 4 bits (O, I) as blocks of `halves`: (O, blocks, size / 2)."""
    low, high = codes.view(len(codes), -1, 2, size // 2).unbind(2)
    return low | high << 4


def spread(scale: Tensor, shape: Shape, size: int, each: Shape) -> Tensor:
    """The scale of each block of `size` elements, (O, blocks), from scale (R, C), one for `each` rows and columns."""
    rows = torch.arange(shape[0]) // each[0]
    columns = torch.arange(0, shape[1], size) // each[1]
    return scale[rows][:, columns]


def as_bytes(values: Tensor) -> Tensor:
    """(..., n) -> (..., n, bytes of an element)."""
    return values.contiguous()[..., None].view(torch.uint8)


class Grouped(Method):
    """Methods with codes of 4 bits, and a scale and a zero for each group of inputs. With
    `act_order` the inputs of a group are not neighbours."""

    def __init__(self, config: Config, skipped: Sequence[str], group: int | None, bits: object, act_order=False):
        super().__init__(config, skipped)
        if bits != 4:
            raise config.error(f"{shortened(bits)} bits are not supported, only 4")
        self.group = group  # None: all inputs
        self.act_order = act_order

    def format(self, name: str, shape: Shape) -> Blocks:
        group = self.group or shape[1]
        if shape[1] % group or group % 2 or shape[0] % 8 or shape[1] % 8:
            sizes = f"{shape[0]} x {shape[1]} of {name!r}"
            raise self.config.error(f"groups of {group} inputs and words of 8 codes do not divide the {sizes}")
        return zeroed(self.name, block_size(group))

    def expected(self, name: str, shape: Shape) -> Format:
        form = self.format(name, shape)
        return Dense(torch.float16) if self.act_order and self.group else form

    def groups(self, shape: Shape) -> int:
        return shape[1] // (self.group or shape[1])


def group_size(config: Config) -> int | None:
    """For GPTQ and AWQ."""
    return None if config.data.get("group_size") == -1 else config.size("group_size", 128)


def affine(codes: Tensor, scale: Tensor, zero: Tensor, index: Tensor | None = None) -> Tensor:
    """(code - zero) * scale as blocks of `zeroed`. In floats of the scale's type, as the methods' own kernels compute,
    if neighbours have different groups (GPTQ's act-order), or fp16 cannot hold a scale.

    Args:
        codes: (O, I); scale, zero: (O, G); all contiguous or not.
        index: (I,), the group of each input.
    """
    if not scale.is_floating_point():
        raise ValueError(f"the scales are in {scale.dtype}, not floats")
    shape = tuple(codes.shape)
    group = shape[1] // scale.shape[1]
    in_order = torch.arange(shape[1]) // group
    index = in_order if index is None else index.long()
    (least, most) = map(int, index.aminmax())
    if least < 0 or most >= scale.shape[1]:
        raise ValueError(f"its inputs are in groups {least} to {most}, and there are {scale.shape[1]}")
    (fewest, most) = map(int, index.bincount(minlength=scale.shape[1]).aminmax())
    if (fewest, most) != (group, group):
        raise ValueError(f"its groups have {fewest} to {most} inputs, not {group} each")
    if not torch.equal(index, in_order) or not torch.equal(scale.half().to(scale.dtype), scale):
        shifted = codes.to(torch.int8) - zero.to(torch.int8)[:, index]
        return shifted.to(scale.dtype).mul_(scale[:, index])
    size = block_size(group)
    scales = as_bytes(spread(scale.half(), shape, size, (1, group)))
    zeros = spread(zero, shape, size, (1, group))[..., None]
    return torch.cat([scales, zeros, packed(codes, size)], -1).flatten()
