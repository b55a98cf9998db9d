"""The memory plan: the bytes that a policy needs on every tier, counted from shapes before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from h2o_flexgen.errors import PlanError
from h2o_flexgen.formats import (
    Dense,
    Format,
    Int8,
    KVFormat,
    cache_format,
    decode_bytes,
    in_matmuls,
    in_memory,
    when_loaded,
)
from h2o_flexgen.kv_cache.layout import KVLayout
from h2o_flexgen.kv_cache.rule import CacheRule
from h2o_flexgen.models.registry import family
from h2o_flexgen.models.spec import Layer, ModelSpec
from h2o_flexgen.offload.activations import activation_bytes
from h2o_flexgen.offload.kv_store import kv_bytes
from h2o_flexgen.offload.weights import largest_layer, staging_bytes
from h2o_flexgen.planning.placement import Placement
from h2o_flexgen.planning.profile import Profile
from h2o_flexgen.policy import MARGIN, TIERS, Policy, gib
from h2o_flexgen.sizes import (
    CHUNK_ELEMENTS,
    COPIED_ELEMENTS,
    HEAD_ROWS,
    INT8_ROWS,
    OUTLIER_ROWS,
    QUERY_CHUNK,
    SAMPLE_ROWS,
    SORTING,
    WIDEN_BYTES,
    WIDEN_ROWS,
    WRITE_BACKS,
    Workload,
    aligned,
    batch_sizes,
    double_buffers,
    matmul_rows,
    micro_tokens,
    slice_rows,
)

#: a transformer block, which stands for all, and the head, among the layers
_DECODER, _HEAD = -2, -1
#: tensors of the inner width that an activation function holds at its peak; others, composed of many steps, up to 4
_INNER_TENSORS = {"relu": 1, "gelu": 2, "silu": 2, "swish": 2}
#: for messages: what a tier is called, and what helps if it is too small
_NAMES = {"gpu": "the gpu tier", "cpu": "the cpu tier", "disk": "the disk tier", "ram": "RAM (gpu and cpu together)"}
_ADVICE = {
    "gpu": "lower the gpu percentages, `gpu_batch_size` or the KV budget",
    "cpu": "lower the cpu percentages, the batch sizes or the KV budget",
    "disk": "free disk space or name another `offload_dir`",
    "ram": "move weights or cache to disk (`percent`), or lower the batch sizes or the KV budget",
}
#: the same where the search has lowered all these already
SEARCHED_ADVICE = {
    "gpu": "raise `gpu_mem` if you gave it, or take shorter prompts or a smaller model",
    "cpu": "raise `cpu_mem` if you gave it, or take shorter prompts or a smaller model",
    "disk": "raise `disk_mem` if you gave it, free disk space or name another `offload_dir`",
    "ram": "end other programs, or take shorter prompts or a smaller model",
}


@dataclass(frozen=True)
class ModelData:
    """A model as plan and cost count it.

    Attributes:
        layers: the tensors of embedding, transformer blocks and head (`tensors` of the family).
        dtype: name of the type of the computation.
        formats: in which every tensor is stored.
        cuda: whether the compute device is one of CUDA.
        compress_cache: as for `LLM`.
        dummy: random weights, which are written to disk first.
        copy_bytes: of a copy of the checkpoint in the cache folder.
        compute: "exact", or "int8" for matmuls in int8 with what is quantised.
        compressed: the formats were asked for, by `compress_weight`; else they are those of the checkpoint.
    """

    spec: ModelSpec
    layers: list[Layer]
    dtype: str
    formats: dict[str, Format]
    cuda: bool
    dummy: bool = False
    copy_bytes: int = 0
    compute: str = "exact"
    compress_cache: str | None = None
    compressed: bool = False

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        dtype: str,
        stored: str,
        cuda: bool,
        dummy: bool = False,
        formats: dict[str, Format] | None = None,
        copy_bytes: int = 0,
        compute: str = "exact",
        compressed: bool = False,
    ) -> ModelData:
        """`dtype` and `stored`: names of the type of the computation, and of that in the checkpoint, for matrices that
        `formats` does not name."""
        layers = family(spec.model_type).tensors(spec)
        types = {1: Dense(getattr(torch, dtype)), 2: Dense(getattr(torch, stored))}  # vectors are never streamed
        found = {name: types[min(2, len(shape))] for layer in layers for name, shape in layer.shapes.items()}
        found |= formats or {}
        return cls(spec, layers, dtype, found, cuda, dummy, copy_bytes, compute, compressed=compressed)

    def decoded(self) -> ModelData | None:
        """With the quantised matrices of the checkpoint decoded once, when they are loaded (`formats.when_loaded`).
        None if there are none, or they are wanted as they are."""
        if self.compressed or all(map(self.is_dense, self.formats)):
            return None
        shapes = [layer.shapes for layer in self.layers]
        return replace(self, formats=self.formats | when_loaded(self.formats, shapes, self.torch_dtype, self.compute))

    def shapes(self, rule: CacheRule, workload: Workload) -> Shapes:
        """With the cache of a job."""
        return Shapes(**vars(self), rule=rule, workload=workload)

    @property
    def kv_format(self) -> KVFormat:
        """Of K and V in the cache."""
        return cache_format(self.compress_cache, self.torch_dtype, self.spec.head_dim)

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the computation."""
        return getattr(torch, self.dtype).itemsize

    @property
    def streamed(self) -> list[dict[str, tuple[int, ...]]]:
        """{name: shape} per layer of what is needed whole (the embedding only gathers rows)."""
        return [layer.streamed_shapes for layer in self.layers]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def nbytes(self, name: str, shape: tuple[int, ...]) -> int:
        """Of a tensor on the gpu and cpu tiers."""
        return in_memory(self.formats[name], self.torch_dtype).nbytes(shape)

    def stored_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        """Of a tensor in the checkpoint."""
        return self.formats[name].nbytes(shape)

    def is_dense(self, name: str) -> bool:
        return isinstance(self.formats[name], Dense)

    def in_int8(self, name: str, is_head: bool = False) -> bool:
        """Whether a matrix is multiplied in int8."""
        return self.compute == "int8" and self.read_in(name, is_head) == Int8()

    def read_in(self, name: str, is_head: bool = False) -> Format:
        """The format in which a matmul reads a matrix."""
        return in_matmuls(self.formats[name], self.torch_dtype, self.compute, is_head)

    @property
    def converts_by_compute(self) -> bool:
        """Whether floats from disk are on the device as they are stored, and compute converts a layer to use it."""
        dense = {form for form in self.formats.values() if isinstance(form, Dense)}
        return dense != {Dense(self.torch_dtype)} and not self.cuda

    @property
    def may_widen(self) -> bool:
        """Whether matmuls go through float32 where the CPU has none in 16 bits (kernels/linear.py)."""
        return not self.cuda and self.itemsize == 2

    @cached_property
    def stored_ratio(self) -> float:
        """Bytes in the checkpoint per byte in memory, of what streams."""
        tensors = [item for layer in self.streamed for item in layer.items()]
        return sum(self.stored_bytes(*t) for t in tensors) / sum(self.nbytes(*t) for t in tensors)


