"""Attention with an explicit mask, and with its probabilities.

Shapes: B sequences, H query heads on KV heads of K and V, G = H / KV, T queries, N keys, D elements of a head.
"""

from __future__ import annotations

from torch import Tensor


def probabilities(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """(B, KV, G, T, N) fp32: attention of q (B, H, T, D) to those k (B, KV, N, D) that are `visible`, bool, of a shape
    that expands to (B, KV, T, N)."""
    B, H, T, D = q.shape
    KV = k.shape[1]
    rows = q.reshape(B, KV, H // KV * T, D).float() * D**-0.5
    logits = (rows @ k.float().transpose(2, 3)).view(B, KV, H // KV, T, -1)
    return logits.masked_fill_(~visible.unsqueeze(-3), float("-inf")).softmax(-1)


def mix(p: Tensor, v: Tensor) -> Tensor:
    """The context (B, H, T, D): v (B, KV, N, D) averaged by `probabilities`, in the dtype of v."""
    B, KV, G, T, N = p.shape
    return (p.view(B, KV, G * T, N).to(v.dtype) @ v).view(B, KV * G, T, -1)
