"""Phi-3 and Phi-3.5 (arXiv 2404.14219), Phi-4 (arXiv 2412.08905), Phi-4-mini: LLaMA's blocks with one matrix for
queries, keys and values, and one for the MLP's gate and up."""

from __future__ import annotations

from torch import Tensor

from h2o_flexgen.models import llama, parts
from h2o_flexgen.models.llama import LlamaSpec, embed, final_states, logits
from h2o_flexgen.models.parts import Attend, Weights, project, rms_norm
from h2o_flexgen.models.rope import ORIGINAL, Positions, rotation
from h2o_flexgen.models.spec import Config, Layer, matrix

__all__ = ["block", "embed", "final_states", "logits", "named", "spec", "tensors"]

#: as in `llama.SIZES`, then the window
SIZES = {
    "microsoft/Phi-3-mini-4k-instruct": (32, 3072, 8192, 32, 32, 96, 32064, 4096, 1e4, False, 2047),
    "microsoft/Phi-3-mini-128k-instruct": (32, 3072, 8192, 32, 32, 96, 32064, 131072, 1e4, False, 262144),
    "microsoft/Phi-3.5-mini-instruct": (32, 3072, 8192, 32, 32, 96, 32064, 131072, 1e4, False, 262144),
    "microsoft/phi-4": (40, 5120, 17920, 40, 10, 128, 100352, 16384, 2.5e5, False, None),
    "microsoft/Phi-4-mini-instruct": (32, 3072, 8192, 24, 8, 128, 200064, 131072, 1e4, True, 262144),
}


def spec(config: Config) -> LlamaSpec:
    config = Config({ORIGINAL: 4096} | config.data, config.where)
    read = llama.spec(
        config,
        default_positions=4096,
        partial_rotary=config.number("partial_rotary_factor", 1.0),
        model_type="phi3",
        eps=config.number("rms_norm_eps", 1e-5),
        eos=config.tokens("eos_token_id", 32000),
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
    )
    if read.rope.type not in ("default", "longrope"):
        raise config.error(f"Phi-3 has no RoPE of the type {read.rope.type}: default and longrope are known")
    return read


def named() -> dict[str, dict]:
    """Divisors of the frequencies are 1, since the weights are random."""
    found = llama.configs({name: row[:-1] for name, row in SIZES.items()}, eos_token_id=32000)
    for name, config in found.items():
        config["sliding_window"] = SIZES[name][-1]
        if config["max_position_embeddings"] == 131072:
            ones = [1.0] * 48
            config["rope_scaling"] = {"type": "longrope", "short_factor": ones, "long_factor": ones}
    found["microsoft/Phi-4-mini-instruct"] |= {"partial_rotary_factor": 0.75, "eos_token_id": 199999}
    found["microsoft/phi-4"]["eos_token_id"] = 100265
    return found


def tensors(spec: LlamaSpec) -> list[Layer]:
    words, *blocks, head = llama.tensors(spec)
    return [words, *(_fused(spec, index, block) for index, block in enumerate(blocks)), head]


def _fused(spec: LlamaSpec, index: int, block: Layer) -> Layer:
    """LLaMA's block with its matrices that read the same input below each other."""
    at = f"model.layers.{index}"
    separate = tuple(f"{name}.weight" for name in ("q", "k", "v", "gate", "up"))
    others = {short: tensor for short, tensor in block.streamed.items() if short not in separate}
    return Layer(
        others
        | matrix("qkv", f"{at}.self_attn.qkv_proj", spec.query_width + 2 * spec.kv_width, spec.hidden)
        | matrix("gate_up", f"{at}.mlp.gate_up_proj", 2 * spec.inner, spec.hidden)
    )


def block(spec: LlamaSpec, w: Weights, hidden: Tensor, positions: Positions | None, attend: Attend) -> Tensor:
    x = rms_norm(w, "attn_norm", hidden, spec.eps)
    heads = project(w, "qkv", x).unflatten(1, (-1, spec.head_dim))
    q, k, v = heads.split([spec.heads, spec.kv_heads, spec.kv_heads], 1)
    rotated = rotation(spec.rope, positions, x)
    context = attend(rotated(q), rotated(k), v)
    del heads, q, k, v, rotated
    hidden = project(w, "out", context.flatten(1)).add_(hidden)
    del context
    gate, up = project(w, "gate_up", rms_norm(w, "mlp_norm", hidden, spec.eps)).chunk(2, -1)
    wide = parts.activation(spec.activation)(gate) * up
    del gate, up
    return project(w, "down", wide).add_(hidden)
