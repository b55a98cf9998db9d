"""The policy with the highest predicted throughput: an enumeration of batch sizes, numbers of batches and prefill
micro-batches, with a linear program over the placement fractions for each (FlexGen, arXiv 2303.06865, section 4.3).

Sizes whose lower bound is no better than the best policy so far are skipped, so the result is that of the whole grid.
(The last block, which may not be full, is assumed to be no faster per prompt than the others.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product
from math import ceil, inf

from h2o_flexgen.errors import PlanError
from h2o_flexgen.machine.profile import Profile
from h2o_flexgen.planning.constraints import Constraints
from h2o_flexgen.planning.cost import CostModel, Prediction
from h2o_flexgen.planning.memory import SEARCHED_ADVICE, MemoryPlan, Resources, plan_policy
from h2o_flexgen.planning.relaxation import Relaxation
from h2o_flexgen.planning.shapes import Shapes
from h2o_flexgen.planning.workload import Workload, micro_tokens
from h2o_flexgen.policy import TIERS, Policy

BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256)
NUM_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
#: blocks that share the prompts evenly are tried for up to this many
_EVEN_BLOCKS = 8
#: most rounds in which fractions become a policy that fits
_ROUNDS = 8
#: most moves that improve the best policy, and their sizes in percent
_MOVES = 24
_STEPS = (16, 4, 1)


@dataclass(frozen=True)
class Candidate:
    """A policy with its predicted seconds and its bytes."""

    policy: Policy
    prediction: Prediction
    plan: MemoryPlan


class Search:
    """The search for a policy for one model, job and machine."""

    def __init__(
        self, profile: Profile, shapes: Shapes, workload: Workload, resources: Resources, constraints: Constraints
    ):
        self.profile = profile
        self.shapes = shapes
        self.resources = resources
        self.constraints = constraints
        self.num_prompts = len(workload.prompt_lens)
        # the plan must hold for the longest prompts, so the search takes all to be that long
        self.workload = replace(workload, prompt_lens=(workload.longest,) * self.num_prompts)
        self.cost = CostModel(profile, shapes, workload.gen_len)
        self.relaxation = Relaxation(self.cost, self.workload, resources, constraints)
        self._seen: dict[Policy, Candidate] = {}

    def best(self) -> Candidate:
        """The policy with the highest predicted throughput of the job. Raises PlanError if nothing fits, with the tiers
        that are short and by how much, or nothing meets `max_latency`; UserError if the solver cannot be run."""
        unplaced = list(self.unplaced())
        bounds = sorted((self.relaxation.lower_bound(policy), n) for n, policy in enumerate(unplaced))
        best: Candidate | None = None
        for bound, n in bounds:
            to_beat = inf if best is None else self.score(best)[1]
            if bound >= to_beat:
                break
            found = self.placed(unplaced[n], to_beat)
            if found is not None and (best is None or self.score(found) < self.score(best)):
                best = found
        return self._improved(best or self._smallest(unplaced))

    # one policy

    def candidate(self, policy: Policy) -> Candidate:
        """Seconds and bytes of a policy, whether it fits or not."""
        if policy not in self._seen:
            planned = self.constraints.planned(self.workload, policy)
            placement, plan = plan_policy(policy, self.shapes, planned, self.resources)
            prediction = self.cost.predict(policy, placement, planned.prompt_lens)
            self._seen[policy] = Candidate(policy, prediction, plan)
        return self._seen[policy]

    def missing(self, c: Candidate) -> float:
        """Bytes, or seconds of latency, by which a policy exceeds the limits; 0 if it fits."""
        late = max(0.0, c.prediction.block_seconds - self.relaxation.max_latency)
        return sum(c.plan.missing().values()) + late

    def score(self, c: Candidate) -> tuple[float, float]:
        """(what is missing, seconds per prompt): smaller is better."""
        return self.missing(c), c.prediction.job_seconds / c.prediction.num_prompts

    # the grid

    def unplaced(self) -> Iterator[Policy]:
        """A policy with nothing placed for each combination of sizes to be searched."""
        given = self.constraints
        cpu_choices = [False, True] if self.shapes.cuda else [False]
        if given.cpu_cache_compute is not None:
            cpu_choices = [given.cpu_cache_compute]
        for size in self._batch_sizes():
            for count, on_cpu, tokens in product(self._batch_counts(size), cpu_choices, self._micro_batches(size)):
                yield Policy(size, count, (0, 0, 0, 0, 0, 0), given.overlap, on_cpu, tokens)

    def _batch_sizes(self) -> list[int]:
        if self.constraints.gpu_batch_size:
            return [self.constraints.gpu_batch_size]
        largest = min(self.num_prompts, BATCH_SIZES[-1])
        return [*(size for size in BATCH_SIZES if size < largest), largest]

    def _batch_counts(self, size: int) -> list[int]:
        if self.constraints.num_gpu_batches:
            return [self.constraints.num_gpu_batches]
        most = ceil(self.num_prompts / size)
        even = {ceil(most / blocks) for blocks in range(1, _EVEN_BLOCKS + 1)}  # waste nothing on a last, smaller block
        return sorted({n for n in NUM_BATCHES if n <= most} | {n for n in even if n <= NUM_BATCHES[-1]})

    def _micro_batches(self, size: int) -> list[int]:
        """The largest `prefill_tokens` of each size that micro-batches of `size` sequences can have."""
        found = {}
        for tokens in self.constraints.micro_batches:
            found.setdefault(micro_tokens(tokens, self.workload.longest, size), tokens)
        return list(found.values())

    # placement

    def placed(self, policy: Policy, to_beat: float = inf) -> Candidate | None:
        """The policy with the best fractions in whole percent; None if none fits in less than `to_beat` seconds per
        prompt. The relaxation underestimates staging buffers: what a plan lacks is subtracted from the limits before
        the next attempt."""
        limits = dict(self.resources.limits)
        least = self.cost.streamed_bytes / 200  # half a percent of the weights
        for _ in range(_ROUNDS):
            percent = self.relaxation.solve(policy, limits, to_beat)
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
                # of what several devices have less, the one that is short has only its share less
                shares = len(self.resources.devices) if tier == "gpu" else 1
                limits[tier] -= max(shares * nbytes, least)
            to_beat = inf  # with reduced limits the relaxation is no longer a lower bound
        return None

    def _improved(self, best: Candidate) -> Candidate:
        """The end of a descent by small moves, which recovers what rounding has lost."""
        for _ in range(_MOVES):
            neighbours = [neighbour for step in _STEPS for neighbour in self._neighbours(best.policy, step)]
            found = min(map(self.candidate, neighbours), key=self.score)
            if self.score(found) >= (self.missing(best), self.score(best)[1] * (1 - 1e-6)):
                break
            best = found
        return best

    def _neighbours(self, policy: Policy, step: int) -> Iterator[Policy]:
        """Policies with up to `step` percent of one kind moved from one tier to another."""
        tiers = TIERS if self.shapes.cuda else ("gpu", "disk")
        for n, (source, target) in product((0, 2, 4), permutations(tiers, 2)):
            gpu, cpu = policy.percent[n : n + 2]
            share = {"gpu": gpu, "cpu": cpu, "disk": 100 - gpu - cpu}
            moved = min(step, share[source])
            if moved > 0:
                share[source] -= moved
                share[target] += moved
                percent = (*policy.percent[:n], share["gpu"], share["cpu"], *policy.percent[n + 2 :])
                yield replace(policy, percent=percent)

    def _smallest(self, unplaced: list[Policy]) -> Candidate:
        """A placement of the smallest block, starting from those with each kind on one tier. Raises PlanError if none
        fits or is fast enough."""
        smallest = min(unplaced, key=lambda p: (p.block_size, p.num_gpu_batches, p.prefill_tokens))
        tiers = [(0, 0), (0, 100), (100, 0)] if self.shapes.cuda else [(0, 0), (100, 0)]
        tried = [self.candidate(replace(smallest, percent=w + c + a)) for w, c, a in product(tiers, repeat=3)]
        found = self._improved(min(tried, key=self.score))
        if self.missing(found) == 0:
            return found
        size = smallest.gpu_batch_size
        batches = smallest.num_gpu_batches
        if found.plan.missing():
            # report the cheapest tier that is short where several would do
            least = min(tried, key=lambda c: [c.plan.missing().get(tier, 0) for tier in ("ram", *TIERS)])
            least.plan.check(f"no policy fits this job, not even {size} x {batches} sequences: ", SEARCHED_ADVICE)
        free = replace(self.constraints, gpu_batch_size=size, num_gpu_batches=batches, max_latency=None)
        fastest = Search(self.profile, self.shapes, self.workload, self.resources, free).best()
        if self.missing(fastest) > 0:
            raise PlanError(
                f"no policy finishes a block within {self.relaxation.max_latency:g} s: the fastest found takes "
                f"{fastest.prediction.block_seconds:.1f} s; raise `max_latency` or shorten the output"
            )
        return fastest
