"""The only chooser of a policy: for a job that is about to run, and for one that is only asked about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

from h2o_flexgen.errors import UserError
from h2o_flexgen.formats.forms import has_cache_format
from h2o_flexgen.kv_cache import CacheRule, rule_for
from h2o_flexgen.machine.profile import Profile
from h2o_flexgen.planning.budget import FORMATS, BudgetPoint, budget_choices, size_budget
from h2o_flexgen.planning.cost import CostModel
from h2o_flexgen.planning.execution_plan import ExecutionPlan
from h2o_flexgen.planning.memory import MemoryPlan, Resources, path_tokens, plan_policy
from h2o_flexgen.planning.placement import Placement
from h2o_flexgen.planning.search import Constraints, Search
from h2o_flexgen.planning.shapes import ModelData
from h2o_flexgen.planning.workload import GROUP_ROWS, Workload
from h2o_flexgen.policy import KVBudget, Policy

#: sequences of a batch where everything is resident: with more the matmuls of a CPU get no faster; fewer if they do not
#: fit
RESIDENT_BATCHES = (GROUP_ROWS, GROUP_ROWS // 2)


class Planner:
    """Chooses policies for a model on a machine.

    Args:
        models: the model under each `compress_weight` that may be chosen; mostly one.
        profile: the machine's rates, or None.
        measure: gives them; it is called when they are needed for the first time.
        progress: show a bar on stderr while a KV budget is sized.
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
        """The policy of a job.

        Args:
            policy: a given one is taken whether it fits or not.
            kv_budget: None is a full cache, "auto" the largest budget that costs no throughput.
            compress_cache: as for `LLM`, or "auto": of the formats that the model can have, the one with the least loss
                that costs no throughput (`budget.largest_free`).

        Raises:
            PlanError: nothing fits, or nothing is fast enough for `max_latency`.
            UserError: the budget comes to no slot, the search cannot be run, or losses are of another rule.
        """
        if "auto" not in (kv_budget, compress_cache) and len(self.models) == 1:
            return self._choose(workload, resources, policy, kv_budget, compress_cache, *self.models)
        losses = self.constraints.losses
        self.measured()  # else what is resident would be chosen without a prediction to compare

        def find(
            ratio: float | None, budget: KVBudget | None, kind: str | None, weights: str | None
        ) -> tuple[BudgetPoint, ExecutionPlan]:
            choice = self._choose(workload, resources, policy, budget, kind, weights)
            choice.plan.check()
            p = choice.prediction
            size = choice.policy.gpu_batch_size
            batches = choice.policy.num_gpu_batches
            slots = choice.rule.budget or self.model.shapes(choice.rule, workload).kv.slots
            loss = None
            allowed = True
            if losses is not None:
                share = None if budget is None else sum(budget.slots(longest)) / longest if given else 2 * ratio
                loss = losses.at(budget and budget.rule, share, kind)
                allowed = losses.allows(loss)
            return BudgetPoint(ratio, slots, size, batches, p.tokens_per_s, kind, weights, loss, allowed), choice

        longest = workload.longest
        given = kv_budget != "auto"
        if given:
            budgets = [(kv_budget and kv_budget.slots(longest)[0] / longest, kv_budget)]
        else:
            budgets = budget_choices(self.constraints.min_hh_ratio, longest, longest + workload.gen_len)
        kinds = self._formats() if compress_cache == "auto" else (compress_cache,)
        choices = [(*budget, kind, weights) for weights in self.models for kind in kinds for budget in budgets]
        choice, curve = size_budget(choices, find, self.progress)
        return replace(choice, curve=curve)

    def _formats(self) -> list[str | None]:
        """Of a cache of this model, whose losses are known if any are."""
        spec = self.model.spec
        losses = self.constraints.losses
        known = FORMATS if losses is None else losses.formats
        return [kind for kind in FORMATS if kind in known and has_cache_format(kind, spec.head_dim)]

    def _choose(
        self,
        workload: Workload,
        resources: Resources,
        policy: Policy | None,
        kv_budget: KVBudget | None,
        compress_cache: str | None,
        compress_weight: str | None,
    ) -> ExecutionPlan:
        stored = replace(self.models[compress_weight], compress_cache=compress_cache)
        rule = rule_for(kv_budget, workload.longest, workload.gen_len, stored.spec)
        models = [*stored.decodings(), stored]

        def takes(model: ModelData, policy: Policy | None) -> bool:
            """Whether a policy is for this form of the model: one that is decoded must be on the device whole, with
            room for all that the plan counts."""
            if policy is None:
                return False
            if model is stored:
                return True
            on_device = policy.fractions("weights")[0] == 1
            return on_device and not self._plan(model, policy, rule, workload, resources)[1].missing()

        resident = ((model, policy or self._resident(model, workload, resources, rule)) for model in models)
        found = next((pair for pair in resident if takes(*pair)), None)
        self.model = stored
        if found is None:
            policy = self.search(rule, workload, resources).best().policy
            found = next((model, policy) for model in models if takes(model, policy))
        self.model, policy = found
        placement, plan = self.plan(policy, rule, workload, resources)
        prediction = predict = None
        least_free = 1
        if self.profile is not None:
            planned = self.constraints.planned(workload, policy)
            cost = CostModel(self.profile, self.model.shapes(rule, workload), workload.gen_len)
            predict = partial(cost.predict, policy, placement, planned.prompt_lens)
            prediction = predict()
            mean = sum(planned.prompt_lens) // len(planned.prompt_lens)
            least_free = cost.least_free(policy, max(1, int(mean * cost.computed)), prediction)
        formats = (compress_cache, compress_weight, self.model.decoding)
        shared = path_tokens(self.model.shapes(rule, workload), resources)
        return ExecutionPlan(
            workload, policy, kv_budget, rule, placement, plan, prediction, *formats, shared, least_free, predict
        )

    def _resident(self, model: ModelData, workload: Workload, resources: Resources, rule: CacheRule) -> Policy | None:
        """Everything on the compute device, if it fits and a search could not gain by larger blocks."""
        given = self.constraints
        prompts = len(workload.prompt_lens)
        sizes = [given.gpu_batch_size] if given.gpu_batch_size else [min(size, prompts) for size in RESIDENT_BATCHES]
        if model.cuda and given.gpu_batch_size is None:  # where a larger block pays, whatever its size
            sizes = [size for size in sizes if size == prompts]
        if not given.resident or given.max_latency is not None:
            return None
        batches = given.num_gpu_batches or 1
        on_cpu = bool(given.cpu_cache_compute)
        for tokens, size in product(given.micro_batches, dict.fromkeys(sizes)):
            policy = Policy(size, batches, overlap=given.overlap, cpu_cache_compute=on_cpu, prefill_tokens=tokens)
            if not self._plan(model, policy, rule, workload, resources)[1].missing():
                return policy
        return None

    def search(self, rule: CacheRule, workload: Workload, resources: Resources) -> Search:
        """The search for a job, on this machine, which is measured if it has not been."""
        shapes = self.model.shapes(rule, workload)
        return Search(self.measured(), shapes, workload, resources, self.constraints)

    def plan(
        self, policy: Policy, rule: CacheRule, workload: Workload, resources: Resources
    ) -> tuple[Placement, MemoryPlan]:
        """Where everything goes under a policy, and the bytes it needs, whether they are available or not."""
        return self._plan(self.model, policy, rule, workload, resources)

    def _plan(
        self, model: ModelData, policy: Policy, rule: CacheRule, workload: Workload, resources: Resources
    ) -> tuple[Placement, MemoryPlan]:
        planned = self.constraints.planned(workload, policy)
        return plan_policy(policy, model.shapes(rule, workload), planned, resources)

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
            "`cpu_mem` does nothing here: without CUDA use `mem`; the cpu tier is a second pool in RAM, for a "
            "policy with cpu percentages (`percent`)"
        )
