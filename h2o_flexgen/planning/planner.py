"""The only chooser of a policy: for a job that is about to run, and for one that is only asked about."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from h2o_flexgen.errors import UserError
from h2o_flexgen.kv_cache import CacheRule, rule_for
from h2o_flexgen.models.registry import family
from h2o_flexgen.models.spec import Layer, ModelSpec
from h2o_flexgen.planning.budget import MIN_HH_RATIO, BudgetPoint, size_budget
from h2o_flexgen.planning.cost import CostModel, Prediction
from h2o_flexgen.planning.memory import Plan, Shapes, plan_policy
from h2o_flexgen.planning.placement import Placement
from h2o_flexgen.planning.profile import ITEMSIZE, Profile
from h2o_flexgen.planning.search import Candidate, Search
from h2o_flexgen.policy import MARGIN, TIERS, KVBudget, Policy
from h2o_flexgen.sizes import Workload

#: sequences of a batch where everything is resident: more make the matmuls of a CPU no faster
RESIDENT_BATCH = 64
_ITEMSIZE = {**ITEMSIZE, "float64": 8}  # a checkpoint may be in the last


@dataclass(frozen=True)
class ModelData:
    """A model as plan and cost count it.

    Attributes:
        layers: the tensors of embedding, transformer blocks and head (`tensors` of the family).
        dtype: name of the type that is computed in, of `itemsize` bytes.
        stored_itemsize: bytes of the widest element in the checkpoint; converts: whether its type is another.
        cuda: whether the compute device is one of CUDA.
        dummy: random weights, which take space on disk that a checkpoint has taken already.
    """

    spec: ModelSpec
    layers: list[Layer]
    dtype: str
    itemsize: int
    stored_itemsize: int
    converts: bool
    cuda: bool
    dummy: bool = False

    @classmethod
    def of(cls, spec: ModelSpec, dtype: str, stored: Iterable[str], cuda: bool, dummy: bool = False) -> ModelData:
        """`dtype` and `stored`: names of the type that is computed in, and of those in the checkpoint."""
        layers, stored = family(spec.model_type).tensors(spec), set(stored)
        widest = max(_ITEMSIZE[name] for name in stored)
        return cls(spec, layers, dtype, _ITEMSIZE[dtype], widest, stored != {dtype}, cuda, dummy)

    def shapes(self, rule: CacheRule, workload: Workload) -> Shapes:
        """What plan and cost count with, for a job with this cache rule."""
        return Shapes.of(
            self.spec,
            self.layers,
            rule,
            workload,
            compute_itemsize=self.itemsize,
            stored_itemsize=self.stored_itemsize,
            converts=self.converts,
            cuda=self.cuda,
            bf16=self.dtype == "bfloat16",
            dummy=self.dummy,
        )


@dataclass(frozen=True)
class Resources:
    """The memory of a machine.

    Attributes:
        limits: bytes that may be planned for on each tier; without CUDA also "ram", for gpu and cpu together.
        baseline: bytes of RAM that the process holds whatever it computes.
        workspace: bytes of device memory that its libraries hold.
    """

    limits: dict[str, int]
    baseline: int = 0
    workspace: int = 0

    @classmethod
    def of(cls, profile: Profile, caps: dict[str, int | None]) -> Resources:
        """Those of a profile's machine, within the caps."""
        available = {tier: int(MARGIN * profile.memory[tier]) for tier in TIERS}
        limits = cap_limits(available, caps, shared=profile.device != "cuda")
        return cls(limits, profile.baseline_bytes, profile.workspace_bytes)


