"""The only chooser of a policy: for a job that is about to run, and for one that is only asked about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from h2o_flexgen.errors import UserError
from h2o_flexgen.kv_cache import CacheRule, rule_for
from h2o_flexgen.planning.budget import BudgetPoint, size_budget
from h2o_flexgen.planning.cost import CostModel, Prediction
from h2o_flexgen.planning.memory import ModelData, Plan, Resources, plan_policy
from h2o_flexgen.planning.placement import Placement
from h2o_flexgen.planning.profile import Profile
from h2o_flexgen.planning.search import Constraints, Search
from h2o_flexgen.policy import KVBudget, Policy
from h2o_flexgen.sizes import Workload

#: sequences of a batch where everything is resident: more make the matmuls of a CPU no faster
RESIDENT_BATCH = 64


@dataclass(frozen=True)
class Choice:
    """A policy for a workload, with all that follows from it: what the engine runs.

    Attributes:
        rule: the cache rule of `kv_budget`.
        compress_cache: as for `LLM`.
        plan: the bytes it needs. A policy that was given may need more than there is (`plan.check`).
        prediction: what it costs; None while this machine has not been measured.
        curve: for the KV budget "auto" the trade of slots for throughput, the fewest slots first; else empty.
    """

    workload: Workload
    policy: Policy
    kv_budget: KVBudget | None
    rule: CacheRule
    placement: Placement
    plan: Plan
    prediction: Prediction | None
    compress_cache: str | None = None
    curve: list[BudgetPoint] = field(default_factory=list)


class Planner:
    """Chooses policies for a model on a machine.

    Args:
        profile: the machine's rates, or None.
        measure: gives them; it is called when they are needed for the first time.
        progress: show a bar on stderr while a KV budget is sized.
    """

    def __init__(
        self,
        model: ModelData,
        constraints: Constraints | None = None,
        profile: Profile | None = None,
        measure: Callable[[], Profile] | None = None,
        progress: bool = False,
    ):
        self.model, self.constraints, self.profile = model, constraints or Constraints(), profile
        self.progress, self._measure = progress, measure

    def choose(
        self,
        workload: Workload,
        resources: Resources,
        policy: Policy | None = None,
        kv_budget: KVBudget | str | None = None,
    ) -> Choice:
        """The policy of a job.

        Args:
            policy: a given one is taken whether it fits or not.
            kv_budget: None is a full cache, "auto" the largest budget that costs no throughput.

        Raises:
            PlanError: nothing fits, or nothing is fast enough for `max_latency`.
            UserError: the budget comes to no slot, the search cannot be run, or losses are of another rule.
        """
        if kv_budget != "auto":
            return self._choose(workload, resources, policy, kv_budget)
        losses = self.constraints.losses
        self.measured()  # else what is resident would be chosen without a prediction to compare

        def find(ratio: float | None, budget: KVBudget | None) -> tuple[BudgetPoint, Choice]:
            choice = self._choose(workload, resources, policy, budget)
            choice.plan.check()
            p, size, batches = choice.prediction, choice.policy.gpu_batch_size, choice.policy.num_gpu_batches
            slots = choice.rule.budget or self.model.shapes(choice.rule, workload).kv.slots
            loss, allowed = None, True
            if losses is not None:
                loss = 0.0 if budget is None else losses.at(budget.rule, 2 * ratio)
                allowed = losses.allows(loss)
            return BudgetPoint(ratio, slots, size, batches, p.tokens_per_s, loss, allowed), choice

        longest, total = workload.longest, workload.longest + workload.gen_len
        choice, curve = size_budget(self.constraints.min_hh_ratio, longest, total, find, self.progress)
        return replace(choice, curve=curve)

    def _choose(
        self, workload: Workload, resources: Resources, policy: Policy | None, kv_budget: KVBudget | None
    ) -> Choice:
        rule = rule_for(kv_budget, workload, self.model.spec)
        policy = policy or self._resident(workload, resources, rule)
        if policy is None:
            policy = self.search(rule, workload, resources).best().policy
        placement, plan = self.plan(policy, rule, workload, resources)
        prediction = None
        if self.profile is not None:
            planned = self.constraints.planned(workload, policy)
            cost = CostModel(self.profile, self.model.shapes(rule, workload), workload.gen_len)
            prediction = cost.predict(policy, placement, planned.prompt_lens)
        return Choice(workload, policy, kv_budget, rule, placement, plan, prediction, self.model.compress_cache)

    def _resident(self, workload: Workload, resources: Resources, rule: CacheRule) -> Policy | None:
        """Everything on the compute device, if it fits and a search could not gain by larger blocks."""
        given, prompts = self.constraints, len(workload.prompt_lens)
        size = given.gpu_batch_size or min(RESIDENT_BATCH, prompts)
        larger_pays = self.model.cuda and given.gpu_batch_size is None and prompts > size
        if not given.resident or given.max_latency is not None or larger_pays:
            return None
        batches, on_cpu = given.num_gpu_batches or 1, bool(given.cpu_cache_compute)
        policy = Policy(size, batches, overlap=given.overlap, cpu_cache_compute=on_cpu)
        _, plan = self.plan(policy, rule, workload, resources)
        return None if plan.missing() else policy

    def search(self, rule: CacheRule, workload: Workload, resources: Resources) -> Search:
        """The search for a job, on this machine, which is measured if it has not been."""
        shapes = self.model.shapes(rule, workload)
        return Search(self.measured(), shapes, workload, resources, self.constraints)

    def plan(self, policy: Policy, rule: CacheRule, workload: Workload, resources: Resources) -> tuple[Placement, Plan]:
        """Where everything goes under a policy, and the bytes it needs, whether they are available or not."""
        planned = self.constraints.planned(workload, policy)
        return plan_policy(policy, self.model.shapes(rule, workload), planned, resources)

    def measured(self) -> Profile:
        """The machine's profile; measured now if need be."""
        if self.profile is None:
            self.profile = self._measure()
        return self.profile


def check_cpu_cap(caps: dict[str, int | None], shared: bool, searched: bool) -> None:
    """Raises UserError for a cap that a search would never come near: where gpu and cpu are the same RAM (`shared`), it
    puts nothing on the cpu tier."""
    if searched and shared and caps["cpu"] is not None:
        raise UserError(
            "`cpu_mem` does nothing here: without CUDA the RAM is the gpu tier, so use `gpu_mem`; the cpu tier is a "
            "second pool in RAM, for a policy with cpu percentages (`percent`)"
        )
