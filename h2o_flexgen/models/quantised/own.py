"""Checkpoints that `h2o-flexgen convert` wrote: each matrix is a tensor of bytes in a format of `formats/`."""

from __future__ import annotations

from collections.abc import Sequence

from h2o_flexgen.formats import Format
from h2o_flexgen.formats.forms import CONVERTED, compressed
from h2o_flexgen.models.quantised.method import Method
from h2o_flexgen.models.spec import Config, Layer

NAME = "h2o_flexgen"


class Own(Method):
    """They are read in place."""

    is_in_place = True

    def __init__(self, config: Config):
        super().__init__(config)
        self.kind = config.text("kind", "")
        if self.kind not in CONVERTED:
            raise config.error(f"kind must be one of {', '.join(CONVERTED)}, not {self.kind!r}")

    def formats(self, layers: Sequence[Layer]) -> dict[str, Format]:
        return compressed(self.kind, [layer.compressible for layer in layers], CONVERTED)
