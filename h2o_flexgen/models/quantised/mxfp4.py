"""MXFP4 of the OCP Microscaling specification, as gpt-oss stores its experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from h2o_flexgen.formats import GGUF, Blocks, Shape
from h2o_flexgen.models.quantised.method import Method, nibbles, packed, suffixes, texts
from h2o_flexgen.models.spec import Config


class MXFP4(Method):
    """`NAME_blocks` (O, I / 32, 16), where neighbours share a byte, and `NAME_scales` (O, I / 32), powers of two."""

    key = "_blocks"

    def __init__(self, config: Config):
        super().__init__(config, suffixes(texts(config, "modules_to_not_convert")))

    def format(self, name: str, shape: Shape) -> Blocks:
        if shape[1] % 32:
            raise self.config.error(f"blocks of 32 do not divide the {shape[1]} inputs of {name!r}")
        return GGUF["MXFP4"]

    def parts(self, shape: Shape, has: Callable[[str], bool]) -> dict[str, Shape | None]:
        blocks = shape[0], shape[1] // 32
        return {"_blocks": (*blocks, 16), "_scales": blocks}

    def encode(self, shape: Shape, parts: dict[str, Tensor]) -> Tensor:
        return ggml_blocks(parts["_blocks"], parts["_scales"])


def ggml_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """The bytes of a matrix, or of a stack of them, in `GGUF["MXFP4"]`: blocks (..., 16) uint8 and scales (...) uint8.
    Raises ValueError for a scale that stands for NaN."""
    if (scales == 255).any():
        raise ValueError("a scale is NaN: is the checkpoint broken?")
    codes = packed(nibbles(blocks).reshape(1, -1), 32)
    return torch.cat([scales.reshape(1, -1, 1), codes], -1).flatten()
