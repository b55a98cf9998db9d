"""The memory plan: the bytes that a policy needs on each tier, counted from shapes before anything is allocated.
Several devices are pools of the gpu tier, each with a limit of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from h2o_flexgen.errors import PlanError
from h2o_flexgen.formats import decode_bytes
from h2o_flexgen.kv_cache.layout import KVLayout
from h2o_flexgen.machine.pages import aligned
from h2o_flexgen.machine.profile import Profile
from h2o_flexgen.models.spec import Layer, shapes_of, units_of
from h2o_flexgen.planning.placement import Placement, divide, of_span
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
        workspace: memory of each device that matrix libraries keep.
        pools: what may be planned for on each device, if there are several.
    """

    limits: dict[str, int]
    baseline: int = 0
    workspace: int = 0
    pools: dict[str, int] = field(default_factory=dict)

    @property
    def devices(self) -> dict[str, int]:
        """What may be planned for on each device; a single one is the gpu tier."""
        return self.pools or {"gpu": self.limits["gpu"]}

    @classmethod
    def capped(cls, available: dict[str, int], caps: dict, cuda: bool, baseline: int, workspace: int) -> Resources:
        """What is available, within what the user allows.

        Args:
            available: of each tier; of several devices, each one instead of the gpu tier.
            caps: of each tier, and as "ram" of all RAM; None: no cap. Of the gpu tier one for each device, or one for
                all that are alike.
        """
        names = [name for name in available if name not in ("cpu", "disk")]
        each = caps["gpu"] if isinstance(caps["gpu"], Sequence) else [caps["gpu"]] * len(names)
        own = dict(zip(names, each, strict=True)) | {tier: caps[tier] for tier in ("cpu", "disk")}
        in_ram = ["cpu"] if cuda else [*names, "cpu"]
        if caps.get("ram") is not None:
            available = available | {pool: min(available[pool], caps["ram"]) for pool in in_ram}
        limits = {pool: n if own[pool] is None else min(n, own[pool]) for pool, n in available.items()}
        pools = {name: limits[name] for name in names if name != "gpu"}
        gpu = sum(pools.values()) if pools else limits["gpu"]
        limits = {"gpu": gpu, "cpu": limits["cpu"], "disk": limits["disk"]}
        return cls(limits if cuda else limits | {"ram": available["cpu"]}, baseline, workspace, pools)

    @classmethod
    def of(cls, profile: Profile, caps: dict) -> Resources:
        """The memory of a profile's machine, within the user's caps."""
        available = {pool: int(MARGIN * nbytes) for pool, nbytes in profile.memory.items()}
        return cls.capped(available, caps, profile.device == "cuda", profile.baseline_bytes, profile.workspace_bytes)


#: tier, or one of several devices; label; bytes
Item = tuple[str, str, int]


