"""Attention over a prompt and over a cache; softmax and column sums in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.kernels.linear import is_slow
from h2o_flexgen.sizes import CHUNK_ELEMENTS, QUERY_CHUNK


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v (B, H, T, D) -> context (B, H, T, D). Padding on the right cannot be seen by a real query."""
    if q.dtype == torch.bfloat16 and not is_slow(q) and not _torch_is_best(q.device):
        return _chunked(q, k, v, None)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _torch_is_best(device: torch.device) -> bool:
    """Whether torch's own attention over a prompt in bf16 is the best. Where a CPU multiplies bf16, products of chunks
    run up to twice as fast; on cards older than sm_80 torch would hold fp32 (T, T) matrices of the whole batch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def causal_attention_with_scores(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and the attention that every token receives from the queries of its sequence.

    Args:
        lengths: (B,) int64 on the CPU; queries from lengths[b] on are padding and count for nothing.

    Returns:
        context (B, H, T, D) and score (B, H, T) fp32; score[j] = sum over queries i >= j of p[i, j].
    """
    score = torch.zeros(k.shape[:3], dtype=torch.float32, device=q.device)
    real = torch.arange(q.shape[2]) < lengths[:, None]
    if bool(real.all()):
        return _chunked(q, k, v, score), score
    real = real.to(q.device, torch.float32, non_blocking=True).repeat_interleave(q.shape[1], 0)
    return _chunked(q, k, v, score, real), score


def _chunked(q: Tensor, k: Tensor, v: Tensor, score: Tensor | None, real: Tensor | None = None) -> Tensor:
    """Causal attention of a few heads and a chunk of queries at a time, over the keys up to the chunk's end: no
    (T, T) matrix of a whole batch is ever held. Column sums of the probabilities go into `score`, over queries
    that are `real` (B * H, T) if that is given."""
    B, H, T, D = q.shape
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    context = torch.empty_like(q)
    score = score if score is None else score.view(B * H, T)
    chunk = min(QUERY_CHUNK, T)
    heads = min(B * H, max(1, CHUNK_ELEMENTS.get(q.device.type, 1 << 25) // (chunk * T)))
    slow = is_slow(q)
    above = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    # taken once: blocks of ever-changing sizes would leave gaps in the heap
    in_fp32 = torch.empty(heads * chunk * T, dtype=torch.float32, device=q.device)
    narrow = in_fp32 if slow or q.dtype == torch.float32 else torch.empty_like(in_fp32, dtype=q.dtype)
    # of 16-bit logits torch's softmax widens fp16 on CUDA as it goes; for others it would take one more tensor
    as_they_are = narrow is in_fp32 or (q.is_cuda and q.dtype == torch.float16)
    for a in range(0, B * H, heads):
        b = min(a + heads, B * H)
        few_q, few_k, few_v = (x[a:b].float() if slow else x[a:b] for x in (q, k, v))
        for begin in range(0, T, chunk):
            end = min(begin + chunk, T)
            n = end - begin
            logits, p = (x[: (b - a) * n * end].view(b - a, n, end) for x in (narrow, in_fp32))
            torch.bmm(few_q[:, begin:end] * D**-0.5, few_k[:, :end].transpose(1, 2), out=logits)
            logits[:, :, begin:end].masked_fill_(above[:n, :n], float("-inf"))
            torch.softmax(logits if as_they_are else p.copy_(logits), -1, dtype=torch.float32, out=p)
            if score is not None and real is None:
                score[a:b, :end] += p.sum(1)
            elif score is not None:
                score[a:b, :end] += torch.bmm(real[a:b, None, begin:end], p)[:, 0]
            into = context[a:b, begin:end]
            if slow:
                into.copy_(torch.bmm(p, few_v[:, :end]))
            else:
                torch.bmm(p if narrow is in_fp32 else logits.copy_(p), few_v[:, :end], out=into)
    return context.view(B, H, T, D)


def cached_attention(q: Tensor, k: list[Tensor], v: list[Tensor], empty: Tensor | None) -> tuple[Tensor, Tensor]:
    """One query per sequence and head over the slots of a cache.

    Args:
        q: (B, H, 1, D); k, v: per segment (B, H, S, D), contiguous.
        empty: (B, H, sum of S) or (B, 1, sum of S) bool, slots that hold no token; None if there are none.

    Returns:
        context (B, H, 1, D), and the probabilities (B, H, sum of S) in fp32.
    """
    if q.device.type == "cpu" and q.dtype == torch.float16:
        return _cached_attention_in_fp32(q, k, v, empty)
    B, H, _, D = q.shape
    q = q.reshape(B * H, 1, D) * D**-0.5
    # one matrix-vector product per head; torch's fused attention moves a quarter of the bytes per second here
    logits = [torch.bmm(q, segment.view(B * H, -1, D).transpose(1, 2)) for segment in k]
    logits = (logits[0] if len(logits) == 1 else torch.cat(logits, -1)).view(B, H, -1)
    if empty is not None:
        logits = logits.masked_fill_(empty, float("-inf"))
    p = torch.softmax(logits, -1, dtype=torch.float32)
    parts = p.to(v[0].dtype).view(B * H, 1, -1).split([segment.shape[2] for segment in v], -1)
    products = [torch.bmm(part.contiguous(), segment.view(B * H, -1, D)) for part, segment in zip(parts, v)]
    # one sum, rounded once
    context = products[0] if len(products) == 1 else torch.cat(products, 1).sum(1)
    return context.view(B, H, 1, D), p


def _cached_attention_in_fp32(q: Tensor, k: list[Tensor], v: list[Tensor], empty: Tensor | None):
    """The same on a CPU, which is slow in fp16: a few heads at a time, whose copies in fp32 stay in its caches."""
    B, H, _, D = q.shape
    S = sum(segment.shape[2] for segment in k)
    heads = max(1, 2 * CHUNK_ELEMENTS["cpu"] // (S * D))
    q, k, v = q.reshape(1, B * H, 1, D), *([x.view(1, B * H, -1, D) for x in segments] for segments in (k, v))
    empty = None if empty is None else empty.expand(B, H, S).reshape(1, B * H, S)
    context, p = torch.empty_like(q), torch.empty(1, B * H, S, dtype=torch.float32)
    for a in range(0, B * H, heads):
        part = slice(a, a + heads)
        few_k, few_v = ([x[:, part].float() for x in segments] for segments in (k, v))
        few_empty = None if empty is None else empty[:, part]
        context[:, part], p[:, part] = cached_attention(q[:, part].float(), few_k, few_v, few_empty)
    return context.view(B, H, 1, D), p.view(B, H, S)
