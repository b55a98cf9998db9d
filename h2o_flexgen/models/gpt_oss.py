"""gpt-oss (arXiv 2508.10925): experts with biases and a clamped gate, a window in every other layer, and sinks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

from torch import Tensor

from h2o_flexgen.kernels.experts import Routing
from h2o_flexgen.models import llama, parts
from h2o_flexgen.models.llama import LlamaSpec
from h2o_flexgen.models.parts import Attend, Weights, embed, project, projections, widened_rms_norm
from h2o_flexgen.models.rope import Positions
from h2o_flexgen.models.spec import FULL, SLIDING, Config, Layer, matrix, of_layers

__all__ = ["attention", "embed", "expert", "final_states", "logits", "named", "route", "spec", "tensors"]

#: as in `llama.SIZES`
SIZES = {
    "openai/gpt-oss-20b": (24, 2880, 2880, 64, 8, 64, 201088, 131072, 1.5e5, False),
    "openai/gpt-oss-120b": (36, 2880, 2880, 64, 8, 64, 201088, 131072, 1.5e5, False),
}
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
YARN |= {"original_max_position_embeddings": 4096}
DEFAULTS = {"num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "attention_bias": True}
#: how the published checkpoints are quantised
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


@dataclass(frozen=True)
class GptOssSpec(LlamaSpec):
    alpha: float = 1.702  # of the gate in its sigmoid
    limit: float = 7.0  # of the gate, and of the size of what it multiplies


def spec(config: Config) -> GptOssSpec:
    rope = {} if config.data.get("rope_scaling") or config.data.get("rope_parameters") else {"rope_parameters": YARN}
    config = Config(DEFAULTS | config.data | rope, config.where)
    if find_spec("transformers.models.gpt_oss") is None:  # its yarn would ignore `truncate`
        raise config.error("gpt_oss needs transformers 4.55 or later")
    experts = config.size("num_local_experts", 128)
    read = llama.spec(
        config,
        model_type="gpt_oss",
        theta=1.5e5,
        eps=config.number("rms_norm_eps", 1e-5),
        eos=config.tokens("eos_token_id"),
        mlp_bias=True,
        window=None,
        experts=experts,
        active=config.active("num_experts_per_tok", 4, experts),
        expert_inner=config.size("intermediate_size"),
    )
    alpha = config.number("swiglu_alpha", 1.702)
    read = GptOssSpec(**vars(read), alpha=alpha, limit=config.number("swiglu_limit", 7.0))
    by_type = {FULL: read, SLIDING: replace(read, window=config.window(128))}
    return of_layers([by_type[kind] for kind in config.layer_types(lambda index: index % 2 == 0)])


def named() -> dict[str, dict]:
    more = {"rms_norm_eps": 1e-5, "rope_scaling": YARN, "num_experts_per_tok": 4, "eos_token_id": 200002}
    found = llama.configs(SIZES, **more, quantization_config=MXFP4)
    return {name: config | {"num_local_experts": 128 if "120b" in name else 32} for name, config in found.items()}


def tensors(spec: GptOssSpec) -> list[Layer]:
    return llama.with_ends(spec, [_block(spec, n) for n in range(spec.layers)])


def _block(spec: GptOssSpec, index: int) -> Layer:
    at = f"model.layers.{index}"
    sinks = {"sinks": (f"{at}.self_attn.sinks", (spec.heads,))}
    router = matrix("router", f"{at}.mlp.router", spec.experts, spec.hidden, bias=True)
    expert = llama.gated_tensors(f"{at}.mlp.experts.{{}}", spec.expert_inner, spec.hidden, bias=True)
    return Layer(llama.attention_tensors(spec, index) | sinks | router, expert=expert, experts=spec.experts)


def attention(spec: GptOssSpec, w: Weights, hidden: Tensor, positions: Positions | None, attend: Attend) -> Tensor:
    x = widened_rms_norm(w, "attn_norm", hidden, spec.eps)
    return parts.attention(spec, w, x, positions, attend).add_(hidden)


def route(spec: GptOssSpec, w: Weights, hidden: Tensor) -> tuple[Tensor, Routing]:
    x = widened_rms_norm(w, "mlp_norm", hidden, spec.eps)
    largest, ids = project(w, "router", x).float().topk(spec.active, -1)
    return x, Routing(ids, largest.softmax(-1))


def expert(spec: GptOssSpec, w: Weights, x: Tensor) -> Tensor:
    gate, up = projections(w, ("gate", "up"), x)
    gate.clamp_(max=spec.limit)
    up.clamp_(-spec.limit, spec.limit).add_(1)
    return project(w, "down", (spec.alpha * gate).sigmoid_().mul_(gate).mul_(up))


def final_states(spec: GptOssSpec, w: Weights, hidden: Tensor) -> Tensor:
    return widened_rms_norm(w, "final_norm", hidden, spec.eps)


def logits(spec: GptOssSpec, w: Weights, hidden: Tensor) -> Tensor:
    return project(w, "head", final_states(spec, w, hidden))