@dataclass
class MemoryPlan:
    """The bytes that a policy needs on each tier, known before anything is allocated.

    Attributes:
        items: what takes how many bytes where.
        limits, pools: bytes that may be planned for, as for `Resources`.
        shared: gpu and cpu are the same RAM (no CUDA), and their sum must fit the limit "ram".
    """

    items: list[Item] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)
    shared: bool = False
    pools: dict[str, int] = field(default_factory=dict)

    def add(self, tier: str, label: str, nbytes: float) -> None:
        if nbytes:
            self.items.append((tier, label, int(nbytes)))

    def add_all(self, device: str, items: list[Item]) -> None:
        """Add items whose tier "gpu" is this device."""
        self.items += [(device if tier == "gpu" else tier, *item) for tier, *item in items]

    def needed(self, tier: str) -> int:
        """Bytes of a tier, of "ram", or of one of several devices."""
        return sum(nbytes for _, _, nbytes in self._items_of(tier))

    def _items_of(self, tier: str) -> list[Item]:
        devices = ("gpu", *self.pools)
        parts = {"gpu": devices, "ram": (*devices, "cpu")}.get(tier, (tier,))
        return [item for item in self.items if item[0] in parts]

    def _short(self) -> dict[str, int]:
        """Bytes beyond the limit of each pool that is too small: of devices, tiers, and without CUDA of "ram"."""
        ram = {"ram": self.limits["ram"]} if self.shared else {}
        devices = self.pools or {"gpu": self.limits["gpu"]}
        limits = ram | devices | {tier: self.limits[tier] for tier in ("cpu", "disk")}
        return {pool: n for pool, limit in limits.items() if (n := self.needed(pool) - limit) > 0}

    def missing(self) -> dict[str, int]:
        """Bytes beyond the limit of each tier that is too small, and without CUDA of "ram"."""
        found: dict[str, int] = {}
        for pool, nbytes in self._short().items():
            tier = "gpu" if pool in self.pools else pool
            found[tier] = found.get(tier, 0) + nbytes
        return found

    def check(self, message: str = "", advice: dict[str, str] = GIVEN_POLICY_ADVICE) -> None:
        """Raises PlanError, after a message, naming each device and tier that is too small, the bytes needed and
        available, and what to change, by `advice` for each tier."""
        pools = self._short()
        short = []
        names = _RAM_NAMES if self.shared else _NAMES
        for pool in ("ram",) if "ram" in pools else pools:
            needed = self.needed(pool)
            limit = (self.limits | self.pools)[pool]
            _, what, nbytes = max(self._items_of(pool), key=lambda item: item[2])
            tier = "gpu" if pool in self.pools else pool
            remedy = advice["ram" if self.shared and tier == "gpu" else tier]
            short.append(
                f"{names.get(pool, pool)} is too small: needs {gib(needed)} ({needed} bytes), there are {gib(limit)} "
                f"({limit} bytes); most goes to {what} ({gib(nbytes)}): {remedy}"
            )
        if short:
            raise PlanError(message + "; ".join(short))

    def describe(self) -> str:
        """A table for humans: every item, then each device and tier, or without CUDA RAM and disk, against its
        limit."""
        lines = ["memory plan:"]
        width = max(map(len, ("disk", *self.pools))) + 1
        for tier, what, nbytes in self.items:
            name = "RAM" if self.shared and tier in ("gpu", "cpu") else tier
            lines.append(f"  {name:<{width}}{gib(nbytes):>12}  {what}")
        for name, (needed, limit) in self.totals().items():
            lines.append(f"  {name:<{width}}{gib(needed):>12}  of {gib(limit)}")
        return "\n".join(lines)

    def totals(self) -> dict[str, tuple[int, int]]:
        """Bytes needed and their limit for each device and tier; without CUDA for RAM and disk."""
        found = {pool: (self.needed(pool), limit) for pool, limit in self.pools.items()}
        tiers = {tier: (self.needed(tier), self.limits[tier]) for tier in TIERS}
        if not self.shared:
            return found | {tier: total for tier, total in tiers.items() if tier != "gpu" or not found}
        limit = self.limits["ram"] if self.needed("cpu") else min(self.limits["gpu"], self.limits["ram"])
        return found | {"RAM": (self.needed("ram"), limit), "disk": tiers["disk"]}


