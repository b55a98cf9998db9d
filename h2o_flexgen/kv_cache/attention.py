"""Attention over a prompt and over a cache; softmax and column sums in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: elements of one chunk of probabilities: small enough for the processor's cache, large enough for a GPU
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
QUERY_CHUNK = 128


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v (B, H, T, D) -> context (B, H, T, D). Padding on the right cannot be seen by a real query."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def causal_attention_with_scores(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and the attention that every token receives from the queries of its sequence.

    No (T, T) matrix is held for more than a few heads and queries at a time: a chunk of queries sees the keys
    up to its end, its probabilities are summed over the queries in fp32 and dropped.

    Returns:
        context (B, H, T, D) and score (B, H, T) fp32; score[j] = sum over queries i >= j of p[i, j].
    """
    B, H, T, D = q.shape
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    context = torch.empty_like(q)
    score = torch.zeros(B * H, T, dtype=torch.float32, device=q.device)
    padded = bool((lengths < T).any())
    real = (torch.arange(T) < lengths[:, None]).to(q.device, torch.float32) if padded else None
    chunk = min(QUERY_CHUNK, T)
    heads = max(1, CHUNK_ELEMENTS.get(q.device.type, 1 << 25) // (chunk * T))
    above = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    if real is not None:
        real = real.repeat_interleave(H, 0)
    for a in range(0, B * H, heads):
        b = min(a + heads, B * H)
        for begin in range(0, T, chunk):
            end = min(begin + chunk, T)
            n = end - begin
            logits = _scaled_logits(q[a:b, begin:end], k[a:b, :end])
            logits[:, :, begin:end].masked_fill_(above[:n, :n], float("-inf"))
            p = torch.softmax(logits, -1, dtype=torch.float32)
            if real is None:
                score[a:b, :end] += p.sum(1)
            else:
                score[a:b, :end] += torch.bmm(real[a:b, None, begin:end], p)[:, 0]
            torch.bmm(p.to(v.dtype), v[a:b, :end], out=context[a:b, begin:end])
    return context.view(B, H, T, D), score.view(B, H, T)


def cached_attention(q: Tensor, k: list[Tensor], v: list[Tensor], empty: Tensor | None) -> tuple[Tensor, Tensor]:
    """One query per sequence and head over the slots of a cache.

    Args:
        q: (B, H, 1, D); k, v: per segment (B, H, S, D), contiguous.
        empty: (B, H, sum of S) or (B, 1, sum of S) bool, slots that hold no token; None if there are none.

    Returns:
        context (B, H, 1, D), and the probabilities (B, H, sum of S) in fp32.
    """
    B, H, _, D = q.shape
    q = q.reshape(B * H, 1, D)
    # one matrix-vector product per head; torch's fused attention moves a quarter of the bytes per second here
    logits = [_scaled_logits(q, segment.view(B * H, -1, D)) for segment in k]
    logits = (logits[0] if len(logits) == 1 else torch.cat(logits, -1)).view(B, H, -1)
    if empty is not None:
        logits = logits.masked_fill_(empty, float("-inf"))
    p = torch.softmax(logits, -1, dtype=torch.float32)
    parts = p.to(v[0].dtype).view(B * H, 1, -1).split([segment.shape[2] for segment in v], -1)
    context = torch.bmm(parts[0].contiguous(), v[0].view(B * H, -1, D))
    for part, segment in zip(parts[1:], v[1:]):
        context += torch.bmm(part.contiguous(), segment.view(B * H, -1, D))
    return context.view(B, H, 1, D), p


def _scaled_logits(q: Tensor, k: Tensor) -> Tensor:
    """(N, Q, D) x (N, S, D) -> (N, Q, S) scaled by D^-1/2."""
    return torch.bmm(q * q.shape[-1] ** -0.5, k.transpose(1, 2))
