"""LLaMA 1 to 3.2 (arXiv 2302.13971, 2307.09288, 2407.21783) and models with its blocks: Vicuna, TinyLlama, SmolLM2."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from h2o_flexgen.models import parts
from h2o_flexgen.models.parts import Attend, Weights, embed, mlp, project, rms_norm
from h2o_flexgen.models.rope import Positions, read_rope
from h2o_flexgen.models.spec import Config, Layer, ModelSpec, Tensors, matrix, vectors

__all__ = ["attention", "block", "embed", "final_states", "logits", "named", "spec", "tensors"]

#: name -> (layers, hidden width, MLP width, heads, KV heads, head size, words, positions, theta, tied)
SIZES = {
    "meta-llama/Llama-2-7b-hf": (32, 4096, 11008, 32, 32, 128, 32000, 4096, 1e4, False),
    "meta-llama/Llama-2-13b-hf": (40, 5120, 13824, 40, 40, 128, 32000, 4096, 1e4, False),
    "meta-llama/Llama-2-70b-hf": (80, 8192, 28672, 64, 8, 128, 32000, 4096, 1e4, False),
    "meta-llama/Llama-3.1-8B": (32, 4096, 14336, 32, 8, 128, 128256, 131072, 5e5, False),
    "meta-llama/Llama-3.1-70B": (80, 8192, 28672, 64, 8, 128, 128256, 131072, 5e5, False),
    "meta-llama/Llama-3.2-1B": (16, 2048, 8192, 32, 8, 64, 128256, 131072, 5e5, True),
    "meta-llama/Llama-3.2-3B": (28, 3072, 8192, 24, 8, 128, 128256, 131072, 5e5, True),
}
GATED_NAMES = ("gate_proj", "up_proj", "down_proj")
#: the RoPE scaling of every LLaMA 3.1 and 3.2, without its factor
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class LlamaSpec(ModelSpec):
    eps: float = 1e-6  # of the norms
    qkv_bias: bool = False  # biases of linear layers, like the next two
    out_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False  # norms of each head's queries and keys


def spec(
    config: Config,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    default_positions: int = 2048,
    theta: float = 10000.0,
    partial_rotary: float | None = None,
    **changes,
) -> LlamaSpec:
    """The spec of LLaMA or a family with its blocks. `kv_heads`, `head_dim`, `default_positions`, `theta` and
    `partial_rotary` (as `partial` of `read_rope`) are the family's defaults; `changes` override fields."""
    sizes = config.sizes(kv_heads, head_dim)
    rope, positions = read_rope(
        config, sizes["head_dim"], partial=partial_rotary, positions=default_positions, theta=theta
    )
    bias = config.flag("attention_bias", False)
    spec = LlamaSpec(
        model_type="llama",
        **sizes,
        inner=config.size("intermediate_size"),
        positions=positions,
        activation=config.text("hidden_act", "silu"),
        eos=config.tokens("eos_token_id", 2),
        gated=True,
        tied=config.flag("tie_word_embeddings", False),
        window=config.window(),
        rope=rope,
        eps=config.number("rms_norm_eps", 1e-6),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )
    return replace(spec, **changes)


def configs(sizes: dict[str, tuple], **more) -> dict[str, dict]:
    """{name: config} of rows like those of SIZES."""
    keys = (
        "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size "
        "max_position_embeddings rope_theta tie_word_embeddings"
    )
    more = {"torch_dtype": "bfloat16"} | more
    return {name: dict(zip(keys.split(), row, strict=True)) | more for name, row in sizes.items()}


def named() -> dict[str, dict]:
    found = configs(SIZES, rms_norm_eps=1e-5)
    for name, config in found.items():
        if "Llama-3" in name:
            factor = 32.0 if "3.2" in name else 8.0
            config["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}
        else:
            config["torch_dtype"] = "float16"
    return found


def tensors(spec: LlamaSpec) -> list[Layer]:
    return with_ends(spec, [Layer(attention_tensors(spec, n) | mlp_tensors(spec, n)) for n in range(spec.layers)])


def with_ends(spec: LlamaSpec, blocks: list[Layer]) -> list[Layer]:
    """The blocks between embedding and head."""
    words = ("model.embed_tokens.weight", (spec.vocab, spec.hidden))
    head = {"head.weight": words if spec.tied else ("lm_head.weight", (spec.vocab, spec.hidden))}
    return [Layer({}, {"words": words}), *blocks, Layer(vectors("final_norm", "model.norm", spec.hidden) | head)]


def attention_tensors(spec: LlamaSpec, index: int) -> Tensors:
    """Of a block without its MLP, except the norm before that."""
    E = spec.hidden
    Q = spec.query_width
    KV = spec.kv_width
    at = f"model.layers.{index}.self_attn"
    norms = {}
    if spec.head_norms:
        norms = vectors("q_norm", f"{at}.q_norm", spec.head_dim) | vectors("k_norm", f"{at}.k_norm", spec.head_dim)
    return (
        vectors("attn_norm", f"model.layers.{index}.input_layernorm", E)
        | matrix("q", f"{at}.q_proj", Q, E, spec.qkv_bias)
        | matrix("k", f"{at}.k_proj", KV, E, spec.qkv_bias)
        | matrix("v", f"{at}.v_proj", KV, E, spec.qkv_bias)
        | matrix("out", f"{at}.o_proj", E, Q, spec.out_bias)
        | vectors("mlp_norm", f"model.layers.{index}.post_attention_layernorm", E)
        | norms
    )


def mlp_tensors(spec: LlamaSpec, index: int) -> Tensors:
    return gated_tensors(f"model.layers.{index}.mlp", spec.inner, spec.hidden, spec.mlp_bias)


def gated_tensors(
    at: str, inner: int, hidden: int, bias: bool = False, names: tuple[str, str, str] = GATED_NAMES
) -> Tensors:
    """Of a gated MLP, or of an expert. `names`: of its gate, up and down in the checkpoint."""
    gate, up, down = names
    return (
        matrix("gate", f"{at}.{gate}", inner, hidden, bias)
        | matrix("up", f"{at}.{up}", inner, hidden, bias)
        | matrix("down", f"{at}.{down}", hidden, inner, bias)
    )


def attention(spec: LlamaSpec, w: Weights, hidden: Tensor, positions: Positions | None, attend: Attend) -> Tensor:
    """A block up to its MLP."""
    norm = partial(rms_norm, w, eps=spec.eps)
    x = norm("attn_norm", hidden)
    return parts.attention(spec, w, x, positions, attend, norm if spec.head_norms else None).add_(hidden)


def block(spec: LlamaSpec, w: Weights, hidden: Tensor, positions: Positions | None, attend: Attend) -> Tensor:
    hidden = attention(spec, w, hidden, positions, attend)
    return mlp(spec, w, rms_norm(w, "mlp_norm", hidden, spec.eps)).add_(hidden)


def final_states(spec: LlamaSpec, w: Weights, hidden: Tensor) -> Tensor:
    return rms_norm(w, "final_norm", hidden, spec.eps)


def logits(spec: LlamaSpec, w: Weights, hidden: Tensor) -> Tensor:
    return project(w, "head", final_states(spec, w, hidden))
