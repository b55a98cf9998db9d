"""The policy with the highest predicted throughput: a linear program over the nine placement fractions inside, an
enumeration of the sizes of batches, and of prefill's micro-batches, outside (FlexGen, arXiv 2303.06865, section 4.3).
One more variable, which is whole, says whether the device holds the vocabulary head.

The linear program is a relaxation: every placement of whole tensors and KV blocks is a point of it, and its seconds are
a lower bound of the cost model's. So sizes whose bound is no better than the best policy so far are left out, and the
result is that of the whole grid. (A last block that is not full is taken to be no better than the others.)
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import ceil, inf

import numpy as np
import pulp

from h2o_flexgen.errors import PlanError, UserError
from h2o_flexgen.machine.profile import Profile
from h2o_flexgen.planning.budget import MIN_HH_RATIO
from h2o_flexgen.planning.cost import CostModel, Part, Prediction, batches_of
from h2o_flexgen.planning.losses import Losses
from h2o_flexgen.planning.memory import SEARCHED_ADVICE, MemoryPlan, Resources, decode_rows, plan_policy, shared_bytes
from h2o_flexgen.planning.shapes import Shapes
from h2o_flexgen.planning.traffic import Flows, Offloaded
from h2o_flexgen.planning.workload import Workload, batch_sizes, micro_tokens
from h2o_flexgen.planning.workspace import workspace_bytes
from h2o_flexgen.policy import KINDS, TIERS, Policy
from h2o_flexgen.storage.queues import double_buffers, kv_buffers
from h2o_flexgen.storage.wal import wal_rows

BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256)
NUM_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
#: what is tried is large enough for matmuls to run at their best
PREFILL_TOKENS = (Policy.prefill_tokens, 512)
#: solvers dislike numbers that are far apart
_GIB = 2.0**-30

#: at most: rounds in which fractions become a policy that fits, and moves that improve the best one
_ROUNDS = 8
_MOVES = 24
#: of placements that take equally long, that which moves least: what a second of traffic that hides counts
_TIE = 1e-3

#: fractions of each of KINDS on TIERS: numbers, arrays of several placements, or variables of a linear program
Placed = list


@dataclass(frozen=True)
class Constraints:
    """What is not for the search to choose.

    Attributes:
        gpu_batch_size, num_gpu_batches, cpu_cache_compute, prefill_tokens: of the policy; None lets the search choose.
        overlap: of the policy.
        max_latency: the most seconds of a block.
        min_hh_ratio: the floor of the KV budget "auto".
        losses: what budgets cost in quality, for the KV budget "auto".
        resident: take everything on the compute device, without a search, if it fits and nothing is to be gained.
        one_block: throughput is that of a full block, whatever the number of prompts.

    Raises:
        UserError: a latency that is not more than 0.
    """

    gpu_batch_size: int | None = None
    num_gpu_batches: int | None = None
    cpu_cache_compute: bool | None = None
    prefill_tokens: int | None = None
    overlap: bool = True
    max_latency: float | None = None
    min_hh_ratio: float = MIN_HH_RATIO
    losses: Losses | None = None
    resident: bool = True
    one_block: bool = False

    def __post_init__(self):
        if self.max_latency is not None and not self.max_latency > 0:
            raise UserError(f"`max_latency` must be more than 0 s, not {self.max_latency}")

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """The `prefill_tokens` to be tried, the most first."""
        return PREFILL_TOKENS if self.prefill_tokens is None else (self.prefill_tokens,)

    def planned(self, workload: Workload, policy: Policy) -> Workload:
        """The prompts whose memory counts."""
        return replace(workload, prompt_lens=workload.prompt_lens[: policy.block_size]) if self.one_block else workload


@dataclass(frozen=True)
class Candidate:
    """A policy, its costs and its bytes."""

    policy: Policy
    prediction: Prediction
    plan: MemoryPlan


class Search:
    """Policies for one model, job and machine."""

    def __init__(
        self,
        profile: Profile,
        shapes: Shapes,
        workload: Workload,
        resources: Resources,
        constraints: Constraints,
    ):
        self.profile = profile
        self.shapes = shapes
        self.resources = resources
        self.constraints = constraints
        self.num_prompts = len(workload.prompt_lens)
        # the plan must hold for the longest prompts; the search takes all to be as long
        self.workload = replace(workload, prompt_lens=(workload.longest,) * self.num_prompts)
        self.cost = CostModel(profile, shapes, workload.gen_len)
        matrices = {n for layer in shapes.layers for n, s in layer.shapes.items() if len(s) > 1}
        self._head_bytes = max(map(shapes.nbytes, shapes.streamed[-1]))
        #: of all weights, with which a policy places the head on the device (`placement.place_weights`)
        self._head_share = self._head_bytes / sum(map(shapes.nbytes, matrices))
        self.max_latency = inf if constraints.max_latency is None else constraints.max_latency
        self._seen: dict[Policy, Candidate] = {}

    # one policy

    def candidate(self, policy: Policy) -> Candidate:
        """Cost and bytes of a policy, whether it fits or not."""
        if policy not in self._seen:
            planned = self.constraints.planned(self.workload, policy)
            placement, plan = plan_policy(policy, self.shapes, planned, self.resources)
            prediction = self.cost.predict(policy, placement, planned.prompt_lens)
            self._seen[policy] = Candidate(policy, prediction, plan)
        return self._seen[policy]

    def missing(self, c: Candidate) -> float:
        """Bytes, or seconds of latency, by which a policy is beyond the limits; 0 if it fits."""
        return sum(c.plan.missing().values()) + max(0.0, c.prediction.block_seconds - self.max_latency)

    def score(self, c: Candidate) -> tuple[float, float]:
        """(what is missing, seconds per prompt): the smaller, the better."""
        return self.missing(c), c.prediction.job_seconds / c.prediction.num_prompts

    # the search

    def best(self) -> Candidate:
        """The policy with the highest predicted throughput of the job.

        Raises:
            PlanError: nothing fits, with the tiers that are short and by how much, or nothing is fast enough for
                `max_latency`.
            UserError: the solver cannot be run.
        """
        unplaced = list(self.unplaced())
        bounds = sorted((self.bound(policy), n) for n, policy in enumerate(unplaced))
        best: Candidate | None = None
        for bound, n in bounds:
            to_beat = inf if best is None else self.score(best)[1]
            if bound >= to_beat:
                break
            found = self.placed(unplaced[n], to_beat)
            if found is not None and (best is None or self.score(found) < self.score(best)):
                best = found
        return self._improved(best or self._smallest(unplaced))

    def unplaced(self) -> Iterator[Policy]:
        """Policies with all batch sizes and micro-batches to be searched, and with nothing placed."""
        given = self.constraints
        N = self.num_prompts
        cpu_choices = [False, True] if self.shapes.cuda else [False]
        if given.cpu_cache_compute is not None:
            cpu_choices = [given.cpu_cache_compute]
        sizes = {*(b for b in BATCH_SIZES if b < N), min(N, BATCH_SIZES[-1])}
        for size in [given.gpu_batch_size] if given.gpu_batch_size else sorted(sizes):
            most = ceil(N / size)
            counts = {k for k in NUM_BATCHES if k <= most}
            # blocks that share the prompts evenly waste nothing on the last one
            counts |= {k for n in range(1, 9) if (k := ceil(most / n)) <= NUM_BATCHES[-1]}
            for count in [given.num_gpu_batches] if given.num_gpu_batches else sorted(counts):
                for on_cpu, tokens in product(cpu_choices, self._micro_batches(size)):
                    yield Policy(size, count, (0, 0, 0, 0, 0, 0), given.overlap, on_cpu, tokens)

    def _micro_batches(self, size: int) -> list[int]:
        """Those `prefill_tokens` whose micro-batches of `size` sequences take different room, the most of each."""
        found = {}
        for tokens in self.constraints.micro_batches:
            found.setdefault(micro_tokens(tokens, self.workload.longest, size), tokens)
        return list(found.values())

    # bounds

    def _phases(self, policy: Policy, x: Placed) -> list[tuple[int, Flows]]:
        """[(how often, what runs at the same time)] of a block's prefill and decode, as if all layers were one."""
        batches = batches_of(policy, self.workload.prompt_lens[: policy.block_size])
        L = self.shapes.spec.layers
        W = self.cost.streamed_bytes
        found = []
        blocks = L * sum(size for size, _ in batches)
        weights, kv, activations = (
            Offloaded(total * cpu, total * disk) for total, (_, cpu, disk) in zip((W, blocks, blocks), x)
        )
        part = Part(weights, x[0][1] + x[0][2], kv, activations, L)
        for steps, layer_flows, head in self.cost.phases(batches):
            flows = layer_flows(policy, batches, part)
            found.append((steps, flows._replace(compute=flows.compute + head)))
        return found

    def bound(self, policy: Policy) -> float:
        """Seconds per prompt that no placement can undercut; infinite if there is no room, or no time at all.

        What does not fit in memory moves to a lower tier. For each reason why a phase takes its time, the bound counts
        the moves that cost it least.
        """
        lower, in_all = (TIERS[1:], ("gpu", "cpu")) if self.shapes.cuda else (TIERS[2:], ("ram",))
        rooms = [("gpu",), in_all, (*in_all, "disk")]
        resident = [_on("gpu")] * len(KINDS)
        moves = [[_on(tier) if k == kind else _on("gpu") for k in KINDS] for kind in KINDS for tier in lower]
        x = np.array([resident, *moves]).transpose(1, 2, 0)  # all at once
        memory = self._memory(policy, x, 1)
        phases = self._phases(policy, x)
        spread = partial(np.broadcast_to, shape=x.shape[2:])
        shape = (len(KINDS), len(lower))
        needed = np.array([spread(sum(memory[tier] for tier in room)) for room in rooms]).T
        bounds = [flows.bounds(self.profile.links, policy.overlap) for _, flows in phases]
        seconds = np.array([list(map(spread, each)) for each in bounds]).transpose(2, 0, 1)
        freed = (needed[0] - needed[1:]).reshape(*shape, len(rooms))
        costs = (seconds[1:] - seconds[0]).reshape(*shape, *seconds[0].shape)
        least = seconds[0] + costs.min(axis=1).clip(max=0).sum(axis=0)  # what gains time is moved in any case
        limits = [sum(self.resources.limits[tier] for tier in room) for room in rooms]
        more = [_least(needed[0, n] - limit, freed[..., n], costs.clip(min=0)) for n, limit in enumerate(limits)]
        longest = (least + np.max(more, axis=0)).max(axis=1)
        block = sum(times * s for (times, _), s in zip(phases, longest))
        return block / min(policy.block_size, self.num_prompts) if block <= self.max_latency else inf

    # the linear program

    def placed(self, policy: Policy, to_beat: float = inf) -> Candidate | None:
        """The policy with the best fractions as whole percentages; None if none fits and takes less than `to_beat`
        seconds per prompt. The program knows too little of staging buffers: what a plan lacks is taken off the limits,
        and the program solved again."""
        limits, least = dict(self.resources.limits), self.cost.streamed_bytes / 200  # half a percentage of weights
        for _ in range(_ROUNDS):
            percent = self.relaxed(policy, limits, to_beat)
            if percent is None:
                return None
            found = self.candidate(replace(policy, percent=percent))
            missing = found.plan.missing()
            if missing:  # hidden states that all stay on the device need no staging buffers
                found = self.candidate(replace(policy, percent=(*percent[:4], 100, 0)))
            if self.missing(found) == 0:
                return found
            if not missing:  # but too slow
                return None
            for tier, nbytes in missing.items():
                limits[tier] -= max(nbytes, least)
            to_beat = inf  # with other limits the program is no bound
        return None

    def relaxed(self, policy: Policy, limits: dict[str, int], to_beat: float = inf) -> tuple[int, ...] | None:
        """Percentages that minimise the seconds of a block, by linear programming; None if nothing fits, or if it takes
        more than `to_beat` seconds per prompt."""
        shapes = self.shapes
        lp = pulp.LpProblem("policy", pulp.LpMinimize)
        x = [[pulp.LpVariable(f"{kind}_{tier}", 0, 1) for tier in TIERS] for kind in KINDS]
        holds_head = pulp.LpVariable("holds_head", cat=pulp.LpBinary)
        lp += x[0][0] >= holds_head * self._head_share
        for fractions in x:
            lp += pulp.lpSum(fractions) == 1
            if not shapes.cuda:  # the cpu tier would be a second copy in the same RAM
                lp += fractions[1] == 0
        for tier, needed in self._memory(policy, x, holds_head).items():
            lp += needed * _GIB <= limits[tier] * _GIB
        count = min(policy.block_size, self.num_prompts)
        phases = self._phases(policy, x)
        seconds = [pulp.LpVariable(f"seconds_{n}", 0) for n in range(len(phases))]
        for longest, (_, flows) in zip(seconds, phases):
            for bound in flows.bounds(self.profile.links, policy.overlap):
                lp += longest >= bound
        block = pulp.lpSum(times * longest for longest, (times, _) in zip(seconds, phases))
        busy = pulp.lpSum(times * s for times, flows in phases for s in flows.busy(self.profile.links).values())
        lp += block + _TIE * busy
        most = min(to_beat * count, self.max_latency)
        if most < inf:
            lp += block <= most
        _solve(lp)
        if lp.status == pulp.LpStatusInfeasible:
            return None
        if lp.status != pulp.LpStatusOptimal:  # the solver gave up: the pair must not be lost for that
            return (100, 0, 100, 0, 100, 0)
        percent = []
        for kind in x:
            gpu, cpu, disk = (round(100 * v.value(), 4) for v in kind)
            least = ceil(100 * self._head_share) if kind is x[0] and holds_head.value() > 0.5 else 0
            gpu = max(int(gpu), least)
            percent += [gpu, int(cpu) if disk > 0 else 100 - gpu]
        return tuple(percent)

    def _memory(self, policy: Policy, x: Placed, holds_head: float) -> dict[str, float]:
        """Bytes needed of each tier that has a limit, at most what the plan says; `holds_head`: 1 if the device holds
        the vocabulary head, else 0."""
        shapes = self.shapes
        kv = self.shapes.kv
        W = self.cost.streamed_bytes
        count = min(policy.block_size, self.num_prompts)
        blocks = shapes.spec.layers * count
        KV = blocks * (kv.kv_bytes + kv.meta_bytes)
        A = count * self.workload.longest * self.cost.hidden_bytes
        (wg, wc, wd), (cg, cc, cd), (ag, ac, ad) = x
        gpu = self._fixed_bytes(policy) + wg * W + cg * KV + ag * A
        # staging buffers: as large as an average layer, or the head where it streams, and as a KV block
        layer = W / (shapes.spec.layers + 2)
        head = self._head_bytes
        gpu += double_buffers(policy.overlap) * (layer * (wc + wd) + max(0, head - layer) * (1 - holds_head))
        staged = min(count, policy.gpu_batch_size) * shapes.most_slots * kv.row_bytes
        gpu += kv_buffers(policy.overlap, False) * staged * (cc + cd)
        cpu = wc * W + cc * KV + cd * (blocks * kv.meta_bytes) + ac * A
        if shapes.cuda:
            cpu += self._process_bytes(policy)
        disk = cd * (blocks * (kv.slots + wal_rows(kv.segments)) * kv.row_bytes) + ad * A
        if shapes.dummy:
            disk += wd * (shapes.stored_ratio * W)
        needed = {"gpu": gpu, "cpu": cpu, "disk": disk, "ram": gpu + cpu}
        return {tier: needed[tier] for tier in self.resources.limits}

    def _fixed_bytes(self, policy: Policy) -> int:
        """What the device holds whatever the placement of weights and cache."""
        batches = batch_sizes(self.num_prompts, policy)
        workspace = workspace_bytes(policy, self.shapes, self.workload.longest, batches, self.workload.cached_len)
        rows = decode_rows(batches, len(self.workload.prompt_lens), self.workload.longest)
        nbytes = self.resources.workspace + workspace + rows * self.cost.hidden_bytes
        nbytes += shared_bytes(self.shapes, self.resources)
        return nbytes if self.shapes.cuda else nbytes + self._process_bytes(policy)

    def _process_bytes(self, policy: Policy) -> int:
        """RAM of the process itself, with what it has generated."""
        return self.resources.baseline + self.constraints.planned(self.workload, policy).output_bytes

    # without it

    def _moves(self, policy: Policy, step: int) -> Iterator[Policy]:
        """Policies with `step` percent of weights, cache or activations moved to another tier."""
        tiers = TIERS if self.shapes.cuda else ("gpu", "disk")
        for n in range(3):
            gpu, cpu = policy.percent[2 * n : 2 * n + 2]
            share = {"gpu": gpu, "cpu": cpu, "disk": 100 - gpu - cpu}
            for a in tiers:
                for b in tiers:
                    amount = min(step, share[a])
                    if a != b and amount > 0:
                        new = {**share, a: share[a] - amount, b: share[b] + amount}
                        percent = (*policy.percent[: 2 * n], new["gpu"], new["cpu"], *policy.percent[2 * n + 2 :])
                        yield replace(policy, percent=percent)

    def _improved(self, best: Candidate) -> Candidate:
        """Small moves that make it better, until there are none: rounding may have lost something."""
        for _ in range(_MOVES):
            moves = (policy for step in (16, 4, 1) for policy in self._moves(best.policy, step))
            found = min(map(self.candidate, moves), key=self.score)
            if self.score(found) >= (self.missing(best), self.score(best)[1] * (1 - 1e-6)):
                break
            best = found
        return best

    def _smallest(self, unplaced: list[Policy]) -> Candidate:
        """A placement of the smallest block, from those with each kind on one tier. Raises PlanError if none fits, or
        none is fast enough."""
        smallest = min(unplaced, key=lambda p: (p.block_size, p.num_gpu_batches, p.prefill_tokens))
        tiers = [(0, 0), (0, 100), (100, 0)] if self.shapes.cuda else [(0, 0), (100, 0)]
        tried = [self.candidate(replace(smallest, percent=w + c + a)) for w in tiers for c in tiers for a in tiers]
        found = self._improved(min(tried, key=self.score))
        if self.missing(found) == 0:
            return found
        size = smallest.gpu_batch_size
        batches = smallest.num_gpu_batches
        if found.plan.missing():
            # what could be on several tiers is missed where it is cheapest
            least = min(tried, key=lambda c: [c.plan.missing().get(tier, 0) for tier in ("ram", *TIERS)])
            least.plan.check(f"no policy fits this job, not even {size} x {batches} sequences: ", SEARCHED_ADVICE)
        free = replace(self.constraints, gpu_batch_size=size, num_gpu_batches=batches, max_latency=None)
        fastest = Search(self.profile, self.shapes, self.workload, self.resources, free).best()
        if self.missing(fastest) > 0:
            raise PlanError(
                f"no policy finishes a block within {self.max_latency:g} s: the fastest found takes "
                f"{fastest.prediction.block_seconds:.1f} s; raise `max_latency` or shorten the output"
            )
        return fastest


def _on(tier: str) -> tuple[float, ...]:
    """Fractions on TIERS."""
    return tuple(float(each == tier) for each in TIERS)


def _least(short: float, freed: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """The least cost of freeing `short` bytes: a fractional knapsack.

    Args:
        freed: (kinds, tiers), bytes that are freed if all of a kind moves to a tier.
        costs: (kinds, tiers, phases, reasons), seconds of that, not below 0.

    Returns:
        (phases, reasons), infinite if all moves together do not free as much.
    """
    most = freed.max(axis=1).clip(min=0)
    if most.sum() < short:
        return np.full(costs.shape[2:], inf)
    rates = np.full(costs.shape, inf)
    np.divide(costs, freed[..., None, None], out=rates, where=freed[..., None, None] > 0)
    rates = rates.min(axis=1)
    order = np.argsort(rates, axis=0)
    rates = np.take_along_axis(rates, order, axis=0)
    most = most[order]
    moved = (short - (most.cumsum(axis=0) - most)).clip(0, most)
    return np.multiply(rates, moved, out=np.zeros_like(rates), where=moved > 0).sum(axis=0)


def _solve(lp: pulp.LpProblem) -> None:
    """By CBC, which comes with pulp. Raises UserError if it cannot be run."""
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
