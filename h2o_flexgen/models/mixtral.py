"""Mixtral (arXiv 2401.04088): Mistral's blocks with a few large experts instead of an MLP."""

from __future__ import annotations

from torch import Tensor

from h2o_flexgen.kernels.experts import Routing
from h2o_flexgen.models import llama, parts
from h2o_flexgen.models.llama import LlamaSpec, attention, embed, final_states, logits
from h2o_flexgen.models.parts import Weights, mlp, rms_norm
from h2o_flexgen.models.spec import Config, Layer, matrix

__all__ = ["attention", "embed", "expert", "final_states", "logits", "named", "route", "spec", "tensors"]

#: as in `llama.SIZES`
SIZES = {
    "mistralai/Mixtral-8x7B-v0.1": (32, 4096, 14336, 32, 8, 128, 32000, 32768, 1e6, False),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (32, 4096, 14336, 32, 8, 128, 32000, 32768, 1e6, False),
    "mistralai/Mixtral-8x22B-v0.1": (56, 6144, 16384, 48, 8, 128, 32768, 65536, 1e6, False),
}


def spec(config: Config) -> LlamaSpec:
    experts = config.size("num_local_experts", 8)
    return llama.spec(
        config,
        model_type="mixtral",
        kv_heads=8,
        default_positions=131072,
        theta=1e6,
        eps=config.number("rms_norm_eps", 1e-5),
        window=config.window(),
        experts=experts,
        active=config.active("num_experts_per_tok", 2, experts),
        expert_inner=config.size("intermediate_size"),
    )


def named() -> dict[str, dict]:
    return llama.configs(SIZES, rms_norm_eps=1e-5, num_local_experts=8, num_experts_per_tok=2)


def tensors(spec: LlamaSpec) -> list[Layer]:
    return llama.with_ends(spec, [_block(spec, n) for n in range(spec.layers)])


def _block(spec: LlamaSpec, index: int) -> Layer:
    at = f"model.layers.{index}.block_sparse_moe"
    expert = llama.gated_tensors(f"{at}.experts.{{}}", spec.inner, spec.hidden, names=("w1", "w3", "w2"))
    router = matrix("router", f"{at}.gate", spec.experts, spec.hidden)
    return Layer(llama.attention_tensors(spec, index) | router, expert=expert, experts=spec.experts)


def route(spec: LlamaSpec, w: Weights, hidden: Tensor) -> tuple[Tensor, Routing]:
    x = rms_norm(w, "mlp_norm", hidden, spec.eps)
    return x, parts.route(spec, w, x, renormalises=True)


expert = mlp
