"""Numbers that change their type on the way."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from h2o_flexgen.offload.device import convert

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("count", [1, 1 << 18, 300_000])
@pytest.mark.parametrize("into, out_of", list(product(DTYPES, DTYPES)))
def test_convert_does_what_torch_does(into, out_of, count):
    src = torch.randn(count).to(out_of)
    dst = torch.empty(count, dtype=into)
    convert(dst, src)
    assert torch.equal(dst, src.to(into))
