"""How much of attention is next to nothing (section 3.1 of the H2O paper)."""

from __future__ import annotations

from torch import Tensor

#: an entry below this part of its row's largest one counts as nothing
THRESHOLD = 0.01


def negligible(p: Tensor) -> float:
    """Of causal attention probabilities p (..., N, N), the share that lies below THRESHOLD of their row's maximum. Only
    pairs in which the query can see the key count, N (N + 1) / 2 of a matrix: the others are no sparsity."""
    small = (p < THRESHOLD * p.amax(-1, keepdim=True)).tril()
    N = p.shape[-1]
    return int(small.sum()) / (p[..., 0, 0].numel() * N * (N + 1) // 2)
