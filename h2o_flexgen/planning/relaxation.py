"""The linear relaxation of a placement: bytes and seconds as linear functions of the fractions of weights, cache and
activations on each tier.

Every placement of whole tensors and KV blocks is a point of it, where no more bytes and seconds are counted than it
really takes. So the fewest seconds of any point are a lower bound: `solve` finds them by linear programming (FlexGen,
arXiv 2303.06865, section 4.3), `lower_bound` estimates them from below at a fraction of the cost. A binary variable
says whether the vocabulary head is on the device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from math import ceil, inf
from typing import NamedTuple

import numpy as np
import pulp

from h2o_flexgen.errors import UserError
from h2o_flexgen.models.spec import shapes_of
from h2o_flexgen.planning.constraints import Constraints
from h2o_flexgen.planning.cost import CostModel, Part, batches_of
from h2o_flexgen.planning.memory import Resources, decode_rows, may_slice, shared_bytes
from h2o_flexgen.planning.traffic import Amount, Flows, Offloaded
from h2o_flexgen.planning.workload import Workload, batch_sizes, grammar_bytes
from h2o_flexgen.planning.workspace import workspace_bytes
from h2o_flexgen.policy import KINDS, TIERS, Policy
from h2o_flexgen.storage.queues import double_buffers, kv_buffers
from h2o_flexgen.storage.wal import wal_rows

#: bytes to GiB: solvers dislike coefficients of very different magnitudes
_GIB = 2.0**-30
#: weight in the objective of seconds in which a link is busy: decides between equally fast placements
_TIE = 1e-3


class Fractions(NamedTuple):
    """The fractions of one kind on each tier, which sum to 1."""

    device: Amount
    host: Amount
    disk: Amount

    def offloaded(self, total: float) -> Offloaded:
        return Offloaded(total * self.host, total * self.disk)


class RelaxedPlacement(NamedTuple):
    """The fractions of all KINDS: a point of the relaxation."""

    weights: Fractions
    cache: Fractions
    activations: Fractions


class Move(NamedTuple):
    """All of one kind moved off the device.

    Attributes:
        freed: bytes, negative if the staging buffers take more than leaves.
        seconds: by which it prolongs a bottleneck.
    """

    kind: str
    tier: str
    freed: float
    seconds: float


def fewest_seconds(short: float, moves: Sequence[Move]) -> float:
    """A lower bound of the seconds it costs to free `short` bytes, infinite if all moves together free less.

    As in a fractional knapsack the moves with the fewest seconds per byte go first, the last of them in part. A kind
    that has moved frees on another tier only what that frees in addition.
    """
    seconds = 0.0
    freed = dict.fromkeys(KINDS, 0.0)
    for move in sorted((move for move in moves if move.freed > 0), key=lambda move: move.seconds / move.freed):
        more = min(short, move.freed - freed[move.kind])
        if more > 0:
            seconds += move.seconds * more / move.freed
            freed[move.kind] = move.freed
            short -= more
    return inf if short > 0 else seconds


class Relaxation:
    """The relaxed placements of one job on one machine.

    Args:
        workload: whose prompts all have the same length.
    """

    def __init__(self, cost: CostModel, workload: Workload, resources: Resources, constraints: Constraints):
        self.cost = cost
        self.shapes = cost.shapes
        self.workload = workload
        self.resources = resources
        self.constraints = constraints
        self.num_prompts = len(workload.prompt_lens)
        self.max_latency = inf if constraints.max_latency is None else constraints.max_latency
        shapes = self.shapes
        matrices = {name for name, shape in shapes_of(shapes.layers).items() if len(shape) > 1}
        self._head_bytes = shapes.nbytes(shapes.head)
        #: fraction of the weights from which on the head is placed on the device (`placement.place_weights`)
        self._head_share = self._head_bytes / sum(map(shapes.nbytes, matrices))
        lower = ("cpu", "disk") if shapes.cuda else ("disk",)  # without CUDA device and host are the same RAM
        self._moves = [(kind, tier) for kind in KINDS for tier in lower]
        ram = ("gpu", "cpu") if shapes.cuda else ("ram",)
        #: tiers whose limits are added up: the device, all RAM, everything
        self._rooms = [("gpu",), ram, (*ram, "disk")]
        #: everything on the device, and after each of the moves alone
        self._placements = RelaxedPlacement(*(_alone(kind, self._moves) for kind in KINDS))

    def memory(self, policy: Policy, x: RelaxedPlacement, holds_head: Amount) -> dict[str, Amount]:
        """Bytes needed on each tier that has a limit, at most those of `plan_policy`; `holds_head`: 1 if the device
        holds the vocabulary head, else 0."""
        shapes = self.shapes
        weights = self.cost.streamed_bytes
        sequences = min(policy.block_size, self.num_prompts)
        caches = shapes.spec.layers * sequences
        kv_cache = caches * shapes.mean(lambda kind: kind.kv.kv_bytes + kind.kv.meta_bytes)
        kv_files = caches * shapes.mean(lambda kind: (kind.kv.slots + wal_rows(kind.kv.segments)) * kind.kv.row_bytes)
        scores = caches * shapes.mean(lambda kind: kind.kv.meta_bytes)  # stay in RAM when the rest is on disk
        hidden = sequences * self.workload.longest * self.cost.layers.hidden_bytes
        device = self._fixed_bytes(policy) + self._staging_bytes(policy, x, holds_head)
        device += x.weights.device * weights + x.cache.device * kv_cache + x.activations.device * hidden
        host = x.weights.host * weights + x.cache.host * kv_cache + x.cache.disk * scores + x.activations.host * hidden
        if shapes.cuda:
            host += self._process_bytes(policy)
        disk = x.cache.disk * kv_files + x.activations.disk * hidden
        if shapes.dummy:
            disk += x.weights.disk * (shapes.stored_ratio * weights)
        needed = {"gpu": device, "cpu": host, "disk": disk, "ram": device + host}
        return {tier: needed[tier] for tier in self.resources.limits}

    def _staging_bytes(self, policy: Policy, x: RelaxedPlacement, holds_head: Amount) -> Amount:
        """For weights the size of an average layer, or of the head where it streams; for the cache, of a KV block."""
        shapes = self.shapes
        streamed = self.cost.streamed_bytes * (x.weights.host + x.weights.disk)
        if may_slice(shapes, min(policy.block_size, self.num_prompts)):  # what streams besides the head
            weights = (streamed - self._head_bytes) * self._staged(shapes.spec.layers + 1)
        else:
            layer = self.cost.streamed_bytes / (shapes.spec.layers + 2)
            share = self._staged(shapes.spec.layers + 2)
            weights = streamed * share + max(0, self._head_bytes - layer) * (1 - holds_head)
        sequences = min(policy.gpu_batch_size, self.num_prompts)
        kv_block = sequences * shapes.largest_cache
        cache = kv_block * (x.cache.host + x.cache.disk)
        return double_buffers(policy.overlap) * weights + kv_buffers(policy.overlap, False) * cache

    def _staged(self, layers: int) -> float:
        """The fraction of the weights that a staging buffer has room for: an average layer, or a unit of it."""
        largest = max(sum(map(self.shapes.nbytes, unit.streamed_shapes)) for unit in self.shapes.units[1:-1])
        is_cut = len(self.shapes.units) > len(self.shapes.layers)
        return min(1 / layers, largest / self.cost.streamed_bytes) if is_cut else 1 / layers

    def _fixed_bytes(self, policy: Policy) -> int:
        """What the device holds regardless of the placement."""
        batches = batch_sizes(self.num_prompts, policy)
        nbytes = workspace_bytes(policy, self.shapes, self.workload.longest, batches, self.workload.cached_len)
        rows = decode_rows(batches, self.workload, self.workload.row_tokens(policy, self.shapes.cuda))
        nbytes += len(self.resources.devices) * (rows * self.cost.layers.hidden_bytes + self.resources.workspace)
        nbytes += shared_bytes(self.shapes, self.resources)
        return nbytes if self.shapes.cuda else nbytes + self._process_bytes(policy)

    def _process_bytes(self, policy: Policy) -> int:
        """RAM of the process itself, of the generated tokens and of grammars."""
        grammars = grammar_bytes(self.workload, min(policy.block_size, self.num_prompts))
        return self.resources.baseline + self.constraints.planned(self.workload, policy).output_bytes + grammars

    def phases(self, policy: Policy, x: RelaxedPlacement) -> list[tuple[float, Flows]]:
        """[(number of passes, what runs at the same time in one)] for prefill and decode of a block, with all layers as
        one."""
        batches = batches_of(policy, self.workload.prompt_lens[: policy.block_size])
        layers = self.shapes.spec.layers
        caches = layers * min(policy.block_size, self.num_prompts)
        part = Part(
            weights=x.weights.offloaded(self.cost.streamed_bytes),
            streamed=x.weights.host + x.weights.disk,
            cache=x.cache.offloaded(caches),
            activations=x.activations.offloaded(caches),
            layers=layers,
        )
        found = []
        for passes, layer_flows, head in self.cost.phases(batches):
            flows = layer_flows(policy, batches, part)
            found.append((passes, flows._replace(compute=flows.compute + head)))
        return found

    def lower_bound(self, policy: Policy) -> float:
        """Seconds per prompt that no placement can undercut, infinite if there is no room or too little time.

        What does not fit on the device moves to a lower tier. Each bottleneck of a phase is prolonged at least by the
        moves that cost it least, in whichever room is short (`fewest_seconds`).
        """
        memory = self.memory(policy, self._placements, 1)
        shortages = []
        for room in self._rooms:
            resident, *moved = self._each(sum(memory[tier] for tier in room))
            short = resident - sum(self.resources.limits[tier] for tier in room)
            if short > 0:
                shortages.append((short, [resident - nbytes for nbytes in moved]))
        block = 0.0
        for passes, flows in self.phases(policy, self._placements):
            bottlenecks = flows.bounds(self.cost.profile.links, policy.overlap)
            block += passes * max(self._prolonged(self._each(seconds), shortages) for seconds in bottlenecks)
        return block / min(policy.block_size, self.num_prompts) if block <= self.max_latency else inf

    def _prolonged(self, seconds: list[float], shortages: list[tuple[float, list[float]]]) -> float:
        """A lower bound of one bottleneck, from its seconds with everything on the device, then after each of `_moves`;
        `shortages`: bytes that each room is short of, and the bytes that each move frees there."""
        resident, *moved = seconds
        changes = [after - resident for after in moved]
        gained = dict.fromkeys(KINDS, 0.0)  # a kind whose move shortens it counts as moved anyway
        for (kind, _), change in zip(self._moves, changes):
            gained[kind] = min(gained[kind], change)
        lost = 0.0
        for short, freed in shortages:
            moves = [
                Move(kind, tier, nbytes, max(0.0, change))
                for (kind, tier), nbytes, change in zip(self._moves, freed, changes)
            ]
            lost = max(lost, fewest_seconds(short, moves))
        return resident + sum(gained.values()) + lost

    def _each(self, x: Amount) -> list[float]:
        """`x` for each of `_placements`, repeated if it does not depend on them."""
        return np.broadcast_to(x, 1 + len(self._moves)).tolist()

    def solve(self, policy: Policy, limits: dict[str, int], to_beat: float = inf) -> tuple[int, ...] | None:
        """The percentages that minimise the seconds of a block, by linear programming; None if nothing fits or takes
        at most `to_beat` seconds per prompt. Raises UserError if the solver cannot be run."""
        lp = pulp.LpProblem("policy", pulp.LpMinimize)
        x = RelaxedPlacement(*map(_variables, KINDS))
        holds_head = pulp.LpVariable("holds_head", cat=pulp.LpBinary)
        lp += x.weights.device >= holds_head * self._head_share
        for fractions in x:
            lp += pulp.lpSum(fractions) == 1
            if not self.shapes.cuda:  # the host would be a second pool in the same RAM
                lp += fractions.host == 0
        for tier, needed in self.memory(policy, x, holds_head).items():
            lp += needed * _GIB <= limits[tier] * _GIB
        links = self.cost.profile.links
        phases = self.phases(policy, x)
        seconds = [pulp.LpVariable(f"seconds_{n}", 0) for n in range(len(phases))]
        for slowest, (_, flows) in zip(seconds, phases):
            for bound in flows.bounds(links, policy.overlap):
                lp += slowest >= bound
        block = pulp.lpSum(passes * slowest for slowest, (passes, _) in zip(seconds, phases))
        busy = pulp.lpSum(passes * s for passes, flows in phases for s in flows.busy(links).values())
        lp += block + _TIE * busy
        most = min(to_beat * min(policy.block_size, self.num_prompts), self.max_latency)
        if most < inf:
            lp += block <= most
        _run_solver(lp)
        if lp.status == pulp.LpStatusInfeasible:
            return None
        if lp.status != pulp.LpStatusOptimal:  # the solver gave up, which must not exclude these batch sizes
            return (100, 0, 100, 0, 100, 0)
        least_weights = ceil(100 * self._head_share) if holds_head.value() > 0.5 else 0
        return (*_percent(x.weights, least_weights), *_percent(x.cache), *_percent(x.activations))


def _alone(kind: str, moves: list[tuple[str, str]]) -> Fractions:
    """The fractions of a kind: all on the device, then after each single move."""
    tiers = np.array(["gpu", *(tier if moved == kind else "gpu" for moved, tier in moves)])
    return Fractions(*((tiers == tier).astype(float) for tier in TIERS))


def _variables(kind: str) -> Fractions:
    return Fractions(*(pulp.LpVariable(f"{kind}_{tier}", 0, 1) for tier in TIERS))


def _percent(fractions: Fractions, least: int = 0) -> tuple[int, int]:
    """Whole percentages on device and host, rounded towards disk, or towards the host if nothing is on disk."""
    device, host, disk = (round(100 * variable.value(), 4) for variable in fractions)
    device = max(int(device), least)
    return device, int(host) if disk > 0 else 100 - device


def _run_solver(lp: pulp.LpProblem) -> None:
    """Run CBC, which comes with pulp. Raises UserError if that is impossible."""
    root = tempfile.gettempdir()
    try:  # pulp splits its command at blanks
        with tempfile.TemporaryDirectory(prefix="h2o_flexgen-lp-", dir="/tmp" if " " in root else root) as folder:
            solver = pulp.PULP_CBC_CMD(msg=False)
            solver.tmpDir = folder
            lp.solve(solver)
    except (pulp.PulpSolverError, OSError) as e:
        raise UserError(
            f"the policy search cannot run its solver ({e}): give a policy (the batch sizes and `percent`)"
        ) from None
