"""The memory plan: the bytes that a policy needs on every tier, counted from shapes before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import torch

from h2o_flexgen.errors import PlanError
from h2o_flexgen.kv_cache.layout import KVLayout
from h2o_flexgen.kv_cache.rule import CacheRule
from h2o_flexgen.models.spec import Layer, ModelSpec
from h2o_flexgen.offload.activations import activation_bytes
from h2o_flexgen.offload.kv_store import kv_bytes
from h2o_flexgen.offload.weights import StagingBytes, largest_layer, staging_bytes
from h2o_flexgen.planning.placement import Placement
from h2o_flexgen.policy import TIERS, Policy, gib
from h2o_flexgen.sizes import (
    CHUNK_ELEMENTS,
    HEAD_ROWS,
    QUERY_CHUNK,
    SAMPLE_ROWS,
    SORTING,
    WIDEN_BYTES,
    WIDEN_ROWS,
    WRITE_BACKS,
    Workload,
    batch_sizes,
    double_buffers,
    matmul_rows,
    micro_tokens,
    wal_rows,
)

#: tensors of the inner width that an activation function holds at its peak; others, composed of many steps, up to 4
_INNER_TENSORS = {"relu": 1, "gelu": 2, "silu": 2, "swish": 2}


@dataclass
class Plan:
    """The bytes that a policy needs on each tier, known before anything is allocated.

    `items` holds (tier, what, bytes). `shared` says that gpu and cpu are the same RAM (no CUDA), so
    that their sum is held against the RAM that is there.
    """

    items: list[tuple[str, str, int]] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)
    shared: bool = False

    def add(self, tier: str, what: str, nbytes: float) -> None:
        if nbytes:
            self.items.append((tier, what, int(nbytes)))

    def needed(self, tier: str) -> int:
        return sum(nbytes for t, _, nbytes in self.items if t == tier)

    @property
    def ram(self) -> float:
        """Bytes of RAM that the process may hold in a job on the CPU; infinite with CUDA."""
        if not self.shared:
            return float("inf")
        return min(self.limits["ram"], self.limits["gpu"] + self.needed("cpu"))

    def shortfall(self) -> tuple[str, int, int] | None:
        """The first tier that is too small, with the bytes needed and there, or None."""
        if self.shared:
            ram = self.needed("gpu") + self.needed("cpu")
            if ram > self.limits["ram"]:
                return "ram", ram, self.limits["ram"]
        for tier in TIERS:
            if tier in self.limits and self.needed(tier) > self.limits[tier]:
                return tier, self.needed(tier), self.limits[tier]
        return None

    def missing(self) -> int:
        """Bytes beyond the limits, of all tiers."""
        needed = {tier: self.needed(tier) for tier in TIERS}
        if self.shared:
            needed["ram"] = needed["gpu"] + needed["cpu"]
        return sum(max(0, needed[tier] - limit) for tier, limit in self.limits.items() if tier in needed)

    def check(self) -> None:
        """Raises PlanError, naming the tier, the bytes needed and there, and what to change."""
        short = self.shortfall()
        if short is None:
            return
        tier, needed, limit = short
        name = "RAM (the gpu and cpu tiers together)" if tier == "ram" else f"the {tier} tier"
        largest = max(
            (item for item in self.items if item[0] == tier or (tier == "ram" and item[0] != "disk")),
            key=lambda item: item[2],
        )
        advice = {
            "disk": "free disk space or name another `offload_dir`",
            "gpu": "lower the gpu percentages, `gpu_batch_size` or the KV budget",
            "cpu": "lower the cpu percentages, the batch sizes or the KV budget",
            "ram": "move weights or cache to disk (`percent`), or lower the batch sizes or the KV budget",
        }[tier]
        raise PlanError(
            f"{name} is too small: needs {gib(needed)} ({needed} bytes), there are {gib(limit)} "
            f"({limit} bytes); most goes to {largest[1]} ({gib(largest[2])}): {advice}"
        )

    def describe(self) -> str:
        """A table for people: every item, then each tier against its limit."""
        lines = ["memory plan:"]
        lines += [f"  {tier:<5}{gib(nbytes):>12}  {what}" for tier, what, nbytes in self.items]
        for tier in TIERS:
            limit = self.limits.get(tier)
            lines.append(f"  {tier:<5}{gib(self.needed(tier)):>12}  of {gib(limit) if limit is not None else '?'}")
        if self.shared and "ram" in self.limits:
            both = self.needed("gpu") + self.needed("cpu")
            lines.append(f"  RAM  {gib(both):>12}  of {gib(self.limits['ram'])}, gpu and cpu together")
        return "\n".join(lines)


@dataclass
class Shapes:
    """Everything about a model and a job that the plan counts with.

    Attributes:
        layers: {name: shape} per layer as for `Placement.of`.
        streamed: {name: shape} per layer of what is needed whole (the embedding only gathers rows).
        segments: KV slots per sequence and head, by segment.
        stored_itemsize: bytes per number in the checkpoint; compute_itemsize: in the computation; bf16: whether that
            is in bf16.
    """

    spec: ModelSpec
    layers: list[dict[str, tuple[int, ...]]]
    streamed: list[dict[str, tuple[int, ...]]]
    segments: tuple[int, ...]
    rule: CacheRule
    compute_itemsize: int
    stored_itemsize: int
    converts: bool
    cuda: bool
    bf16: bool
    dummy: bool = False

    @property
    def slots(self) -> int:
        return sum(self.segments)

    @property
    def wal_rows(self) -> int:
        return wal_rows(self.segments)

    def layout(self, batch: int) -> KVLayout:
        """The cache of so many sequences in one layer."""
        dtype = torch.float32 if self.compute_itemsize == 4 else torch.bfloat16 if self.bf16 else torch.float16
        return KVLayout(
            batch, self.spec.kv_heads, self.segments, self.spec.head_dim, dtype, self.rule.metadata, self.rule.growth
        )

    @property
    def row_bytes(self) -> int:
        """K and V of one token of one sequence in one layer."""
        return self.layout(1).row_bytes

    @property
    def meta_bytes(self) -> int:
        """Scores and positions of one sequence in one layer."""
        return self.layout(1).meta_bytes

    @property
    def block_bytes(self) -> int:
        """The cache of one sequence in one layer."""
        return self.slots * self.row_bytes + self.meta_bytes

    @property
    def converts_by_compute(self) -> bool:
        """Whether weights from disk lie on the device as they are stored, and compute converts a layer to use it."""
        return self.converts and not self.cuda

    @property
    def may_widen(self) -> bool:
        """Whether products go through float32 where the processor has none in 16 bits (cpu.py)."""
        return not self.cuda and self.compute_itemsize == 2

    @property
    def by_chunks(self) -> bool:
        """Whether attention over prompts runs by chunks, at least on some CPUs and GPUs."""
        return bool(self.rule.metadata) or self.may_widen or self.bf16 or self.spec.groups > 1

    @property
    def stored_ratio(self) -> float:
        """Bytes in the checkpoint per byte of the computation."""
        return self.stored_itemsize / self.compute_itemsize

    @classmethod
    def of(cls, spec: ModelSpec, layers: list[Layer], rule, workload: Workload, **sizes) -> Shapes:
        """`layers` as the family lists them (`tensors`), `rule` as in kv_cache; `sizes` are the other fields."""
        return cls(
            spec=spec,
            layers=[layer.shapes for layer in layers],
            streamed=[layer.streamed_shapes for layer in layers],
            segments=rule.segments(workload.longest, workload.gen_len),
            rule=rule,
            **sizes,
        )


def plan_memory(policy: Policy, shapes: Shapes, workload: Workload, placement: Placement, baseline: int) -> Plan:
    """The bytes a job needs on each tier at its peak.

    `baseline` is what the process holds whatever it computes (interpreter and libraries), in bytes of RAM.
    """
    plan = Plan(shared=not shapes.cuda)
    host = "cpu" if shapes.cuda else "gpu"  # whose RAM the process itself is counted to
    batches = batch_sizes(len(workload.prompt_lens), policy)
    P = workload.longest

    plan.add(host, "the process itself", baseline)
    plan.add(host, "generated tokens", workload.output_bytes)
    _plan_weights(plan, shapes, placement, policy.overlap)
    _plan_cache(plan, policy, shapes, placement, batches)

    _plan_activations(plan, policy, shapes, placement, batches, P)
    plan.add("gpu", "workspace of a layer or the head", workspace_bytes(policy, shapes, P, batches))
    return plan


def plan_policy(
    policy: Policy,
    shapes: Shapes,
    workload: Workload,
    limits: dict[str, int],
    baseline: int,
    workspace: int,
    weights: dict[str, str] | None = None,
) -> tuple[Placement, Plan]:
    """Where everything goes under a policy, and the bytes it takes against the limits. `workspace`: bytes of the device
    that its libraries hold; `weights` as for `Placement.of`, the rest as for `plan_memory`."""
    batches = len(batch_sizes(len(workload.prompt_lens), policy))
    placement = Placement.of(policy, shapes.layers, shapes.spec.layers, batches, weights)
    plan = plan_memory(policy, shapes, workload, placement, baseline)
    plan.add("gpu", "workspace of matrix products", workspace)
    plan.limits = limits
    return placement, plan


def workspace_bytes(policy: Policy, shapes: Shapes, longest: int, batches: list[int]) -> int:
    """What computing a layer or the head takes on the device, for batches of so many prompts, the largest first, of up
    to `longest` tokens."""
    prefill = prefill_workspace(shapes, micro_tokens(policy, longest, batches[0]), longest)
    rows = max(matmul_rows(batches))
    decode = _decode_workspace(shapes, batches[0], rows)
    chosen = min(rows, SAMPLE_ROWS) * (4 + SORTING["cuda" if shapes.cuda else "cpu"])
    head = (min(rows, HEAD_ROWS) * shapes.compute_itemsize + chosen) * shapes.spec.vocab
    return max(prefill, decode, head)


def _plan_weights(plan: Plan, shapes: Shapes, placement: Placement, overlap: bool) -> None:
    size, stored = shapes.compute_itemsize, shapes.stored_itemsize
    every = {n: prod(s) for layer in shapes.layers for n, s in layer.items()}
    elements = dict.fromkeys(TIERS, 0)
    for name, n in every.items():
        elements[placement.weights[name]] += n
    plan.add("gpu", "weights", elements["gpu"] * size)
    plan.add("cpu", "weights", elements["cpu"] * size)
    if shapes.dummy:  # a real checkpoint is on disk already
        plan.add("disk", "random weights", elements["disk"] * stored)

    def staging(name: str, shape: tuple[int, ...]) -> StagingBytes:
        n = prod(shape)
        return staging_bytes(placement.weights[name], n * size, n * stored, shapes.converts, shapes.cuda)

    buffers = largest_layer([staging(*item) for item in layer.items()] for layer in shapes.streamed)
    count = double_buffers(overlap)
    plan.add("gpu", "weight staging buffers", count * buffers.device)
    plan.add("cpu", "weight host buffers", count * buffers.host)
    plan.add("gpu", "weight conversion", buffers.converted)
    if shapes.cuda and shapes.converts:  # a copy to CUDA changes the dtype there
        on_disk = [n for name, n in every.items() if placement.weights[name] == "disk"]
        plan.add("gpu", "weight conversion", max(on_disk, default=0) * stored)


def _plan_cache(plan: Plan, policy: Policy, shapes: Shapes, placement: Placement, batches: list[int]) -> None:
    layouts = [shapes.layout(n) for n in batches]
    sizes = kv_bytes(layouts, placement.cache, policy.overlap, shapes.cuda)
    for tier in TIERS:
        plan.add(tier, "KV cache", sizes.tiers[tier])
    plan.add("gpu", "KV staging buffers", sizes.count * (sizes.staging + sizes.meta))
    plan.add("cpu", "KV host buffers", sizes.count * sizes.host + sizes.write)
    plan.add("cpu" if shapes.cuda else "gpu", "KV write-back of a step", sizes.row)
    if sizes.row:  # each write-back may hold the tokens of its matmul group
        plan.add(
            "gpu", "keys and values being written back", sizes.count * max(matmul_rows(batches)) * shapes.row_bytes
        )


def _plan_activations(
    plan: Plan, policy: Policy, shapes: Shapes, placement: Placement, batches: list[int], longest: int
) -> None:
    row = shapes.spec.hidden * shapes.compute_itemsize
    for k, tier in enumerate(placement.activations):
        plan.add(tier, f"activations of batch {k}", batches[k] * longest * row)
    plan.add("gpu", "activations of a decode step", sum(batches) * row)
    micro = micro_tokens(policy, longest, batches[0]) * row
    sizes = activation_bytes(placement.activations, micro, policy.overlap, shapes.cuda)
    plan.add("gpu", "activation staging buffers", sizes.count * sizes.staging)
    plan.add("gpu", "activations being written back", WRITE_BACKS * sizes.staging * policy.overlap)
    plan.add("cpu", "activation host buffers", 2 * sizes.host)


def prefill_workspace(shapes: Shapes, tokens: int, P: int) -> int:
    """Bytes of a micro-batch of so many tokens, of prompts of up to `P`, in one transformer block."""
    spec, size = shapes.spec, shapes.compute_itemsize
    E, Q, KV = spec.hidden, spec.query_width, spec.kv_width
    inner = spec.inner * (_INNER_TENSORS.get(spec.activation, 4) + spec.gated)
    mlp = tokens * (3 * E + inner) * size + _widened(shapes, tokens)
    # hidden states, normed, and the sum; queries, keys, values, and the context
    attention = tokens * (3 * E + 2 * Q + 2 * KV) * size
    norm = tokens * E * (3 * size + 8)  # RMSNorm's two tensors in fp32
    if shapes.rule.metadata:
        attention += tokens * spec.kv_heads * (4 + 4 + 4 + 8)  # scores; the sort's keys and indices
    if shapes.by_chunks:
        # three copies in (B * KV, G * T, D) shape, and the context; or the rows that are kept
        attention += tokens * (2 * Q + 2 * KV) * size
        attention += chunk_bytes(shapes, tokens, P)
        # queries and context of the chunk
        attention += 3 * _chunk_elements(shapes, tokens, P) * spec.head_dim // P * size
    if shapes.may_widen:  # queries, keys, values and the context of a few heads
        attention += (
            16
            * spec.head_dim
            * min(tokens * spec.heads, max(P * spec.groups, CHUNK_ELEMENTS["cpu"] // min(QUERY_CHUNK, P)))
        )
    return max(mlp, attention, norm)


def chunk_bytes(shapes: Shapes, tokens: int, P: int) -> int:
    """Logits of a chunk and, in float32, their probabilities; one buffer for both if the logits are in float32 too."""
    size = shapes.compute_itemsize
    return _chunk_elements(shapes, tokens, P) * (4 + size * (size < 4))


def _chunk_elements(shapes: Shapes, tokens: int, P: int) -> int:
    chunk, spec = min(QUERY_CHUNK, P), shapes.spec
    most = max(CHUNK_ELEMENTS["cuda" if shapes.cuda else "cpu"], spec.groups * chunk * P)
    return min(tokens * spec.heads * chunk, most)


def _widened(shapes: Shapes, tokens: int) -> int:
    """Of a matmul's operands and its result, what is in float32 at once."""
    widest = max(shapes.spec.inner, shapes.spec.hidden)
    return (min(tokens, WIDEN_ROWS) * widest * 4 + 2 * WIDEN_BYTES) * shapes.may_widen


def _decode_workspace(shapes: Shapes, batch: int, rows: int) -> int:
    """`rows` go through the matmuls together, `batch` of them through attention."""
    spec, size = shapes.spec, shapes.compute_itemsize
    scores = batch * spec.heads * shapes.slots
    # a few heads in float32
    cache = 8 * min(batch * spec.kv_width * shapes.slots, 2 * CHUNK_ELEMENTS["cpu"]) * shapes.may_widen
    inner = spec.inner * (2 + spec.gated)
    matmuls = rows * (4 * spec.hidden + 2 * spec.query_width + 2 * spec.kv_width + inner) * size
    return matmuls + _widened(shapes, rows) + cache + scores * (4 * 4 + 2 * size)
