"""Chooses the policy of every job, whether it runs or is only planned; nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import gcd

from h2o_flexgen.errors import PlanError, UserError
from h2o_flexgen.formats.forms import has_cache_format
from h2o_flexgen.kv_cache import CacheRule, rule_for
from h2o_flexgen.machine.profile import Profile
from h2o_flexgen.planning.budget import FORMATS, BudgetChoice, BudgetPoint, budget_choices, largest_free
from h2o_flexgen.planning.constraints import Constraints
from h2o_flexgen.planning.cost import CostModel
from h2o_flexgen.planning.execution_plan import ExecutionPlan
from h2o_flexgen.planning.memory import MemoryPlan, Resources, path_tokens, plan_policy
from h2o_flexgen.planning.placement import Placement
from h2o_flexgen.planning.search import Search
from h2o_flexgen.planning.shapes import ModelData
from h2o_flexgen.planning.workload import GROUP_ROWS, Workload
from h2o_flexgen.policy import KVBudget, Policy
from h2o_flexgen.utils.progress import bar

#: batch sizes tried with everything resident: above the first the matmuls of a CPU get no faster
RESIDENT_BATCHES = (GROUP_ROWS, GROUP_ROWS // 2)


@dataclass(frozen=True)
class CandidateJob:
    """A job under one KV budget and one format each for cache and weights.

    Attributes:
        model: in these formats, with nothing decoded yet.
        compress_weight: as for `LLM`, but not "auto".
        policy: the user's; None leaves it to the planner.
    """

    model: ModelData
    compress_weight: str | None
    budget: BudgetChoice
    workload: Workload
    resources: Resources
    constraints: Constraints
    policy: Policy | None = None

    @cached_property
    def rule(self) -> CacheRule:
        return rule_for(self.budget.kv_budget, self.workload.longest, self.workload.gen_len, self.model.spec)

    @cached_property
    def variants(self) -> list[ModelData]:
        """The model with its quantised matrices decoded while they are loaded, fastest first, then as stored."""
        return [*self.model.decoded(), self.model]

    @cached_property
    def without_search(self) -> tuple[ModelData, Policy] | None:
        """The variant and the policy if nothing is searched: a policy is given, or everything can be resident."""
        for variant in self.variants:
            policy = self.policy or self._resident(variant)
            if policy is not None and self._suits(variant, policy):
                return variant, policy
        return None

    def execution_plan(self, profile: Profile | None) -> ExecutionPlan:
        """The fastest policy of this candidate; `profile` may be None if `without_search` is not. Raises PlanError if
        nothing fits, or nothing is fast enough for `max_latency`; UserError if the search cannot be run."""
        if self.without_search is not None:
            variant, policy = self.without_search
        else:
            shapes = self.model.shapes(self.rule, self.workload)
            policy = Search(profile, shapes, self.workload, self.resources, self.constraints).best().policy
            variant = next(variant for variant in self.variants if self._suits(variant, policy))
        shapes = variant.shapes(self.rule, self.workload)
        placement, memory = self._plan(variant, policy)
        found = ExecutionPlan(
            workload=self.workload,
            policy=policy,
            kv_budget=self.budget.kv_budget,
            rule=self.rule,
            placement=placement,
            layers=variant.layers,
            forms=variant.forms,
            plan=memory,
            compress_cache=variant.compress_cache,
            compress_weight=self.compress_weight,
            shared_tokens=path_tokens(shapes, self.resources),
        )
        return found if profile is None else self._predicted(found, CostModel(profile, shapes, self.workload.gen_len))

    def point(self, plan: ExecutionPlan) -> BudgetPoint:
        """The point of the curve for the plan of this candidate. Raises UserError if its losses are of another rule."""
        kv_budget, ratio, share = self.budget
        losses = self.constraints.losses
        loss = losses and losses.at(kv_budget and kv_budget.rule, share, plan.compress_cache)
        return BudgetPoint(
            ratio,
            slots=self.rule.budget or self.model.shapes(self.rule, self.workload).kv.slots,
            gpu_batch_size=plan.policy.gpu_batch_size,
            num_gpu_batches=plan.policy.num_gpu_batches,
            tokens_per_s=plan.prediction.tokens_per_s,
            compress_cache=plan.compress_cache,
            compress_weight=plan.compress_weight,
            loss=loss,
            allowed=losses is None or losses.allows(loss),
        )

    def _plan(self, variant: ModelData, policy: Policy) -> tuple[Placement, MemoryPlan]:
        planned = self.constraints.planned(self.workload, policy)
        return plan_policy(policy, variant.shapes(self.rule, self.workload), planned, self.resources)

    def _fits(self, variant: ModelData, policy: Policy) -> bool:
        return not self._plan(variant, policy)[1].missing()

    def _suits(self, variant: ModelData, policy: Policy) -> bool:
        """Whether a policy can run a variant: a decoded one must be on the device whole, and must fit."""
        if variant is self.model:
            return True
        return policy.fractions("weights")[0] == 1 and self._fits(variant, policy)

    def _resident(self, variant: ModelData) -> Policy | None:
        """Everything on the compute device, if it fits and a search could not gain by larger blocks."""
        given = self.constraints
        if not given.resident or given.max_latency is not None:
            return None
        prompts = len(self.workload.prompt_lens)
        sizes = [given.gpu_batch_size] if given.gpu_batch_size else [min(size, prompts) for size in RESIDENT_BATCHES]
        if variant.cuda and given.gpu_batch_size is None:  # larger blocks always pay on CUDA
            sizes = [size for size in sizes if size == prompts]
        on_cpu = bool(given.cpu_cache_compute)
        resident = Policy(1, given.num_gpu_batches or 1, overlap=given.overlap, cpu_cache_compute=on_cpu)
        for tokens, size in product(given.micro_batches, dict.fromkeys(sizes)):
            policy = replace(resident, gpu_batch_size=size, prefill_tokens=tokens)
            if self._fits(variant, policy):
                return policy
        return None

    def _predicted(self, plan: ExecutionPlan, cost: CostModel) -> ExecutionPlan:
        prompt_lens = self.constraints.planned(self.workload, plan.policy).prompt_lens
        predict = partial(cost.predict, plan.policy, plan.placement, prompt_lens)
        prediction = predict()
        mean_len = sum(prompt_lens) // len(prompt_lens)
        least_free = cost.least_free(plan.policy, max(1, int(mean_len * cost.layers.computed)), prediction)
        return replace(plan, prediction=prediction, predict=predict, least_free=least_free)


def choose(candidates: Sequence[CandidateJob], profile: Profile, progress: bool = False) -> ExecutionPlan:
    """The plan of the candidate with the best quality that costs no throughput (`budget.largest_free`), with the curve
    of them all.

    Args:
        candidates: for each pair of formats the fewest slots first.
        progress: show a bar on stderr.

    Raises:
        PlanError: nothing fits, not even the first candidate.
        UserError: nothing that fits has a loss that is allowed, or losses are of another rule.
    """
    plans = {}
    errors = []
    for candidate in bar(candidates, "sizing the KV cache", unit="choices", show=progress):
        try:
            plan = candidate.execution_plan(profile)
            plan.plan.check()
            plans[candidate.point(plan)] = plan
        except PlanError as e:
            errors.append(e)
    if not plans:
        raise errors[0]
    curve = list(plans)
    return replace(plans[largest_free(curve)], curve=curve)


class Planner:
    """Makes the candidates of a job for a model on a machine, and chooses among them.

    Args:
        models: the model under each `compress_weight` that may be chosen; usually one.
        profile: the machine's rates, or None.
        measure: measures them; called when they are first needed.
        progress: show a bar on stderr while a KV budget is sized.

    Attributes:
        model: the first of `models`.
    """

    def __init__(
        self,
        models: dict[str | None, ModelData],
        constraints: Constraints | None = None,
        profile: Profile | None = None,
        measure: Callable[[], Profile] | None = None,
        progress: bool = False,
    ):
        self.models = models
        self.model = next(iter(models.values()))
        self.constraints = constraints or Constraints()
        self.profile = profile
        self.progress = progress
        self._measure = measure

    def choose(
        self,
        workload: Workload,
        resources: Resources,
        policy: Policy | None = None,
        kv_budget: KVBudget | str | None = None,
        compress_cache: str | None = None,
    ) -> ExecutionPlan:
        """The policy of a job, and what follows from it.

        Args:
            policy: taken whether it fits or not; None searches for one unless everything can be resident.
            kv_budget: None is a full cache, "auto" the largest budget that costs no throughput.
            compress_cache: as for `LLM`, or "auto": of the formats this model can have, the one with the least loss
                that costs no throughput (`budget.largest_free`).

        Raises:
            PlanError: nothing fits, or nothing is fast enough for `max_latency`.
            UserError: the budget has no slots, the search cannot be run, or losses are of another rule.
        """
        candidates = self.candidates(workload, resources, policy, kv_budget, compress_cache)
        if "auto" in (kv_budget, compress_cache) or len(self.models) > 1:
            return choose(candidates, self.measured(), self.progress)
        (candidate,) = candidates
        if candidate.without_search is None:
            self.measured()
        return candidate.execution_plan(self.profile)

    def candidates(
        self,
        workload: Workload,
        resources: Resources,
        policy: Policy | None = None,
        kv_budget: KVBudget | str | None = None,
        compress_cache: str | None = None,
    ) -> list[CandidateJob]:
        """The job under every weight format, cache format and KV budget that it may have; arguments as for `choose`.
        Raises UserError for more devices than the model has layers."""
        layers = self.model.spec.layers
        if layers < len(resources.devices):
            raise UserError(f"`device`: {len(resources.devices)} devices for a model with {layers} layers: give fewer")
        longest = workload.longest
        if kv_budget == "auto":
            budgets = budget_choices(self.constraints.min_hh_ratio, longest, longest + workload.gen_len)
        else:
            budgets = [BudgetChoice.of(kv_budget, longest)]
        formats = self._cache_formats() if compress_cache == "auto" else [compress_cache]
        job = dict(workload=workload, resources=resources, constraints=self.constraints, policy=policy)
        return [
            CandidateJob(replace(self.models[weights], compress_cache=cache), weights, budget, **job)
            for weights, cache, budget in product(self.models, formats, budgets)
        ]

    def _cache_formats(self) -> list[str | None]:
        """The cache formats this model can have, restricted to those with known losses if there are any."""
        losses = self.constraints.losses
        known = FORMATS if losses is None else losses.formats
        divides_all = gcd(*self.model.spec.head_dims)
        return [each for each in FORMATS if each in known and has_cache_format(each, divides_all)]

    def only(self, compress_weight: str | None) -> Planner:
        """The planner for one of the models alone."""
        models = {compress_weight: self.models[compress_weight]}
        return Planner(models, self.constraints, self.profile, self._measure, self.progress)

    def measured(self) -> Profile:
        """The machine's profile, measured at the first call unless it was given."""
        if self.profile is None:
            self.profile = self._measure()
        return self.profile
