"""What model families are made of, as pure functions of (weights, tensors).

Weights come as dicts of short names. Every function works on whatever device its tensors are on and knows no tier, file
or stream. Shapes: B sequences, T tokens, E hidden width, H heads, D elements of a head, V words.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.errors import UserError
from h2o_flexgen.kernels.linear import linear
from h2o_flexgen.models.rope import rotate
from h2o_flexgen.models.spec import ModelSpec

Weights = dict[str, Tensor]
#: q (B, H, T, D), k and v (B, KV heads, T, D) -> context, shaped as q; it owns the KV cache
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
#: (short name, ids (B, T)) -> rows of a gathered tensor (B, T, width)
Gather = Callable[[str, Tensor], Tensor]


def project(w: Weights, name: str, x: Tensor) -> Tensor:
    """x (..., I) through the linear layer `name` -> (..., O)."""
    return linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def layer_norm(w: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w.get(f"{name}.weight"), w.get(f"{name}.bias"), eps)


def rms_norm(w: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    """RMSNorm (arXiv 1910.07467), its mean square in fp32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return w[f"{name}.weight"] * (wide * scale).to(x.dtype)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, H * D) -> (B, H, T, D), a view."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, T, H * D)."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def position(spec: ModelSpec, x: Tensor, positions: Tensor | None) -> Tensor:
    """Queries or keys (B, H, T, D) rotated to their positions (B, T); as they are without RoPE, and for None, where
    `attend` rotates."""
    return x if positions is None or spec.rope is None else rotate(spec.rope, x, positions)


def attention(spec: ModelSpec, w: Weights, x: Tensor, positions: Tensor | None, attend: Attend) -> Tensor:
    """Attention with matrices q, k, v and out: x (B, T, E) -> (B, T, E)."""
    q = position(spec, split_heads(project(w, "q", x), spec.heads), positions)
    k = position(spec, split_heads(project(w, "k", x), spec.kv_heads), positions)
    v = split_heads(project(w, "v", x), spec.kv_heads)
    return project(w, "out", merge_heads(attend(q, k, v)))


def mlp(spec: ModelSpec, w: Weights, x: Tensor) -> Tensor:
    """An MLP with matrices up and down: x (B, T, E) -> (B, T, E)."""
    return project(w, "down", activation(spec.activation)(project(w, "up", x)))


def gated_mlp(spec: ModelSpec, w: Weights, x: Tensor) -> Tensor:
    """A gated MLP (GLU, arXiv 2002.05202) with matrices gate, up and down: x (B, T, E) -> (B, T, E)."""
    gate = activation(spec.activation)(project(w, "gate", x))
    return project(w, "down", gate.mul_(project(w, "up", x)))


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """transformers' activation of that name; may change its input, which is never needed again.

    Raises:
        UserError: there is none.
    """
    if name == "relu":
        return torch.relu_
    if name in ("silu", "swish"):
        return lambda x: F.silu(x, inplace=True)
    from transformers.activations import ACT2FN

    try:
        return ACT2FN[name]
    except KeyError:
        raise UserError(f"unknown activation function {name!r} in the config") from None
