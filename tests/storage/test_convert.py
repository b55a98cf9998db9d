"""Conversion between float types."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from h2o_flexgen.formats import convert

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("count", [1, 1 << 18, 300_000])
@pytest.mark.parametrize("target, source", list(product(DTYPES, DTYPES)))
def test_convert_does_what_torch_does(target, source, count):
    src = torch.randn(count).to(source)
    dst = torch.empty(count, dtype=target)
    convert(dst, src)
    assert torch.equal(dst, src.to(target))
