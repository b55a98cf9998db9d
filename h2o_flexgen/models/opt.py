"""OPT (arXiv 2205.01068) as pure functions of (weights, tensors).

Weights come as dicts of short names. Every function here works on whatever device its tensors are on and
knows no tier, file or stream. Shapes: B sequences, T tokens, E hidden size, H heads, D head size, V words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.kernels.linear import linear
from h2o_flexgen.models.config import OPTConfig

#: OPT's position table starts with two rows that no token uses
POSITION_OFFSET = 2

Weights = dict[str, Tensor]
#: (q, k, v), each (B, H, T, D) -> context, same shape
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """One step of the schedule: the tensors it needs as {short name: (checkpoint name, shape)}.

    `streamed` tensors are needed whole; of the `gathered` ones only the rows that are asked for.
    """

    streamed: dict[str, tuple[str, tuple[int, ...]]]
    gathered: dict[str, tuple[str, tuple[int, ...]]]


def layers(config: OPTConfig) -> list[Layer]:
    """The layers in order of computation: embed, the decoder layers, head."""
    E, V, W, ffn = config.hidden_size, config.vocab_size, config.word_embed_proj_dim, config.ffn_dim
    words = ("decoder.embed_tokens.weight", (V, W))
    positions = ("decoder.embed_positions.weight", (config.max_position_embeddings + POSITION_OFFSET, E))

    def norm(short: str, name: str) -> dict:
        if not config.layer_norm_elementwise_affine:
            return {}
        return {f"{short}.{part}": (f"{name}.{part}", (E,)) for part in ("weight", "bias")}

    def product(short: str, name: str, out: int, into: int) -> dict:
        spec = {f"{short}.weight": (f"{name}.weight", (out, into))}
        return spec | ({f"{short}.bias": (f"{name}.bias", (out,))} if config.enable_bias else {})

    project_in = {"project_in": ("decoder.project_in.weight", (E, W))} if config.has_projection else {}
    project_out = {"project_out": ("decoder.project_out.weight", (W, E))} if config.has_projection else {}
    final_norm = norm("final_norm", "decoder.final_layer_norm") if config.has_final_norm else {}
    head = words if config.tie_word_embeddings else ("lm_head.weight", (V, W))

    def decoder(index: int) -> Layer:
        at = f"decoder.layers.{index}"
        return Layer(
            norm("attn_norm", f"{at}.self_attn_layer_norm")
            | product("q", f"{at}.self_attn.q_proj", E, E)
            | product("k", f"{at}.self_attn.k_proj", E, E)
            | product("v", f"{at}.self_attn.v_proj", E, E)
            | product("out", f"{at}.self_attn.out_proj", E, E)
            | norm("mlp_norm", f"{at}.final_layer_norm")
            | product("fc1", f"{at}.fc1", ffn, E)
            | product("fc2", f"{at}.fc2", E, ffn),
            {},
        )

    return [
        Layer(project_in, {"words": words, "positions": positions}),
        *(decoder(i) for i in range(config.num_hidden_layers)),
        Layer(final_norm | project_out | {"lm_head": head}, {}),
    ]


def embed(words: Tensor, positions: Tensor, w: Weights) -> Tensor:
    """Rows of the two tables, words (B, T, W) and positions (B, T, E) -> hidden (B, T, E)."""
    if "project_in" in w:
        words = linear(words, w["project_in"])
    return words + positions


def decoder_layer(config: OPTConfig, w: Weights, hidden: Tensor, attend: Attend) -> Tensor:
    """One transformer layer: hidden (B, T, E) -> hidden (B, T, E); `attend` owns the KV cache."""
    B, T, E = hidden.shape
    pre_norm = config.do_layer_norm_before

    def heads(name: str, x: Tensor) -> Tensor:
        x = linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))
        return x.view(B, T, config.num_attention_heads, config.head_dim).transpose(1, 2)

    x = _norm(w, "attn_norm", hidden) if pre_norm else hidden
    context = attend(heads("q", x), heads("k", x), heads("v", x))
    del x
    context = context.transpose(1, 2).reshape(B, T, E)
    hidden = linear(context, w["out.weight"], w.get("out.bias")).add_(hidden)
    del context
    if not pre_norm:
        hidden = _norm(w, "attn_norm", hidden)

    x = _norm(w, "mlp_norm", hidden) if pre_norm else hidden
    x = activation(config.activation_function)(linear(x, w["fc1.weight"], w.get("fc1.bias")))
    hidden = linear(x, w["fc2.weight"], w.get("fc2.bias")).add_(hidden)
    return hidden if pre_norm else _norm(w, "mlp_norm", hidden)


def logits(config: OPTConfig, w: Weights, hidden: Tensor) -> Tensor:
    """Last hidden states (B, E), contiguous -> logits (B, V)."""
    if config.has_final_norm:
        hidden = _norm(w, "final_norm", hidden)
    if "project_out" in w:
        hidden = linear(hidden, w["project_out"])
    return linear(hidden, w["lm_head"])


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """transformers' activation of that name; relu in place, since its input is never needed again."""
    if name == "relu":
        return torch.relu_
    from transformers.activations import ACT2FN

    return ACT2FN[name]


def _norm(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w.get(f"{name}.weight"), w.get(f"{name}.bias"), 1e-5)
