"""Attention over a prompt and over a cache; softmax and column sums in fp32.

Query heads that share a KV head (grouped-query attention, arXiv 2305.13245) become rows of one matmul with it, so that
K and V are never repeated in memory. Shapes: B sequences, H query heads, KV heads of K and V, G = H / KV, T tokens,
D elements of a head, S slots of a segment.
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
#: probabilities of a prompt in memory at once: what stays in a CPU's cache, or fills a GPU
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
#: queries of a chunk. On 2 cores 128, wasting few pairs, took up to a quarter less time than 256 with short prompts
#: and up to a sixth more at 2048 tokens; not measured on CUDA
QUERY_CHUNK = {"cpu": 128, "cuda": 256}

#: keys (n, 1, S, D) of some KV heads, and their places among all B * KV -> the same, rotated
Rotate = Callable[[Tensor, slice], Tensor]


# over a prompt


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (B, H, T, D), k and v (B, KV, N, D) -> context (B, H, T, D), where the queries belong to the last T of N
    tokens. No real query sees padding on the right."""
    if q.shape[2] < k.shape[2]:
        return _chunked(q, k, v)
    grouped = q.shape[1] != k.shape[1]
    # torch's flash kernel takes grouped heads directly; its other kernels would repeat K and V, hold fp32 (T, T)
    # matrices of a whole batch in bf16 on GPUs, and be up to twice as slow as chunked matmuls in bf16 on CPUs
    flash = q.is_cuda and q.dtype != torch.float32 and torch.cuda.get_device_capability(q.device) >= (8, 0)
    if not flash and (grouped or (q.dtype == torch.bfloat16 and not prefers_fp32(q))):
        return _chunked(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def causal_attention_with_scores(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, empty: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`causal_attention`, and the attention that every token receives from the queries of its sequence.

    Args:
        k, v: (B, KV, N, D); the queries belong to the last T of these N tokens, and see all tokens before them.
        weights: (B, T) fp32, how much each query counts; 0 for padding.
        empty: (B, N - T) bool, places before the queries' tokens that hold no token; None if there are none.

    Returns:
        context (B, H, T, D) and score (B, KV, N) fp32; score[j] = sum of weights[i] p[i, j] over the queries i >= j
        of all heads of the group.
    """
    KV = k.shape[1]
    score = torch.zeros(k.shape[:3], dtype=torch.float32, device=q.device)
    weights = weights.repeat_interleave(KV, 0)
    empty = None if empty is None else empty.repeat_interleave(KV, 0)
    return _chunked(q, k, v, score.flatten(0, 1), weights, empty), score


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Tensor | None = None,
    weights: Tensor | None = None,
    empty: Tensor | None = None,
) -> Tensor:
    """Causal attention of a few KV heads and a chunk of queries at a time, over the keys up to the chunk's end, so that
    no (T, N) matrix of a whole batch is ever in memory.

    Args:
        score: (B * KV, N) fp32, to which the attention that each key receives is added, with `weights` (B * KV, T).
        empty: (B * KV, N - T) bool.
    """
    B, H, T, D = q.shape
    KV, N = k.shape[1:3]
    G = H // KV
    q = q.reshape(B * KV, G, T, D)
    k = k.reshape(B * KV, N, D)
    v = v.reshape(B * KV, N, D)
    context = torch.empty_like(q)
    chunk = min(QUERY_CHUNK[q.device.type], T)
    few = min(B * KV, max(1, CHUNK_ELEMENTS[q.device.type] // (G * chunk * N)))
    scratch = _Scratch(few * G * chunk * N, chunk, q)
    for first in range(0, B * KV, few):
        heads = slice(first, first + few)
        few_q, few_k, few_v = (x[heads].float() if scratch.widens else x[heads] for x in (q, k, v))
        for begin in range(0, T, chunk):
            queries = slice(begin, min(begin + chunk, T))
            seen = N - T + queries.stop
            logits = scratch.causal_logits(few_q[:, :, queries], few_k[:, :seen])
            if empty is not None:
                logits[..., : N - T].masked_fill_(empty[heads, None], float("-inf"))
            p = scratch.softmax(logits)
            if score is not None:
                weight = weights[heads, queries].repeat(1, G)[:, None]
                score[heads, :seen] += torch.bmm(weight, p)[:, 0]
            scratch.write_context(p, few_v[:, :seen], context[heads, :, queries])
    return context.view(B, H, T, D)


class _Scratch:
    """The buffers of one chunk: logits in the type of the matmuls and probabilities in fp32, in one buffer if both are
    fp32. They are allocated once per call, since buffers of ever-changing sizes would fragment the heap. Shapes: h KV
    heads, n queries, S keys.
    """

    def __init__(self, elements: int, chunk: int, q: Tensor):
        self.widens = prefers_fp32(q)
        self.p = torch.empty(elements, dtype=torch.float32, device=q.device)
        in_fp32 = self.widens or q.dtype == torch.float32
        self.logits = self.p if in_fp32 else torch.empty_like(self.p, dtype=q.dtype)
        # torch's softmax widens fp16 on CUDA as it reads; other 16-bit logits it would copy to one more tensor
        self.copies_logits = not in_fp32 and not (q.is_cuda and q.dtype == torch.float16)
        # a minimum with this takes a tenth of the time of filling by a mask. NaN stays NaN: a key that overflows
        # spoils its chunk (padding repeats a prompt's own token, `engine.batch`)
        future = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
        self.ceiling = torch.where(future, float("-inf"), float("inf")).to(self.logits.dtype)

    def causal_logits(self, q: Tensor, k: Tensor) -> Tensor:
        """q (h, G, n, D) of the last n tokens of k (h, S, D) -> (h, G * n, S), -inf where a key is behind the query."""
        h, G, n, D = q.shape
        S = k.shape[1]
        logits = self.logits[: h * G * n * S].view(h, G * n, S)
        torch.bmm(q.reshape(h, G * n, D) * D**-0.5, k.transpose(1, 2), out=logits)
        own = logits.view(h, G, n, S)[..., S - n :]
        torch.minimum(own, self.ceiling[:n, :n], out=own)
        return logits

    def softmax(self, logits: Tensor) -> Tensor:
        """Probabilities in fp32."""
        p = self.p[: logits.numel()].view(logits.shape)
        return torch.softmax(p.copy_(logits) if self.copies_logits else logits, -1, dtype=torch.float32, out=p)

    def write_context(self, p: Tensor, v: Tensor, out: Tensor) -> None:
        """Write p (h, G * n, S) @ v (h, S, D) into out (h, G, n, D). In 16 bits p replaces the logits."""
        if self.logits is not self.p:
            p = self.logits[: p.numel()].view(p.shape).copy_(p)
        rows = out.flatten(1, 2)  # a view, except of grouped heads in several chunks
        if self.widens or rows.data_ptr() != out.data_ptr():
            out.copy_(torch.bmm(p, v).view(out.shape))
        else:
            torch.bmm(p, v, out=rows)


def prefill_pairs(length: int, device: str, cached_len: int = 0) -> int:
    """Pairs of query and key that attention over a prompt behind `cached_len` tokens computes for one head: chunks of
    queries, each over all keys up to its end. `device`: "cpu" or "cuda"."""
    chunk = QUERY_CHUNK[device]
    ends = [min(begin + chunk, length) for begin in range(0, length, chunk)]
    return sum((end - begin) * (cached_len + end) for begin, end in zip([0, *ends], ends))


# over a cache


def by_loops(device: torch.device) -> bool:
    """Whether attention over a cache runs in compiled loops, which read no slot beyond those in use."""
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
        q: (B, H, 1, D); k, v: per segment (B, KV, S, W), contiguous, as stored in `form`.
        cached_len: (B,) int64 on the CPU, how many slots are in use, counted from the first; None if all are, and the
            attention that they receive is wanted.
        empty: (B, KV, sum of S) or (B, 1, sum of S) bool, slots that hold no token; None if there are none.
        rotate: applied to keys before they are used, if they are cached unrotated.
        form: how vectors are stored; None: as floats of D elements.

    Returns:
        context (B, H, 1, D), and per KV head the attention that each slot receives from the heads of its group
        (B, KV, sum of S) in fp32; to be ignored with `cached_len`, where it may be None.
    """
    form = form or KVFormat.dense(q.dtype)
    if rotate is None and by_loops(q.device):
        return _cached_attention_by_loops(q, k, v, cached_len, empty, form)
    if cached_len is not None:
        slots = torch.arange(sum(x.shape[2] for x in k), device=q.device)
        empty = slots >= cached_len.to(q.device, non_blocking=True)[:, None, None]
    # `prefers_fp32` is about a prompt's many queries: with one query torch's fp16 matmul always took ten times as long
    no_matmul = not form.is_dense or (not q.is_cuda and (q.dtype == torch.float16 or prefers_fp32(q)))
    if rotate is not None or no_matmul:
        return _cached_attention_by_parts(q, k, v, empty, rotate, form)
    return _cached_attention_by_matmuls(q, k, v, empty)


def _cached_attention_by_matmuls(
    q: Tensor, k: list[Tensor], v: list[Tensor], empty: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same of stored floats, with one small matmul per KV head and segment; torch's fused attention moves a quarter
    of the bytes per second here."""
    B, H, _, D = q.shape
    KV = k[0].shape[1]
    G = H // KV
    q = q.reshape(B * KV, G, D) * D**-0.5
    logits = [torch.bmm(q, segment.view(B * KV, -1, D).transpose(1, 2)) for segment in k]
    logits = (logits[0] if len(logits) == 1 else torch.cat(logits, -1)).view(B, KV, G, -1)
    if empty is not None:
        logits = logits.masked_fill_(empty[:, :, None], float("-inf"))
    p = torch.softmax(logits, -1, dtype=torch.float32)
    parts = p.to(v[0].dtype).view(B * KV, G, -1).split([segment.shape[2] for segment in v], -1)
    contexts = [torch.bmm(part.contiguous(), segment.view(B * KV, -1, D)) for part, segment in zip(parts, v)]
    # one sum, rounded once
    context = contexts[0] if len(contexts) == 1 else torch.stack(contexts).sum(0)
    return context.view(B, H, 1, D), p.squeeze(2) if H == KV else p.sum(2)


def put_by_loops(segments: list[Tensor], slots: Tensor, new: Tensor) -> None:
    """Write one vector per sequence and head, new (B, KV, W), into slots (B, KV) of segments (B, KV, S, W)."""
    vectors = new.contiguous().view(-1, new.shape[-1]).view(torch.uint8)
    threads.compiled().attention.put(*_segments(segments), slots.reshape(-1).contiguous().numpy(), vectors.numpy())


def _segments(segments: list[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Their addresses and their slots. The compiled loops check neither."""
    assert all(x.is_contiguous() for x in segments)
    return np.array([x.data_ptr() for x in segments]), np.array([x.shape[2] for x in segments])


def _cached_attention_by_loops(
    q: Tensor, k: list[Tensor], v: list[Tensor], cached_len: Tensor | None, empty: Tensor | None, form: KVFormat
) -> tuple[Tensor, Tensor | None]:
    """The same on a CPU by compiled loops, which widen stored vectors to fp32 a few at a time."""
    B, H, _, D = q.shape
    KV = k[0].shape[1]
    S = sum(segment.shape[2] for segment in k)
    queries = q.reshape(B * KV, H // KV, D)
    context = torch.empty_like(queries)
    received = torch.zeros((B * KV, S) if cached_len is None else (0, 0), dtype=torch.float32)
    cached_len = torch.full((B,), S) if cached_len is None else cached_len
    empty = torch.empty(0, 0, 0, dtype=torch.bool) if empty is None else empty
    at_k, sizes = _segments(k)
    at_v, _ = _segments(v)
    # `Vectors` and `Slots` of the loop as plain tuples
    keys = (form.k.loop_kind, D, k[0].shape[-1] * k[0].itemsize, at_k)
    values = (form.v.loop_kind, D, v[0].shape[-1] * v[0].itemsize, at_v)
    slots = (sizes, cached_len.numpy(), empty.numpy())
    arrays = [keys, values, slots, float_array(queries), float_array(context), received.numpy()]
    attend = threads.compiled().attention.attend
    size = 2 * KV * D * int(cached_len.sum())
    threads.in_threads(lambda begin, end: attend(begin, end, *arrays), B * KV, size)
    return context.view(B, H, 1, D), received.view(B, KV, S) if len(received) else None


def _cached_attention_by_parts(
    q: Tensor, k: list[Tensor], v: list[Tensor], empty: Tensor | None, rotate: Rotate | None, form: KVFormat
) -> tuple[Tensor, Tensor]:
    """The same with copies of stored vectors, in fp32 on a CPU: a few KV heads at a time, which stay in its caches."""
    B, H, _, D = q.shape
    KV = k[0].shape[1]
    S = sum(segment.shape[2] for segment in k)
    queries = q.reshape(B * KV, H // KV, 1, D)  # every KV head as a sequence of its own
    empty = None if empty is None else empty.expand(B, KV, S).reshape(B * KV, 1, S)
    few = max(1, WIDENED_ELEMENTS[q.device.type] // (S * D))
    dtype = torch.float32 if q.device.type == "cpu" else q.dtype
    context = torch.empty_like(queries)
    received = torch.empty(B * KV, 1, S, dtype=torch.float32, device=q.device)
    for begin in range(0, B * KV, few):
        part = slice(begin, begin + few)
        few_k = [form.k.floats(x.flatten(0, 1)[part, None], dtype) for x in k]
        few_v = [form.v.floats(x.flatten(0, 1)[part, None], dtype) for x in v]
        if rotate is not None:
            few_k = [rotate(x, part) for x in few_k]
        few_empty = None if empty is None else empty[part]
        context[part], received[part] = cached_attention(queries[part].to(dtype), few_k, few_v, empty=few_empty)
    return context.view(B, H, 1, D), received.view(B, KV, S)
