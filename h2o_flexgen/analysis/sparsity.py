"""How sparse attention is (section 3.1 of the H2O paper)."""

from __future__ import annotations

from torch import Tensor

#: an entry below this fraction of its row's maximum is negligible
THRESHOLD = 0.01


def negligible(p: Tensor) -> float:
    """The share of causal attention probabilities p (..., N, N) below THRESHOLD of their row's maximum. Only pairs in
    which the query sees the key count, N (N + 1) / 2 per matrix: masked ones are not sparsity."""
    small = (p < THRESHOLD * p.amax(-1, keepdim=True)).tril()
    N = p.shape[-1]
    return int(small.sum()) / (p[..., 0, 0].numel() * N * (N + 1) // 2)
