"""Qwen3's mixtures of experts (arXiv 2505.09388): Qwen3's blocks with many small experts instead of an MLP."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from h2o_flexgen.kernels.experts import Routing
from h2o_flexgen.models import llama, parts
from h2o_flexgen.models.llama import LlamaSpec, attention, block, embed, final_states, logits
from h2o_flexgen.models.parts import Weights, mlp, rms_norm
from h2o_flexgen.models.spec import Config, Layer, matrix

__all__ = ["attention", "block", "embed", "expert", "final_states", "logits", "named", "route", "spec", "tensors"]

#: as in `llama.SIZES`
SIZES = {
    "Qwen/Qwen3-30B-A3B": (48, 2048, 6144, 32, 4, 128, 151936, 40960, 1e6, False),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (48, 2048, 6144, 32, 4, 128, 151936, 262144, 1e7, False),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": (48, 2048, 5472, 32, 4, 128, 151936, 262144, 1e7, False),
    "Qwen/Qwen3-235B-A22B": (94, 4096, 12288, 64, 4, 128, 151936, 40960, 1e6, False),
}


@dataclass(frozen=True)
class Qwen3MoeSpec(LlamaSpec):
    renormalises: bool = False  # the weights of a token's experts add up to 1
    dense: frozenset[int] = frozenset()  # layers with an MLP instead of experts


def qwen_moe_spec(config: Config, experts: int, active: int, inner: int, **changes) -> Qwen3MoeSpec:
    """The spec of a Qwen with experts. `experts`, `active` and `inner` are the family's defaults; `changes` as in
    `llama.spec`."""
    experts = config.size("num_experts", config.size("num_local_experts", experts, least=0), least=0)
    found = llama.spec(
        config,
        default_positions=32768,
        eos=config.tokens("eos_token_id"),
        experts=experts,
        active=config.active("num_experts_per_tok", active, experts),
        expert_inner=config.size("moe_intermediate_size", inner),
        **changes,
    )
    step = config.size("decoder_sparse_step", 1)
    only = config.tokens("mlp_only_layers")
    return Qwen3MoeSpec(
        **vars(found),
        renormalises=config.flag("norm_topk_prob", False),
        dense=frozenset(n for n in range(found.layers) if n in only or not experts or (n + 1) % step),
    )


def spec(config: Config) -> Qwen3MoeSpec:
    window = config.window(4096) if config.flag("use_sliding_window", False) else None
    return qwen_moe_spec(config, 128, 8, 768, model_type="qwen3_moe", kv_heads=4, window=window, head_norms=True)


def named() -> dict[str, dict]:
    found = llama.configs(SIZES, rms_norm_eps=1e-6, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True)
    for name, config in found.items():
        config["moe_intermediate_size"] = 1536 if "235B" in name else 768
    return found


def tensors(spec: Qwen3MoeSpec) -> list[Layer]:
    return llama.with_ends(spec, [_block(spec, n) for n in range(spec.layers)])


def _block(spec: Qwen3MoeSpec, index: int) -> Layer:
    attention = llama.attention_tensors(spec, index)
    if index in spec.dense:
        return Layer(attention | llama.mlp_tensors(spec, index))
    at = f"model.layers.{index}.mlp"
    expert = llama.gated_tensors(f"{at}.experts.{{}}", spec.expert_inner, spec.hidden)
    router = matrix("router", f"{at}.gate", spec.experts, spec.hidden)
    return Layer(attention | router, expert=expert, experts=spec.experts)


def route(spec: Qwen3MoeSpec, w: Weights, hidden: Tensor) -> tuple[Tensor, Routing]:
    x = rms_norm(w, "mlp_norm", hidden, spec.eps)
    return x, parts.route(spec, w, x, spec.renormalises)


expert = mlp
