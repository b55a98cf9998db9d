"""The memory plan: the bytes that a policy needs on every tier, counted from shapes before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from h2o_flexgen.errors import PlanError
from h2o_flexgen.models.spec import Layer, ModelSpec
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
    aligned,
    batch_sizes,
    kv_buffers,
    kv_file_bytes,
    matmul_rows,
    micro_tokens,
    staging_span,
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
        segments: KV slots per sequence and head, by segment; budget: heavy + recent, or None for a full cache.
        stored_itemsize: bytes per number in the checkpoint; compute_itemsize: in the computation; bf16: whether that
            is in bf16.
    """

    spec: ModelSpec
    layers: list[dict[str, tuple[int, ...]]]
    streamed: list[dict[str, tuple[int, ...]]]
    segments: tuple[int, ...]
    budget: int | None
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

    @property
    def row_bytes(self) -> int:
        """K and V of one token of one sequence in one layer."""
        return 2 * self.spec.kv_width * self.compute_itemsize

    @property
    def meta_bytes(self) -> int:
        """Scores and positions of one sequence in one layer."""
        return 8 * self.spec.kv_heads * self.slots if self.budget is not None else 0

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
        return self.budget is not None or self.may_widen or self.bf16 or self.spec.groups > 1

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
            budget=rule.budget if rule.scored else None,
            **sizes,
        )


def plan_memory(policy: Policy, shapes: Shapes, workload: Workload, placement: Placement, baseline: int) -> Plan:
    """The bytes a job needs on each tier at its peak.

    `baseline` is what the process holds whatever it computes (interpreter and libraries), in bytes of RAM.
    """
    size = shapes.compute_itemsize
    plan = Plan(shared=not shapes.cuda)
    host = "cpu" if shapes.cuda else "gpu"  # whose RAM the process itself is counted to
    overlap = 2 if policy.overlap else 1
    batches = batch_sizes(len(workload.prompt_lens), policy)
    P = workload.longest

    plan.add(host, "the process itself", baseline)
    plan.add(host, "generated tokens", workload.output_bytes)
    _plan_weights(plan, shapes, placement, overlap)
    _plan_cache(plan, policy, shapes, placement, batches)

    # hidden states
    E = shapes.spec.hidden
    tokens = micro_tokens(policy, P, batches[0])
    piece = tokens * E * size
    for k, home in enumerate(placement.activations):
        plan.add(home, f"activations of batch {k}", batches[k] * P * E * size)
    plan.add("gpu", "activations of a decode step", sum(batches) * E * size)
    if any(home != "gpu" for home in placement.activations):
        plan.add("gpu", "activation buffers", overlap * piece)
        plan.add("gpu", "activations on their way home", WRITE_BACKS * piece * policy.overlap)
        if shapes.cuda and "disk" in placement.activations:
            plan.add("cpu", "activation staging", 2 * piece)

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


def _plan_weights(plan: Plan, shapes: Shapes, placement: Placement, overlap: int) -> None:
    size = shapes.compute_itemsize
    every = {n: s for layer in shapes.layers for n, s in layer.items()}
    by_tier = {"gpu": 0, "cpu": 0, "disk": 0}
    for name, shape in every.items():
        by_tier[placement.weights[name]] += prod(shape) * size
    plan.add("gpu", "weights", by_tier["gpu"])
    plan.add("cpu", "weights", by_tier["cpu"])
    if shapes.dummy:  # a real checkpoint already lies on disk
        plan.add("disk", "random weights", by_tier["disk"] * shapes.stored_ratio)

    in_place = shapes.stored_itemsize if shapes.converts_by_compute else size  # read into the slot
    slot = host = converted = 0
    for layer in shapes.streamed:
        cpu, disk = ([prod(s) for n, s in layer.items() if placement.weights[n] == tier] for tier in ("cpu", "disk"))
        slot = max(slot, sum(staging_span(n * size) for n in cpu) + sum(staging_span(n * in_place) for n in disk))
        host = max(host, sum(staging_span(n * shapes.stored_itemsize) for n in disk))
        converted = max(converted, sum(aligned(n * size) for n in disk))
    plan.add("gpu", "weight slots", overlap * slot)
    if shapes.cuda:
        plan.add("cpu", "weight staging", overlap * host)
        on_disk = [prod(s) for n, s in every.items() if placement.weights[n] == "disk"]
        converted = max(on_disk, default=0) * shapes.stored_itemsize  # a copy to CUDA changes its dtype there
    if shapes.converts:
        plan.add("gpu", "weight conversion", converted)


def _plan_cache(plan: Plan, policy: Policy, shapes: Shapes, placement: Placement, batches: list[int]) -> None:
    row, meta = shapes.row_bytes, shapes.meta_bytes
    kv = {"gpu": 0, "cpu": 0, "disk": 0}
    metas = {"gpu": 0, "cpu": 0, "disk": 0}
    on_disk = 0
    for (_, k), home in placement.cache.items():
        size = batches[k] * row
        kv[home] += kv_file_bytes(shapes.segments, size) if home == "disk" else shapes.slots * size
        metas["gpu" if home == "gpu" else "cpu"] += batches[k] * meta
        if home == "disk":
            on_disk = max(on_disk, batches[k])
            # the slots of the log's rows
            heads = 1 if shapes.budget is None else shapes.spec.kv_heads
            metas["cpu"] += batches[k] * shapes.wal_rows * heads * 4
    for tier in kv:
        plan.add(tier, "KV cache", kv[tier] + metas[tier])
    # with CPU attention prefill still fills a cache on the device
    buffers = max((batches[k] for (_, k), home in placement.cache.items() if home != "gpu"), default=0)
    slots = kv_buffers(policy.overlap, on_disk > 0)
    piece, landing = buffers * shapes.slots * row, kv_file_bytes(shapes.segments, on_disk * row)
    if shapes.cuda:
        plan.add("gpu", "KV slots", slots * (piece + buffers * meta))
        plan.add("cpu", "KV staging", slots * landing + on_disk * shapes.slots * row)
    else:
        plan.add("gpu", "KV slots", slots * max(piece, landing))
    plan.add("cpu" if shapes.cuda else "gpu", "KV staging of a step", buffers * row)
    if buffers:  # each may hold those of its group
        plan.add("gpu", "keys and values on their way home", slots * max(matmul_rows(batches)) * row)


def prefill_workspace(shapes: Shapes, tokens: int, P: int) -> int:
    """Bytes of a micro-batch of so many tokens, of prompts of up to `P`, in one transformer block."""
    spec, size = shapes.spec, shapes.compute_itemsize
    E, Q, KV = spec.hidden, spec.query_width, spec.kv_width
    inner = spec.inner * (_INNER_TENSORS.get(spec.activation, 4) + spec.gated)
    mlp = tokens * (3 * E + inner) * size + _widened(shapes, tokens)
    # hidden states, normed, and the sum; queries, keys, values, and the context
    attention = tokens * (3 * E + 2 * Q + 2 * KV) * size
    norm = tokens * E * (3 * size + 8)  # RMSNorm's two tensors in fp32
    if shapes.budget is not None:
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
