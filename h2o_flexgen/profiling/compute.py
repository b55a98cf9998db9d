"""Time compute: matmuls by shape, a vocabulary head's with the choice of tokens, and attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, product
from math import prod
from statistics import median

import torch
from torch import Tensor

from h2o_flexgen.engine.sampling import SamplingParams, sample
from h2o_flexgen.formats import GGUF, Dense, Format, Int4, Int8, KVFormat, Quantised
from h2o_flexgen.kernels import int8
from h2o_flexgen.kernels.attention import prefill_pairs
from h2o_flexgen.kernels.exact import pack
from h2o_flexgen.kernels.experts import Routing
from h2o_flexgen.kernels.linear import linear, packs, packs_int8
from h2o_flexgen.kernels.operands import Int8Weight
from h2o_flexgen.kernels.rates import INT4, INT8
from h2o_flexgen.kv_cache import CacheRule, FullCache, HeavyHitterCache, KVLayout
from h2o_flexgen.kv_cache.layout import KVTensors
from h2o_flexgen.kv_cache.rule import Rows
from h2o_flexgen.machine import memory
from h2o_flexgen.machine.device import Device, open_device
from h2o_flexgen.machine.profile import GROUP, AttentionRates, Profile, Shape, experts_kind
from h2o_flexgen.models.parts import mlp
from h2o_flexgen.models.registry import family, spec_of
from h2o_flexgen.models.rope import Positions
from h2o_flexgen.planning.workload import HEAD_ROWS

#: the cache rules whose attention is measured, by name (`profile.RULES`)
MEASURED = {rule.name: rule for rule in (FullCache, HeavyHitterCache)}

#: a matmul of one row with a matrix of this shape is so small that its seconds do not depend on its size
TINY_SHAPE: Shape = (64, 64)
#: matmuls in a layer: four of attention, three of a gated MLP
LAYER_MATMULS = 7
#: how a LLaMA's config names the sizes of `SMALL_LAYER`
CONFIG_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
#: (hidden, inner, heads, KV heads, head size, rows) of the layer whose fixed cost is measured, and the tokens it has
#: cached: as small as a model can be that is worth running
SMALL_LAYER = (512, 1536, 8, 2, 64, 64)
SMALL_CACHE = 128
#: experts in a group that is measured, and the rows of each. 512 sequences give each of 128 experts 32; the rates with
#: 16 and 64 differ threefold
EXPERTS = 16
EXPERT_ROWS = (1, 4, 16, 32, 64, 256)
#: a matrix that is this many times taller than wide is a vocabulary head
HEAD_RATIO = 16
#: elements of the largest block of a format
BLOCK = 256
#: head sizes of attention, and elements in all heads together
HEAD_DIMS = (64, 128)
WIDTH = 1024
#: sequences in attention over a cache for each prompt in attention over prompts, so that both are as much work
SEQUENCES = 16


@dataclass(frozen=True)
class Scale:
    """How much is measured. The defaults are for a CPU; tests measure less."""

    #: (out, in) of the matrices: small and large, tall and wide as in an MLP, and a vocabulary head. All but the first
    #: are left out where they would take more than a quarter of the free memory
    shapes: tuple[Shape, ...] = ((768, 768), (2048, 2048), (8192, 2048), (2048, 8192), (50272, 768))
    #: of the matmuls with each matrix; with a head, no more than the engine puts through it at once
    rows: tuple[int, ...] = (1, 4, 16, 32, 64, 128, 256, 1024)
    expert: Shape = (768, 2048)  # (inner, hidden) of experts
    weight_bytes: int = 1 << 27  # of the matrices of a shape, which take turns: each is read from memory, not a cache
    prompt: int = 512  # tokens of a prompt in attention
    short: int = 32  # of one so short that the constant cost of a head shows
    sequences: int = 1  # prompts in attention; attention over a cache has SEQUENCES times more
    cold_bytes: int = 1 << 25  # written between two calls, so that the second finds nothing in the caches
    transfer_bytes: int = 1 << 26  # of a large transfer
    file_bytes: int = 1 << 28  # of the file that large transfers write and read
    #: how long large reads and copies are repeated, and compute alone: the compute that a byte costs differs sevenfold
    #: between samples of a tenth of a second
    read_seconds: float = 0.5
    #: of a small transfer by link: a KV block that is read, a row that is written
    small_bytes: dict[str, int] = field(default_factory=lambda: {"disk_to_cpu": 1 << 22, "cpu_to_disk": 1 << 18})
    call_seconds: float = 0.1  # how long a call is repeated
    passes: int = 3  # over everything; medians count, since other users of a machine come and go


#: smaller matrices would measure how fast the host launches kernels
CUDA = Scale(
    shapes=((2048, 2048), (4096, 4096), (16384, 4096), (4096, 16384), (50272, 4096)),
    weight_bytes=1 << 28,
    sequences=8,
    cold_bytes=1 << 27,
)


def measure_compute(device: Device, dtype: torch.dtype, scale: Scale) -> dict:
    """The fields of a `Profile` that describe compute."""
    weights = _weights(device, dtype, TINY_SHAPE, 0)
    tiny = call_seconds(device, matmul_call(device, dtype, 1, TINY_SHAPE, weights), scale)
    blocks = (Int4(64), *GGUF.values())
    phases = {"prefill": (device, scale), "decode": (device, scale)}
    if device.is_cuda:
        phases["cpu"] = (open_device("cpu"), Scale())
    rates = {}
    for phase, (on, amount) in phases.items():
        rates[phase] = {rule: attention_rates(on, dtype, phase, rule, amount) for rule in MEASURED}
    return {
        "step_seconds": call_seconds(device, small_layer(device, dtype), scale),
        "matmul": matmul_rates(device, dtype, scale, tiny) | expert_rates(device, dtype, scale),
        "decode": {form.name: decode_rate(device, dtype, form, scale) for form in (Int8(), *blocks)},
        "unpack": {form.name: decode_rate(device, dtype, form, scale, to_int8=True) for form in blocks},
        "attention": rates,
    }


def call_seconds(device: Device, work: Callable[[], object], scale: Scale, cold: bool = False) -> float:
    """The median of calls for `scale.call_seconds`, after one to warm up; `cold` calls find nothing in the caches."""
    other = device.buffer(scale.cold_bytes if cold else 0)
    work()
    times = []
    end = time.perf_counter() + scale.call_seconds
    while not times or time.perf_counter() < end:
        other.add_(1)
        device.synchronize()
        start = time.perf_counter()
        work()
        device.synchronize()
        times.append(time.perf_counter() - start)
    return median(times)


def remainder(taken: float, known: float) -> float:
    """What remains of a time without a known part of it; noise must not make it vanish."""
    return max(taken - known, taken / 4)


# matmuls


def matmul_rates(
    device: Device, dtype: torch.dtype, scale: Scale, dispatch: float
) -> dict[str, dict[Shape, dict[int, float]]]:
    """Flops per second by kind, shape and rows: of streamed weights, of resident ones where these are packed, and of
    those in int8. `dispatch`: seconds that any matmul takes, which count as part of a step."""
    kinds = streamed_kinds(device, dtype)
    if not device.is_cuda:
        kinds |= {"resident": (dtype, True)} if packs(dtype) else {}
        kinds |= {f"{INT8} resident": (INT8, True)} if packs_int8() else {}
    found = {kind: {} for kind in kinds}
    for (kind, (stored, is_packed)), shape in product(kinds.items(), shapes_with_room(device, dtype, scale)):
        weights = _weights(device, stored, shape, scale.weight_bytes, is_packed)
        found[kind][shape] = {}
        for rows in scale.rows[:: 1 if stored == dtype else 2]:
            if rows <= HEAD_ROWS or not is_head(shape):
                seconds = call_seconds(device, matmul_call(device, dtype, rows, shape, weights), scale)
                found[kind][shape][rows] = 2 * prod(shape) * rows / remainder(seconds, dispatch)
        del weights
    return found


def streamed_kinds(device: Device, dtype: torch.dtype) -> dict[str, tuple[torch.dtype | str, bool]]:
    """{kind: (what its weights are, whether they are packed)} of weights that stream."""
    kinds = {"streamed": (dtype, False), INT8: (INT8, False)}
    return kinds | {INT4: (INT4, False)} if not device.is_cuda and int8.takes_blocks() else kinds


def expert_rates(device: Device, dtype: torch.dtype, scale: Scale) -> dict[str, dict[Shape, dict[int, float]]]:
    """Flops per second of groups of experts, by kind, shape and the rows of each: what was measured with matrices up
    and down stands for both."""
    found = {}
    for kind, (stored, _) in streamed_kinds(device, dtype).items():
        rates = _expert_rates(device, dtype, stored, scale)
        found[experts_kind(kind)] = {scale.expert: rates, scale.expert[::-1]: rates}
    return found


def _expert_rates(device: Device, dtype: torch.dtype, stored: torch.dtype | str, scale: Scale) -> dict[int, float]:
    inner, hidden = scale.expert
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": 1}
    spec = spec_of({"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 1, **sizes}, "the experts")
    shapes = {"gate.weight": (inner, hidden), "up.weight": (inner, hidden), "down.weight": (hidden, inner)}
    matrices: dict[str, list] = {}
    for name, shape in shapes.items():
        matrices[name] = [_weights(device, stored, shape, 0)[0] for _ in range(EXPERTS)]
    found = {}
    for rows in EXPERT_ROWS:
        x = torch.randn(rows * EXPERTS, hidden, device=device.torch_device).to(dtype)
        ids = torch.arange(len(x), device=device.torch_device).remainder(EXPERTS)[:, None]
        routing = Routing(ids, torch.ones_like(ids, dtype=torch.float32))
        total = torch.zeros_like(x)
        seconds = call_seconds(
            device, partial(routing.add, range(EXPERTS), matrices, partial(mlp, spec), x, total), scale
        )
        found[rows] = 6 * prod(scale.expert) * len(x) / seconds
    return found


def decode_rate(device: Device, dtype: torch.dtype, form: Format, scale: Scale, to_int8: bool = False) -> float:
    """Elements per second at which a quantised matrix is decoded, or converted to `Int8`."""
    out, width = max((shape for shape in shapes_with_room(device, dtype, scale) if not is_head(shape)), key=prod)
    shape = out, -(-width // BLOCK) * BLOCK
    nbytes = form.nbytes(shape)
    count = 1 + _room(device, scale.weight_bytes) // nbytes
    turn = cycle([form.view(device.buffer(nbytes).fill_(1), shape) for _ in range(count)])
    if to_int8:
        out = Int8().view(device.buffer(Int8().nbytes(shape)), shape)
    else:
        out = torch.empty(shape, dtype=dtype, device=device.torch_device)
    return prod(shape) / call_seconds(device, lambda: next(turn).decode_into(out), scale)


def shapes_with_room(device: Device, dtype: torch.dtype, scale: Scale) -> list[Shape]:
    """The shapes of `scale` that memory has room for."""
    most = device.free_bytes() // 4
    return [s for s in scale.shapes if s == scale.shapes[0] or prod(s) * dtype.itemsize <= most]


def _room(device: Device, most_bytes: int) -> int:
    """Free bytes for matrices that take turns."""
    return min(most_bytes, memory.ram_available() // 4, device.free_bytes() // 4)


def is_head(shape: Shape) -> bool:
    """Whether a matrix is so tall that it stands for a vocabulary head."""
    return shape[0] >= HEAD_RATIO * shape[1]


def matmul_call(
    device: Device, dtype: torch.dtype, rows: int, shape: Shape, weights: list[Tensor | int8.Weight]
) -> Callable[[], object]:
    """x @ W.T with the next of the weights, and one pass over its output, since the norms, activations and sums of a
    layer amount to about one per matmul. After a head tokens are chosen instead."""
    turn = cycle(weights)
    x = torch.randn(rows, shape[1], device=device.torch_device).to(dtype)
    if is_head(shape):
        params = [SamplingParams()] * rows
        draws = [(row, 0) for row in range(rows)]
        return lambda: sample(linear(x, next(turn)), params, draws)
    return lambda: linear(x, next(turn)).relu_()


def _weights(
    device: Device, dtype: torch.dtype | str, shape: Shape, most_bytes: int, packed: bool = False
) -> list[Tensor | int8.Weight]:
    """One matrix, and as many more as memory and `most_bytes` have room for."""
    form = {INT4: Int4(64), INT8: Int8()}.get(dtype) or Dense(dtype)
    nbytes = form.nbytes(shape)
    on = device.torch_device
    scale = torch.full(shape[:1], 0.01, device=on)

    def weight() -> Tensor | int8.Weight:
        if dtype == INT4:
            return Quantised(form, torch.ones(nbytes, dtype=torch.uint8), shape, operand=form)
        if dtype == INT8:
            codes = torch.ones(shape, dtype=torch.int8, device=on)
            return Int8Weight(int8.pack(codes) if packed else codes, scale)
        floats = torch.full(shape, 0.01, dtype=dtype, device=on)
        return pack(floats) if packed else floats

    return [weight() for _ in range(1 + _room(device, most_bytes) // nbytes)]


# a layer


def layer_call(device: Device, dtype: torch.dtype, shape: Shape, rows: int, weight_bytes: int) -> Callable[[], object]:
    """The matmuls of one layer."""
    call = matmul_call(device, dtype, rows, shape, _weights(device, dtype, shape, weight_bytes))
    return lambda: [call() for _ in range(LAYER_MATMULS)]


def small_layer(device: Device, dtype: torch.dtype) -> Callable[[], object]:
    """A decode step of one layer of a small LLaMA."""
    hidden, inner, heads, kv_heads, head_dim, rows = SMALL_LAYER
    config = dict(zip(CONFIG_SIZES, (hidden, inner, heads, kv_heads, head_dim)), rms_norm_eps=1e-5)
    config |= {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": hidden, "max_position_embeddings": 2048}
    spec = spec_of(config, "the layer that is measured")
    _, layer, _ = family("llama").tensors(spec)
    w = {name: torch.full(shape, 0.01).to(device.torch_device, dtype) for name, (_, shape) in layer.streamed.items()}
    w = {name: pack(x) if x.dim() > 1 and not device.is_cuda and packs(dtype) else x for name, x in w.items()}
    case = Attention("full", rows, kv_heads, head_dim, SMALL_CACHE)
    cache = filled_cache(device, dtype, case)
    lengths = torch.full((rows,), SMALL_CACHE)
    positions = Positions(lengths, lengths + 1)
    x = torch.randn(rows, hidden).to(device.torch_device, dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context, _ = case.rule.decode(cache, *(x[:, :, None] for x in (q, k, v)), Rows.steps(lengths, lengths))
        return context[:, :, 0]

    return lambda: family("llama").block(spec, w, x, positions, attend)


def known_seconds(profile: Profile) -> float:
    """What matmuls and attention of the small layer should take by the other rates of a profile."""
    hidden, inner, heads, kv_heads, head_dim, rows = SMALL_LAYER
    matmuls = [(heads * head_dim, hidden)] + 2 * [(kv_heads * head_dim, hidden)] + [(hidden, heads * head_dim)]
    matmuls += 2 * [(inner, hidden)] + [(hidden, inner)]
    seconds = sum(profile.matmul_seconds(shape, rows, resident=True) for shape in matmuls)
    nbytes = 2 * SMALL_CACHE * kv_heads * head_dim * getattr(torch, profile.dtype).itemsize
    return seconds + rows * profile.attention["decode"]["full"].seconds(nbytes, kv_heads, head_dim, heads // kv_heads)


# attention


@dataclass(frozen=True)
class Attention:
    """Attention to be timed: over prompts of `tokens` tokens, or of one token over the cache that they leave."""

    rule_name: str
    batch: int
    heads: int
    head_dim: int
    tokens: int
    group: int = 1

    @property
    def rule(self) -> CacheRule:
        """If it has a budget, it keeps half of the tokens."""
        rule = MEASURED[self.rule_name]
        return rule(self.tokens // 4, self.tokens // 4) if rule.growth == "fixed" else rule()

    def layout(self, dtype: torch.dtype) -> KVLayout:
        """The cache behind the prompt, grown if it grows."""
        segments = self.rule.segments(self.tokens, 2)
        fields = (self.rule.metadata, self.rule.growth)
        return KVLayout(self.batch, self.heads, segments, self.head_dim, KVFormat.dense(dtype), *fields)

    def work(self, device: Device, dtype: torch.dtype, phase: str) -> int:
        """Flops of a prefill, or bytes of K and V, for one head of one sequence."""
        if phase == "prefill":
            return 4 * self.head_dim * prefill_pairs(self.tokens, device.torch_device.type)
        return self.layout(dtype).kv_bytes // (self.batch * self.heads)


def smallest_attention(rule: str, scale: Scale) -> Attention:
    """Attention so small that its time does not depend on its size."""
    return Attention(rule, 1, 2, HEAD_DIMS[0], scale.short)


def attention_rates(device: Device, dtype: torch.dtype, phase: str, rule: str, scale: Scale) -> AttentionRates:
    """Attention at two lengths shows the seconds that its work takes, and the constant ones of each head."""
    prefill = phase == "prefill"

    def seconds(case: Attention) -> float:
        return call_seconds(device, attention_call(device, dtype, phase, case), scale, cold=not prefill)

    def of_head(case: Attention) -> float:
        return remainder(seconds(case), dispatch) / (case.batch * case.heads)

    dispatch = seconds(smallest_attention(rule, scale))
    batch = scale.sequences * (1 if prefill else SEQUENCES)
    cases = {dim: Attention(rule, batch, WIDTH // dim, dim, scale.prompt) for dim in HEAD_DIMS}
    taken = {dim: of_head(case) for dim, case in cases.items()}
    work = {dim: case.work(device, dtype, phase) for dim, case in cases.items()}
    first = HEAD_DIMS[0]
    short = replace(cases[first], batch=scale.sequences * SEQUENCES, tokens=scale.short)
    short_taken = of_head(short)
    short_work = short.work(device, dtype, phase)
    slope = remainder(taken[first], short_taken) / (work[first] - short_work)
    constant = max(0.0, short_taken - slope * short_work)
    rates = {dim: work[dim] / remainder(taken[dim], constant) for dim in HEAD_DIMS}
    grouped = 1.0 if prefill else of_head(replace(cases[first], group=GROUP)) / taken[first]
    return AttentionRates(rates, constant, grouped)


def filled_cache(device: Device, dtype: torch.dtype, case: Attention) -> KVTensors:
    layout = case.layout(dtype)
    kv = layout.view(device.buffer(layout.kv_bytes), device.buffer(layout.meta_bytes))
    for x in (*kv.k, *kv.v):
        x.fill_(0.5)
    if case.rule.metadata:
        kv.score.uniform_()
        kv.position.copy_(torch.arange(layout.slots).expand(kv.position.shape))
    return kv


def attention_call(device: Device, dtype: torch.dtype, phase: str, case: Attention) -> Callable[[], object]:
    """Attention over prompts, of tensors laid out as by the matmuls, or of one token over a full cache."""
    layout = case.layout(dtype)
    rule = case.rule
    tokens = case.tokens if phase == "prefill" else 1
    kv = filled_cache(device, dtype, case)
    shapes = [(case.batch, tokens, heads, case.head_dim) for heads in (case.heads * case.group, case.heads, case.heads)]
    q, k, v = (torch.randn(shape, device=device.torch_device).to(dtype).transpose(1, 2) for shape in shapes)
    if phase == "prefill":
        rows = Rows.prompts(torch.full((case.batch,), tokens))
        return lambda: rule.prefill(kv, q, k, v, rows)
    lengths = torch.full((case.batch,), 4 * layout.slots if layout.growth == "fixed" else layout.slots - 1)
    rows = Rows.steps(lengths, lengths)
    return lambda: rule.decode(kv, q, k, v, rows)
