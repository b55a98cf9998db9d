"""Attention over a prompt and over a cache; softmax and column sums in fp32.

Query heads that share a KV head (grouped-query attention, arXiv 2305.13245) become rows of one matmul with it, so that
K and V are never repeated in memory. Shapes: B sequences, H query heads, KV heads of K and V, G = H / KV, T tokens,
D elements of a head, S slots of a segment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.formats import KVFormat
from h2o_flexgen.kernels import cache_loops
from h2o_flexgen.kernels.cache_loops import by_loops
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
#: the age of a place without a token: older than any window
EMPTY = 1 << 30


class Softmax(NamedTuple):
    """How products of queries and keys become probabilities, where a layer does it differently.

    Attributes:
        scale: of the products; None: D ** -0.5.
        cap: a product x becomes cap * tanh(x / cap) before the mask (Gemma 2, arXiv 2408.00118, section 2); None: no
            cap.
        window: a query sees its own token and the `window` - 1 tokens before it (arXiv 2004.05150, section 3.1); None:
            all before it.
        sinks: (H,), or (B, H), floats: one more logit for each query head, which takes its share of the probabilities
            and adds nothing to the context (gpt-oss, arXiv 2508.10925, section 2.3); None: none.
    """

    scale: float | None = None
    cap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a query sees all tokens before it, and the probabilities of these are a softmax of the products."""
        return self.cap is None and self.window is None and self.sinks is None

    def with_sinks(self, sinks: Tensor | None) -> Softmax:
        return self if sinks is None else self._replace(sinks=sinks)

    def within(self, tokens: int) -> Softmax:
        """The same for texts of at most so many tokens."""
        return self if self.window is None or self.window < tokens else self._replace(window=None)

    def scale_of(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale

    def sinks_of(self, B: int, KV: int) -> Tensor | None:
        """The sinks (B * KV, G) fp32 of the query heads of each KV head."""
        if self.sinks is None:
            return None
        return self.sinks.float().expand(B, self.sinks.shape[-1]).reshape(B * KV, -1)


PLAIN = Softmax()


def _with_sinks(p: Tensor, largest: Tensor, sinks: Tensor) -> Tensor:
    """Probabilities p (..., S) scaled in place as if the logits of each row, the largest of which is given (...), had
    included one more, its sink (...)."""
    log_sum = largest - p.amax(-1).log()
    return p.mul_(torch.sigmoid(log_sum - sinks)[..., None])


# over a prompt


def causal_attention(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax = PLAIN) -> Tensor:
    """q (B, H, T, D), k and v (B, KV, N, D) -> context (B, H, T, D), where the queries belong to the last T of N
    tokens. No real query sees padding on the right."""
    softmax = softmax.within(k.shape[2])
    if q.shape[2] < k.shape[2] or not softmax.is_plain:
        return _chunked(q, k, v, softmax)
    grouped = q.shape[1] != k.shape[1]
    # torch's flash kernel takes grouped heads directly; its other kernels would repeat K and V, hold fp32 (T, T)
    # matrices of a whole batch in bf16 on GPUs, and be up to twice as slow as chunked matmuls in bf16 on CPUs
    flash = q.is_cuda and q.dtype != torch.float32 and torch.cuda.get_device_capability(q.device) >= (8, 0)
    if not flash and (grouped or (q.dtype == torch.bfloat16 and not prefers_fp32(q))):
        return _chunked(q, k, v, softmax)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax.scale, enable_gqa=grouped)