def plan_policy(
    policy: Policy, shapes: Shapes, workload: Workload, resources: Resources
) -> tuple[Placement, MemoryPlan]:
    """The placement of a policy, and the bytes it takes at its peak against the limits."""
    batches = batch_sizes(len(workload.prompt_lens), policy)
    layouts = shapes.layouts(batches)
    placement = Placement.of(policy, [layer.shapes for layer in shapes.layers], len(batches), shapes.nbytes)
    plan = MemoryPlan(limits=resources.limits, shared=not shapes.cuda, pools=resources.pools)
    _plan_process(plan, shapes, workload, resources, sum(batches))
    computing = []
    rooms = []
    for n, (device, limit) in enumerate(resources.devices.items()):
        has_head = n == len(resources.devices) - 1
        items = _plan_computing(policy, shapes, placement, batches, workload, resources, has_head)
        computing.append(items)
        layers = shapes.layers if has_head else shapes.layers[:-1]
        buffers = _weight_buffers(shapes, placement, policy.overlap, layers) if resources.pools else []
        taken = sum(nbytes for tier, _, nbytes in [*items, *buffers] if tier == "gpu")
        rooms.append(limit - plan.needed(device) - taken)
    if resources.pools:
        placement.spans = divide(_layer_bytes(shapes, placement, layouts), rooms)
    for device, span, items in zip(resources.devices, placement.spans, computing):
        layers = of_span(span, shapes.layers)
        plan.add_all(device, _plan_weights(shapes, placement, layers))
        begin = len(plan.items)
        plan.add_all(device, _weight_buffers(shapes, placement, policy.overlap, layers))
        end = len(plan.items)
        plan.add_all(device, _plan_cache(policy, shapes, placement.cache_of(span), batches, layouts))
        shared = shared_bytes(shapes, resources) * len(span) // shapes.spec.layers
        plan.add(device, "prefixes that prompts share", shared)
        plan.add_all(device, items)
    # staged whole where there is room: while layers compute, the disk may have time to read all of the head
    if plan.missing() and placement.weights[shapes.head] == "disk" and may_slice(shapes, sum(batches)):
        sliced = replace(placement, sliced=shapes.head)
        buffers = _weight_buffers(shapes, sliced, policy.overlap, layers)
        if sum(nbytes for *_, nbytes in buffers) < sum(nbytes for *_, nbytes in plan.items[begin:end]):
            del plan.items[begin:end]
            plan.add_all(device, buffers)
            return sliced, plan
    return placement, plan


def may_slice(shapes: Shapes, sequences: int) -> bool:
    """Whether the head's matmul may read it from disk a slice at a time: where a pass of so many sequences multiplies
    with it once, and so reads it once, as it does a head that is staged."""
    return not shapes.cuda and sequences * shapes.workload.logits <= HEAD_ROWS


def _plan_process(plan: MemoryPlan, shapes: Shapes, workload: Workload, resources: Resources, sequences: int) -> None:
    """What is there once, whatever the number of devices."""
    tier = "cpu" if shapes.cuda else next(iter(resources.devices))
    plan.add(tier, "the process itself", resources.baseline)
    plan.add(tier, "generated tokens", workload.output_bytes)
    plan.add(tier, "grammars of structured output", grammar_bytes(workload, sequences))
    plan.add("disk", "converted copy of the weights", shapes.copy_bytes)


def _layer_bytes(shapes: Shapes, placement: Placement, layouts: dict[tuple[int, int], KVLayout]) -> list[int]:
    """Bytes of each decoder layer that lie on its device, with embedding and head in the first and the last."""
    found = []
    for layer in shapes.layers:
        found.append(sum(shapes.nbytes(name) for name in layer.shapes if placement.weights[name] == "gpu"))
    for (layer, batch), tier in placement.cache.items():
        if tier == "gpu":
            layout = layouts[layer, batch]
            found[layer + 1] += layout.kv_bytes + layout.meta_bytes
    embedding, *decoders, head = found
    decoders[0] += embedding
    decoders[-1] += head
    return decoders


def _plan_weights(shapes: Shapes, placement: Placement, layers: Sequence[Layer]) -> list[Item]:
    plan = MemoryPlan()
    nbytes = dict.fromkeys(TIERS, 0)
    for name in shapes_of(layers):
        each = shapes.tensor_bytes[name]
        # random weights on disk begin a page each (`DummyCheckpoint.on_disk`)
        tier = placement.weights[name]
        nbytes[tier] += aligned(each.stored) if tier == "disk" else each.memory
    plan.add("gpu", "weights", nbytes["gpu"])
    plan.add("cpu", "weights", nbytes["cpu"])
    if shapes.dummy:  # a real checkpoint is on disk already
        plan.add("disk", "random weights", nbytes["disk"])
    return plan.items


