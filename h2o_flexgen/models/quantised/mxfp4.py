"""MXFP4 of the OCP Microscaling specification, in which gpt-oss stores its experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from h2o_flexgen.formats import GGUF, Format, Shape
from h2o_flexgen.models.quantised.method import Method, texts
from h2o_flexgen.models.spec import Config

#: elements that share a scale
GROUP = 32


class MXFP4(Method):
    """Of each expert `_blocks` (O, I / 32, 16), two codes of neighbouring inputs a byte, and `_scales` (O, I / 32); all
    else is in floats."""

    key = "_blocks"
    is_fused = True
    targets = (r".*\.experts\.",)

    def __init__(self, config: Config):
        super().__init__(config, texts(config, "modules_to_not_convert"))

    def format(self, name: str, shape: Shape) -> Format:
        if shape[1] % GROUP:
            raise self.config.error(f"groups of {GROUP} inputs do not divide the {shape[1]} of {name!r}")
        return GGUF["MXFP4"]

    def parts(self, shape: Shape, has: Callable[[str], bool]) -> dict[str, Shape | None]:
        scales = (shape[0], shape[1] // GROUP)
        return {"_blocks": (*scales, GROUP // 2), "_scales": scales}

    def encode(self, shape: Shape, parts: dict[str, Tensor]) -> Tensor:
        if any(part.dtype != torch.uint8 for part in parts.values()):
            raise ValueError(f"its codes and scales are in {', '.join(str(part.dtype) for part in parts.values())}")
        return ggml_blocks(*parts.values())


def ggml_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """The bytes of a matrix, or of a stack of them, in `GGUF["MXFP4"]`.

    Args:
        blocks: (..., 16) uint8, 32 codes of which neighbours share a byte; scales: (...) uint8, powers of two.

    Raises:
        ValueError: a scale stands for NaN.
    """
    if (scales == 255).any():
        raise ValueError("a scale is NaN: is the checkpoint broken?")
    first, second = blocks.chunk(2, -1)  # elements 0 to 15, which become lower bits, and 16 to 31
    codes = torch.stack([first & 15 | second << 4, first >> 4 | second & 240], -1).flatten(-2)
    return torch.cat([scales[..., None], codes], -1).flatten()
