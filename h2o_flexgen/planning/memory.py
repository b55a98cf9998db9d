"""The memory plan: the bytes that a policy needs on each tier, counted from shapes before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from h2o_flexgen.errors import PlanError
from h2o_flexgen.formats import decode_bytes
from h2o_flexgen.machine.pages import aligned
from h2o_flexgen.machine.profile import Profile
from h2o_flexgen.planning.placement import Placement
from h2o_flexgen.planning.shapes import Shapes
from h2o_flexgen.planning.workload import (
    GROUP_ROWS,
    HEAD_ROWS,
    Workload,
    batch_sizes,
    grammar_bytes,
    group_rows,
    matmul_rows,
    micro_tokens,
)
from h2o_flexgen.planning.workspace import workspace_bytes
from h2o_flexgen.policy import MARGIN, TIERS, Policy, gib
from h2o_flexgen.storage.activations import WRITE_BACKS, activation_bytes
from h2o_flexgen.storage.kv_store import kv_bytes
from h2o_flexgen.storage.queues import double_buffers
from h2o_flexgen.storage.staging import StagingBytes, largest_unit

#: for messages: what a tier is called, with and without CUDA, and what helps if it is too small
_NAMES = {"gpu": "the gpu tier", "cpu": "the cpu tier", "disk": "the disk tier"}
_RAM_NAMES = _NAMES | {"gpu": "RAM", "ram": "RAM"}
GIVEN_POLICY_ADVICE = {
    "gpu": "lower the gpu percentages, `gpu_batch_size` or the KV budget",
    "cpu": "lower the cpu percentages, the batch sizes or the KV budget",
    "disk": "free disk space or name another `offload_dir`",
    "ram": "move weights or cache to disk (`percent`), or lower `gpu_batch_size` or the KV budget",
}
#: the advice where the search has already lowered all of these
SEARCHED_ADVICE = {
    "gpu": "raise `gpu_mem` if you gave it, or take shorter prompts or a smaller model",
    "cpu": "raise `mem` or `cpu_mem` if you gave it, or take shorter prompts or a smaller model",
    "disk": "raise `disk_mem` if you gave it, free disk space or name another `offload_dir`",
    "ram": "raise `mem` (or `gpu_mem`) if you gave it, end other programs, or take shorter prompts or a smaller model",
}
#: the most of the device's memory that a prefix shared by prompts may take
PATH_SHARE = 1 / 16


@dataclass(frozen=True)
class Resources:
    """The memory of a machine, in bytes.

    Attributes:
        limits: what may be planned for on each tier; without CUDA also on "ram", which is gpu and cpu together.
        baseline: RAM that the process holds whatever it computes.
        workspace: device memory that matrix libraries keep.
    """

    limits: dict[str, int]
    baseline: int = 0
    workspace: int = 0

    @classmethod
    def capped(
        cls, available: dict[str, int], caps: dict[str, int | None], cuda: bool, baseline: int, workspace: int
    ) -> Resources:
        """What is available, within what the user allows: `caps` of each tier, and as "ram" of all RAM."""
        in_ram = ("cpu",) if cuda else ("gpu", "cpu")
        if caps.get("ram") is not None:
            available = available | {tier: min(available[tier], caps["ram"]) for tier in in_ram}
        limits = {tier: n if caps[tier] is None else min(n, caps[tier]) for tier, n in available.items()}
        return cls(limits if cuda else limits | {"ram": available["cpu"]}, baseline, workspace)

    @classmethod
    def of(cls, profile: Profile, caps: dict[str, int | None]) -> Resources:
        """The memory of a profile's machine, within the user's caps."""
        available = {tier: int(MARGIN * profile.memory[tier]) for tier in TIERS}
        return cls.capped(available, caps, profile.device == "cuda", profile.baseline_bytes, profile.workspace_bytes)


@dataclass
class MemoryPlan:
    """The bytes that a policy needs on each tier, known before anything is allocated.

    Attributes:
        items: (tier, label, bytes).
        limits: bytes that may be planned for, as for `Resources`.
        shared: gpu and cpu are the same RAM (no CUDA), and their sum must fit the limit "ram".
    """

    items: list[tuple[str, str, int]] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)
    shared: bool = False

    def add(self, tier: str, label: str, nbytes: float) -> None:
        if nbytes:
            self.items.append((tier, label, int(nbytes)))

    def needed(self, tier: str) -> int:
        """Bytes of a tier, or of "ram"."""
        return sum(nbytes for each, _, nbytes in self.items if each in _parts(tier))

    def missing(self) -> dict[str, int]:
        """Bytes beyond the limit of each tier that is too small, and without CUDA of "ram"."""
        tiers = ("ram", *TIERS) if self.shared else TIERS
        return {tier: n for tier in tiers if (n := self.needed(tier) - self.limits[tier]) > 0}

    def check(self, message: str = "", advice: dict[str, str] = GIVEN_POLICY_ADVICE) -> None:
        """Raises PlanError, after a message, naming each tier that is too small, the bytes needed and available, and
        what to change, by `advice` for each tier."""
        tiers = self.missing()
        short = []
        names = _RAM_NAMES if self.shared else _NAMES
        for tier in ("ram",) if "ram" in tiers else tiers:
            needed = self.needed(tier)
            limit = self.limits[tier]
            _, what, nbytes = max((item for item in self.items if item[0] in _parts(tier)), key=lambda item: item[2])
            remedy = advice["ram" if self.shared and tier == "gpu" else tier]
            short.append(
                f"{names[tier]} is too small: needs {gib(needed)} ({needed} bytes), there are {gib(limit)} "
                f"({limit} bytes); most goes to {what} ({gib(nbytes)}): {remedy}"
            )
        if short:
            raise PlanError(message + "; ".join(short))

    def describe(self) -> str:
        """A table for humans: every item, then each tier, or without CUDA RAM and disk, against its limit."""
        lines = ["memory plan:"]
        for tier, what, nbytes in self.items:
            lines.append(f"  {'RAM' if self.shared and tier != 'disk' else tier:<5}{gib(nbytes):>12}  {what}")
        lines += [f"  {name:<5}{gib(needed):>12}  of {gib(limit)}" for name, (needed, limit) in self.totals().items()]
        return "\n".join(lines)

    def totals(self) -> dict[str, tuple[int, int]]:
        """Bytes needed and their limit for each tier; without CUDA for RAM and disk."""
        found = {tier: (self.needed(tier), self.limits[tier]) for tier in TIERS}
        if not self.shared:
            return found
        limit = self.limits["ram"] if self.needed("cpu") else min(self.limits["gpu"], self.limits["ram"])
        return {"RAM": (self.needed("ram"), limit), "disk": found["disk"]}


def _parts(tier: str) -> tuple[str, ...]:
    return ("gpu", "cpu") if tier == "ram" else (tier,)


def plan_policy(
    policy: Policy, shapes: Shapes, workload: Workload, resources: Resources
) -> tuple[Placement, MemoryPlan]:
    """The placement of a policy, and the bytes it takes at its peak against the limits."""
    batches = batch_sizes(len(workload.prompt_lens), policy)
    placement = Placement.of(policy, [layer.shapes for layer in shapes.layers], len(batches), shapes.nbytes)
    plan = MemoryPlan(limits=resources.limits, shared=not shapes.cuda)
    process_tier = "cpu" if shapes.cuda else "gpu"
    plan.add(process_tier, "the process itself", resources.baseline)
    plan.add(process_tier, "generated tokens", workload.output_bytes)
    plan.add(process_tier, "grammars of structured output", grammar_bytes(workload, sum(batches)))
    _plan_weights(plan, shapes, placement)
    begin = len(plan.items)
    plan.items += _weight_buffers(shapes, placement, policy.overlap)
    end = len(plan.items)
    _plan_cache(plan, policy, shapes, placement, batches)
    _plan_activations(plan, policy, shapes, placement, batches, workload)
    plan.add("gpu", "prefixes that prompts share", shared_bytes(shapes, resources))
    workspace = workspace_bytes(policy, shapes, workload.longest, batches, workload.cached_len)
    plan.add("gpu", "workspace for computing one layer", workspace)
    plan.add("gpu", "workspace of matrix libraries", resources.workspace)
    # staged whole where there is room: while layers compute, the disk may have time to read all of the head
    if plan.missing() and placement.weights[shapes.head] == "disk" and may_slice(shapes, sum(batches)):
        sliced = replace(placement, sliced=shapes.head)
        buffers = _weight_buffers(shapes, sliced, policy.overlap)
        if sum(nbytes for *_, nbytes in buffers) < sum(nbytes for *_, nbytes in plan.items[begin:end]):
            plan.items[begin:end] = buffers
            return sliced, plan
    return placement, plan


def may_slice(shapes: Shapes, sequences: int) -> bool:
    """Whether the head's matmul may read it from disk a slice at a time: where a pass of so many sequences multiplies
    with it once, and so reads it once, as it does a head that is staged."""
    return not shapes.cuda and sequences * shapes.workload.logits <= HEAD_ROWS


def _plan_weights(plan: MemoryPlan, shapes: Shapes, placement: Placement) -> None:
    nbytes = dict.fromkeys(TIERS, 0)
    for name, each in shapes.tensor_bytes.items():
        # random weights on disk begin a page each (`DummyCheckpoint.on_disk`)
        tier = placement.weights[name]
        nbytes[tier] += aligned(each.stored) if tier == "disk" else each.memory
    plan.add("gpu", "weights", nbytes["gpu"])
    plan.add("cpu", "weights", nbytes["cpu"])
    if shapes.dummy:  # a real checkpoint is on disk already
        plan.add("disk", "random weights", nbytes["disk"])
    plan.add("disk", "converted copy of the weights", shapes.copy_bytes)


def _weight_buffers(shapes: Shapes, placement: Placement, overlap: bool) -> list[tuple[str, str, int]]:
    """What weights take on their way to matmuls: (tier, label, bytes)."""
    plan = MemoryPlan()
    tiers = placement.weights
    tensors = shapes.tensor_bytes
    sizes = {name: each.staging[tiers[name]] for name, each in tensors.items()}
    in_slices = StagingBytes()
    if placement.sliced is not None:
        in_slices = tensors[placement.sliced].sliced
        sizes[placement.sliced] = in_slices._replace(device=0)
    buffers = largest_unit(list(map(sizes.get, unit.streamed_shapes)) for unit in shapes.units)
    count = double_buffers(overlap)
    plan.add("gpu", "weight staging buffers", count * (buffers.device + in_slices.device))
    plan.add("cpu", "weight buffers for disk reads", count * buffers.host)
    plan.add("gpu", "weight conversion for one layer", buffers.converted)
    if shapes.cuda:
        on_disk = [each.retyped for name, each in tensors.items() if tiers[name] == "disk"]
        plan.add("gpu", "weight conversion for one matrix", max(on_disk, default=0))
    formats = [shapes.forms[name].kept for name in tensors]
    plan.add("gpu", "weight decoding", decode_bytes(formats, shapes.torch_dtype, shapes.cuda))
    return plan.items


def _plan_cache(plan: MemoryPlan, policy: Policy, shapes: Shapes, placement: Placement, batches: list[int]) -> None:
    sizes = kv_bytes(shapes.layouts(batches), placement.cache, policy.overlap, shapes.cuda)
    for tier in TIERS:
        plan.add(tier, "KV cache", sizes.tiers[tier])
    plan.add("gpu", "KV staging buffers", sizes.count * (sizes.staging + sizes.meta))
    plan.add("cpu", "KV buffers for disk reads and writes", sizes.count * sizes.host + sizes.write)
    plan.add("cpu" if shapes.cuda else "gpu", "KV buffer for write-back", sizes.row)
    if sizes.row:  # each write-back may hold the tokens of its matmul group
        new_tokens = sizes.count * max(matmul_rows(batches, group_rows(shapes.spec)))
        plan.add("gpu", "keys and values being written back", new_tokens * shapes.most(lambda kind: kind.kv.row_bytes))


def _plan_activations(
    plan: MemoryPlan, policy: Policy, shapes: Shapes, placement: Placement, batches: list[int], workload: Workload
) -> None:
    longest = workload.longest
    hidden = shapes.spec.state_width * shapes.itemsize  # bytes of a token's state between two stages
    for k, tier in enumerate(placement.activations):
        plan.add(tier, f"activations of batch {k}", batches[k] * longest * hidden)
    rows = decode_rows(batches, workload)
    plan.add("gpu", "activations of a decode step", rows * hidden)
    micro_bytes = micro_tokens(policy.prefill_tokens, longest, batches[0]) * hidden
    sizes = activation_bytes(placement.activations, micro_bytes, policy.overlap, shapes.cuda)
    plan.add("gpu", "activation staging buffers", sizes.count * sizes.staging)
    plan.add("gpu", "activations being written back", WRITE_BACKS * sizes.staging * policy.overlap)
    plan.add("cpu", "activation buffers for disk reads and writes", 2 * sizes.host)


def decode_rows(batches: list[int], workload: Workload) -> int:
    """Tokens of a pass whose hidden states stay on the device: one for each place, and prompts of rows that join the
    matmuls of a decode step, of up to GROUP_ROWS rows. Structured output may have more for each place."""
    places = sum(batches)
    joining = min(len(batches) * GROUP_ROWS, places * workload.longest) if len(workload.prompt_lens) > places else 0
    return places * workload.row_tokens + joining


def path_bytes(shapes: Shapes) -> int:
    """Bytes of a token in a shared prefix, in all layers: K and V in floats and as stored, and what the rule
    remembers."""
    return sum(layers * _path_bytes(kind) for layers, kind in shapes.kinds)


def _path_bytes(shapes: Shapes) -> int:
    """The same in one layer of a kind."""
    spec = shapes.spec
    floats = 2 * spec.head_dim * shapes.itemsize
    stored = 0
    if not shapes.kv_format.is_dense:
        stored = sum(form.nbytes((spec.head_dim,)) for form in shapes.kv_format)
    remembered = sum(dtype.itemsize for _, dtype in shapes.rule.metadata)
    return spec.kv_heads * (floats + stored + remembered)


def path_tokens(shapes: Shapes, resources: Resources) -> int:
    """The most tokens of a shared prefix that fit into its part of the device's memory."""
    return min(shapes.workload.path, int(PATH_SHARE * resources.limits["gpu"]) // path_bytes(shapes))


def shared_bytes(shapes: Shapes, resources: Resources) -> int:
    """Bytes of the longest prefix that prompts share."""
    return path_tokens(shapes, resources) * path_bytes(shapes)
