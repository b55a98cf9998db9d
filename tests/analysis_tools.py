"""What tests of the analysis share."""

from __future__ import annotations

import torch

from h2o_flexgen.engine.model import load_model
from h2o_flexgen.profiling.layer_model import LayerModel


def resident(tiny) -> LayerModel:
    """A model of the zoo in RAM, in fp32."""
    return LayerModel(load_model(str(tiny.folder), None, lambda stored: torch.float32, False), progress=False)
