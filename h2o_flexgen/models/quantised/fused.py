"""Experts in floats, of families that store those of a layer in one tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from h2o_flexgen.formats import Dense, Format, Shape
from h2o_flexgen.models.quantised.method import Method
from h2o_flexgen.models.spec import Config

#: `model_type` of these families
FAMILIES = ("gpt_oss",)


class Fused(Method):
    """Nothing is quantised, but experts are read from a copy in which each matrix is by itself."""

    is_declared = False
    is_fused = True
    targets = (r".*\.experts\.",)

    def __init__(self, config: Config):
        super().__init__(config)
        name = str(config.data.get("dtype") or config.data.get("torch_dtype")).removeprefix("torch.")
        self.name = name if name in ("float16", "float32") else "bfloat16"  # which published configs do not name

    def format(self, name: str, shape: Shape) -> Format:
        return Dense(getattr(torch, self.name))

    def parts(self, shape: Shape, has: Callable[[str], bool]) -> dict[str, Shape | None]:
        return {".weight": shape}

    def encode(self, shape: Shape, parts: dict[str, Tensor]) -> Tensor:
        return parts[".weight"]