@dataclass(frozen=True, kw_only=True)
class Shapes(ModelData):
    """A model and the cache of a job."""

    rule: CacheRule
    workload: Workload

    def layouts(self, batches: list[int]) -> dict[tuple[int, int], KVLayout]:
        """The cache of every (layer, batch), for batches of these sizes."""
        longest, gen_len = self.workload.longest, self.workload.gen_len
        return self.rule.layouts(self.spec, self.kv_format, [(n, longest) for n in batches], gen_len)

    @cached_property
    def kv(self) -> KVLayout:
        """The cache of one sequence in the average layer."""
        longest, gen_len = self.workload.longest, self.workload.gen_len
        return self.rule.layout(self.spec, self.kv_format, 1, longest, gen_len)

    @cached_property
    def most_slots(self) -> int:
        """Of a sequence in one layer."""
        return max(layout.slots for layout in self.layouts([1]).values())

    @property
    def kv_bytes(self) -> int:
        """Of a sequence in all layers."""
        return sum(layout.kv_bytes + layout.meta_bytes for layout in self.layouts([1]).values())


@dataclass(frozen=True)
class Resources:
    """The memory of a machine.

    Attributes:
        limits: bytes that may be planned for on each tier; without CUDA also "ram", for gpu and cpu together.
        baseline: bytes of RAM that the process holds whatever it computes.
        workspace: bytes of device memory that its libraries hold.
    """

    limits: dict[str, int]
    baseline: int = 0
    workspace: int = 0

    @classmethod
    def capped(
        cls, available: dict[str, int], caps: dict[str, int | None], cuda: bool, baseline: int, workspace: int
    ) -> Resources:
        """What is available, within what the user allows."""
        limits = {tier: n if caps[tier] is None else min(n, caps[tier]) for tier, n in available.items()}
        return cls(limits if cuda else limits | {"ram": available["cpu"]}, baseline, workspace)

    @classmethod
    def of(cls, profile: Profile, caps: dict[str, int | None]) -> Resources:
        """Those of a profile's machine, within what the user allows."""
        available = {tier: int(MARGIN * profile.memory[tier]) for tier in TIERS}
        return cls.capped(available, caps, profile.device == "cuda", profile.baseline_bytes, profile.workspace_bytes)


