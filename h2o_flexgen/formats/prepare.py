"""Compile the loops that decode on a CPU, or read them from numba's cache, before memory is measured."""

from __future__ import annotations

import torch

from h2o_flexgen.formats.blocks import Int4
from h2o_flexgen.formats.int8 import Int8


def prepare(dtype: torch.dtype) -> None:
    """For decoding matrices to `dtype` and to int8."""
    shape = 1, 32
    for form in (Int8(), Int4(32)):
        matrix = form.view(torch.zeros(form.nbytes(shape), dtype=torch.uint8), shape)
        matrix.to(dtype)
        matrix.to_int8(Int8().view(torch.zeros(Int8().nbytes(shape), dtype=torch.uint8), shape))
