"""How quantised checkpoints of Hugging Face store their matrices: one method per file, and their registry.

A new method is a file with a `Method`, an entry in METHODS and its tests.
"""

from __future__ import annotations

from collections.abc import Callable

from h2o_flexgen.errors import UserError
from h2o_flexgen.models.quantised import fused
from h2o_flexgen.models.quantised.awq import AWQ
from h2o_flexgen.models.quantised.bitsandbytes import bitsandbytes
from h2o_flexgen.models.quantised.compressed_tensors import compressed_tensors
from h2o_flexgen.models.quantised.fp8 import FP8
from h2o_flexgen.models.quantised.gptq import GPTQ
from h2o_flexgen.models.quantised.method import Method
from h2o_flexgen.models.quantised.mxfp4 import MXFP4
from h2o_flexgen.models.quantised.own import NAME as OWN
from h2o_flexgen.models.quantised.own import Own
from h2o_flexgen.models.spec import Config, shortened

__all__ = ["METHODS", "Method", "method_of"]

#: by their `quant_method`
METHODS: dict[str, Callable[[Config], Method]] = {
    "gptq": GPTQ,
    "awq": AWQ,
    "fp8": FP8,
    "fbgemm_fp8": FP8,
    "compressed-tensors": compressed_tensors,
    "bitsandbytes": bitsandbytes,
    "mxfp4": MXFP4,
    OWN: Own,
}


def method_of(config: dict, where: str = "the config") -> Method | None:
    """The method by which a checkpoint with this config.json, called `where` in messages, is quantised or arranged;
    None if its matrices are floats as they are needed. Raises UserError for a method or a setting that is not
    supported."""
    advice = "or take a checkpoint in float16, bfloat16 or float32"
    known = f"known methods: {', '.join(METHODS)}"
    if config.get("quantization") is not None:
        raise UserError(f"{where}: the checkpoint is quantised by MLX, which is not supported; {known}; {advice}")
    given = config.get("quantization_config")
    if given is None:
        return fused.Fused(Config(config, where)) if config.get("model_type") in fused.FAMILIES else None
    if not isinstance(given, dict):
        raise UserError(f"{where}: the checkpoint is quantised, but quantization_config is {shortened(given)}")
    name = given.get("quant_method")
    if name is None and (given.get("load_in_4bit") or given.get("load_in_8bit")):
        name = "bitsandbytes"  # which older versions left out
    if not isinstance(name, str) or name not in METHODS:
        method = f"by the method {shortened(name)}, which is not supported"
        raise UserError(f"{where}: the checkpoint is quantised {method}; {known}; {advice}")
    return METHODS[name](Config(given, f"{where}: quantization_config of {name}"))