@dataclass
class Plan:
    """The bytes that a policy needs on each tier, known before anything is allocated.

    Attributes:
        items: (tier, what, bytes).
        shared: gpu and cpu are the same RAM (no CUDA), and their sum is held against the limit "ram".
    """

    items: list[tuple[str, str, int]] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)
    shared: bool = False

    def add(self, tier: str, what: str, nbytes: float) -> None:
        if nbytes:
            self.items.append((tier, what, int(nbytes)))

    def needed(self, tier: str) -> int:
        """Of a tier, or of "ram": gpu and cpu together."""
        return sum(nbytes for t, _, nbytes in self.items if t in _parts(tier))

    def missing(self) -> dict[str, int]:
        """Bytes beyond the limit of each tier that is too small; without CUDA of "ram" too, gpu and cpu together."""
        tiers = ("ram", *TIERS) if self.shared else TIERS
        return {tier: n for tier in tiers if (n := self.needed(tier) - self.limits[tier]) > 0}

    def check(self, message: str = "", advice: dict[str, str] = _ADVICE) -> None:
        """Raises PlanError, after a message, naming each tier that is too small, the bytes needed and available, and
        what to change, by `advice` for each tier."""
        tiers, short = self.missing(), []
        for tier in ("ram",) if "ram" in tiers else tiers:
            needed, limit = self.needed(tier), self.limits[tier]
            _, what, nbytes = max((item for item in self.items if item[0] in _parts(tier)), key=lambda item: item[2])
            short.append(
                f"{_NAMES[tier]} is too small: needs {gib(needed)} ({needed} bytes), there are {gib(limit)} "
                f"({limit} bytes); most goes to {what} ({gib(nbytes)}): {advice[tier]}"
            )
        if short:
            raise PlanError(message + "; ".join(short))

    def describe(self) -> str:
        """A table for people: every item, then each tier against its limit."""
        lines = ["memory plan:"]
        lines += [f"  {tier:<5}{gib(nbytes):>12}  {what}" for tier, what, nbytes in self.items]
        lines += [f"  {tier:<5}{gib(self.needed(tier)):>12}  of {gib(self.limits[tier])}" for tier in TIERS]
        if self.shared:
            lines.append(f"  RAM  {gib(self.needed('ram')):>12}  of {gib(self.limits['ram'])}, gpu and cpu together")
        return "\n".join(lines)


