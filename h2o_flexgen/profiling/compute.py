"""What computes, as calls to be timed: matmuls by shape, attention, the choice of tokens, conversion of weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle, product
from statistics import median

import torch
from torch import Tensor

from h2o_flexgen.engine.sampling import SamplingParams, sample
from h2o_flexgen.kernels.linear import linear, pack, packs
from h2o_flexgen.kv_cache import CacheRule, FullCache, HeavyHitterCache, KVLayout
from h2o_flexgen.offload import memory
from h2o_flexgen.offload.device import Device, convert
from h2o_flexgen.planning.profile import ATTENTION, GROUP, MATMULS, Shape
from h2o_flexgen.profiling.scale import Scale
from h2o_flexgen.sizes import HEAD_ROWS, prefill_pairs

#: a matmul whose seconds do not depend on its size: of one row with a matrix of this shape
TINY_SHAPE: Shape = (64, 64)
#: matmuls in a layer: four of attention, three of a gated MLP
LAYER_MATMULS = 7
#: a matrix that is so many times taller than wide is a vocabulary head
HEAD_RATIO = 16
#: head sizes of attention, with WIDTH elements in all heads together
HEAD_DIMS, WIDTH = (64, 128), 1024
#: sequences in attention over a cache; one prompt is as much work
SEQUENCES = 16
#: of attention: over a prompt, over a cache, and over a cache on the CPU beside a CUDA device
PHASES = ("prefill", "decode", "cpu")
#: the most calls that are timed, of those before which caches are emptied (which takes long) and of others
MOST_COLD_CALLS, MOST_CALLS = 20, 100


@dataclass(frozen=True)
class Case:
    """Something to time: `make` prepares tensors and gives the call; `cold` calls find nothing in the caches."""

    key: tuple
    device: Device
    make: Callable[[], Callable[[], object]]
    cold: bool = False

    def seconds(self, scale: Scale) -> float:
        """Median over calls of `scale.call_seconds` in all, after one that does not count."""
        work, other = self.make(), self.device.buffer(scale.cold_bytes if self.cold else 0)
        most = MOST_COLD_CALLS if self.cold else MOST_CALLS
        work()
        times: list[float] = []
        while not times or (len(times) < most and sum(times) < scale.call_seconds):
            other.add_(1)
            self.device.synchronize()
            start = time.perf_counter()
            work()
            self.device.synchronize()
            times.append(time.perf_counter() - start)
        return median(times)


def cases(device: Device, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    """Everything that computes, with these keys:

    ("step",): LAYER_MATMULS tiny matmuls
    ("matmul", "streamed" or "resident", (out, in), rows)
    ("small", rule): attention of a decode step that takes no time for its size
    (phase, rule, head size) and (phase, rule, "short"): attention
    ("decode" or "cpu", rule, "grouped"): attention of GROUP query heads to each KV head
    ("choose",): tokens from logits; ("convert",): weights of another type
    """
    yield Case(("step",), device, partial(layer_call, device, dtype, TINY_SHAPE, 1, 0), cold=True)
    yield from matmul_cases(device, dtype, scale)
    for kind in ATTENTION:
        smallest = Attention(kind, 1, 2, HEAD_DIMS[0], scale.short)
        yield Case(("small", kind), device, partial(attention_call, device, dtype, smallest), cold=True)
    for kind, phase, size in product(ATTENTION, PHASES, (*HEAD_DIMS, "short", "grouped")):
        if (phase == "cpu" and not device.is_cuda) or (phase, size) == ("prefill", "grouped"):
            continue
        where = Device("cpu") if phase == "cpu" else device
        call = prompt_attention_call if phase == "prefill" else attention_call
        attention = Attention.of(phase, kind, size, scale)
        yield Case((phase, kind, size), where, partial(call, where, dtype, attention), cold=phase != "prefill")
    yield Case(("choose",), device, partial(_choose_call, device, dtype, scale))
    yield Case(("convert",), device, partial(_convert_call, device, dtype, scale))


# matmuls


def matmul_cases(device: Device, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    """Of each shape with streamed weights, and with resident ones where these are packed."""
    kinds = MATMULS if not device.is_cuda and packs(dtype) else MATMULS[:1]
    for kind, shape in product(kinds, fitting_shapes(device, dtype, scale)):
        weights = cache(partial(_weights, device, dtype, shape, scale.weight_bytes, kind == "resident"))
        for rows in scale.rows:
            if rows <= HEAD_ROWS or shape[0] < HEAD_RATIO * shape[1]:
                yield Case(("matmul", kind, shape, rows), device, partial(matmul_call, rows, weights))
        del weights


def fitting_shapes(device: Device, dtype: torch.dtype, scale: Scale) -> list[Shape]:
    """The shapes that there is memory to measure now."""
    first, *others = scale.shapes
    free = device.free_bytes()
    return [first, *(s for s in others if s[0] * s[1] * dtype.itemsize <= free // 4)]


def matmul_call(rows: int, weights: Callable[[], list[Tensor]]) -> Callable[[], object]:
    """x @ W.T with the next of the weights, and a pass over its output: about one for each matmul is what norms,
    activations and sums of a layer come to."""
    turn = cycle(weights())
    w = next(turn)
    x = torch.randn(rows, w.shape[1], device=w.device).to(w.dtype)
    return lambda: linear(x, next(turn)).relu_()


def _weights(device: Device, dtype: torch.dtype, shape: Shape, most_bytes: int, packed: bool = False) -> list[Tensor]:
    """One matrix, and as many more as memory and `most_bytes` have room for."""
    room = min(most_bytes, memory.ram_available() // 4, device.free_bytes() // 4)
    count = 1 + room // (shape[0] * shape[1] * dtype.itemsize)
    full = (torch.full(shape, 0.01, dtype=dtype, device=device.torch_device) for _ in range(count))
    return [pack(w) if packed else w for w in full]


def layer_call(device: Device, dtype: torch.dtype, shape: Shape, rows: int, weight_bytes: int) -> Callable[[], object]:
    """As many matmuls as a layer has."""
    call = matmul_call(rows, partial(_weights, device, dtype, shape, weight_bytes))
    return lambda: [call() for _ in range(LAYER_MATMULS)]


# attention


@dataclass(frozen=True)
class Attention:
    """An attention that is timed: over prompts of so many tokens, or of one token over the cache that they leave."""

    kind: str
    batch: int
    heads: int
    head_dim: int
    tokens: int
    group: int = 1

    @classmethod
    def of(cls, phase: str, kind: str, size: int | str, scale: Scale) -> Attention:
        """`size`: a head size, "short", or "grouped": both as the first head size, but for tokens or query heads."""
        head_dim = size if isinstance(size, int) else HEAD_DIMS[0]
        batch = 1 if phase == "cpu" else scale.sequences
        if phase != "prefill" or size == "short":
            batch *= SEQUENCES
        tokens = scale.short if size == "short" else scale.prompt
        return cls(kind, batch, WIDTH // head_dim, head_dim, tokens, GROUP if size == "grouped" else 1)

    @property
    def rule(self) -> CacheRule:
        """Of the profile's names; a heavy-hitter cache keeps half of the tokens."""
        return FullCache() if self.kind == "full" else HeavyHitterCache(self.tokens // 4, self.tokens // 4)

    def layout(self, dtype: torch.dtype, decode: bool = True) -> KVLayout:
        segments = self.rule.segments(self.tokens, 1)
        if decode and self.rule.growth == "append":  # behind the prompt it has grown
            segments = (self.tokens // 2, self.tokens // 2)
        return KVLayout(self.batch, self.heads, segments, self.head_dim, dtype, self.rule.metadata, self.rule.growth)

    def work(self, phase: str, dtype: torch.dtype) -> int:
        """Flops, or bytes of K and V, of one head of one sequence."""
        if phase == "prefill":
            return 4 * self.head_dim * prefill_pairs(self.tokens)
        return self.layout(dtype).kv_bytes // (self.batch * self.heads)


def prompt_attention_call(device: Device, dtype: torch.dtype, case: Attention) -> Callable[[], object]:
    """Attention over prompts, of tensors as they come out of the matmuls."""
    layout, rule = case.layout(dtype, decode=False), case.rule
    kv = layout.view(device.buffer(layout.kv_bytes), device.buffer(layout.meta_bytes))
    shape = (case.batch, case.tokens, case.heads, case.head_dim)
    q, k, v = (torch.randn(shape, device=device.torch_device).to(dtype).transpose(1, 2) for _ in range(3))
    lengths = torch.full((case.batch,), case.tokens)
    return lambda: rule.prefill(kv, q, k, v, lengths)


def attention_call(device: Device, dtype: torch.dtype, case: Attention) -> Callable[[], object]:
    """Attention of one token per sequence over a cache that is full."""
    layout, rule = case.layout(dtype), case.rule
    kv = layout.view(device.buffer(layout.kv_bytes), device.buffer(layout.meta_bytes))
    for x in (*kv.k, *kv.v):
        x.fill_(0.5)
    if rule.metadata:
        kv.score.uniform_()
        kv.position.copy_(torch.arange(layout.slots).expand(kv.position.shape))
    shapes = [(case.batch, heads, 1, case.head_dim) for heads in (case.heads * case.group, case.heads, case.heads)]
    q, k, v = (torch.randn(shape, device=device.torch_device).to(dtype) for shape in shapes)
    lengths = torch.full((case.batch,), 4 * layout.slots if layout.growth == "fixed" else layout.slots - 1)
    return lambda: rule.decode(kv, q, k, v, lengths, 1)


# the rest


def _choose_call(device: Device, dtype: torch.dtype, scale: Scale) -> Callable[[], object]:
    logits = torch.randn(scale.logits, device=device.torch_device).to(dtype)
    return lambda: sample(logits, SamplingParams(), list(range(len(logits))), 0)


def _convert_call(device: Device, dtype: torch.dtype, scale: Scale) -> Callable[[], object]:
    """Weights from the other type that checkpoints come in."""
    other = torch.bfloat16 if dtype == torch.float16 else torch.float16
    dst = device.buffer(scale.transfer_bytes).view(dtype)
    src = device.buffer(dst.numel() * other.itemsize).view(other)
    src.fill_(0.5)
    return lambda: convert(dst, src)
