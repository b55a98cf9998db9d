"""Gemma 4, its text model: Gemma 3 with values that are normed, larger heads in layers without a window, and in some
models experts beside the MLP."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from h2o_flexgen.kernels.experts import Routing
from h2o_flexgen.models import llama, parts
from h2o_flexgen.models.gemma2 import GemmaSpec, embed, gemma_spec, head
from h2o_flexgen.models.gemma3_text import with_rope
from h2o_flexgen.models.parts import Attend, Weights, activation, mlp, plain_rms_norm, project, projections
from h2o_flexgen.models.parts import widened_rms_norm as norm
from h2o_flexgen.models.rope import Positions, rotation
from h2o_flexgen.models.spec import FULL, SLIDING, Config, Layer, Tensors, matrix, of_layers, shortened, vectors

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

#: as in `llama.SIZES`, then the values of OWN_KEYS
SIZES = {
    "google/gemma-4-31B": (60, 5376, 21504, 32, 16, 256, 262144, 262144, 1e6, True, 4, False, None, None, None),
    "google/gemma-4-26B-A4B": (30, 2816, 2112, 16, 8, 256, 262144, 262144, 1e6, True, 2, True, 128, 8, 704),
}
OWN_KEYS = ("num_global_key_value_heads", "enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size")
ROPE = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262144,
    "max_position_embeddings": 131072,
}


@dataclass(frozen=True)
class Gemma4Spec(GemmaSpec):
    values_are_keys: bool = False  # before norm and rotation


def spec(config: Config) -> Gemma4Spec:
    if config.size("hidden_size_per_layer_input", 256, least=0) or config.size("num_kv_shared_layers", 0, least=0):
        missing = "embeddings for each layer (hidden_size_per_layer_input), and layers that share keys and values"
        raise config.error(f"{missing} (num_kv_shared_layers), as in Gemma 4 E2B and E4B, are not supported")
    data = DEFAULTS | config.data
    data |= {"rope_scaling": None, "rope_parameters": data.get("rope_parameters") or ROPE}
    if data.get("use_bidirectional_attention") == "vision":  # text is read as ever
        data["use_bidirectional_attention"] = None
    config = Config(data, config.where)
    types = config.layer_types(lambda index: (index + 1) % 6 != 0)
    types = [*types[:-1], FULL]  # the last layer has no window, whatever a config says
    return of_layers([_layer_spec(config, kind, own) for kind, own in zip(types, _own_sizes(config, types))])


def _own_sizes(config: Config, types: list[str]) -> list[dict]:
    """{key: value} of what each layer has of its own, in the spelling of published configs, or in that of configs that
    transformers writes."""
    given = config.data.get("per_layer_config")
    if given is None:
        full = {"head_dim": config.size("global_head_dim", 512)}
        if config.flag("attention_k_eq_v", False) and config.data.get("num_global_key_value_heads") is not None:
            full["num_key_value_heads"] = config.size("num_global_key_value_heads")
        return [full if kind == FULL else {} for kind in types]
    known = {"head_dim", "num_key_value_heads"}
    if not isinstance(given, dict) or not all(isinstance(own, dict) and {*own} <= known for own in given.values()):
        what = "objects with head_dim and num_key_value_heads"
        raise config.error(f"per_layer_config must hold {what}, not {shortened(given)}")
    return [given.get(str(index), {}) for index in range(len(types))]


def _layer_spec(config: Config, kind: str, own: dict) -> Gemma4Spec:
    """The spec of a model whose layers are all of one type."""
    config = Config(config.data | own, config.where)
    experts = config.size("num_experts") if config.flag("enable_moe_block", False) else 0
    read = gemma_spec(
        with_rope(config, kind),
        model_type="gemma4_text",
        head_norms=True,
        scale=1.0,
        window=config.window(512) if kind == SLIDING else None,
        experts=experts,
        active=config.active("top_k_experts", None, experts) if experts else 0,
        expert_inner=config.size("moe_intermediate_size") if experts else 0,
    )
    return Gemma4Spec(**vars(read), values_are_keys=kind == FULL and config.flag("attention_k_eq_v", False))


def named() -> dict[str, dict]:
    more = {"sliding_window": 1024, "final_logit_softcapping": 30.0, "attention_k_eq_v": True}
    found = llama.configs({name: row[:10] for name, row in SIZES.items()}, **more, hidden_size_per_layer_input=0)
    found = {name: config | dict(zip(OWN_KEYS, SIZES[name][10:], strict=True)) for name, config in found.items()}
    return found | {f"{name}-it": config for name, config in found.items()}


def tensors(spec: Gemma4Spec) -> list[Layer]:
    return llama.with_ends(spec, [_block(spec.at(index), index) for index in range(spec.layers)])


def _block(spec: Gemma4Spec, index: int) -> Layer:
    at = f"model.layers.{index}"
    begin = _attention_tensors(spec, index)
    end = llama.mlp_tensors(spec, index) | {"scalar": (f"{at}.layer_scalar", (1,))}
    end |= vectors("mlp_norm", f"{at}.pre_feedforward_layernorm", spec.hidden)
    end |= vectors("mlp_post_norm", f"{at}.post_feedforward_layernorm", spec.hidden)
    if not spec.experts:
        return Layer(begin | end)
    begin |= vectors("experts_norm", f"{at}.pre_feedforward_layernorm_2", spec.hidden)
    begin |= matrix("router", f"{at}.router.proj", spec.experts, spec.hidden)
    begin["router.scale"] = (f"{at}.router.scale", (spec.hidden,))
    begin["router.factors"] = (f"{at}.router.per_expert_scale", (spec.experts,))
    end |= vectors("dense_post_norm", f"{at}.post_feedforward_layernorm_1", spec.hidden)
    end |= vectors("experts_post_norm", f"{at}.post_feedforward_layernorm_2", spec.hidden)
    expert = matrix("gate_up", f"{at}.experts.{{}}.gate_up_proj", 2 * spec.expert_inner, spec.hidden)
    expert |= matrix("down", f"{at}.experts.{{}}.down_proj", spec.hidden, spec.expert_inner)
    return Layer(begin, expert=expert, experts=spec.experts, after=end)


def _attention_tensors(spec: Gemma4Spec, index: int) -> Tensors:
    found = llama.attention_tensors(spec, index)
    found |= vectors("attn_post_norm", f"model.layers.{index}.post_attention_layernorm", spec.hidden)
    unused = ("mlp_norm.", "v.") if spec.values_are_keys else ("mlp_norm.",)
    return {short: tensor for short, tensor in found.items() if not short.startswith(unused)}


def attention(spec: Gemma4Spec, w: Weights, hidden: Tensor, positions: Positions | None, attend: Attend) -> Tensor:
    x = norm(w, "attn_norm", hidden, spec.eps)
    x = project(w, "out", attend(*_heads(spec, w, x, positions)).flatten(1))
    return norm(w, "attn_post_norm", x, spec.eps).add_(hidden)


def _heads(spec: Gemma4Spec, w: Weights, x: Tensor, positions: Positions | None) -> tuple[Tensor, Tensor, Tensor]:
    rotated = rotation(spec.rope, positions, x)
    names = ("q", "k") if spec.values_are_keys else ("q", "k", "v")
    q, k, *v = (each.unflatten(1, (-1, spec.head_dim)) for each in projections(w, names, x))
    v = plain_rms_norm(v[0] if v else k, spec.eps)
    q = rotated(norm(w, "q_norm", q, spec.eps))
    k = rotated(norm(w, "k_norm", k, spec.eps))
    return q, k, v


def block(spec: Gemma4Spec, w: Weights, hidden: Tensor, positions: Positions | None, attend: Attend) -> Tensor:
    return _end(spec, w, attention(spec, w, hidden, positions, attend))


def _end(spec: Gemma4Spec, w: Weights, hidden: Tensor, experts: Tensor | None = None) -> Tensor:
    """A block from its MLP on, beside which there may be `experts`."""
    x = mlp(spec, w, norm(w, "mlp_norm", hidden, spec.eps))
    if experts is not None:
        x = norm(w, "dense_post_norm", x, spec.eps).add_(norm(w, "experts_post_norm", experts, spec.eps))
    return norm(w, "mlp_post_norm", x, spec.eps).add_(hidden).mul_(w["scalar"])


def route(spec: Gemma4Spec, w: Weights, hidden: Tensor) -> tuple[Tensor, Routing]:
    x = plain_rms_norm(hidden, spec.eps).mul_(w["router.scale"]).mul_(spec.hidden**-0.5)
    return norm(w, "experts_norm", hidden, spec.eps), parts.route(spec, w, x, renormalises=True)


def expert(spec: Gemma4Spec, w: Weights, x: Tensor) -> Tensor:
    gate, up = project(w, "gate_up", x).chunk(2, -1)
    return project(w, "down", activation(spec.activation)(gate) * up)


def join(spec: Gemma4Spec, w: Weights, hidden: Tensor, x: Tensor, total: Tensor) -> Tensor:
    return _end(spec, w, hidden, total)


def final_states(spec: Gemma4Spec, w: Weights, hidden: Tensor) -> Tensor:
    return norm(w, "final_norm", hidden, spec.eps)


def logits(spec: Gemma4Spec, w: Weights, hidden: Tensor) -> Tensor:
    return head(spec, w, final_states(spec, w, hidden))