def _parts(tier: str) -> tuple[str, ...]:
    return ("gpu", "cpu") if tier == "ram" else (tier,)


def plan_policy(policy: Policy, shapes: Shapes, workload: Workload, resources: Resources) -> tuple[Placement, Plan]:
    """Where everything goes under a policy, and the bytes it takes at its peak against the limits."""
    batches = batch_sizes(len(workload.prompt_lens), policy)
    placement = Placement.of(policy, [layer.shapes for layer in shapes.layers], len(batches), shapes.nbytes)
    plan = Plan(limits=resources.limits, shared=not shapes.cuda)
    host = "cpu" if shapes.cuda else "gpu"  # the tier whose RAM the process itself takes
    plan.add(host, "the process itself", resources.baseline)
    plan.add(host, "generated tokens", workload.output_bytes)
    _plan_weights(plan, shapes, placement, policy.overlap)
    _plan_cache(plan, policy, shapes, placement, batches)
    _plan_activations(plan, policy, shapes, placement, batches, workload.longest)
    workspace = workspace_bytes(policy, shapes, workload.longest, batches, workload.held)
    plan.add("gpu", "workspace of a layer or the head", workspace)
    plan.add("gpu", "workspace of matmuls", resources.workspace)
    return placement, plan


def workspace_bytes(policy: Policy, shapes: Shapes, longest: int, batches: list[int], held: int = 0) -> int:
    """What computing a layer or the head takes on the device, for batches of these sizes, the largest first, of
    prompts of up to `longest` tokens, behind `held` that caches hold."""
    prefill = prefill_workspace(shapes, micro_tokens(policy, longest, batches[0]), longest, held)
    rows = max(matmul_rows(batches))
    decode = _decode_workspace(shapes, batches[0], rows)
    chosen = min(rows, SAMPLE_ROWS) * (4 + SORTING["cuda" if shapes.cuda else "cpu"])
    few = min(rows, HEAD_ROWS)
    head = (few * shapes.itemsize + chosen) * shapes.spec.vocab + _sliced(shapes, few) + _in_int8(shapes, few, _HEAD)
    return max(prefill, decode, head)


def _plan_weights(plan: Plan, shapes: Shapes, placement: Placement, overlap: bool) -> None:
    tensors = {name: shape for layer in shapes.layers for name, shape in layer.shapes.items()}
    nbytes = dict.fromkeys(TIERS, 0)
    for name, shape in tensors.items():
        tier = placement.weights[name]
        # on disk each tensor of random weights begins a page (`DummyCheckpoint.on_disk`)
        nbytes[tier] += aligned(shapes.stored_bytes(name, shape)) if tier == "disk" else shapes.nbytes(name, shape)
    plan.add("gpu", "weights", nbytes["gpu"])
    plan.add("cpu", "weights", nbytes["cpu"])
    if shapes.dummy:  # a real checkpoint is on disk already
        plan.add("disk", "random weights", nbytes["disk"])
    plan.add("disk", "compressed weights", shapes.copy_bytes)

    dtype, cuda, head = shapes.torch_dtype, shapes.cuda, shapes.streamed[-1]
    buffers = largest_layer(
        [
            staging_bytes(
                placement.weights[name], shapes.formats[name], shape, dtype, cuda, layer is head, shapes.compute
            )
            for name, shape in layer.items()
        ]
        for layer in shapes.streamed
    )
    count = double_buffers(overlap)
    plan.add("gpu", "weight staging buffers", count * buffers.device)
    plan.add("cpu", "weight host buffers", count * buffers.host)
    plan.add("gpu", "weight conversion", buffers.converted)
    if shapes.cuda:  # a copy to CUDA changes the dtype there
        converted = [
            shapes.stored_bytes(name, shape)
            for name, shape in tensors.items()
            if placement.weights[name] == "disk" and shapes.is_dense(name) and shapes.formats[name] != Dense(dtype)
        ]
        plan.add("gpu", "weight conversion", max(converted, default=0))
    plan.add("gpu", "decoding of weights", decode_bytes(map(shapes.formats.get, tensors), dtype, cuda))