def causal_attention_with_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    ages: Tensor | None = None,
    softmax: Softmax = PLAIN,
) -> tuple[Tensor, Tensor]:
    """`causal_attention`, and the attention that every token receives from the queries of its sequence.

    Args:
        k, v: (B, KV, N, D); the queries belong to the last T of these N tokens, and see all tokens before them.
        weights: (B, T) fp32, how much each query counts; 0 for padding. (B, R, T) for R scores.
        ages: (1 or B, 1 or KV, N - T) int32, how many tokens before the first query each key before it is, EMPTY for a
            place without a token; None if they are the tokens right before it.

    Returns:
        context (B, H, T, D) and score (B, KV, N) or (B, KV, R, N) fp32; score[j] = sum of weights[i] p[i, j] over the
        queries i >= j of all heads of the group.
    """
    B, KV, N, _ = k.shape
    score = torch.zeros(B, KV, *weights.shape[1:-1], N, dtype=torch.float32, device=q.device)
    weights = weights.view(B, -1, q.shape[2]).repeat_interleave(KV, 0)
    if ages is None:
        softmax = softmax.within(N)
    else:
        ages = ages.expand(B, KV, -1).flatten(0, 1)
    return _chunked(q, k, v, softmax, score.view(B * KV, -1, N), weights, ages), score


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax: Softmax,
    score: Tensor | None = None,
    weights: Tensor | None = None,
    ages: Tensor | None = None,
) -> Tensor:
    """Causal attention of a few KV heads and a chunk of queries at a time, over the keys up to the chunk's end, so that
    no (T, N) matrix of a whole batch is ever in memory.

    Args:
        score: (B * KV, R, N) fp32, to which the attention that each key receives is added.
        weights: (B * KV, R, T).
        ages: (B * KV, N - T) int32.
    """
    B, H, T, D = q.shape
    KV, N = k.shape[1:3]
    G = H // KV
    q = q.reshape(B * KV, G, T, D)
    k = k.reshape(B * KV, N, D)
    v = v.reshape(B * KV, N, D)
    sinks = softmax.sinks_of(B, KV)
    context = torch.empty_like(q)
    chunk = min(QUERY_CHUNK[q.device.type], T)
    most = chunk_keys(chunk, N, softmax.window, 0 if ages is None else N - T)
    few = min(B * KV, max(1, CHUNK_ELEMENTS[q.device.type] // (G * chunk * most)))
    scratch = _Scratch(few * G * chunk * most, chunk, q, softmax)
    for first in range(0, B * KV, few):
        heads = slice(first, first + few)
        few_q, few_k, few_v = (x[heads].float() if scratch.widens else x[heads] for x in (q, k, v))
        few_ages = None if ages is None else ages[heads]
        for begin in range(0, T, chunk):
            queries = slice(begin, min(begin + chunk, T))
            keys = slice(_first_key(N - T, begin, softmax.window, ages is not None), N - T + queries.stop)
            logits = scratch.causal_logits(few_q[:, :, queries], few_k[:, keys])
            if softmax.window is not None:
                scratch.hide_old(logits, N - T + begin - softmax.window + 1, keys.start, 0 if ages is None else N - T)
            if ages is not None and keys.start == 0:
                scratch.hide_past(logits, few_ages, queries)
            p = scratch.probabilities(logits, None if sinks is None else sinks[heads])
            if score is not None:
                score[heads, :, keys] += torch.bmm(weights[heads, :, queries].repeat(1, 1, G), p)
            scratch.write_context(p, few_v[:, keys], context[heads, :, queries])
    return context.view(B, H, T, D)


def chunk_keys(chunk: int, tokens: int, window: int | None, scattered: int = 0) -> int:
    """The most keys that a chunk of queries is multiplied with, of `tokens`; the first `scattered` of these have any
    age."""
    return tokens if window is None else min(tokens, scattered + chunk + window - 1)


def _first_key(cached_len: int, begin: int, window: int | None, scattered: bool) -> int:
    """The first key that some query of a chunk from `begin` on may see. `scattered`: the `cached_len` keys before the
    queries have any age."""
    oldest = 0 if window is None else max(0, cached_len + begin - window + 1)
    return 0 if scattered and oldest < cached_len else oldest


class _Scratch:
    """The buffers of one chunk: logits in the type of the matmuls and probabilities in fp32, in one buffer if both are
    fp32. They are allocated once per call, since buffers of ever-changing sizes would fragment the heap. Shapes: h KV
    heads, n queries, S keys.
    """

    def __init__(self, elements: int, chunk: int, q: Tensor, softmax: Softmax):
        self.widens = prefers_fp32(q)
        self.scale = softmax.scale_of(q.shape[-1])
        self.cap = softmax.cap
        self.window = softmax.window
        self.p = torch.empty(elements, dtype=torch.float32, device=q.device)
        in_fp32 = self.widens or q.dtype == torch.float32
        self.logits = self.p if in_fp32 else torch.empty_like(self.p, dtype=q.dtype)
        # torch's softmax widens fp16 on CUDA as it reads; other 16-bit logits it would copy to one more tensor
        self.copies_logits = not in_fp32 and not (q.is_cuda and q.dtype == torch.float16)
        # a minimum with this takes a tenth of the time of filling by a mask. NaN stays NaN: a key that overflows
        # spoils its chunk (padding repeats a prompt's own token, `engine.batch`)
        square = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device)
        self.ceiling = self._ceiling(square.triu(1))
        self.old = None if self.window is None else self._ceiling(square.tril(-1))

    def _ceiling(self, hidden: Tensor) -> Tensor:
        return torch.where(hidden, float("-inf"), float("inf")).to(self.logits.dtype)

    def causal_logits(self, q: Tensor, k: Tensor) -> Tensor:
        """q (h, G, n, D) of the last n tokens of k (h, S, D) -> (h, G, n, S), -inf where a key is behind the query."""
        h, G, n, D = q.shape
        S = k.shape[1]
        logits = self.logits[: h * G * n * S].view(h, G * n, S)
        torch.bmm(q.reshape(h, G * n, D) * self.scale, k.transpose(1, 2), out=logits)
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        logits = logits.view(h, G, n, S)
        own = logits[..., S - n :]
        torch.minimum(own, self.ceiling[:n, :n], out=own)
        return logits

    def hide_old(self, logits: Tensor, oldest: int, start: int, first: int) -> None:
        """Hide from each query of logits (h, G, n, S) the keys before its window.

        Args:
            oldest: the first query's oldest key, if all keys stood side by side.
            start: the first of the S keys.
            first: the first key of those side by side.
        """
        n = logits.shape[2]
        begin = max(start, first)
        missing = begin - oldest  # keys of the first query's window
        if missing < n:
            part = logits[..., begin - start : begin - start + n - missing]
            torch.minimum(part, self.old[:n, missing:n], out=part)

    def hide_past(self, logits: Tensor, ages: Tensor, queries: slice) -> None:
        """Hide from these queries the first keys, of the given ages (h, L), where there is no token or none within the
        window."""
        limit = torch.full((1, 1), EMPTY, device=ages.device)
        if self.window is not None:
            limit = self.window - torch.arange(queries.start, queries.stop, device=ages.device)[:, None]
        logits[..., : ages.shape[1]].masked_fill_((ages[:, None] >= limit)[:, None], float("-inf"))

    def probabilities(self, logits: Tensor, sinks: Tensor | None) -> Tensor:
        """Logits (h, G, n, S) and sinks (h, G) -> probabilities (h, G * n, S) in fp32."""
        largest = None if sinks is None else logits.amax(-1).float()
        p = self.p[: logits.numel()].view(logits.shape)
        p = torch.softmax(p.copy_(logits) if self.copies_logits else logits, -1, dtype=torch.float32, out=p)
        return (p if sinks is None else _with_sinks(p, largest, sinks[..., None])).flatten(1, 2)

    def write_context(self, p: Tensor, v: Tensor, out: Tensor) -> None:
        """Write p (h, G * n, S) @ v (h, S, D) into out (h, G, n, D). In 16 bits p replaces the logits."""
        if self.logits is not self.p:
            p = self.logits[: p.numel()].view(p.shape).copy_(p)
        rows = out.flatten(1, 2)  # a view, except of grouped heads in several chunks
        if self.widens or rows.data_ptr() != out.data_ptr():
            out.copy_(torch.bmm(p, v).view(out.shape))
        else:
            torch.bmm(p, v, out=rows)


def prefill_pairs(length: int, device: str, cached_len: int = 0, window: int | None = None) -> int:
    """Pairs of query and key that attention over a prompt behind `cached_len` tokens computes for one head: chunks of
    queries, each over all keys up to its end that a query may see. `device`: "cpu" or "cuda"."""
    pairs = 0
    for begin in range(0, length, QUERY_CHUNK[device]):
        end = min(begin + QUERY_CHUNK[device], length)
        pairs += (end - begin) * (cached_len + end - _first_key(cached_len, begin, window, False))
    return pairs


# over a cache


def cached_attention(
    q: Tensor,
    k: list[Tensor],
    v: list[Tensor],
    cached_len: Tensor | None = None,
    empty: Tensor | None = None,
    rotate: Rotate | None = None,
    form: KVFormat | None = None,
    softmax: Softmax = PLAIN,
) -> tuple[Tensor, Tensor | None]:
    """One query per sequence and head over the slots of a cache.

    Args:
        q: (B, H, 1, D); k, v: per segment (B, KV, S, W), contiguous, as stored in `form`.
        cached_len: (B,) int64 on the CPU, how many slots are in use, counted from the first; None if all are, and the
            attention that they receive is wanted.
        empty: (B, KV, sum of S) or (B, 1, sum of S) bool, slots that hold no token; None if there are none.
        rotate: applied to keys before they are used, if they are cached unrotated.
        form: how vectors are stored; None: as floats of D elements.
        softmax: without regard to its window: slots hold no token outside it.

    Returns:
        context (B, H, 1, D), and per KV head the attention that each slot receives from the heads of its group
        (B, KV, sum of S) in fp32; to be ignored with `cached_len`, where it may be None.
    """
    form = form or KVFormat.dense(q.dtype)
    if rotate is None and by_loops(q.device):
        heads = (tuple(range(k[0].shape[1])),)
        if empty is not None:
            empty = [empty.expand(*k[0].shape[:2], -1).contiguous()]
        context, received = cache_loops.attend(q, cache_loops.Cache(heads, [k], [v], form, cached_len, empty), softmax)
        return context, received and received[0]
    if cached_len is not None:
        slots = torch.arange(sum(x.shape[2] for x in k), device=q.device)
        empty = slots >= cached_len.to(q.device, non_blocking=True)[:, None, None]
    # `prefers_fp32` is about a prompt's many queries: with one query torch's fp16 matmul always took ten times as long
    no_matmul = not form.is_dense or (not q.is_cuda and (q.dtype == torch.float16 or prefers_fp32(q)))
    if rotate is not None or no_matmul:
        return _cached_attention_by_parts(q, k, v, empty, rotate, form, softmax)
    return _cached_attention_by_matmuls(q, k, v, empty, softmax)


def _cached_attention_by_matmuls(
    q: Tensor, k: list[Tensor], v: list[Tensor], empty: Tensor | None, softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """The same of stored floats, with one small matmul per KV head and segment; torch's fused attention moves a quarter
    of the bytes per second here."""
    B, H, _, D = q.shape
    KV = k[0].shape[1]
    G = H // KV
    q = q.reshape(B * KV, G, D) * softmax.scale_of(D)
    logits = [torch.bmm(q, segment.view(B * KV, -1, D).transpose(1, 2)) for segment in k]
    logits = (logits[0] if len(logits) == 1 else torch.cat(logits, -1)).view(B, KV, G, -1)
    if softmax.cap is not None:
        logits = logits.div_(softmax.cap).tanh_().mul_(softmax.cap)
    if empty is not None:
        logits = logits.masked_fill_(empty[:, :, None], float("-inf"))
    p = torch.softmax(logits, -1, dtype=torch.float32)
    if softmax.sinks is not None:
        p = _with_sinks(p, logits.amax(-1).float(), softmax.sinks_of(B, KV).view(B, KV, G))
    parts = p.to(v[0].dtype).view(B * KV, G, -1).split([segment.shape[2] for segment in v], -1)
    contexts = [torch.bmm(part.contiguous(), segment.view(B * KV, -1, D)) for part, segment in zip(parts, v)]
    # one sum, rounded once
    context = contexts[0] if len(contexts) == 1 else torch.stack(contexts).sum(0)
    return context.view(B, H, 1, D), p.squeeze(2) if H == KV else p.sum(2)


def _cached_attention_by_parts(
    q: Tensor,
    k: list[Tensor],
    v: list[Tensor],
    empty: Tensor | None,
    rotate: Rotate | None,
    form: KVFormat,
    softmax: Softmax,
) -> tuple[Tensor, Tensor]:
    """The same with copies of stored vectors, in fp32 on a CPU: a few KV heads at a time, which stay in its caches."""
    B, H, _, D = q.shape
    KV = k[0].shape[1]
    S = sum(segment.shape[2] for segment in k)
    queries = q.reshape(B * KV, H // KV, 1, D)  # every KV head as a sequence of its own
    empty = None if empty is None else empty.expand(B, KV, S).reshape(B * KV, 1, S)
    sinks = softmax.sinks_of(B, KV)
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
        of_part = softmax._replace(sinks=None if sinks is None else sinks[part])
        few_q = queries[part].to(dtype)
        context[part], received[part] = cached_attention(few_q, few_k, few_v, empty=few_empty, softmax=of_part)
    return context.view(B, H, 1, D), received.view(B, KV, S)
