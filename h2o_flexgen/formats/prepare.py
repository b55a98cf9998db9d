"""Compile what formats run on a CPU, or read it from numba's cache: once, before memory is measured."""

from __future__ import annotations

import torch

from h2o_flexgen.formats.blocks import Int4
from h2o_flexgen.formats.cache import KVFormat
from h2o_flexgen.formats.int8 import Int8


def prepare_cache(form: KVFormat, dtype: torch.dtype) -> None:
    """What stores floats of `dtype` in a cache, and attends to it."""
    if form.is_compiled:
        width = 64 if form.is_dense else form.k.group
        k, v = form.stored(*torch.zeros(2, 2, 1, width, dtype=dtype))
        queries = torch.zeros(2, 2, width)
        for part in torch.zeros(2, 2, 1), torch.zeros(2, 2, 2)[..., :1]:  # of a cache in several segments, a part
            form.k.dots(queries, k, part)
            form.v.mix(part, v, torch.empty_like(queries))


def prepare(dtype: torch.dtype) -> None:
    """What decodes matrices into `dtype` and into int8."""
    shape = 1, 32
    for form in (Int8(), Int4(32)):
        matrix = form.view(torch.zeros(form.nbytes(shape), dtype=torch.uint8), shape)
        matrix.decode(torch.empty(shape, dtype=dtype))
        matrix.to_int8(Int8().view(torch.zeros(Int8().nbytes(shape), dtype=torch.uint8), shape))