def _plan_cache(plan: Plan, policy: Policy, shapes: Shapes, placement: Placement, batches: list[int]) -> None:
    sizes = kv_bytes(shapes.layouts(batches), placement.cache, policy.overlap, shapes.cuda)
    for tier in TIERS:
        plan.add(tier, "KV cache", sizes.tiers[tier])
    plan.add("gpu", "KV staging buffers", sizes.count * (sizes.staging + sizes.meta))
    plan.add("cpu", "KV host buffers", sizes.count * sizes.host + sizes.write)
    plan.add("cpu" if shapes.cuda else "gpu", "KV write-back of a step", sizes.row)
    if sizes.row:  # each write-back may hold the tokens of its matmul group
        nbytes = sizes.count * max(matmul_rows(batches)) * shapes.kv.row_bytes
        plan.add("gpu", "keys and values being written back", nbytes)


def _plan_activations(
    plan: Plan, policy: Policy, shapes: Shapes, placement: Placement, batches: list[int], longest: int
) -> None:
    row = shapes.spec.hidden * shapes.itemsize
    for k, tier in enumerate(placement.activations):
        plan.add(tier, f"activations of batch {k}", batches[k] * longest * row)
    plan.add("gpu", "activations of a decode step", sum(batches) * row)
    micro = micro_tokens(policy, longest, batches[0]) * row
    sizes = activation_bytes(placement.activations, micro, policy.overlap, shapes.cuda)
    plan.add("gpu", "activation staging buffers", sizes.count * sizes.staging)
    plan.add("gpu", "activations being written back", WRITE_BACKS * sizes.staging * policy.overlap)
    plan.add("cpu", "activation host buffers", 2 * sizes.host)


