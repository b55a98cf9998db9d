"""Timing what computes: matmuls by shape, those of a vocabulary head with the choice of tokens, and attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle, product
from statistics import median

import torch
from torch import Tensor

from h2o_flexgen.engine.sampling import SamplingParams, sample
from h2o_flexgen.kernels.linear import linear, pack, packs
from h2o_flexgen.kv_cache import RULES, CacheRule, KVLayout
from h2o_flexgen.offload import memory
from h2o_flexgen.offload.device import Device
from h2o_flexgen.planning.profile import GROUP, Shape
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


@dataclass(frozen=True)
class Scale:
    """How much is measured. The defaults are for a CPU; tests take less.

    Attributes:
        shapes: (out, in) of the matrices: small and large, tall and wide as in an MLP, and a vocabulary head. All but
            the first are left out where they would take more than a quarter of the free memory.
        rows: of the matmuls with each; with a head, at most as many as the engine puts through it at once.
        weight_bytes: of the matrices of a shape, which take turns, so that each comes from memory and not from a cache.
        prompt: tokens of a prompt in attention; short: of one so short that what a head takes anyway shows.
        sequences: times as many in attention over a cache.
        cold_bytes: written between two calls, so that the second finds nothing in the caches.
        transfer_bytes: of a large transfer; file_bytes: of the file that is written and read by such transfers.
        small_bytes: of a small transfer by link: a KV block that is read, a row that is written.
        call_seconds: a call is repeated for so long.
        passes: over everything; medians count, since other users of a machine come and go.
    """

    shapes: tuple[Shape, ...] = ((768, 768), (2048, 2048), (8192, 2048), (2048, 8192), (50272, 768))
    rows: tuple[int, ...] = (1, 4, 16, 32, 64, 128, 256, 1024)
    weight_bytes: int = 1 << 27
    prompt: int = 512
    short: int = 32
    sequences: int = 1
    cold_bytes: int = 1 << 25
    transfer_bytes: int = 1 << 26
    file_bytes: int = 1 << 28
    small_bytes: dict[str, int] = field(default_factory=lambda: {"disk_to_cpu": 1 << 22, "cpu_to_disk": 1 << 18})
    call_seconds: float = 0.1
    passes: int = 3


#: smaller matrices would measure how fast the host launches kernels
CUDA = Scale(
    shapes=((2048, 2048), (4096, 4096), (16384, 4096), (4096, 16384), (50272, 4096)),
    weight_bytes=1 << 28,
    sequences=8,
    cold_bytes=1 << 27,
)


def scale_for(device: Device) -> Scale:
    return CUDA if device.is_cuda else Scale()


def compute_seconds(device: Device, dtype: torch.dtype, scale: Scale) -> Iterator[tuple[tuple, float]]:
    """Keys and seconds of everything that computes:

    ("step",): LAYER_MATMULS tiny matmuls
    ("matmul", "streamed" or "resident", (out, in), rows)
    ("small", rule): attention of a decode step that takes no time for its size
    (phase, rule, head size) and (phase, rule, "short"): attention
    ("decode" or "cpu", rule, "grouped"): attention of GROUP query heads to each KV head
    """
    yield ("step",), call_seconds(device, layer_call(device, dtype, TINY_SHAPE, 1, 0), scale, cold=True)
    yield from matmul_seconds(device, dtype, scale)
    for rule in RULES:
        smallest = Attention(rule, 1, 2, HEAD_DIMS[0], scale.short)
        yield ("small", rule), call_seconds(device, attention_call(device, dtype, smallest), scale, cold=True)
    for rule, size in product(RULES, (*HEAD_DIMS, "short", "grouped")):
        for phase in ("prefill", "decode", "cpu") if device.is_cuda else ("prefill", "decode"):
            if (phase, size) != ("prefill", "grouped"):
                on = Device("cpu") if phase == "cpu" else device
                call = prompt_attention_call if phase == "prefill" else attention_call
                case = Attention.of(phase, rule, size, scale)
                yield (phase, rule, size), call_seconds(on, call(on, dtype, case), scale, cold=phase != "prefill")


def call_seconds(device: Device, work: Callable[[], object], scale: Scale, cold: bool = False) -> float:
    """Median over calls for `scale.call_seconds`, after one that does not count; `cold` ones find nothing in the
    caches."""
    other = device.buffer(scale.cold_bytes if cold else 0)
    work()
    times, end = [], time.perf_counter() + scale.call_seconds
    while not times or time.perf_counter() < end:
        other.add_(1)
        device.synchronize()
        start = time.perf_counter()
        work()
        device.synchronize()
        times.append(time.perf_counter() - start)
    return median(times)


# matmuls


def matmul_seconds(device: Device, dtype: torch.dtype, scale: Scale) -> Iterator[tuple[tuple, float]]:
    """Of each shape with streamed weights, and with resident ones where these are packed."""
    kinds = ("streamed", "resident") if not device.is_cuda and packs(dtype) else ("streamed",)
    free = device.free_bytes()
    shapes = [s for s in scale.shapes if s == scale.shapes[0] or s[0] * s[1] * dtype.itemsize <= free // 4]
    for kind, shape in product(kinds, shapes):
        weights = _weights(device, dtype, shape, scale.weight_bytes, kind == "resident")
        for rows in scale.rows:
            if rows <= HEAD_ROWS or not is_head(shape):
                yield ("matmul", kind, shape, rows), call_seconds(device, matmul_call(rows, shape, weights), scale)
        del weights


def is_head(shape: Shape) -> bool:
    """Whether so tall a matrix is a vocabulary head."""
    return shape[0] >= HEAD_RATIO * shape[1]


def matmul_call(rows: int, shape: Shape, weights: list[Tensor]) -> Callable[[], object]:
    """x @ W.T with the next of the weights, and a pass over its output: about one for each matmul is what norms,
    activations and sums of a layer come to. Behind a head it is the choice of tokens."""
    turn = cycle(weights)
    x = torch.randn(rows, shape[1], device=weights[0].device).to(weights[0].dtype)
    if is_head(shape):
        return lambda: sample(linear(x, next(turn)), SamplingParams(), list(range(rows)), 0)
    return lambda: linear(x, next(turn)).relu_()


def _weights(device: Device, dtype: torch.dtype, shape: Shape, most_bytes: int, packed: bool = False) -> list[Tensor]:
    """One matrix, and as many more as memory and `most_bytes` have room for."""
    room = min(most_bytes, memory.ram_available() // 4, device.free_bytes() // 4)
    count = 1 + room // (shape[0] * shape[1] * dtype.itemsize)
    full = (torch.full(shape, 0.01, dtype=dtype, device=device.torch_device) for _ in range(count))
    return [pack(w) if packed else w for w in full]


def layer_call(device: Device, dtype: torch.dtype, shape: Shape, rows: int, weight_bytes: int) -> Callable[[], object]:
    """As many matmuls as a layer has."""
    call = matmul_call(rows, shape, _weights(device, dtype, shape, weight_bytes))
    return lambda: [call() for _ in range(LAYER_MATMULS)]


# attention


@dataclass(frozen=True)
class Attention:
    """An attention that is timed: over prompts of so many tokens, or of one token over the cache that they leave."""

    rule_name: str
    batch: int
    heads: int
    head_dim: int
    tokens: int
    group: int = 1

    @classmethod
    def of(cls, phase: str, rule_name: str, size: int | str, scale: Scale) -> Attention:
        """`size`: a head size, "short", or "grouped": both as the first head size, but for tokens or query heads."""
        head_dim = size if isinstance(size, int) else HEAD_DIMS[0]
        batch = 1 if phase == "cpu" else scale.sequences
        if phase != "prefill" or size == "short":
            batch *= SEQUENCES
        tokens = scale.short if size == "short" else scale.prompt
        return cls(rule_name, batch, WIDTH // head_dim, head_dim, tokens, GROUP if size == "grouped" else 1)

    @property
    def rule(self) -> CacheRule:
        """A rule with a budget keeps half of the tokens."""
        rule = RULES[self.rule_name]
        return rule(self.tokens // 4, self.tokens // 4) if rule.growth == "fixed" else rule()

    def layout(self, dtype: torch.dtype) -> KVLayout:
        """Of a cache that has grown, if it does, behind the prompt."""
        segments = self.rule.segments(self.tokens, 2)
        return KVLayout(self.batch, self.heads, segments, self.head_dim, dtype, self.rule.metadata, self.rule.growth)

    def work(self, phase: str, dtype: torch.dtype) -> int:
        """Flops, or bytes of K and V, of one head of one sequence."""
        if phase == "prefill":
            return 4 * self.head_dim * prefill_pairs(self.tokens)
        return self.layout(dtype).kv_bytes // (self.batch * self.heads)


def prompt_attention_call(device: Device, dtype: torch.dtype, case: Attention) -> Callable[[], object]:
    """Attention over prompts, of tensors as they come out of the matmuls."""
    layout, rule = case.layout(dtype), case.rule
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
