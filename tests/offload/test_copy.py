"""Copies in RAM."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from h2o_flexgen.offload.device import copy

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("count", [1, 1 << 15, 100_000])
@pytest.mark.parametrize("into, out_of", list(product(DTYPES, DTYPES)))
def test_copy_converts_as_torch_does(into, out_of, count):
    src = torch.randn(count).to(out_of)
    dst = torch.empty(count, dtype=into)
    copy(dst, src)
    assert torch.equal(dst, src.to(into))
