"""Random blocks of any format."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.formats import Blocks
from h2o_flexgen.formats.layout import EXPONENT


def random_blocks(form: Blocks, shape: tuple[int, int], seed: int = 0) -> Tensor:
    """Bytes of a matrix (O, I): random codes, with scales of any size and sign, as in files; (O, blocks, bytes)."""
    random = torch.Generator().manual_seed(seed)
    layout = form.layout
    raw = torch.randint(0, 256, (shape[0], shape[1] // layout.size, layout.nbytes), generator=random).to(torch.uint8)
    if layout.scale_kind == EXPONENT:
        raw[..., layout.scale_at] = torch.randint(118, 132, raw.shape[:2], generator=random).to(torch.uint8)
        return raw
    for at in (layout.scale_at, layout.minimum_at):
        if at is not None:
            set_half(raw, at, torch.randn(raw.shape[:2], generator=random) * torch.logspace(-3, 0, raw.shape[1]))
    return raw


def set_half(raw: Tensor, at: int, values: Tensor | float) -> None:
    """Write numbers in fp16 at byte `at` of each block."""
    halves = torch.as_tensor(values).half().expand(raw.shape[:-1]).contiguous().clone()[..., None]
    raw[..., at : at + 2] = halves.view(torch.uint8)
