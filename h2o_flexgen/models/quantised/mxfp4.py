"""MXFP4 of the OCP Microscaling specification, in which gpt-oss stores its experts."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.models.quantised.method import nibbles, packed


def ggml_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """The bytes of a matrix, or of a stack of them, in `GGUF["MXFP4"]`.

    Args:
        blocks: (..., 16) uint8, 32 codes of which neighbours share a byte; scales: (...) uint8, powers of two.

    Raises:
        ValueError: a scale stands for NaN.
    """
    if (scales == 255).any():
        raise ValueError("a scale is NaN: is the checkpoint broken?")
    codes = packed(nibbles(blocks).reshape(1, -1), 32)
    return torch.cat([scales.reshape(1, -1, 1), codes], -1).flatten()
