"""compressed-tensors, the format of llm-compressor: FP8 weights, and 4-bit codes packed into words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from h2o_flexgen.formats import Shape
from h2o_flexgen.models.quantised.fp8 import FP8
from h2o_flexgen.models.quantised.method import Grouped, Method, affine, check_patterns, nibbles, texts
from h2o_flexgen.models.spec import Config, shortened

FLOATS = ("float-quantized", "naive-quantized")
PACKED = "pack-quantized"
#: values of `actorder`, in lower case, by which the inputs of a group are not neighbours
ACT_ORDER = ("group", "dynamic", "true")
#: the zero of symmetric codes
MIDDLE = 8


def compressed_tensors(config: Config) -> Method:
    """The method of a config, all of whose groups must treat weights alike. Modules in `ignore`, and those that no
    group targets, stay floats."""
    groups = config.data.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else [None]
    weights = [group.get("weights") if isinstance(group, dict) else None for group in groups]
    if not weights or not isinstance(weights[0], dict) or any(each != weights[0] for each in weights):
        raise config.error("config_groups must have the same weights in all groups")
    scheme = Config(weights[0], f"{config.where}: weights")
    skipped = [name[3:] if name.startswith("re:") else re.escape(name) for name in texts(config, "ignore")]
    form = config.data.get("format") if config.data.get("format") != "mixed-precision" else groups[0].get("format")
    kind = scheme.text("type", "int")
    if form in FLOATS and kind == "float" and scheme.data.get("num_bits") == 8:
        method = FP8(config, _block(scheme), skipped)
    elif form == PACKED and kind == "int":
        method = PackQuantized(config, scheme, skipped)
    else:
        known = f"float-quantized in FP8 and {PACKED} in 4 bits"
        raise config.error(f"format {shortened(form)} of {shortened(kind)} is not supported; known: {known}")
    method.quantises_head = True  # unless `ignore` names it
    targets = [target for group in groups for target in texts(Config(group, config.where), "targets")]
    method.targets = check_patterns(config, [*map(_pattern, targets)]) or method.targets
    return method


def _pattern(target: str) -> str:
    """For the start of a module's name, from one of `targets`: a class, a pattern or a name."""
    if target == "Linear":
        return ""
    return target[3:] if target.startswith("re:") else re.escape(target) + "$"


def _block(scheme: Config) -> list[int] | None:
    strategy = scheme.text("strategy", "tensor")
    if strategy in ("tensor", "channel"):
        return None
    if strategy == "group":
        return [1, scheme.size("group_size")]
    if strategy != "block":
        raise scheme.error(f"strategy {shortened(strategy)} is not supported; known: tensor, channel, group, block")
    return scheme.data.get("block_structure")


class PackQuantized(Grouped):
    """`weight_packed` (O, I / 8), eight codes of neighbouring inputs a word; `weight_scale` (O, G); unless symmetric
    `weight_zero_point` (O / 8, G)."""

    key = ".weight_packed"

    def __init__(self, config: Config, scheme: Config, skipped: Sequence[str]):
        strategy = scheme.text("strategy", "group")
        if strategy not in ("group", "channel"):
            raise scheme.error(f"strategy {shortened(strategy)} is not supported; known: group, channel")
        group = scheme.size("group_size") if strategy == "group" else None
        act_order = str(scheme.data.get("actorder")).lower() in ACT_ORDER
        super().__init__(config, skipped, group, scheme.data.get("num_bits"), act_order)
        self.is_symmetric = scheme.flag("symmetric", True)

    def parts(self, shape: Shape, has: Callable[[str], bool]) -> dict[str, Shape | None]:
        (out, width) = shape
        found = {".weight_packed": (out, width // 8), ".weight_scale": (out, self.groups(shape))}
        if not self.is_symmetric:
            found[".weight_zero_point"] = out // 8, self.groups(shape)
        return found | ({".weight_g_idx": (width,)} if has(".weight_g_idx") else {})

    def encode(self, shape: Shape, parts: dict[str, Tensor]) -> Tensor:
        scale = parts[".weight_scale"]
        if self.is_symmetric:
            zeros = torch.full(scale.shape, MIDDLE, dtype=torch.uint8)
        else:
            zeros = nibbles(parts[".weight_zero_point"].t()).t()
        return affine(nibbles(parts[".weight_packed"]), scale, zeros, parts.get(".weight_g_idx"))
