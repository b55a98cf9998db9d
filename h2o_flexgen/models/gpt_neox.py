"""GPT-NeoX-20B (arXiv 2204.06745) and Pythia (arXiv 2304.01373): one matrix for queries, keys and values, RoPE for a
part of each head, and attention and MLP side by side."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from h2o_flexgen.models.parts import Attend, Weights, embed, layer_norm, mlp, project
from h2o_flexgen.models.rope import Positions, read_rope, rotation
from h2o_flexgen.models.spec import Config, Layer, ModelSpec, matrix, vectors

__all__ = ["block", "embed", "final_states", "logits", "named", "spec", "tensors"]

#: name -> (layers, hidden width, heads, words)
SIZES = {
    "EleutherAI/pythia-70m": (6, 512, 8, 50304),
    "EleutherAI/pythia-160m": (12, 768, 12, 50304),
    "EleutherAI/pythia-410m": (24, 1024, 16, 50304),
    "EleutherAI/pythia-1b": (16, 2048, 8, 50304),
    "EleutherAI/pythia-1.4b": (24, 2048, 16, 50304),
    "EleutherAI/pythia-2.8b": (32, 2560, 32, 50304),
    "EleutherAI/pythia-6.9b": (32, 4096, 32, 50432),
    "EleutherAI/pythia-12b": (36, 5120, 40, 50688),
    "EleutherAI/gpt-neox-20b": (44, 6144, 64, 50432),
}


@dataclass(frozen=True)
class NeoXSpec(ModelSpec):
    eps: float = 1e-5  # of the norms
    bias: bool = True  # attention's linear layers have biases; those of the MLP always do
    parallel: bool = True  # attention and MLP both read the block's input


def spec(config: Config) -> NeoXSpec:
    sizes = config.sizes(grouped=False)
    rope, positions = read_rope(config, sizes["head_dim"], "rotary_emb_base", config.number("rotary_pct", 0.25))
    return NeoXSpec(
        model_type="gpt_neox",
        **sizes,
        inner=config.size("intermediate_size"),
        positions=positions,
        activation=config.text("hidden_act", "gelu"),
        eos=config.tokens("eos_token_id", 2),
        tied=config.flag("tie_word_embeddings", False),
        window=config.window(),
        rope=rope,
        eps=config.number("layer_norm_eps", 1e-5),
        bias=config.flag("attention_bias", True),
        parallel=config.flag("use_parallel_residual", True),
    )


def named() -> dict[str, dict]:
    return {
        name: {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_attention_heads": heads,
            "vocab_size": vocab,
            "max_position_embeddings": 2048,
            "eos_token_id": 0,
            "hidden_act": "gelu_fast" if "20b" in name else "gelu",
        }
        for name, (layers, hidden, heads, vocab) in SIZES.items()
    }


def tensors(spec: NeoXSpec) -> list[Layer]:
    E = spec.hidden
    parts = ("weight", "bias")
    words = ("gpt_neox.embed_in.weight", (spec.vocab, E))

    def block(index: int) -> Layer:
        at = f"gpt_neox.layers.{index}"
        return Layer(
            vectors("attn_norm", f"{at}.input_layernorm", E, parts)
            | matrix("qkv", f"{at}.attention.query_key_value", 3 * E, E, spec.bias)
            | matrix("out", f"{at}.attention.dense", E, E, spec.bias)
            | vectors("mlp_norm", f"{at}.post_attention_layernorm", E, parts)
            | matrix("up", f"{at}.mlp.dense_h_to_4h", spec.inner, E, True)
            | matrix("down", f"{at}.mlp.dense_4h_to_h", E, spec.inner, True)
        )

    blocks = map(block, range(spec.layers))
    norm = vectors("final_norm", "gpt_neox.final_layer_norm", E, parts)
    head = {"head.weight": words if spec.tied else ("embed_out.weight", (spec.vocab, E))}
    return [Layer({}, {"words": words}), *blocks, Layer(norm | head)]


def block(spec: NeoXSpec, w: Weights, hidden: Tensor, positions: Positions | None, attend: Attend) -> Tensor:
    x = layer_norm(w, "attn_norm", hidden, spec.eps)
    # (N, H, 3 D): each head's query, key and value lie side by side
    q, k, v = project(w, "qkv", x).unflatten(1, (spec.heads, -1)).chunk(3, dim=-1)
    rotated = rotation(spec.rope, positions, x)
    context = attend(rotated(q), rotated(k), v)
    del q, k, v, rotated
    summed = project(w, "out", context.flatten(1)).add_(hidden)
    del context
    x = layer_norm(w, "mlp_norm", hidden if spec.parallel else summed, spec.eps)
    return mlp(spec, w, x).add_(summed)


def final_states(spec: NeoXSpec, w: Weights, hidden: Tensor) -> Tensor:
    return layer_norm(w, "final_norm", hidden, spec.eps)


def logits(spec: NeoXSpec, w: Weights, hidden: Tensor) -> Tensor:
    return project(w, "head", final_states(spec, w, hidden))
