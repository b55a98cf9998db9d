"""Mixtures of experts of Qwen1.5 and Qwen2 (arXiv 2407.10671): Qwen2's blocks with small experts instead of an MLP, and
a large one that all tokens go through."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from h2o_flexgen.models import llama, qwen3_moe
from h2o_flexgen.models.llama import attention, block, embed, final_states, logits
from h2o_flexgen.models.parts import Weights, mlp, project
from h2o_flexgen.models.qwen2 import windows
from h2o_flexgen.models.qwen3_moe import Qwen3MoeSpec, expert, qwen_moe_spec, route
from h2o_flexgen.models.spec import Config, Layer, Tensors, matrix, of_layers

__all__ = [
    "attention",
    "block",
    "embed",
    "expert",
    "final_states",
    "join",
    "logits",
    "named",
    "route",
    "spec",
    "tensors",
]

#: as in `llama.SIZES`, then experts, those that a token goes through, and widths of an expert and of the shared one
SIZES = {
    "Qwen/Qwen1.5-MoE-A2.7B": (24, 2048, 5632, 16, 16, 128, 151936, 8192, 1e6, False, 60, 4, 1408, 5632),
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": (24, 2048, 5632, 16, 16, 128, 151936, 32768, 1e6, False, 60, 4, 1408, 5632),
    "Qwen/Qwen2-57B-A14B": (28, 3584, 18944, 28, 4, 128, 151936, 131072, 1e6, False, 64, 8, 2560, 20480),
    "Qwen/Qwen2-57B-A14B-Instruct": (28, 3584, 18944, 28, 4, 128, 151936, 32768, 1e6, False, 64, 8, 2560, 20480),
}
OWN_KEYS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")


def spec(config: Config) -> Qwen3MoeSpec:
    if not config.flag("use_sliding_window", False):
        config = Config(config.data | {"sliding_window": None}, config.where)  # 0 in configs that transformers writes
    found = qwen_moe_spec(
        config,
        experts=60,
        active=4,
        inner=1408,
        model_type="qwen2_moe",
        kv_heads=16,
        qkv_bias=config.flag("qkv_bias", True),
        out_bias=False,
        mlp_bias=False,
        shared_inner=config.size("shared_expert_intermediate_size", 5632),
    )
    slides = lambda layer, full: layer % 2 == 0 and layer < full
    return of_layers([replace(found, window=window) for window in windows(config, slides)])


def named() -> dict[str, dict]:
    found = llama.configs({name: row[:10] for name, row in SIZES.items()}, rms_norm_eps=1e-6)
    return {name: config | dict(zip(OWN_KEYS, SIZES[name][10:], strict=True)) for name, config in found.items()}


def tensors(spec: Qwen3MoeSpec) -> list[Layer]:
    words, *blocks, head = qwen3_moe.tensors(spec)
    return [words, *(_with_shared_expert(spec, index, block) for index, block in enumerate(blocks)), head]


def _with_shared_expert(spec: Qwen3MoeSpec, index: int, block: Layer) -> Layer:
    return replace(block, after=_shared_expert(spec, index)) if block.experts else block


def _shared_expert(spec: Qwen3MoeSpec, index: int) -> Tensors:
    at = f"model.layers.{index}.mlp.shared_expert"
    # like a router it decides too much to be kept in fewer bits
    gate = matrix("router.shared", f"{at}_gate", 1, spec.hidden)
    return llama.gated_tensors(at, spec.shared_inner, spec.hidden) | gate


def join(spec: Qwen3MoeSpec, w: Weights, hidden: Tensor, x: Tensor, total: Tensor) -> Tensor:
    shared = mlp(spec, w, x).mul_(project(w, "router.shared", x).sigmoid_())
    return shared.add_(total).add_(hidden)
