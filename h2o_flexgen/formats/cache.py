"""The formats of a KV cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.formats.base import Format
from h2o_flexgen.formats.dense import Dense


class KVFormat(NamedTuple):
    """How K and V are stored: each vector, one token's in one head, on its own."""

    k: Format
    v: Format

    @classmethod
    def dense(cls, dtype: torch.dtype) -> KVFormat:
        """Floats."""
        return cls(Dense(dtype), Dense(dtype))

    @property
    def is_dense(self) -> bool:
        return self.k.is_dense

    def stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Both as a cache stores them; see `Format.stored`."""
        return self.k.stored(k), self.v.stored(v)
