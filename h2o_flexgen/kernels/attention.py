"""Attention over a prompt and over a cache; softmax and column sums in fp32.

Query heads that share a head of K and V (grouped-query attention, arXiv 2305.13245) are rows of one matmul with it, so
that K and V are never repeated in memory. Shapes: B sequences, H query heads, KV heads of K and V, G = H / KV, T
tokens, D elements of a head, S slots of a segment.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.compiled import threads
from h2o_flexgen.compiled.threads import float_array
from h2o_flexgen.formats import KVFormat
from h2o_flexgen.kernels.linear import prefers_fp32

#: elements that are widened to fp32, or rotated, at once: of K where positions roll, of hidden states in a norm
WIDENED_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}
#: attention over prompts: probabilities held at once (what stays in a CPU's cache, or fills a GPU), and queries
#: of one chunk; measured on 2 cores, prompts of 64 to 2048 tokens: with 128 queries, which waste few pairs, up to a
#: quarter less time than with 256, and at 2048 tokens up to a sixth more; on CUDA not measured
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
QUERY_CHUNK = {"cpu": 128, "cuda": 256}

#: keys (n, 1, S, D) of some KV heads, and their places among all B * KV -> the same, rotated
Rotate = Callable[[Tensor, slice], Tensor]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (B, H, T, D), k and v (B, KV, N, D) -> context (B, H, T, D): the queries are those of the last T of N tokens.
    Padding on the right cannot be seen by a real query."""
    if q.shape[2] < k.shape[2]:
        return _chunked(q, k, v)
    grouped = q.shape[1] != k.shape[1]
    # torch's flash kernel takes grouped heads as they are; where it does not run, torch would repeat K and V, hold fp32
    # (T, T) matrices of a whole batch in bf16 on GPUs, and be up to twice as slow as matmuls of chunks in bf16 on CPUs
    flash = q.is_cuda and q.dtype != torch.float32 and torch.cuda.get_device_capability(q.device) >= (8, 0)
    if not flash and (grouped or (q.dtype == torch.bfloat16 and not prefers_fp32(q))):
        return _chunked(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def causal_attention_with_scores(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, empty: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same, and the attention that every token receives from the queries of its sequence.

    Args:
        k, v: (B, KV, N, D); the queries are those of the last T of these N tokens, and see all that are before them.
        weights: (B, T) fp32, how much each query counts; 0 for padding.
        empty: (B, N - T) bool, places before the queries' tokens that hold no token; None if there are none.

    Returns:
        context (B, H, T, D) and score (B, KV, N) fp32; score[j] = sum of weights[i] p[i, j] over the queries i >= j
        of all heads of the group.
    """
    score = torch.zeros(k.shape[:3], dtype=torch.float32, device=q.device)
    weights, empty = (x if x is None else x.repeat_interleave(k.shape[1], 0) for x in (weights, empty))
    return _chunked(q, k, v, score, weights, empty), score


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Tensor | None = None,
    weights: Tensor | None = None,
    empty: Tensor | None = None,
) -> Tensor:
    """Causal attention of a few KV heads and a chunk of queries at a time, over the keys up to the chunk's end: no
    (T, N) matrix of a whole batch is ever held. Column sums of the probabilities go to `score` (B, KV, N), each query's
    times its weight in `weights` (B * KV, T), if they are given. `empty`: (B * KV, N - T)."""
    B, H, T, D = q.shape
    KV, N = k.shape[1:3]
    G = H // KV
    cached_len = N - T
    q = q.reshape(B * KV, G, T, D)
    k, v = (x.reshape(B * KV, N, D) for x in (k, v))
    context = torch.empty_like(q)
    score = score if score is None else score.view(B * KV, N)
    chunk = min(QUERY_CHUNK[q.device.type], T)
    heads = min(B * KV, max(1, CHUNK_ELEMENTS[q.device.type] // (G * chunk * N)))
    slow = prefers_fp32(q)
    # taken once: blocks of ever-changing sizes would leave gaps in the heap
    in_fp32 = torch.empty(heads * G * chunk * N, dtype=torch.float32, device=q.device)
    narrow = in_fp32 if slow or q.dtype == torch.float32 else torch.empty_like(in_fp32, dtype=q.dtype)
    # of 16-bit logits torch's softmax widens fp16 on CUDA as it goes; for others it would take one more tensor
    as_they_are = narrow is in_fp32 or (q.is_cuda and q.dtype == torch.float16)
    # minima with this take a tenth of the time of filling by a mask. NaN stays NaN: a key that overflows spoils the
    # chunk that it is in (padding repeats a prompt's own token, `engine.batch`)
    above = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    most = torch.where(above, float("-inf"), float("inf")).to(narrow.dtype)
    for a in range(0, B * KV, heads):
        b = min(a + heads, B * KV)
        few_q, few_k, few_v = (x[a:b].float() if slow else x[a:b] for x in (q, k, v))
        for begin in range(0, T, chunk):
            end = min(begin + chunk, T)
            n = end - begin
            seen = cached_len + end
            # rows: the queries of the chunk of each head of the group
            logits, p = (x[: (b - a) * G * n * seen].view(b - a, G * n, seen) for x in (narrow, in_fp32))
            queries = few_q[:, :, begin:end].reshape(b - a, G * n, D)
            torch.bmm(queries * D**-0.5, few_k[:, :seen].transpose(1, 2), out=logits)
            own = logits.view(b - a, G, n, seen)[..., cached_len + begin :]
            torch.minimum(own, most[:n, :n], out=own)
            if empty is not None:
                logits[..., :cached_len].masked_fill_(empty[a:b, None], float("-inf"))
            torch.softmax(logits if as_they_are else p.copy_(logits), -1, dtype=torch.float32, out=p)
            if score is not None:
                weight = weights[a:b, None, begin:end].expand(-1, G, -1).reshape(b - a, 1, G * n)
                score[a:b, :seen] += torch.bmm(weight, p)[:, 0]
            p = p if narrow is in_fp32 else logits.copy_(p)
            target = context[a:b, :, begin:end]
            rows = target.flatten(1, 2)  # a view of it, but for grouped heads in several chunks
            if slow or rows.data_ptr() != target.data_ptr():
                target.copy_(torch.bmm(p, few_v[:, :seen]).view(b - a, G, n, D))
            else:
                torch.bmm(p, few_v[:, :seen], out=rows)
    return context.view(B, H, T, D)


def by_loops(device: torch.device) -> bool:
    """Whether attention over a cache runs in compiled loops, which read no slot behind those that are held."""
    return device.type == "cpu" and threads.compiled() is not None


def cached_attention(
    q: Tensor,
    k: list[Tensor],
    v: list[Tensor],
    cached_len: Tensor | None = None,
    empty: Tensor | None = None,
    rotate: Rotate | None = None,
    form: KVFormat | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One query per sequence and head over the slots of a cache.

    Args:
        q: (B, H, 1, D); k, v: per segment (B, KV, S, W), contiguous, as they are stored.
        cached_len: (B,) int64 on the CPU, slots in use, the first ones; None if all are, and what they receive
            is wanted.
        empty: (B, KV, sum of S) or (B, 1, sum of S) bool, slots that hold no token; None if there are none.
        rotate: what the keys become before they are used, if they are cached unrotated.
        form: in which vectors are stored; None: as floats of D elements.

    Returns:
        context (B, H, 1, D), and per KV head the attention that each slot receives from the heads of its group
        (B, KV, sum of S) in fp32; None, or of no use, with `cached_len`.
    """
    form = form or KVFormat.dense(q.dtype)
    if rotate is None and by_loops(q.device):
        return _cached_attention_by_loops(q, k, v, cached_len, empty, form)
    if cached_len is not None:
        slots = torch.arange(sum(x.shape[2] for x in k), device=q.device)
        empty = slots >= cached_len.to(q.device, non_blocking=True)[:, None, None]
    # whatever `prefers_fp32` says of a prompt's many queries: with one query torch's fp16 matmul took ten times as long
    no_matmul = not form.is_dense or (not q.is_cuda and (q.dtype == torch.float16 or prefers_fp32(q)))
    if rotate is not None or no_matmul:
        return _cached_attention_by_parts(q, k, v, empty, rotate, form)
    B, H, _, D = q.shape
    KV = k[0].shape[1]
    q = q.reshape(B * KV, H // KV, D) * D**-0.5
    # one small matmul per KV head; torch's fused attention moves a quarter of the bytes per second here
    logits = [torch.bmm(q, segment.view(B * KV, -1, D).transpose(1, 2)) for segment in k]
    logits = (logits[0] if len(logits) == 1 else torch.cat(logits, -1)).view(B, KV, H // KV, -1)
    if empty is not None:
        logits = logits.masked_fill_(empty[:, :, None], float("-inf"))
    p = torch.softmax(logits, -1, dtype=torch.float32)
    parts = p.to(v[0].dtype).view(B * KV, H // KV, -1).split([segment.shape[2] for segment in v], -1)
    contexts = [torch.bmm(part.contiguous(), segment.view(B * KV, -1, D)) for part, segment in zip(parts, v)]
    # one sum, rounded once
    context = contexts[0] if len(contexts) == 1 else torch.stack(contexts).sum(0)
    return context.view(B, H, 1, D), p.squeeze(2) if H == KV else p.sum(2)


def put_by_loops(segments: list[Tensor], slots: Tensor, new: Tensor) -> None:
    """Write one vector per sequence and head, new (B, KV, W), into slots (B, KV) of segments (B, KV, S, W)."""
    vectors = new.contiguous().view(-1, new.shape[-1]).view(torch.uint8)
    threads.compiled().attention.put(*_segments(segments), slots.reshape(-1).contiguous().numpy(), vectors.numpy())


def _segments(segments: list[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Where they are, and their slots. The loops trust in what they get."""
    assert all(x.is_contiguous() for x in segments)
    return np.array([x.data_ptr() for x in segments]), np.array([x.shape[2] for x in segments])


def _cached_attention_by_loops(
    q: Tensor, k: list[Tensor], v: list[Tensor], cached_len: Tensor | None, empty: Tensor | None, form: KVFormat
) -> tuple[Tensor, Tensor | None]:
    """The same on a CPU by compiled loops: what is stored becomes fp32 a few vectors at a time."""
    B, H, _, D = q.shape
    KV = k[0].shape[1]
    S = sum(segment.shape[2] for segment in k)
    queries = q.reshape(B * KV, H // KV, D)
    context = torch.empty_like(queries)
    received = torch.zeros((B * KV, S) if cached_len is None else (0, 0), dtype=torch.float32)
    cached_len = torch.full((B,), S) if cached_len is None else cached_len
    empty = torch.empty(0, 0, 0, dtype=torch.bool) if empty is None else empty
    loops = threads.compiled().attention
    at_k, sizes = _segments(k)
    at_v, _ = _segments(v)
    # plain tuples of the fields of `Vectors` and `Slots`
    keys = (form.k.loop_kind, D, k[0].shape[-1] * k[0].itemsize, at_k)
    values = (form.v.loop_kind, D, v[0].shape[-1] * v[0].itemsize, at_v)
    slots = (sizes, cached_len.numpy(), empty.numpy())
    arrays = [keys, values, slots, float_array(queries), float_array(context), received.numpy()]
    size = 2 * KV * D * int(cached_len.sum())
    threads.in_threads(lambda begin, end: loops.attend(begin, end, *arrays), B * KV, size)
    return context.view(B, H, 1, D), received.view(B, KV, S) if len(received) else None


def _cached_attention_by_parts(
    q: Tensor, k: list[Tensor], v: list[Tensor], empty: Tensor | None, rotate: Rotate | None, form: KVFormat
) -> tuple[Tensor, Tensor]:
    """The same with copies of what is cached, on a CPU in fp32: a few KV heads at a time, which stay in its caches."""
    B, H, _, D = q.shape
    KV = k[0].shape[1]
    S = sum(segment.shape[2] for segment in k)
    # every KV head as a sequence of its own
    queries = q.reshape(B * KV, H // KV, 1, D)
    k = [x.view(B * KV, 1, -1, x.shape[-1]) for x in k]
    v = [x.view(B * KV, 1, -1, x.shape[-1]) for x in v]
    empty = None if empty is None else empty.expand(B, KV, S).reshape(B * KV, 1, S)
    few = max(1, WIDENED_ELEMENTS[q.device.type] // (S * D))
    dtype = torch.float32 if q.device.type == "cpu" else q.dtype
    context = torch.empty_like(queries)
    received = torch.empty(B * KV, 1, S, dtype=torch.float32, device=q.device)
    for begin in range(0, B * KV, few):
        part = slice(begin, begin + few)
        few_k = [form.k.floats(x[part], dtype) for x in k]
        few_v = [form.v.floats(x[part], dtype) for x in v]
        if rotate is not None:
            few_k = [rotate(x, part) for x in few_k]
        few_empty = None if empty is None else empty[part]
        context[part], received[part] = cached_attention(queries[part].to(dtype), few_k, few_v, empty=few_empty)
    return context.view(B, H, 1, D), received.view(B, KV, S)


def prefill_pairs(length: int, device: str, cached_len: int = 0) -> int:
    """Pairs of query and key that attention over a prompt behind `cached_len` tokens computes for one head: chunks of
    queries, each over all keys up to its end. `device`: "cpu" or "cuda"."""
    chunk = QUERY_CHUNK[device]
    ends = [min(begin + chunk, length) for begin in range(0, length, chunk)]
    return sum((end - begin) * (cached_len + end) for begin, end in zip([0, *ends], ends))
