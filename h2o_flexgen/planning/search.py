"""The policy with the highest predicted throughput: a linear program over the nine placement fractions inside, an
enumeration of batch sizes outside (FlexGen, arXiv 2303.06865, section 4.3).

The linear program is a relaxation: every placement of whole tensors and KV blocks is a point of it, and its seconds are
a lower bound of the cost model's. So a pair of batch sizes whose bound is no better than the best policy so far can be
left out, and the result is that of the whole grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, inf

from h2o_flexgen.errors import PlanError, UserError
from h2o_flexgen.planning.budget import MIN_HH_RATIO
from h2o_flexgen.planning.cost import Batches, CostModel, Prediction
from h2o_flexgen.planning.memory import Plan, Resources, Shapes, plan_policy, tier_name, workspace_bytes
from h2o_flexgen.planning.placement import Placement
from h2o_flexgen.planning.profile import Profile
from h2o_flexgen.planning.solver import pulp, solve
from h2o_flexgen.planning.traffic import Offloaded
from h2o_flexgen.policy import KINDS, TIERS, Policy, gib
from h2o_flexgen.sizes import Workload, batch_sizes, double_buffers, kv_buffers, wal_rows

BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256)
NUM_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
#: solvers dislike numbers that are far apart
_GIB = 2.0**-30

#: gpu, cpu and disk of each of KINDS: numbers, or variables of a linear program
Fractions = dict[str, tuple[float, float, float]]


@dataclass(frozen=True)
class Constraints:
    """What is not for the search to choose.

    Attributes:
        gpu_batch_size, num_gpu_batches, cpu_cache_compute: of the policy; None lets the search choose.
        overlap: of the policy.
        max_latency: the most seconds of a block.
        min_hh_ratio: the floor of the KV budget "auto".
        resident: take everything on the compute device, without a search, if it fits and nothing is to be gained.
        one_block: throughput is that of a full block, not of a job with so many prompts.
    """

    gpu_batch_size: int | None = None
    num_gpu_batches: int | None = None
    cpu_cache_compute: bool | None = None
    overlap: bool = True
    max_latency: float | None = None
    min_hh_ratio: float = MIN_HH_RATIO
    resident: bool = True
    one_block: bool = False

    def planned(self, workload: Workload, policy: Policy) -> Workload:
        """The prompts whose memory counts."""
        return replace(workload, prompt_lens=workload.prompt_lens[: policy.block_size]) if self.one_block else workload


@dataclass(frozen=True)
class Candidate:
    """A policy, its costs and its bytes."""

    policy: Policy
    prediction: Prediction
    plan: Plan


class Search:
    """Policies for one model, job and machine.

    Raises:
        UserError: the solver is not installed.
    """

    def __init__(
        self,
        profile: Profile,
        shapes: Shapes,
        workload: Workload,
        resources: Resources,
        constraints: Constraints,
    ):
        if pulp is None:
            raise UserError("the policy search needs the package pulp: install it, or give a policy (`percent`)")
        self.profile, self.shapes, self.resources, self.constraints = profile, shapes, resources, constraints
        self.num_prompts = len(workload.prompt_lens)
        # the plan must hold for the longest prompts; the search takes all to be as long
        self.workload = replace(workload, prompt_lens=(workload.longest,) * self.num_prompts)
        self.cost = CostModel(profile, shapes, self.workload)
        self.max_latency = inf if constraints.max_latency is None else constraints.max_latency
        self._weights: dict[tuple, dict[str, str]] = {}
        self._seen: dict[Policy, Candidate] = {}

    # one policy

    def candidate(self, policy: Policy) -> Candidate:
        """Cost and bytes of a policy, whether it fits or not."""
        if policy not in self._seen:
            placement, plan = self.plan(policy)
            self._seen[policy] = Candidate(policy, self.cost.predict(policy, placement), plan)
        return self._seen[policy]

    def plan(self, policy: Policy) -> tuple[Placement, Plan]:
        key = policy.fractions("weights")
        planned = self.constraints.planned(self.workload, policy)
        placement, plan = plan_policy(policy, self.shapes, planned, self.resources, self._weights.get(key))
        self._weights[key] = placement.weights
        return placement, plan

    def _missing(self, c: Candidate) -> float:
        """Bytes, or seconds of latency, by which a policy is beyond the limits; 0 if it fits."""
        return c.plan.missing() + max(0.0, c.prediction.block_seconds - self.max_latency)

    def score(self, c: Candidate) -> tuple[float, float]:
        """(what is missing, seconds per prompt): the smaller, the better."""
        p = c.prediction
        one_block = self.constraints.one_block
        return self._missing(c), p.block_seconds / p.block_size if one_block else p.job_seconds / self.num_prompts

    # the search

    def best(self, exhaustive: bool = False) -> Candidate:
        """The policy with the highest predicted throughput of the job.

        Args:
            exhaustive: cost every pair of batch sizes, for tests of the pruning.

        Raises:
            PlanError: nothing fits, with the tier that is short and by how much, or nothing is fast enough for
                `max_latency`.
            UserError: the solver cannot be run.
        """
        pairs = list(self._pairs())
        # the cheapest bound first, which no linear program is needed for
        quick = [(self.quick_bound(pair), n) for n, pair in enumerate(pairs)]
        bounds = sorted((self.per_prompt(pairs[n], s), n) for s, n in quick if s <= self.max_latency and s < inf)
        best: Candidate | None = None
        for bound, n in bounds:
            to_beat = inf
            if best is not None and not exhaustive:
                if bound >= self.score(best)[1]:
                    break
                to_beat = self._block_to_beat(pairs[n], self.score(best)[1])
            fractions = self.relaxed(pairs[n], to_beat)
            if fractions is None:
                continue
            found = self._rounded(pairs[n], fractions)
            if self._missing(found) == 0 and (best is None or self.score(found) < self.score(best)):
                best = found
        return self._improved(best or self._smallest(pairs))

    def _pairs(self) -> Iterator[Policy]:
        """Policies with all batch sizes to be searched, and with nothing placed."""
        given, N = self.constraints, self.num_prompts
        cpu_choices = [False, True] if self.shapes.cuda else [False]
        if given.cpu_cache_compute is not None:
            cpu_choices = [given.cpu_cache_compute]
        sizes = {*(b for b in BATCH_SIZES if b < N), min(N, BATCH_SIZES[-1])}
        for size in [given.gpu_batch_size] if given.gpu_batch_size else sorted(sizes):
            most = ceil(N / size)
            counts = {k for k in NUM_BATCHES if k <= most}
            if not given.one_block:  # blocks that share the prompts evenly waste nothing on the last one
                counts |= {k for n in range(1, 9) if (k := ceil(most / n)) <= NUM_BATCHES[-1]}
            for count in [given.num_gpu_batches] if given.num_gpu_batches else sorted(counts):
                for on_cpu in cpu_choices:
                    yield Policy(size, count, (0, 0, 0, 0, 0, 0), given.overlap, on_cpu)

    # bounds

    def _blocks(self, policy: Policy) -> tuple[float, float, int]:
        """Full blocks of the job, a lower bound for the seconds of the last one, and the prompts of all."""
        if self.constraints.one_block:
            return 1, 0.0, min(policy.block_size, self.num_prompts)
        full, rest = divmod(self.num_prompts, policy.block_size)
        if full == 0:
            return 1, 0.0, rest
        phases = self._compute(policy, self.cost.batches(policy, full * policy.block_size)) if rest else []
        return full, sum(count * seconds for count, seconds in phases), self.num_prompts

    def per_prompt(self, policy: Policy, block_seconds: float) -> float:
        """A bound for a block as a bound for the job."""
        full, last, prompts = self._blocks(policy)
        return (full * block_seconds + last) / prompts

    def _block_to_beat(self, policy: Policy, per_prompt: float) -> float:
        """The other way round: a block that takes longer cannot make a job that takes `per_prompt`."""
        full, last, prompts = self._blocks(policy)
        return (per_prompt * prompts - last) / full

    def _compute(self, policy: Policy, batches: Batches) -> list[tuple[int, float]]:
        """[(how often, seconds)] of the least compute of a block: prefill, then groups of decode steps."""
        cost, L = self.cost, self.shapes.spec.layers
        sizes = [size for size, _ in batches]
        prefill_head, decode_head = cost.head_compute(sizes)
        phases = [(1, L * cost.prefill_compute(policy, batches) + prefill_head)]
        for state in cost.cache_states(batches[0][1]):
            caches = Offloaded(), Offloaded(cpu=L * sum(sizes))
            compute = min(cost.decode_compute(policy, batches, state.slots, cache, L) for cache in caches)
            phases.append((state.steps, compute + decode_head))
        return phases

    def quick_bound(self, policy: Policy) -> float:
        """Seconds of a block that no placement can undercut: the compute of each phase, the weights that the device has
        no room for, what neither device nor RAM has room for. Infinite if there is no room at all."""
        cost, shapes, limits = self.cost, self.shapes, self.resources.limits
        batches = cost.batches(policy, 0)
        length, W = batches[0][1], cost.streamed_bytes
        kv = shapes.spec.layers * sum(size for size, _ in batches) * shapes.kv.slots * shapes.kv.row_bytes
        device = limits["gpu"] - self._fixed_bytes(policy)
        ram = device + limits["cpu"] if shapes.cuda else device
        stored = min(1.0, shapes.stored_ratio)
        if device < 0 or kv + (W * stored if shapes.dummy else 0) > ram + limits["disk"]:
            return inf
        weights = Offloaded(cpu=max(0, W - device)) if shapes.cuda else Offloaded()
        read = max(0, W + kv - ram) * stored
        used = [0, *(state.stored / shapes.kv.slots for state in cost.cache_states(length))]
        seconds = 0.0
        for n, (count, compute) in enumerate(self._compute(policy, batches)):
            step = max(cost.seconds(cost.prefill_flows(policy, compute, length, weights), policy.overlap).values())
            if n:  # prefill writes what decode reads
                step = max(step, max(0, read - (1 - used[n]) * kv) / self.profile.links["disk_to_cpu"].bytes_per_s)
            seconds += count * step
        return seconds

    # the linear program

    def relaxed(self, policy: Policy, to_beat: float = inf) -> Fractions | None:
        """Fractions of each kind on each tier that minimise the seconds of a block, by linear programming; None if
        nothing fits, or if it takes more than `to_beat` seconds."""
        cost, L = self.cost, self.shapes.spec.layers
        batches = cost.batches(policy, 0)
        sizes, length = [size for size, _ in batches], batches[0][1]
        lp, x = self._program()
        sequences = L * sum(sizes)
        weights, kv, activations = (
            Offloaded(cpu=total * x[kind][1], disk=total * x[kind][2])
            for kind, total in zip(KINDS, (cost.streamed_bytes, sequences, sequences))
        )
        # the part of the decoder's weights that is streamed is least if all others' are streamed too
        streamed = pulp.LpVariable("decoder_streamed", 0, 1)
        others = cost.streamed_bytes - cost.decoder_bytes
        lp += streamed >= (weights.cpu + weights.disk - others) * (1 / cost.decoder_bytes)

        prefill_head, decode_head = (head + cost.conversion(weights) for head in cost.head_compute(sizes))
        compute = L * cost.prefill_compute(policy, batches, streamed) + prefill_head
        phases = [(1, cost.prefill_flows(policy, compute, length, weights, kv, activations))]
        for state in cost.cache_states(length):
            compute = cost.decode_compute(policy, batches, state.slots, kv, L, streamed) + decode_head
            phases.append((state.steps, cost.decode_flows(policy, compute, state, weights, kv)))
        seconds = []
        for n, (count, flows) in enumerate(phases):
            longest = pulp.LpVariable(f"seconds_{n}", 0)
            for busy in cost.seconds(flows, policy.overlap).values():
                lp += longest >= busy
            seconds.append(count * longest)
        lp += pulp.lpSum(seconds)
        for most in (self.max_latency, to_beat):
            if most < inf:
                lp += pulp.lpSum(seconds) <= most
        for tier, needed in self._memory(policy, sizes, x).items():
            lp += needed * _GIB <= self.resources.limits[tier] * _GIB
        if not solve(lp):
            return None
        if lp.status != pulp.LpStatusOptimal:  # the solver gave up: the pair must not be lost for that
            return dict.fromkeys(KINDS, (1.0, 0.0, 0.0))
        return {kind: tuple(min(1.0, max(0.0, v.value() or 0.0)) for v in x[kind]) for kind in KINDS}

    def _program(self) -> tuple[pulp.LpProblem, Fractions]:
        """A linear program with the nine fractions."""
        lp = pulp.LpProblem("policy", pulp.LpMinimize)
        x = {kind: [pulp.LpVariable(f"{kind}_{tier}", 0, 1) for tier in TIERS] for kind in KINDS}
        for fractions in x.values():
            lp += pulp.lpSum(fractions) == 1
            if not self.shapes.cuda:  # the cpu tier would be a second copy in the same RAM
                lp += fractions[1] == 0
        return lp, x

    def _memory(self, policy: Policy, sizes: list[int], x: Fractions) -> dict[str, float]:
        """Bytes needed of each tier that has a limit; at most what the plan says of any placement with these
        fractions."""
        shapes, kv, L, B = self.shapes, self.shapes.kv, self.shapes.spec.layers, sum(sizes)
        W, KV = self.cost.streamed_bytes, L * B * (kv.kv_bytes + kv.meta_bytes)
        A = B * self.workload.longest * self.cost.hidden_bytes
        (wg, wc, wd), (cg, cc, cd), (ag, ac, ad) = (x[kind] for kind in KINDS)
        buffers, layer = double_buffers(policy.overlap), W / (L + 2)
        gpu = self._fixed_bytes(policy) + wg * W + buffers * wc * layer + ag * A
        if shapes.converts_by_compute:
            gpu += wd * (buffers * shapes.stored_ratio * layer + layer)
        else:
            gpu += buffers * wd * layer
        least, most = (kv_buffers(policy.overlap, on_disk) for on_disk in (False, True))
        staged = sizes[0] * (kv.kv_bytes + kv.meta_bytes if shapes.cuda else kv.kv_bytes)
        gpu += cg * KV + (least * (cc + cd) + (most - least) * cd) * staged
        cpu = wc * W + cc * KV + cd * (L * B * kv.meta_bytes) + ac * A
        disk = cd * (L * B * (kv.slots + wal_rows(shapes.segments)) * kv.row_bytes) + ad * A
        if shapes.dummy:
            disk += wd * (shapes.stored_ratio * W)
        if shapes.cuda:
            cpu += self._process_bytes(policy) + buffers * wd * (shapes.stored_ratio * layer)
            cpu += cd * ((most + 1) * sizes[-1] * kv.kv_bytes)
        needed = {"gpu": gpu, "cpu": cpu, "disk": disk, "ram": gpu + cpu}
        return {tier: needed[tier] for tier in self.resources.limits}

    def _fixed_bytes(self, policy: Policy) -> int:
        """What the device holds whatever the placement of weights and cache."""
        batches = batch_sizes(self.num_prompts, policy)
        workspace = workspace_bytes(policy, self.shapes, self.workload.longest, batches)
        nbytes = self.resources.workspace + workspace + sum(batches) * self.cost.hidden_bytes
        return nbytes if self.shapes.cuda else nbytes + self._process_bytes(policy)

    def _process_bytes(self, policy: Policy) -> int:
        """RAM of the process itself, with what it has generated."""
        return self.resources.baseline + self.constraints.planned(self.workload, policy).output_bytes

    # from fractions to a policy

    def _rounded(self, policy: Policy, fractions: Fractions) -> Candidate:
        """Whole percentages near the fractions, or with the head on the device, moved towards slower tiers until they
        fit."""
        percent = []
        for kind in KINDS:
            gpu, cpu, _ = (round(100 * f, 4) for f in fractions[kind])
            gpu = int(gpu)
            percent += [gpu, min(100 - gpu, ceil(cpu)) if self.shapes.cuda else 0]
        # a kind that is resident as a whole needs no staging buffers
        for start in (percent, (*percent[:4], 100, 0), (*percent[:2], 100, 0, 100, 0)):
            found = self._fitted(replace(policy, percent=start))
            if self._missing(found) == 0:
                break
        if percent[0] < self._head_percent:
            start = (self._head_percent, min(percent[1], 100 - self._head_percent), *found.policy.percent[2:])
            found = min(found, self._fitted(replace(policy, percent=start)), key=self.score)
        return found

    @property
    def _head_percent(self) -> int:
        """The percentage of weights with which the head is resident. It may be larger than any other layer: without it
        the staging buffers for weights, which the linear program takes to be as large as an average layer, shrink."""
        return ceil(100 * self.cost.head_bytes / self.cost.streamed_bytes)

    def _fitted(self, policy: Policy) -> Candidate:
        """Move percentages off the tier that is short: as many as it lacks, rounded up."""
        found = self.candidate(policy)
        B = sum(batch_sizes(self.num_prompts, policy))
        totals = (
            self.cost.streamed_bytes,
            self.shapes.spec.layers * B * (self.shapes.kv.kv_bytes + self.shapes.kv.meta_bytes),
            B * self.workload.longest * self.cost.hidden_bytes,
        )
        for _ in range(8):
            short = found.plan.shortfall()
            if short is None:
                break
            tier, needed, limit = short
            steps = [min(100, ceil(100 * (needed - limit) / max(1, nbytes))) for nbytes in totals]
            tiers = ("gpu", "cpu") if tier == "ram" else (tier,)
            slower = [
                m for m, a, b in self._moves(found.policy, steps) if a in tiers and TIERS.index(b) > TIERS.index(a)
            ]
            if not slower:
                break
            missing = {m: self.plan(m)[1].missing() for m in slower}
            # what the moves cost matters once they fit
            fitting = [m for m in slower if missing[m] == 0] or [min(slower, key=missing.get)]
            found = min(map(self.candidate, fitting), key=self.score)
        return found

    def _moves(self, policy: Policy, steps: list[int]) -> Iterator[tuple[Policy, str, str]]:
        """Policies with so many percent of weights, cache or activations moved, from which tier to which."""
        tiers = TIERS if self.shapes.cuda else ("gpu", "disk")
        for n in range(3):
            gpu, cpu = policy.percent[2 * n : 2 * n + 2]
            share = {"gpu": gpu, "cpu": cpu, "disk": 100 - gpu - cpu}
            for a in tiers:
                for b in tiers:
                    amount = min(steps[n], share[a])
                    if a != b and amount > 0:
                        new = {**share, a: share[a] - amount, b: share[b] + amount}
                        percent = (*policy.percent[: 2 * n], new["gpu"], new["cpu"], *policy.percent[2 * n + 2 :])
                        yield replace(policy, percent=percent), a, b

    def _improved(self, best: Candidate) -> Candidate:
        """Small moves that make it better, until there are none: rounding may have lost something."""
        for step in sorted({16, self._head_percent, 4, 1}, reverse=True):
            for _ in range(8):
                found = min((self.candidate(m) for m, _, _ in self._moves(best.policy, [step] * 3)), key=self.score)
                if self.score(found) >= (0.0, self.score(best)[1] * (1 - 1e-6)):
                    break
                best = found
        return best

    # where nothing was found

    def _smallest(self, pairs: list[Policy]) -> Candidate:
        """The best placement of the smallest block; raises what says why if none fits either."""
        smallest = min(pairs, key=lambda p: (p.block_size, p.num_gpu_batches))
        shares = [(0, 0), (0, 100), (100, 0)] if self.shapes.cuda else [(0, 0), (100, 0)]
        percents = [(*w, *c, *a) for w in shares for c in shares for a in shares]
        tried = [self.candidate(replace(smallest, percent=percent)) for percent in percents]
        best = min(tried, key=self.score)
        if self._missing(best) == 0:
            return best
        if any(c.plan.missing() == 0 for c in self._seen.values()):
            return self._fastest(smallest)
        block = f"no policy fits this job, not even {smallest.gpu_batch_size} x {smallest.num_gpu_batches} sequences"
        lacking = self._lacking(smallest)
        if not lacking:
            try:
                min(tried, key=lambda c: c.plan.missing()).plan.check()
            except PlanError as e:
                raise PlanError(f"{block}: {e}") from None
        short = []
        for tier, nbytes in lacking.items():
            limit = self.resources.limits[tier]
            short.append(
                f"{tier_name(tier)} is too small: needs at least {gib(limit + nbytes)} ({limit + nbytes} bytes), "
                f"there are {gib(limit)} ({limit} bytes), {nbytes} bytes are missing"
            )
        raise PlanError(
            f"{block}: {'; '.join(short)}, wherever the rest goes: give it more of it, or take a smaller model, "
            "shorter prompts or outputs, or a smaller KV budget"
        )

    def _fastest(self, smallest: Policy) -> Candidate:
        """The fastest placement of the smallest block. Raises PlanError if it takes more than `max_latency`."""
        size, batches = smallest.gpu_batch_size, smallest.num_gpu_batches
        free = replace(self.constraints, gpu_batch_size=size, num_gpu_batches=batches, max_latency=None)
        found = Search(self.profile, self.shapes, self.workload, self.resources, free).best()
        if self._missing(found) > 0:
            raise PlanError(
                f"no policy finishes a block within {self.max_latency:g} s: the fastest found takes "
                f"{found.prediction.block_seconds:.1f} s; raise `max_latency` or shorten the output"
            )
        return found

    def _lacking(self, policy: Policy) -> dict[str, int]:
        """Bytes that tiers would need beyond their limits for the policy's block: the least of any placement."""
        lp, x = self._program()
        lack = {tier: pulp.LpVariable(f"lack_{tier}", 0) for tier in self.resources.limits}
        for tier, needed in self._memory(policy, batch_sizes(self.num_prompts, policy), x).items():
            lp += needed * _GIB <= self.resources.limits[tier] * _GIB + lack[tier]
        # what could be on several tiers is missed where it is cheapest
        lp += pulp.lpSum({"disk": 1, "cpu": 2}.get(tier, 4) * v for tier, v in lack.items())
        solve(lp)
        nbytes = {tier: int((v.value() or 0.0) * 2**30) for tier, v in lack.items()}
        return {tier: n for tier, n in nbytes.items() if n > 0}
