"""AWQ (arXiv 2306.00978): 4-bit codes with a scale and a zero for each group of inputs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from h2o_flexgen.formats import Shape
from h2o_flexgen.models.quantised.method import Grouped, affine, group_size, nibbles, texts
from h2o_flexgen.models.spec import Config, shortened

#: where in its word the code of each of 8 neighbouring outputs is
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class AWQ(Grouped):
    """`qweight` (I, O / 8), eight codes of neighbouring outputs a word; `qzeros` (G, O / 8); `scales` (G, O)."""

    key = ".qweight"

    def __init__(self, config: Config):
        bits = config.data.get("bits", config.data.get("w_bit"))
        super().__init__(config, texts(config, "modules_to_not_convert"), group_size(config), bits)
        version = config.data.get("version") or config.data.get("format") or "gemm"
        if str(version).lower() != "gemm":
            raise config.error(f"version {shortened(version)} is not supported, only gemm")
        if not config.flag("zero_point", True):
            raise config.error("zero_point false is not supported, only true")

    def parts(self, shape: Shape, has: Callable[[str], bool]) -> dict[str, Shape | None]:
        (out, width) = shape
        groups = self.groups(shape)
        return {".qweight": (width, out // 8), ".qzeros": (groups, out // 8), ".scales": (groups, out)}

    def encode(self, shape: Shape, parts: dict[str, Tensor]) -> Tensor:
        return affine(_in_order(parts[".qweight"]), parts[".scales"].t(), _in_order(parts[".qzeros"]))


def _in_order(words: Tensor) -> Tensor:
    """(n, O / 8) int32 -> (O, n) codes."""
    return nibbles(words).unflatten(-1, (-1, 8))[..., PLACES].flatten(-2).t().contiguous()
