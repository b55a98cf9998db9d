"""Building blocks of model families, as pure functions of weights and tensors.

Weights are dicts by short names. Every function works on the device of its tensors and knows no tier, file or stream,
nor which tokens belong to one text. Shapes: N tokens, E hidden width, H heads, D elements of a head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.errors import UserError
from h2o_flexgen.kernels import rowwise
from h2o_flexgen.kernels.experts import Routing
from h2o_flexgen.kernels.linear import linears
from h2o_flexgen.models.rope import Positions, rotation
from h2o_flexgen.models.spec import ModelSpec

Weights = dict[str, Tensor]
#: linear layers whose input does not come from a norm, so that its outliers are not in the same few columns
INNER = ("out", "down")
#: q (N, H, D), k and v (N, KV heads, D), and the sinks (H,) of a family that has some (`kernels.attention.Softmax`) ->
#: context, shaped as q; knows the texts of the tokens, and their KV cache
Attend = Callable[..., Tensor]
#: (short name, ids (N,)) -> rows of a gathered tensor (N, width)
Gather = Callable[[str, Tensor], Tensor]
#: (short name, x (..., E)) -> x after that norm
Norm = Callable[[str, Tensor], Tensor]


def project(w: Weights, name: str, x: Tensor) -> Tensor:
    """x (..., I) through the linear layer `name` -> (..., O)."""
    return projections(w, (name,), x)[0]


def projections(w: Weights, names: tuple[str, ...], x: Tensor) -> list[Tensor]:
    """`project` through several layers that read the same input."""
    layers = [(w[f"{name}.weight"], w.get(f"{name}.bias")) for name in names]
    return linears(x, layers, outliers=names[0] not in INNER)


def layer_norm(w: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w.get(f"{name}.weight"), w.get(f"{name}.bias"), eps)


def rms_norm(w: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    return rowwise.rms_norm(x, w[f"{name}.weight"], eps)


def centred_rms_norm(w: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    """RMSNorm with a weight that is stored less 1, and by which it multiplies in fp32, as Gemma does."""
    return rowwise.rms_norm(x, w[f"{name}.weight"].float() + 1, eps)


def widened_rms_norm(w: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    """RMSNorm that multiplies by its weight in fp32."""
    return rowwise.rms_norm(x, w[f"{name}.weight"].float(), eps)


def plain_rms_norm(x: Tensor, eps: float) -> Tensor:
    """RMSNorm without a weight."""
    return rowwise.rms_norm(x, torch.ones(x.shape[-1], device=x.device), eps)


def attention(
    spec: ModelSpec, w: Weights, x: Tensor, positions: Positions | None, attend: Attend, norm: Norm | None = None
) -> Tensor:
    """Attention with matrices q, k, v and out: x (N, E) -> (N, E). With `norm` the queries and keys of each head go
    through the norms q_norm and k_norm before they are rotated. `sinks` are handed on if there are such."""
    sinks = [w["sinks"]] if "sinks" in w else []
    return project(w, "out", attend(*_heads(spec, w, x, positions, norm), *sinks).flatten(1))


def _heads(spec: ModelSpec, w: Weights, x: Tensor, positions: Positions | None, norm: Norm | None) -> tuple:
    """q, k and v for `attend`; in a function of its own, so that they are freed before the output matrix."""
    rotated = rotation(spec.rope, positions, x)
    q, k, v = (each.unflatten(1, (-1, spec.head_dim)) for each in projections(w, ("q", "k", "v"), x))
    if norm is not None:
        q = norm("q_norm", q)
        k = norm("k_norm", k)
    q = rotated(q)
    k = rotated(k)
    return q, k, v


def embed(spec: ModelSpec, w: Weights, gather: Gather, ids: Tensor, positions: Positions) -> Tensor:
    """The `embed` of a family without position embeddings: ids (N,) -> (N, E)."""
    return gather("words", ids)


def mlp(spec: ModelSpec, w: Weights, x: Tensor) -> Tensor:
    """An MLP with matrices up and down, and gate if it is gated (GLU, arXiv 2002.05202): x (N, E) -> (N, E)."""
    wide, *up = projections(w, ("gate", "up") if spec.gated else ("up",), x)
    wide = activation(spec.activation)(wide)
    if spec.gated:
        wide.mul_(*up)
    return project(w, "down", wide)


def route(spec: ModelSpec, w: Weights, x: Tensor, renormalises: bool) -> Routing:
    """The experts of each token of x (N, E): those with the largest share of a softmax over all of them in fp32. With
    `renormalises` their weights add up to 1. They are multiplied by the expert's own factor if there are such."""
    shares = torch.softmax(project(w, "router", x), -1, dtype=torch.float32)
    weights, ids = shares.topk(spec.active, -1)
    if renormalises:
        weights = weights / weights.sum(-1, keepdim=True)
    if "router.factors" in w:
        weights = weights * w["router.factors"][ids]
    return Routing(ids, weights)


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """transformers' activation function of that name; may work in place. Raises UserError for an unknown name, or a
    function with weights."""
    if name == "relu":
        return torch.relu_
    if name in ("silu", "swish"):
        return lambda x: F.silu(x, inplace=True)
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise UserError(f"unknown activation function {name!r} in the config")
    found = ACT2FN[name]
    if list(found.parameters()):
        raise UserError(f"the activation function {name!r} in the config has weights, which is not supported")
    return found
