"""GPTQ (arXiv 2210.17323): 4-bit codes with a scale and a zero for each group of inputs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from h2o_flexgen.formats import Shape
from h2o_flexgen.models.quantised.method import Grouped, affine, group_size, nibbles, texts
from h2o_flexgen.models.spec import Config, shortened

#: what is added to stored zeros, by the version of the files
ZEROS = {"gptq": 1, "gptq_v2": 0}


class GPTQ(Grouped):
    """`qweight` (I / 8, O), eight codes of neighbouring inputs a word; `qzeros` (G, O / 8); `scales` (G, O)."""

    key = ".qweight"

    def __init__(self, config: Config):
        skipped = _left_out(config) + texts(config, "modules_to_not_convert")
        act_order = config.flag("desc_act", False) and not config.flag("static_groups", False)
        super().__init__(config, skipped, group_size(config), config.data.get("bits"), act_order)
        self.quantises_head = config.flag("lm_head", False)
        version = config.data.get("checkpoint_format") or "gptq"
        if not isinstance(version, str) or version not in ZEROS:
            known = ", ".join(ZEROS)
            raise config.error(f"checkpoint_format {shortened(version)} is not supported; known: {known}")
        self.zero = ZEROS[version]

    def parts(self, shape: Shape, has: Callable[[str], bool]) -> dict[str, Shape | None]:
        (out, width) = shape
        groups = self.groups(shape)
        found = {".qweight": (width // 8, out), ".qzeros": (groups, out // 8), ".scales": (groups, out)}
        return found | ({".g_idx": (width,)} if has(".g_idx") else {})

    def encode(self, shape: Shape, parts: dict[str, Tensor]) -> Tensor:
        codes = nibbles(parts[".qweight"].t())
        zeros = nibbles(parts[".qzeros"]).t() + self.zero
        return affine(codes, parts[".scales"].t(), zeros, parts.get(".g_idx"))


def _left_out(config: Config) -> list[str]:
    """Patterns of the modules that `dynamic`, the settings of single modules, leaves out."""
    dynamic = config.data.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise config.error(f"dynamic must give settings of modules, not {shortened(dynamic)}")
    for key, settings in dynamic.items():
        if not key.startswith("-:") and not _has_same(settings, config.data):
            raise config.error(f"dynamic gives {shortened(key)} other bits or groups, which is not supported")
    return [key[2:] for key in dynamic if key.startswith("-:")]


def _has_same(settings: object, whole: dict) -> bool:
    """Whether the settings of some modules have the bits and groups of the whole model's."""
    if not isinstance(settings, dict):
        return False
    return all(settings.get(name, whole.get(name)) == whole.get(name) for name in ("bits", "group_size"))