def _weight_buffers(shapes: Shapes, placement: Placement, overlap: bool, layers: Sequence[Layer]) -> list[Item]:
    """What weights take on their way to matmuls."""
    plan = MemoryPlan()
    tiers = placement.weights
    tensors = {name: shapes.tensor_bytes[name] for name in shapes_of(layers)}
    sizes = {name: each.staging[tiers[name]] for name, each in tensors.items()}
    in_slices = StagingBytes()
    if placement.sliced in tensors:
        in_slices = tensors[placement.sliced].sliced
        sizes[placement.sliced] = in_slices._replace(device=0)
    buffers = largest_unit(list(map(sizes.get, unit.streamed_shapes)) for unit in units_of(layers))
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


def _plan_cache(
    policy: Policy,
    shapes: Shapes,
    tiers: dict[tuple[int, int], str],
    batches: list[int],
    layouts: dict[tuple[int, int], KVLayout],
) -> list[Item]:
    """`tiers`: of the KV blocks of a device."""
    plan = MemoryPlan()
    sizes = kv_bytes(layouts, tiers, policy.overlap, shapes.cuda)
    for tier in TIERS:
        plan.add(tier, "KV cache", sizes.tiers[tier])
    plan.add("gpu", "KV staging buffers", sizes.count * (sizes.staging + sizes.meta))
    plan.add("cpu", "KV buffers for disk reads and writes", sizes.count * sizes.host + sizes.write)
    plan.add("cpu" if shapes.cuda else "gpu", "KV buffer for write-back", sizes.row)
    if sizes.row:  # each write-back may hold the tokens of its matmul group
        new_tokens = sizes.count * max(matmul_rows(batches, group_rows(shapes.spec)))
        plan.add("gpu", "keys and values being written back", new_tokens * shapes.most(lambda kind: kind.kv.row_bytes))
    return plan.items


def _plan_computing(
    policy: Policy,
    shapes: Shapes,
    placement: Placement,
    batches: list[int],
    workload: Workload,
    resources: Resources,
    has_head: bool,
) -> list[Item]:
    """What computing takes, besides what the layers hold: hidden states, and workspace."""
    plan = MemoryPlan()
    longest = workload.longest
    hidden = shapes.spec.state_width * shapes.itemsize  # bytes of a token's state between two stages
    for k, tier in enumerate(placement.activations):
        plan.add(tier, f"activations of batch {k}", batches[k] * longest * hidden)
    rows = decode_rows(batches, workload, workload.row_tokens(policy, shapes.cuda))
    plan.add("gpu", "activations of a decode step", rows * hidden)
    micro_bytes = micro_tokens(policy.prefill_tokens, longest, batches[0]) * hidden
    sizes = activation_bytes(placement.activations, micro_bytes, policy.overlap, shapes.cuda)
    plan.add("gpu", "activation staging buffers", sizes.count * sizes.staging)
    plan.add("gpu", "activations being written back", WRITE_BACKS * sizes.staging * policy.overlap)
    plan.add("cpu", "activation buffers for disk reads and writes", 2 * sizes.host)
    plan.add("gpu", "workspace of matrix libraries", resources.workspace)
    workspace = workspace_bytes(policy, shapes, longest, batches, workload.cached_len, has_head)
    plan.add("gpu", "workspace for computing one layer", workspace)
    return plan.items


def decode_rows(batches: list[int], workload: Workload, row_tokens: int) -> int:
    """Tokens of a pass whose hidden states stay on the device: `row_tokens` for each place, and prompts of rows that
    join the matmuls of a decode step, of up to GROUP_ROWS rows."""
    places = sum(batches)
    joining = min(len(batches) * GROUP_ROWS, places * workload.longest) if len(workload.prompt_lens) > places else 0
    return places * row_tokens + joining


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