def prefill_workspace(shapes: Shapes, tokens: int, P: int, held: int = 0) -> int:
    """Bytes of a micro-batch of `tokens` tokens, of prompts of up to `P` behind `held` that caches hold, in one
    transformer block."""
    spec, size = shapes.spec, shapes.itemsize
    E, Q, KV = spec.hidden, spec.query_width, spec.kv_width
    inner = spec.inner * (_INNER_TENSORS.get(spec.activation, 4) + spec.gated)
    mlp = tokens * (3 * E + inner) * size + max(_widened(shapes, tokens), _in_int8(shapes, tokens))
    # hidden states, normed, and the sum; queries, keys, values, and the context
    attention = tokens * (3 * E + 2 * Q + 2 * KV) * size
    norm = tokens * E * (3 * size + 8)  # RMSNorm's two tensors in fp32
    if shapes.rule.scores_prompt:
        metadata = dict(shapes.rule.metadata)
        remembered = sum(metadata[name].itemsize for name in metadata.keys() - {"score", "position"})
        # scores, and what else is remembered; the sort's keys and indices
        attention += tokens * spec.kv_heads * (4 + remembered + 4 + 4 + 8)
    # attention by chunks, at least on some CPUs and GPUs
    if shapes.rule.scores_prompt or shapes.may_widen or shapes.dtype == "bfloat16" or spec.groups > 1:
        # three copies in (B * KV, G * T, D) shape, and the context; or the rows that are kept
        attention += tokens * (2 * Q + 2 * KV) * size
        attention += chunk_bytes(shapes, tokens, P, held)
        # queries and context of the chunk
        attention += 3 * _chunk_elements(shapes, tokens, P, held) * spec.head_dim // (P + held) * size
        # K and V in the order of the text, with the new ones, and again of those that stay
        attention += 6 * (tokens * held // P) * KV * size
    if shapes.rule.rope:
        attention += tokens * Q * size + tokens * (P + held) // P * KV * _rotating(shapes)
    if not shapes.kv_format.is_dense:  # heads side by side, as they are stored, and those that stay
        attention += tokens * KV * size + 2 * (tokens * (P + held) // P) * shapes.kv.row_bytes
    if shapes.may_widen:  # queries, keys, values and the context of a few heads
        few = max(P * spec.groups, CHUNK_ELEMENTS["cpu"] // min(QUERY_CHUNK, P))
        attention += 16 * spec.head_dim * min(tokens * spec.heads, few)
    return max(mlp, attention, norm)


def chunk_bytes(shapes: Shapes, tokens: int, P: int, held: int = 0) -> int:
    """Logits of a chunk and, in float32, their probabilities; one buffer for both if the logits are in float32 too."""
    size = shapes.itemsize
    return _chunk_elements(shapes, tokens, P, held) * (4 + size * (size < 4))


def _chunk_elements(shapes: Shapes, tokens: int, P: int, held: int) -> int:
    chunk, spec, keys = min(QUERY_CHUNK, P), shapes.spec, P + held
    most = max(CHUNK_ELEMENTS["cuda" if shapes.cuda else "cpu"], spec.groups * chunk * keys)
    return min(tokens * keys // P * spec.heads * chunk, most)


def _rotating(shapes: Shapes) -> int:
    """Bytes of a key's element while it is rotated: in float32, with its sine or cosine, and as it is used."""
    return 8 + shapes.itemsize * (shapes.itemsize < 4)


def _widened(shapes: Shapes, tokens: int) -> int:
    """Of a matmul's operands and its result, what is in float32 at once."""
    widest = max(shapes.spec.inner, shapes.spec.hidden)
    return (min(tokens, WIDEN_ROWS) * widest * 4 + 2 * WIDEN_BYTES) * shapes.may_widen


def _in_int8(shapes: Shapes, rows: int, layer: int = _DECODER) -> int:
    """Of a matmul in int8: floats and codes of x, on CUDA also what its operators make of them, sums in int32, floats
    of the result, and a slice of the weight where floats multiply codes."""
    rows, each = min(rows, INT8_ROWS) + OUTLIER_ROWS, 18 if shapes.cuda else 5
    names = [item for item in shapes.streamed[layer].items() if shapes.in_int8(item[0], layer == _HEAD)]
    return max((rows * (each * width + 12 * out) + WIDEN_BYTES for _, (out, width) in names), default=0)


def _sliced(shapes: Shapes, rows: int) -> int:
    """Of a quantised head, a slice that is decoded, and its part of the logits."""
    sizes = [0]
    for name, shape in shapes.streamed[-1].items():
        if not shapes.is_dense(name) and not shapes.in_int8(name, is_head=True):
            step = min(shape[0], slice_rows(shape[1], shapes.itemsize))
            sizes.append(step * (shape[1] + rows) * shapes.itemsize)
    return max(sizes)


def _decode_workspace(shapes: Shapes, batch: int, rows: int) -> int:
    """`rows` go through the matmuls together, `batch` of them through attention."""
    spec, size = shapes.spec, shapes.itemsize
    slots = shapes.most_slots
    scores = batch * spec.heads * slots
    # a few heads in float32, or rotated
    few = max(slots * spec.head_dim, COPIED_ELEMENTS["cuda" if shapes.cuda else "cpu"])
    quantised = not shapes.kv_format.is_dense
    copies = 8 * (shapes.may_widen or quantised) + (_rotating(shapes) if shapes.rule.rope else 0)
    copies += 2 * size * (quantised and shapes.cuda)
    cache = min(batch * spec.kv_width * slots, few) * copies
    inner = spec.inner * (2 + spec.gated)
    matmuls = rows * (4 * spec.hidden + 2 * spec.query_width + 2 * spec.kv_width + inner) * size
    return matmuls + max(_widened(shapes, rows), _in_int8(shapes, rows)) + cache + scores * (4 * 4 + 2 * size)