@dataclass(frozen=True)
class Given:
    """What is not for the planner to choose.

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


@dataclass(frozen=True)
class Choice:
    """A policy with all that follows from it.

    Attributes:
        rule: the cache rule of `kv_budget`.
        plan: the bytes it needs. A policy that was given may need more than there is (`plan.check`).
        prediction: what it costs; None while this machine has not been measured.
        curve: for the KV budget "auto" the trade of slots for throughput, the fewest slots first; else empty.
    """

    policy: Policy
    kv_budget: KVBudget | None
    rule: CacheRule
    placement: Placement
    plan: Plan
    prediction: Prediction | None
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
        given: Given | None = None,
        profile: Profile | None = None,
        measure: Callable[[], Profile] | None = None,
        progress: bool = False,
    ):
        self.model, self.given, self.profile = model, given or Given(), profile
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
            UserError: the budget comes to no slot, or the search cannot be run.
        """
        if kv_budget != "auto":
            return self._choose(workload, resources, policy, kv_budget)
        self.measured()  # before anything is searched: the throughputs are what is compared

        def find(ratio: float | None, budget: KVBudget | None) -> tuple[BudgetPoint, Choice]:
            choice = self._choose(workload, resources, policy, budget)
            choice.plan.check()
            p = choice.prediction
            speed = p.block_tokens_per_s if self.given.one_block else p.tokens_per_s
            return BudgetPoint.of(ratio, self.model.shapes(choice.rule, workload), choice.policy, speed), choice

        longest, total = workload.longest, workload.longest + workload.gen_len
        _, choice, curve = size_budget(self.given.min_hh_ratio, longest, total, find, self.progress)
        return replace(choice, curve=curve)

    def _choose(
        self, workload: Workload, resources: Resources, policy: Policy | None, kv_budget: KVBudget | None
    ) -> Choice:
        rule = rule_for(kv_budget, workload, self.model.spec.positions)
        policy = policy or self._resident(workload, resources, rule) or self._fastest(workload, resources, rule).policy
        placement, plan = self.plan(policy, rule, workload, resources)
        prediction = self.predict(policy, placement, rule, workload)
        return Choice(policy, kv_budget, rule, placement, plan, prediction)

    def _resident(self, workload: Workload, resources: Resources, rule: CacheRule) -> Policy | None:
        """Everything on the compute device, if it fits and a search could not gain by larger blocks."""
        given, prompts = self.given, len(workload.prompt_lens)
        size = given.gpu_batch_size or min(RESIDENT_BATCH, prompts)
        larger_pays = self.model.cuda and given.gpu_batch_size is None and prompts > size
        if not given.resident or given.max_latency is not None or larger_pays:
            return None
        batches, on_cpu = given.num_gpu_batches or 1, bool(given.cpu_cache_compute)
        policy = Policy(size, batches, overlap=given.overlap, cpu_cache_compute=on_cpu)
        _, plan = self.plan(policy, rule, workload, resources)
        return policy if plan.shortfall() is None else None

    def _fastest(self, workload: Workload, resources: Resources, rule: CacheRule) -> Candidate:
        given = self.given
        return self.search(rule, workload, resources).best(
            given.gpu_batch_size, given.num_gpu_batches, given.cpu_cache_compute, given.overlap
        )

    def search(self, rule: CacheRule, workload: Workload, resources: Resources) -> Search:
        """The search for a job, on this machine, which is measured if it has not been."""
        return Search(
            self.measured(),
            self.model.shapes(rule, workload),
            workload,
            resources.limits,
            resources.baseline,
            resources.workspace,
            self.given.max_latency,
            self.given.one_block,
        )

    def plan(self, policy: Policy, rule: CacheRule, workload: Workload, resources: Resources) -> tuple[Placement, Plan]:
        """Where everything goes under a policy, and the bytes it needs, whether they are there or not."""
        if self.given.one_block:
            workload = replace(workload, prompt_lens=workload.prompt_lens[: policy.block_size])
        shapes = self.model.shapes(rule, workload)
        return plan_policy(policy, shapes, workload, resources.limits, resources.baseline, resources.workspace)

    def predict(self, policy: Policy, placement: Placement, rule: CacheRule, workload: Workload) -> Prediction | None:
        """The times of a job, if this machine has been measured."""
        if self.profile is None:
            return None
        return CostModel(self.profile, self.model.shapes(rule, workload), workload).predict(policy, placement)

    def measured(self) -> Profile:
        """The machine's profile; measured now if it is not there."""
        if self.profile is None:
            self.profile = self._measure()
        return self.profile


def cap_limits(available: dict[str, int], caps: dict[str, int | None], shared: bool) -> dict[str, int]:
    """Bytes that may be planned for on each tier: what is available, within what the user allows. `shared`: gpu and cpu
    are the same RAM, whose whole is the limit "ram"."""
    limits = {tier: nbytes if caps[tier] is None else min(nbytes, caps[tier]) for tier, nbytes in available.items()}
    return limits | ({"ram": available["cpu"]} if shared else {})


def check_cpu_cap(caps: dict[str, int | None], shared: bool, searched: bool) -> None:
    """Raises UserError for a cap that a search would never come near: where gpu and cpu are the same RAM (`shared`), it
    puts nothing on the cpu tier."""
    if searched and shared and caps["cpu"] is not None:
        raise UserError(
            "`cpu_mem` does nothing here: without CUDA the RAM is the gpu tier, so use `gpu_mem`; the cpu tier is a "
            "second pool in RAM, for a policy with cpu percentages (`percent`)"
        )
