"""bitsandbytes: NF4 and FP4 (QLoRA, arXiv 2305.14314), and LLM.int8() (arXiv 2208.07339)."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor

from h2o_flexgen.formats import Blocks, Int8, Shape
from h2o_flexgen.models.quantised.method import Method, as_bytes, block_size, looked_up, nibbles, packed, texts
from h2o_flexgen.models.spec import Config, shortened

NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635)
NF4 += (-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634)
NF4 += (0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
FP4 = tuple(sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3))
TABLES = {"nf4": NF4, "fp4": FP4}
#: elements that share a scale, unless a matrix says otherwise
GROUP = 64
#: scales that share one of their own, if these are quantised too
NESTED = 256


def bitsandbytes(config: Config) -> Method:
    """The method of a config, in 4 or 8 bits."""
    return FourBits(config) if config.flag("load_in_4bit", False) else EightBits(config)


class FourBits(Method):
    """`weight` has two codes a byte, the first in the upper bits, and a scale, `absmax`, for each 64 of all elements.
    Scales may be quantised themselves: `nested_absmax`."""

    def __init__(self, config: Config):
        super().__init__(config, texts(config, "llm_int8_skip_modules"))
        self.kind = config.text("bnb_4bit_quant_type", "fp4")
        storage = config.text("bnb_4bit_quant_storage", "uint8")
        if self.kind not in TABLES or storage != "uint8":
            known = ", ".join(TABLES)
            raise config.error(f"{self.kind} in {storage} is not supported; known: {known} in uint8")
        self.state = f".weight.quant_state.bitsandbytes__{self.kind}"

    def format(self, name: str, shape: Shape) -> Blocks:
        if shape[1] % 2:
            raise self.config.error(f"two codes a byte do not fill the {shape[1]} inputs of {name!r}")
        return looked_up(self.kind, block_size(shape[1], GROUP), TABLES[self.kind])

    def parts(self, shape: Shape, has: Callable[[str], bool]) -> dict[str, Shape | None]:
        found = {".weight": (shape[0] * shape[1] // 2, 1), ".weight.quant_map": (16,), self.state: None}
        scales = [".weight.absmax"]
        if has(".weight.nested_absmax"):
            scales += [".weight.nested_absmax", ".weight.nested_quant_map"]
        return found | dict.fromkeys(scales)

    def encode(self, shape: Shape, parts: dict[str, Tensor]) -> Tensor:
        state = json.loads(bytes(parts[self.state].to(torch.uint8).flatten().tolist()))
        table = torch.tensor(TABLES[self.kind])
        fits = isinstance(state, dict) and state.get("shape") == list(shape)
        if not fits or not torch.equal(parts[".weight.quant_map"], table):
            raise ValueError(f"its quant_state is not that of a matrix {list(shape)} in {self.kind}")
        size = block_size(shape[1], GROUP)
        group = state.get("blocksize", GROUP)
        scale = _scales(parts, state)
        if type(group) is not int or group < 1 or group % size or len(scale) != -(-shape[0] * shape[1] // group):
            raise ValueError(f"{len(scale)} scales do not fit groups of {shortened(group)} elements")
        each = scale[torch.arange(0, shape[0] * shape[1], size) // group].view(shape[0], -1)
        first_is_low = nibbles(parts[".weight"].view(shape[0], -1)).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return torch.cat([as_bytes(each), packed(first_is_low, size)], -1).flatten()


def _scales(parts: dict[str, Tensor], state: dict) -> Tensor:
    """The scales in fp32, as bitsandbytes computes them."""
    absmax = parts[".weight.absmax"]
    if ".weight.nested_absmax" not in parts:
        return absmax.float()
    nested = parts[".weight.nested_absmax"].float()
    table = parts[".weight.nested_quant_map"].float()
    group = state.get("nested_blocksize", NESTED)
    offset = state.get("nested_offset", 0.0)
    fits = type(group) is int and group > 0 and len(nested) == -(-len(absmax) // group) and len(table) == 256
    if not fits or absmax.dtype != torch.uint8 or not isinstance(offset, float | int):
        raise ValueError(f"its {len(absmax)} quantised scales do not fit the {len(nested)} of their groups")
    return table[absmax.long()] * nested[torch.arange(len(absmax)) // group] + offset


class EightBits(Method):
    """`weight` (O, I) int8 and `SCB` (O,), the value of the code 127."""

    def __init__(self, config: Config):
        super().__init__(config, texts(config, "llm_int8_skip_modules"))

    def format(self, name: str, shape: Shape) -> Int8:
        return Int8()

    def parts(self, shape: Shape, has: Callable[[str], bool]) -> dict[str, Shape | None]:
        found = {".weight": shape, ".SCB": shape[:1]}
        return found | ({".weight_format": None} if has(".weight_format") else {})

    def encode(self, shape: Shape, parts: dict[str, Tensor]) -> Tensor:
        codes = parts[".weight"]
        if codes.dtype != torch.int8 or (codes == -128).any() or parts.get(".weight_format", torch.zeros(1)).any():
            raise ValueError("its codes are not rows in int8 from -127 to 127")
        return torch.cat([(parts[".SCB"].float() / 127).view(torch.uint8), codes.view(torch.uint8).flatten()])
