"""FP8 (e4m3) weights with a scale for each tensor, row or block: `fp8` and `fbgemm_fp8`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from h2o_flexgen.formats import Blocks, Shape
from h2o_flexgen.models.quantised.method import Method, as_bytes, block_size, looked_up, spread, texts
from h2o_flexgen.models.spec import Config, shortened

E4M3 = tuple(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist())
#: names of the scales, which are multiplied under both
SCALES = (".weight_scale_inv", ".weight_scale")


class FP8(Method):
    """`weight` (O, I) and `weight_scale` or `weight_scale_inv`: one for each `block` (rows, columns); without blocks
    one, or one for each row. How activations were to be rounded is ignored: they stay floats."""

    def __init__(self, config: Config, block: Sequence[int] | None = None, skipped: Sequence[str] | None = None):
        if skipped is None:
            skipped = texts(config, "modules_to_not_convert", "ignored_layers")
        super().__init__(config, skipped)
        self.block = block or config.data.get("weight_block_size")
        is_pair = isinstance(self.block, list) and len(self.block) == 2
        if self.block and not (is_pair and all(type(n) is int and n > 0 for n in self.block)):
            raise config.error(f"blocks of {shortened(self.block)} are not rows and columns")

    def format(self, name: str, shape: Shape) -> Blocks:
        size = block_size(shape[1], self.block[1]) if self.block else shape[1]
        return looked_up("fp8", size, E4M3)

    def parts(self, shape: Shape, has: Callable[[str], bool]) -> dict[str, Shape | None]:
        scale = next((suffix for suffix in SCALES if has(suffix)), SCALES[0])
        blocks = self.block and tuple(-(-size // each) for size, each in zip(shape, self.block))
        return {".weight": shape, scale: blocks or None}

    def encode(self, shape: Shape, parts: dict[str, Tensor]) -> Tensor:
        weight, scale = parts.values()
        if weight.dtype != torch.float8_e4m3fn or not scale.is_floating_point():
            raise ValueError(f"{weight.dtype} with scales in {scale.dtype} is not float8_e4m3fn with floats")
        codes = weight.view(torch.uint8)
        if (codes & 127 == 127).any():
            raise ValueError("it contains NaN: is the checkpoint broken?")
        if not self.block and scale.numel() not in (1, shape[0]):
            raise ValueError(f"{scale.numel()} scales are neither one nor {shape[0]}, one for each row")
        each = self.block or (-(-shape[0] // scale.numel()), shape[1])
        scale = scale if self.block else scale.reshape(-1, 1)
        size = self.format("", shape).layout.size
        scales = as_bytes(spread(scale.float(), shape, size, each))
        return torch.cat([scales, codes.view(shape[0], -1, size)], -1).flatten()
