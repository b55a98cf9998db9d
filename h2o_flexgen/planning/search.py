"""The policy with the highest predicted throughput: a linear program over the nine placement fractions inside, an
enumeration of batch sizes outside (FlexGen, arXiv 2303.06865, section 4.3).

The linear program is a relaxation: every placement of whole pieces is a point of it, and its seconds are a lower bound
of the cost model's. So a pair of batch sizes whose bound is no better than what is already found cannot hold the best
policy, and leaving it out gives what the whole grid would.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path

from h2o_flexgen.errors import PlanError, UserError
from h2o_flexgen.files import sweep
from h2o_flexgen.planning.cost import Away, Batches, CostModel, Prediction
from h2o_flexgen.planning.memory import Plan, Shapes, plan_policy, workspace_bytes
from h2o_flexgen.planning.placement import Placement
from h2o_flexgen.planning.profile import Profile
from h2o_flexgen.policy import TIERS, Policy, gib
from h2o_flexgen.sizes import Workload, batch_sizes, kv_buffers

try:  # here, not where it is used: pulp keeps exceptions of its import, which hold the frames that imported it
    import pulp
except ImportError:  # a job with a policy of its own needs no solver
    pulp = None

BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256)
NUM_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
KINDS = ("weights", "cache", "activations")
#: begins the names of the solver's folders
_LP = "h2o_flexgen-lp-"


@dataclass(frozen=True)
class Candidate:
    """A policy, its costs and its bytes."""

    policy: Policy
    prediction: Prediction
    plan: Plan


class Search:
    """Policies for one model, job and machine.

    Args:
        shapes, workload, limits: as for the memory plan; `limits` may hold "ram" for gpu and cpu together.
        baseline: bytes of RAM the process holds; workspace: bytes of the device its libraries hold.
        max_latency: the most seconds a block may take.
        one_block: throughput is that of a full block, not of a job with so many prompts.
    """

    def __init__(
        self,
        profile: Profile,
        shapes: Shapes,
        workload: Workload,
        limits: dict[str, int],
        baseline: int = 0,
        workspace: int = 0,
        max_latency: float | None = None,
        one_block: bool = False,
    ):
        if pulp is None:
            raise UserError("the policy search needs the package pulp: install it, or give a policy (`percent`)")
        self.profile, self.shapes, self.limits = profile, shapes, limits
        # the plan must hold for the longest prompts; the search takes all to be as long
        self.workload = Workload((workload.longest,) * len(workload.prompt_lens), workload.gen_len)
        self.cost = CostModel(profile, shapes, self.workload)
        self.baseline, self.workspace = baseline, workspace
        self.max_latency, self.one_block = max_latency, one_block
        self._weights: dict[tuple, dict[str, str]] = {}
        self._seen: dict[Policy, Candidate] = {}

    @property
    def num_prompts(self) -> int:
        return len(self.workload.prompt_lens)

    # one policy

    def candidate(self, policy: Policy) -> Candidate:
        """Cost and bytes of a policy, whether it fits or not."""
        if policy not in self._seen:
            placement, plan = self.plan(policy)
            self._seen[policy] = Candidate(policy, self.cost.predict(policy, placement), plan)
        return self._seen[policy]

    def plan(self, policy: Policy) -> tuple[Placement, Plan]:
        key = policy.fractions("weights")
        known = self._weights.get(key)
        workload = self._planned(policy)
        found = plan_policy(policy, self.shapes, workload, self.limits, self.baseline, self.workspace, known)
        self._weights[key] = found[0].weights
        return found

    def _planned(self, policy: Policy) -> Workload:
        """The prompts whose memory counts."""
        if not self.one_block:
            return self.workload
        prompts = self.workload.prompt_lens[: policy.block_size]
        return Workload(prompts, self.workload.gen_len)

    def _missing(self, c: Candidate) -> float:
        """Bytes, or seconds of latency, by which a policy is beyond the limits; 0 if it fits."""
        missing = c.plan.missing()
        if self.max_latency is not None:
            missing += max(0.0, c.prediction.block_seconds - self.max_latency)
        return missing

    def score(self, c: Candidate) -> tuple[float, float]:
        """(what is missing, seconds per prompt): the smaller, the better."""
        p = c.prediction
        seconds = p.block_seconds / p.block_size if self.one_block else p.job_seconds / self.num_prompts
        return self._missing(c), seconds

    # the search

    def best(
        self,
        batch_size: int | None = None,
        num_batches: int | None = None,
        cpu_compute: bool | None = None,
        overlap: bool = True,
        exhaustive: bool = False,
    ) -> Candidate:
        """The policy with the highest predicted throughput of the job.

        Args:
            batch_size, num_batches, cpu_compute: given ones are not searched.
            exhaustive: cost every pair of batch sizes, for tests of the pruning.

        Raises:
            PlanError: nothing fits, with the tier that is short and by how much, or nothing is fast enough for
                `max_latency`.
            UserError: the solver cannot be run.
        """
        cpu_choices = [cpu_compute] if cpu_compute is not None else [False, True] if self.shapes.cuda else [False]
        pairs = [
            Policy(b, k, (0, 0, 0, 0, 0, 0), overlap, cpu)
            for b, k in self._pairs(batch_size, num_batches)
            for cpu in cpu_choices
        ]
        # the cheapest bound first, which no linear program is needed for
        most = self.max_latency or float("inf")
        quick = [(self.quick_bound(p), n) for n, p in enumerate(pairs)]
        bounds = sorted((self.per_prompt(pairs[n], s) if s <= most else float("inf"), n) for s, n in quick)
        best: Candidate | None = None
        for bound, n in bounds:
            if bound == float("inf") or (best is not None and bound >= self.score(best)[1] and not exhaustive):
                break
            to_beat = None if best is None or exhaustive else self._block_to_beat(pairs[n], self.score(best)[1])
            solved = self.relaxed(pairs[n], to_beat)
            if solved is None:
                continue
            found = self._rounded(pairs[n], solved)
            if self._missing(found) == 0 and (best is None or self.score(found) < self.score(best)):
                best = found
        return self._improved(best or self._smallest(pairs, cpu_compute))

    def _pairs(self, batch_size: int | None, num_batches: int | None) -> Iterator[tuple[int, int]]:
        N = self.num_prompts
        sizes = [batch_size] if batch_size else {*(b for b in BATCH_SIZES if b < N), min(N, BATCH_SIZES[-1])}
        for b in sorted(sizes):
            most = ceil(N / b)
            if num_batches:
                yield b, num_batches
                continue
            choices = {k for k in NUM_BATCHES if k <= most}
            if not self.one_block:  # blocks that share the prompts evenly waste nothing on the last one
                choices |= {k for n in range(1, 9) if (k := ceil(most / n)) <= NUM_BATCHES[-1]}
            for k in sorted(choices):
                yield b, k

    # bounds

    def _blocks(self, policy: Policy) -> tuple[float, float, int]:
        """Full blocks of the job, a lower bound for the seconds of what is left, and the prompts of both."""
        if self.one_block:
            return 1, 0.0, min(policy.block_size, self.num_prompts)
        whole, rest = divmod(self.num_prompts, policy.block_size)
        if whole == 0:
            return 1, 0.0, rest
        begin = whole * policy.block_size
        phases = self._compute(policy, self.cost.batches(policy, begin)) if rest else []
        return whole, sum(count * seconds for count, seconds in phases), self.num_prompts

    def per_prompt(self, policy: Policy, block_seconds: float) -> float:
        """A bound for a block as a bound for the job."""
        whole, left, prompts = self._blocks(policy)
        return (whole * block_seconds + left) / prompts

    def _block_to_beat(self, policy: Policy, per_prompt: float) -> float:
        """The other way round: a block that takes longer cannot make a job that takes `per_prompt`."""
        whole, left, prompts = self._blocks(policy)
        return (per_prompt * prompts - left) / whole

    def _compute(self, policy: Policy, batches: Batches) -> list[tuple[int, float]]:
        """[(how often, seconds)] of the least compute of a block: prefill, then groups of decode steps."""
        cost, L = self.cost, self.cost.num_decoder
        heads = cost.heads_compute([b for b, _ in batches])
        phases = [(1, L * cost.prefill_compute(policy, batches) + heads[0])]
        sequences = L * sum(b for b, _ in batches)
        for held in cost.held(batches[0][1]):
            compute = min(cost.decode_compute(policy, batches, held.slots, Away(cpu, 0), L) for cpu in (0, sequences))
            phases.append((held.steps, compute + heads[1]))
        return phases

    def quick_bound(self, policy: Policy) -> float:
        """Seconds of a block that no placement can undercut: the compute of each phase, the weights that the device has
        no room for, what neither device nor RAM has room for. Infinite if there is no room at all."""
        cost, shapes, L = self.cost, self.shapes, self.cost.num_decoder
        batches = cost.batches(policy, 0)
        length = batches[0][1]
        B, W = sum(b for b, _ in batches), cost.streamed_bytes
        kv = L * B * shapes.slots * shapes.row_bytes
        device = self.limits["gpu"] - self._fixed_bytes(policy)
        ram = device + self.limits["cpu"] if shapes.cuda else device
        stored = min(1.0, shapes.stored_ratio)
        if device < 0 or kv + (W * stored if shapes.dummy else 0) > ram + self.limits["disk"]:
            return float("inf")
        weights = Away(cpu=max(0, W - device)) if shapes.cuda else Away()
        read = max(0, W + kv - ram) * stored
        held = cost.held(length)
        seconds = 0.0
        for n, (count, compute) in enumerate(self._compute(policy, batches)):
            flows = cost.prefill_flows(policy, compute, length, weights, Away(), Away())
            step = max(cost.seconds(flows, policy.overlap).values())
            if n:  # prefill writes what decode reads
                used = held[n - 1].stored / shapes.slots
                step = max(step, max(0, read - (1 - used) * kv) / self.profile.links["disk_to_cpu"].bytes_per_s)
            seconds += count * step
        return seconds

    def relaxed(self, policy: Policy, to_beat: float | None) -> dict[str, tuple[float, float, float]] | None:
        """Fractions of each kind on each tier that minimise the seconds of a block, by linear programming; None if
        nothing fits, or if it takes more than `to_beat` seconds."""
        cost, L = self.cost, self.cost.num_decoder
        batches = cost.batches(policy, 0)
        sizes, length = [b for b, _ in batches], batches[0][1]
        B = sum(sizes)
        lp, x = self._fractions()
        weights = Away(*(cost.streamed_bytes * f for f in x["weights"][1:]))
        cache = Away(*(L * B * f for f in x["cache"][1:]))
        acts = Away(*(L * B * f for f in x["activations"][1:]))
        # the head, and the conversion of every layer
        once = [head + cost.conversion(weights) for head in cost.heads_compute(sizes)]

        streamed = self._streamed_part(lp, weights)
        seconds = []
        compute = L * cost.prefill_compute(policy, batches, streamed) + once[0]
        flows = [(1, cost.prefill_flows(policy, compute, length, weights, cache, acts))]
        for held in cost.held(length):
            compute = cost.decode_compute(policy, batches, held.slots, cache, L, streamed) + once[1]
            flows.append((held.steps, cost.decode_flows(policy, compute, held, weights, cache)))
        for n, (count, flow) in enumerate(flows):
            t = pulp.LpVariable(f"seconds_{n}", 0)
            for value in cost.seconds(flow, policy.overlap).values():
                lp += t >= value
            seconds.append(count * t)
        lp += pulp.lpSum(seconds)
        if self.max_latency is not None:
            lp += pulp.lpSum(seconds) <= self.max_latency
        if to_beat is not None:
            lp += pulp.lpSum(seconds) <= to_beat
        for needed, limit in self._memory(policy, sizes, x):
            # in GiB: solvers dislike numbers that are far apart
            lp += needed * 2.0**-30 <= limit * 2.0**-30
        if not _solve(lp):
            return None
        if lp.status != pulp.LpStatusOptimal:  # the solver gave up: the pair must not be lost for that
            return dict.fromkeys(KINDS, (1.0, 0.0, 0.0))
        return {kind: tuple(min(1.0, max(0.0, v.value() or 0.0)) for v in x[kind]) for kind in KINDS}

    def _streamed_part(self, lp: pulp.LpProblem, weights: Away) -> pulp.LpVariable:
        """The least part of the decoder layers' weights that is streamed when `weights` are away in all: the other
        layers' may be among them."""
        part = pulp.LpVariable("decoder_streamed", 0, 1)
        others = self.cost.streamed_bytes - self.cost.decoder_bytes
        lp += part >= (weights.cpu + weights.disk - others) * (1 / self.cost.decoder_bytes)
        return part

    def _memory(self, policy: Policy, sizes: list[int], x: dict) -> list:
        """(bytes needed, limit) per tier; at most what the plan says of any placement with these fractions."""
        shapes, L = self.shapes, self.cost.num_decoder
        B, rings = sum(sizes), 2 if policy.overlap else 1
        W = self.cost.streamed_bytes
        piece = shapes.block_bytes
        log = shapes.wal_rows * shapes.row_bytes
        A = B * self.workload.longest * self.cost.hidden_bytes
        (wg, wc, wd), (cg, cc, cd), (ag, ac, ad) = (x[kind] for kind in KINDS)
        fixed = self._fixed_bytes(policy)
        layer = W / (L + 2)
        gpu = fixed + wg * W + rings * wc * layer + ag * A
        if shapes.converts_by_compute:
            gpu += wd * (rings * shapes.stored_ratio * layer + layer)
        else:
            gpu += rings * wd * layer
        least, most = (kv_buffers(policy.overlap, on_disk) for on_disk in (False, True))
        visiting = sizes[0] * (piece if shapes.cuda else piece - shapes.meta_bytes)
        gpu += cg * (L * B * piece) + (least * (cc + cd) + (most - least) * cd) * visiting
        cpu = wc * W + cc * (L * B * piece) + cd * (L * B * shapes.meta_bytes) + ac * A
        disk = cd * (L * B * (shapes.slots * shapes.row_bytes + log)) + ad * A
        if shapes.dummy:
            disk += wd * (shapes.stored_ratio * W)
        if shapes.cuda:
            cpu += self._process_bytes(policy) + rings * wd * (shapes.stored_ratio * layer)
            cpu += cd * ((most + 1) * sizes[-1] * shapes.slots * shapes.row_bytes)
        needed = {"gpu": gpu, "cpu": cpu, "disk": disk, "ram": gpu + cpu}
        return [(needed[tier], limit) for tier, limit in self.limits.items()]

    def _fixed_bytes(self, policy: Policy) -> int:
        """What the device holds wherever weights and cache lie."""
        batches = batch_sizes(self.num_prompts, policy)
        nbytes = self.workspace + workspace_bytes(policy, self.shapes, self.workload.longest, batches)
        nbytes += sum(batches) * self.cost.hidden_bytes
        return nbytes if self.shapes.cuda else nbytes + self._process_bytes(policy)

    def _process_bytes(self, policy: Policy) -> int:
        """RAM of the process itself, with what it has generated."""
        return self.baseline + self._planned(policy).output_bytes

    # from fractions to a policy

    def _rounded(self, policy: Policy, fractions: dict[str, tuple[float, float, float]]) -> Candidate:
        """Whole percentages near the fractions, or with the head on the device, moved towards slower tiers until they
        fit."""
        percent = []
        for kind in KINDS:
            gpu, cpu, _ = (round(100 * f, 4) for f in fractions[kind])
            gpu = int(gpu)
            percent += [gpu, min(100 - gpu, ceil(cpu)) if self.shapes.cuda else 0]
        # a kind that lies on the device whole needs no buffers to travel through
        starts = [tuple(percent), (*percent[:4], 100, 0), (*percent[:2], 100, 0, 100, 0)]
        for start in starts:
            found = self._fitted(replace(policy, percent=start))
            if self._missing(found) == 0:
                break
        if percent[0] < self._head_percent:
            start = (self._head_percent, min(percent[1], 100 - self._head_percent), *found.policy.percent[2:])
            found = min(found, self._fitted(replace(policy, percent=start)), key=self.score)
        return found

    @property
    def _head_percent(self) -> int:
        """The percentage of weights with which the head lies on the device whole: slots for weights, which the linear
        program takes to be as large as an average layer, are smaller then if it is larger than any other."""
        return ceil(100 * self.cost.head_size * self.shapes.compute_itemsize / self.cost.streamed_bytes)

    def _fitted(self, policy: Policy) -> Candidate:
        """Move percentages off the tier that is short: as many as it lacks, rounded up."""
        found = self.candidate(policy)
        B = sum(batch_sizes(self.num_prompts, policy))
        whole = (
            self.cost.streamed_bytes,
            self.cost.num_decoder * B * self.shapes.block_bytes,
            B * self.workload.longest * self.cost.hidden_bytes,
        )
        for _ in range(8):
            short = found.plan.shortfall()
            if short is None:
                break
            tiers = ("gpu", "cpu") if short[0] == "ram" else (short[0],)
            steps = [min(100, ceil(100 * (short[1] - short[2]) / nbytes)) for nbytes in whole]
            slower = [
                m for m, a, b in self._moves(found.policy, steps) if a in tiers and TIERS.index(b) > TIERS.index(a)
            ]
            if not slower:
                break
            missing = {m: self.plan(m)[1].missing() for m in slower}
            fitting = [m for m in slower if missing[m] == 0]
            # what the moves cost matters once they fit
            found = min(map(self.candidate, fitting or [min(slower, key=missing.get)]), key=self.score)
        return found

    def _moves(self, policy: Policy, steps: Sequence[int]) -> list[tuple[Policy, str, str]]:
        """Policies with so many percent of weights, cache or activations moved from a tier to another."""
        moves = []
        tiers = TIERS if self.shapes.cuda else ("gpu", "disk")
        for n in range(3):
            gpu, cpu = policy.percent[2 * n : 2 * n + 2]
            share = {"gpu": gpu, "cpu": cpu, "disk": 100 - gpu - cpu}
            for a in tiers:
                for b in tiers:
                    amount = min(steps[n], share[a])
                    if a == b or amount <= 0:
                        continue
                    new = {**share, a: share[a] - amount}
                    new[b] += amount
                    percent = (*policy.percent[: 2 * n], new["gpu"], new["cpu"], *policy.percent[2 * n + 2 :])
                    moves.append((replace(policy, percent=percent), a, b))
        return moves

    def _improved(self, best: Candidate) -> Candidate:
        """Small moves that make it better, until there are none: rounding may have lost something."""
        for step in sorted({16, self._head_percent, 4, 1}, reverse=True):
            for _ in range(8):
                found = min((self.candidate(m[0]) for m in self._moves(best.policy, (step,) * 3)), key=self.score)
                if self.score(found) >= (0.0, self.score(best)[1] * (1 - 1e-6)):
                    break
                best = found
        return best

    def _unhurried(self) -> Search:
        """The same search without a limit for the latency."""
        c = self.cost
        return Search(
            c.profile, self.shapes, self.workload, self.limits, self.baseline, self.workspace, one_block=self.one_block
        )

    def _smallest(self, pairs: list[Policy], cpu_compute: bool | None) -> Candidate:
        """The best placement of the smallest block; raises what says why if none fits either."""
        smallest = min(pairs, key=lambda p: (p.block_size, p.num_gpu_batches))
        homes = [(0, 0), (0, 100), (100, 0)] if self.shapes.cuda else [(0, 0), (100, 0)]
        tried = [self.candidate(replace(smallest, percent=(*w, *c, *a))) for w in homes for c in homes for a in homes]
        best = min(tried, key=self.score)
        if self._missing(best) == 0:
            return best
        if any(c.plan.missing() == 0 for c in self._seen.values()):
            found = self._unhurried().best(
                smallest.gpu_batch_size, smallest.num_gpu_batches, overlap=smallest.overlap, cpu_compute=cpu_compute
            )
            if self._missing(found) == 0:
                return found
            raise PlanError(
                f"no policy finishes a block within {self.max_latency:g} s: the fastest found takes "
                f"{found.prediction.block_seconds:.1f} s; "
                "raise `max_latency` or shorten the output"
            )
        block = f"no policy fits this job, not even {smallest.gpu_batch_size} x {smallest.num_gpu_batches} sequences"
        needed = self._shortage(smallest)
        if not needed:
            try:
                min(tried, key=lambda c: c.plan.missing()).plan.check()
            except PlanError as e:
                raise PlanError(f"{block}: {e}") from None
        short = "; ".join(
            f"{'RAM (the gpu and cpu tiers together)' if tier == 'ram' else f'the {tier} tier'} is too small: needs at "
            f"least {gib(nbytes)} ({nbytes} bytes), there are {gib(self.limits[tier])} ({self.limits[tier]} bytes), "
            f"{nbytes - self.limits[tier]} bytes are missing"
            for tier, nbytes in needed.items()
        )
        raise PlanError(
            f"{block}: {short}, wherever the rest goes: give it more of it, or take a smaller model, shorter prompts "
            "or outputs, or a smaller KV budget"
        )

    def _shortage(self, policy: Policy) -> dict[str, int]:
        """Bytes that tiers would have to have for the policy's block, where they are more than the limits: the least
        that any placement lacks."""
        lp, x = self._fractions()
        lack = {tier: pulp.LpVariable(f"lack_{tier}", 0) for tier in self.limits}
        sizes = batch_sizes(self.num_prompts, policy)
        for (needed, limit), tier in zip(self._memory(policy, sizes, x), self.limits):
            lp += needed * 2.0**-30 <= limit * 2.0**-30 + lack[tier]
        # what could lie on several tiers is missed where it is cheapest
        lp += pulp.lpSum({"disk": 1, "cpu": 2}.get(tier, 4) * v for tier, v in lack.items())
        _solve(lp)
        short = {tier: int((v.value() or 0.0) * 2**30) for tier, v in lack.items()}
        return {tier: self.limits[tier] + nbytes for tier, nbytes in short.items() if nbytes > 0}

    def _fractions(self) -> tuple[pulp.LpProblem, dict[str, list]]:
        """A linear program with the nine fractions."""
        lp = pulp.LpProblem("policy", pulp.LpMinimize)
        x = {kind: [pulp.LpVariable(f"{kind}_{t}", 0, 1) for t in TIERS] for kind in KINDS}
        for kind in KINDS:
            lp += pulp.lpSum(x[kind]) == 1
            if not self.shapes.cuda:  # the cpu tier would be a second copy in the same RAM
                lp += x[kind][1] == 0
        return lp, x


def _solve(lp: pulp.LpProblem) -> bool:
    """Whether it has a solution. What CBC writes goes to a folder of its own, which goes with it.

    Raises:
        UserError: the solver cannot be run.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=_LP, dir=_lp_root(tempfile.gettempdir())) as folder:
            solver = pulp.PULP_CBC_CMD(msg=False)
            solver.tmpDir = folder
            lp.solve(solver)
    except (pulp.PulpSolverError, OSError) as e:
        raise UserError(
            f"the policy search cannot run its solver ({e}): give a policy (the batch sizes and `percent`)"
        ) from None
    return lp.status != pulp.LpStatusInfeasible


@cache
def _lp_root(base: str) -> Path:
    """Where the solver's folders go, cleared once of those that killed processes left."""
    root = Path("/tmp" if " " in base else base)  # pulp splits the command at blanks
    sweep(root, _LP)
    return root
