"""What computes, as calls to be timed: matmuls by shape, attention, the choice of tokens, conversion of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle, product

import torch
from torch import Tensor

from h2o_flexgen.engine.sampling import SamplingParams, sample
from h2o_flexgen.kernels.linear import linear, pack, packs
from h2o_flexgen.kv_cache import CacheRule, FullCache, HeavyHitterCache, KVLayout
from h2o_flexgen.offload import memory
from h2o_flexgen.offload.device import Device, convert
from h2o_flexgen.planning.profile import GROUP, MATMULS, Shape
from h2o_flexgen.profiling.scale import Scale
from h2o_flexgen.sizes import HEAD_ROWS, prefill_pairs

#: a matmul whose seconds do not depend on its size: of one row with a matrix of this shape
TINY_SHAPE: Shape = (64, 64)
#: matmuls in a layer: four of attention, three of a gated MLP
LAYER_MATMULS = 7
#: a matrix that is so many times taller than wide is a vocabulary head
HEAD_RATIO = 16
#: head sizes of attention, with WIDTH elements in all heads together
HEAD_DIMS = (64, 128)
WIDTH = 1024
#: sequences in attention over a cache; one prompt is as much work
SEQUENCES = 16
#: of attention: over a prompt, over a cache, and over a cache on the CPU beside a CUDA device
PHASES = ("prefill", "decode", "cpu")
#: cache rules by the profile's names, with slots as for a long prompt and for a short one
RULES = {rule.name: rule for rule in (FullCache(), HeavyHitterCache(128, 128))}
SHORT_RULES = {rule.name: rule for rule in (FullCache(), HeavyHitterCache(8, 8))}


@dataclass(frozen=True)
class Case:
    """Something to time.

    Attributes:
        key: what it is; two passes have the same.
        device: where it runs.
        make: prepares tensors and gives the call.
        cold: whether the call finds nothing of its own in the caches.
    """

    key: tuple
    device: Device
    make: Callable[[], Callable[[], object]]
    cold: bool = False


def cases(device: Device, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    """Everything that computes, with these keys:

    ("step",): LAYER_MATMULS tiny matmuls
    ("matmul", "streamed" or "resident", (out, in), rows)
    ("small", rule): attention of a decode step that takes no time for its size
    (phase, rule, head size) and (phase, rule, "short"): attention
    ("decode" or "cpu", rule, "grouped"): attention of GROUP query heads to each KV head
    ("choose",): tokens from logits; ("convert",): weights of another type
    """
    yield Case(("step",), device, partial(_step_call, device, dtype), cold=True)
    yield from matmul_cases(device, dtype, scale)
    for name in RULES:
        smallest = Attention(SHORT_RULES[name], 1, 2, HEAD_DIMS[0], scale.short)
        yield Case(("small", name), device, partial(_decode_call, device, dtype, smallest), cold=True)
    for name, phase, size in product(RULES, PHASES, (*HEAD_DIMS, "short", "grouped")):
        if (phase == "cpu" and not device.is_cuda) or (phase, size) == ("prefill", "grouped"):
            continue
        where = Device("cpu") if phase == "cpu" else device
        call = _prefill_call if phase == "prefill" else _decode_call
        attention = Attention.of(phase, name, size, scale)
        yield Case((phase, name, size), where, partial(call, where, dtype, attention), cold=phase != "prefill")
    yield Case(("choose",), device, partial(_choose_call, device, dtype, scale))
    yield Case(("convert",), device, partial(_convert_call, device, dtype, scale))


# matmuls


def matmul_cases(device: Device, dtype: torch.dtype, scale: Scale) -> Iterator[Case]:
    """Of each shape with streamed weights, and with resident ones where these are packed."""
    kinds = MATMULS if not device.is_cuda and packs(dtype) else MATMULS[:1]
    for kind, shape in product(kinds, fitting_shapes(device, dtype, scale)):
        weights = cache(partial(_weights, device, dtype, scale, shape, packed=kind == "resident"))
        for rows in scale.rows:
            if rows <= HEAD_ROWS or not is_head(shape):
                call = partial(matmul_call, device, dtype, shape, rows, weights)
                yield Case(("matmul", kind, shape, rows), device, call)
        del weights


def is_head(shape: Shape) -> bool:
    return shape[0] >= HEAD_RATIO * shape[1]


def fitting_shapes(device: Device, dtype: torch.dtype, scale: Scale) -> list[Shape]:
    """The shapes that there is memory to measure now."""
    first, *others = scale.shapes
    free = device.free_bytes()
    return [first, *(s for s in others if s[0] * s[1] * dtype.itemsize <= free // 4)]


def matmul_call(
    device: Device, dtype: torch.dtype, shape: Shape, rows: int, weights: Callable[[], list[Tensor]]
) -> Callable[[], object]:
    """x @ W.T with the next of the weights, and a pass over its output: about one for each matmul is what norms,
    activations and sums of a layer come to."""
    x, turn = torch.randn(rows, shape[1], device=device.torch_device).to(dtype), cycle(weights())
    return lambda: linear(x, next(turn)).relu_()


def _weights(device: Device, dtype: torch.dtype, scale: Scale, shape: Shape, packed: bool = False) -> list[Tensor]:
    size = shape[0] * shape[1] * dtype.itemsize
    room = min(scale.weight_bytes, memory.ram_available() // 4, device.free_bytes() // 4)
    full = (torch.full(shape, 0.01, dtype=dtype, device=device.torch_device) for _ in range(1 + room // size))
    return [pack(w) if packed else w for w in full]


def layer_call(device: Device, dtype: torch.dtype, scale: Scale) -> Callable[[], object]:
    """The matmuls of a decode step in a layer: what computes while links are measured."""
    shape = scale.shapes[0]
    weights = partial(_weights, device, dtype, scale, shape)
    call = matmul_call(device, dtype, shape, scale.logits[0], weights)
    return lambda: [call() for _ in range(LAYER_MATMULS)]


def _step_call(device: Device, dtype: torch.dtype) -> Callable[[], object]:
    weight = torch.full(TINY_SHAPE, 0.01, dtype=dtype, device=device.torch_device)
    call = matmul_call(device, dtype, TINY_SHAPE, 1, lambda: [weight])
    return lambda: [call() for _ in range(LAYER_MATMULS)]


# attention


@dataclass(frozen=True)
class Attention:
    """An attention that is timed: over prompts of so many tokens, or of one token over as many slots."""

    rule: CacheRule
    batch: int
    heads: int
    head_dim: int
    tokens: int
    group: int = 1

    @classmethod
    def of(cls, phase: str, rule: str, size: int | str, scale: Scale) -> Attention:
        """`size`: a head size, "short", or "grouped": as the first head size, but for its queries."""
        sequences = 1 if phase == "cpu" else scale.sequences
        if size == "short":
            return cls(SHORT_RULES[rule], SEQUENCES * sequences, WIDTH // HEAD_DIMS[0], HEAD_DIMS[0], scale.short)
        batch = sequences * (1 if phase == "prefill" else SEQUENCES)
        if size == "grouped":
            return cls(RULES[rule], batch, WIDTH // HEAD_DIMS[0], HEAD_DIMS[0], scale.prompt, GROUP)
        return cls(RULES[rule], batch, WIDTH // size, size, scale.prompt)

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


def _prefill_call(device: Device, dtype: torch.dtype, case: Attention) -> Callable[[], object]:
    """Attention over prompts, of tensors as they come out of the matmuls."""
    layout, rule = case.layout(dtype, decode=False), case.rule
    kv = layout.view(device.buffer(layout.kv_bytes), device.buffer(layout.meta_bytes))
    shape = (case.batch, case.tokens, case.heads, case.head_dim)
    q, k, v = (torch.randn(shape, device=device.torch_device).to(dtype).transpose(1, 2) for _ in range(3))
    lengths = torch.full((case.batch,), case.tokens)
    return lambda: rule.prefill(kv, q, k, v, lengths)


def _decode_call(device: Device, dtype: torch.dtype, case: Attention) -> Callable[[], object]:
    """Attention of one token per sequence over a cache that is full."""
    layout = case.layout(dtype)
    length = 4 * layout.slots if layout.growth == "fixed" else layout.slots - 1
    return attention_call(device, case.rule, layout, length, 1, case.group)


def attention_call(
    device: Device, rule: CacheRule, layout: KVLayout, length: int, step: int, group: int = 1
) -> Callable[[], object]:
    """Attention of a decode step after prompts of `length` tokens, over a cache of its own; `group`: query heads to
    each KV head."""
    B, H = layout.batch, layout.heads
    kv = layout.view(device.buffer(layout.kv_bytes), device.buffer(layout.meta_bytes))
    for x in (*kv.k, *kv.v):
        x.fill_(0.5)
    if rule.metadata:
        kv.score.uniform_()
        kv.position.copy_(torch.arange(layout.slots).expand(kv.position.shape))
    shapes = [(B, heads, 1, layout.head_dim) for heads in (H * group, H, H)]
    q, k, v = (torch.randn(shape, device=device.torch_device).to(layout.dtype) for shape in shapes)
    lengths = torch.full((B,), length)
    return lambda: rule.decode(kv, q, k, v, lengths, step)


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
