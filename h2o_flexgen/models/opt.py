"""OPT (arXiv 2205.01068) and its variants: 350m, OPT-IML, Galactica."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from h2o_flexgen.models.parts import Attend, Gather, Weights, attention, layer_norm, mlp, project
from h2o_flexgen.models.rope import Positions
from h2o_flexgen.models.spec import Config, Layer, ModelSpec, matrix, vectors

#: the position table starts with two rows that no token uses
POSITION_OFFSET = 2
EPS = 1e-5
#: size -> (layers, hidden width, heads), table 1
SIZES = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "1.3b": (24, 2048, 32),
    "2.7b": (32, 2560, 32),
    "6.7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "66b": (64, 9216, 72),
    "175b": (96, 12288, 96),
}


@dataclass(frozen=True)
class OptSpec(ModelSpec):
    word_width: int = 0  # of the embedding; if it is not `hidden`, matrices project between the two
    pre_norm: bool = True  # norms before attention and MLP instead of after them
    final_norm: bool = True  # a norm before the head
    bias: bool = True  # linear layers have biases
    affine: bool = True  # norms have weights


def spec(config: Config) -> OptSpec:
    pre_norm = config.flag("do_layer_norm_before", True)
    return OptSpec(
        model_type="opt",
        **config.sizes(grouped=False),
        inner=config.size("ffn_dim"),
        positions=config.size("max_position_embeddings"),
        activation=config.text("activation_function", "relu"),
        eos=config.tokens("eos_token_id", 2),
        tied=config.flag("tie_word_embeddings", True),
        window=config.window(),
        word_width=config.size("word_embed_proj_dim", config.size("hidden_size")),
        pre_norm=pre_norm,
        final_norm=pre_norm and not config.flag("_remove_final_layer_norm", False),
        bias=config.flag("enable_bias", True),
        affine=config.flag("layer_norm_elementwise_affine", True),
    )


def named() -> dict[str, dict]:
    configs = {}
    for size, (layers, hidden, heads) in SIZES.items():
        config = {
            "vocab_size": 50272,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "ffn_dim": 4 * hidden,
            "num_attention_heads": heads,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 512 if size == "350m" else hidden,
            "do_layer_norm_before": size != "350m",
        }
        for prefix in ("opt-", "opt-iml-", "opt-iml-max-"):
            configs[f"facebook/{prefix}{size}"] = config
    return configs


def tensors(spec: OptSpec) -> list[Layer]:
    E = spec.hidden
    W = spec.word_width
    parts = ("weight", "bias") if spec.affine else ()
    words = ("model.decoder.embed_tokens.weight", (spec.vocab, W))
    positions = ("model.decoder.embed_positions.weight", (spec.positions + POSITION_OFFSET, E))
    head = vectors("final_norm", "model.decoder.final_layer_norm", E, parts) if spec.final_norm else {}
    project_in = {}
    if W != E:
        project_in = matrix("project_in", "model.decoder.project_in", E, W)
        head |= matrix("project_out", "model.decoder.project_out", W, E)

    def block(index: int) -> Layer:
        at = f"model.decoder.layers.{index}"
        return Layer(
            vectors("attn_norm", f"{at}.self_attn_layer_norm", E, parts)
            | matrix("q", f"{at}.self_attn.q_proj", E, E, spec.bias)
            | matrix("k", f"{at}.self_attn.k_proj", E, E, spec.bias)
            | matrix("v", f"{at}.self_attn.v_proj", E, E, spec.bias)
            | matrix("out", f"{at}.self_attn.out_proj", E, E, spec.bias)
            | vectors("mlp_norm", f"{at}.final_layer_norm", E, parts)
            | matrix("up", f"{at}.fc1", spec.inner, E, spec.bias)
            | matrix("down", f"{at}.fc2", E, spec.inner, spec.bias)
        )

    blocks = map(block, range(spec.layers))
    head |= {"head.weight": words if spec.tied else ("lm_head.weight", (spec.vocab, W))}
    return [Layer(project_in, {"words": words, "positions": positions}), *blocks, Layer(head)]


def embed(spec: OptSpec, w: Weights, gather: Gather, ids: Tensor, positions: Positions) -> Tensor:
    words = gather("words", ids)
    if "project_in.weight" in w:
        words = project(w, "project_in", words)
    return words + gather("positions", positions.at + POSITION_OFFSET)


def block(spec: OptSpec, w: Weights, hidden: Tensor, positions: Positions | None, attend: Attend) -> Tensor:
    x = layer_norm(w, "attn_norm", hidden, EPS) if spec.pre_norm else hidden
    hidden = attention(spec, w, x, positions, attend).add_(hidden)
    if not spec.pre_norm:
        hidden = layer_norm(w, "attn_norm", hidden, EPS)
    x = layer_norm(w, "mlp_norm", hidden, EPS) if spec.pre_norm else hidden
    hidden = mlp(spec, w, x).add_(hidden)
    return hidden if spec.pre_norm else layer_norm(w, "mlp_norm", hidden, EPS)


def final_states(spec: OptSpec, w: Weights, hidden: Tensor) -> Tensor:
    if spec.final_norm:
        hidden = layer_norm(w, "final_norm", hidden, EPS)
    return project(w, "project_out", hidden) if "project_out.weight" in w else hidden


def logits(spec: OptSpec, w: Weights, hidden: Tensor) -> Tensor:
    return project(w, "head", final_states(spec, w, hidden))
