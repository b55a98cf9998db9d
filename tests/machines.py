"""Machines that were never measured, for tests of the policy search."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from h2o_flexgen.kernels.rates import HALF_TYPES, ROWS, KernelRates
from h2o_flexgen.kv_cache import CacheRule, rule_for
from h2o_flexgen.machine.profile import AttentionRates, Link, Profile
from h2o_flexgen.models.registry import named_spec
from h2o_flexgen.planning.memory import Resources, plan_policy
from h2o_flexgen.planning.planner import Planner
from h2o_flexgen.planning.search import Constraints, Search
from h2o_flexgen.planning.shapes import ModelData
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.policy import GIB, TIERS, KVBudget, Policy

ROOT = Path(__file__).resolve().parent.parent
T4 = Profile.from_file(ROOT / "policies" / "hardware" / "t4-16gb.json")


def kernels(
    packed: tuple[str, ...] = (), slow: tuple[str, ...] = (), blocks: bool = False, **fastest: str
) -> KernelRates:
    """Rates of a CPU that was never measured.

    Args:
        packed: types whose packed kernel is the fastest.
        slow: types in which attention is slower than in fp32.
        blocks: matmuls in int8 are as fast with blocks of 4 bits.
        fastest: by type its fastest kernel for a matrix that is not packed; types that are not named are slow in all.
    """
    linear = {"float32": {"native": dict.fromkeys(ROWS, 1e11)}}
    for dtype in HALF_TYPES:
        linear[dtype] = {name: dict.fromkeys(ROWS, 1e10) for name in ("native", "widened", "packed")}
        if dtype in fastest:
            linear[dtype][fastest[dtype]] = dict.fromkeys(ROWS, 2e11)
        if dtype in packed:
            linear[dtype]["packed"] = dict.fromkeys(ROWS, 4e11)
    linear["int8"] = {"native": dict.fromkeys(ROWS, 4e11), "packed": dict.fromkeys(ROWS, 8e11)}
    if blocks:
        linear["int4"] = {"tiled": dict.fromkeys(ROWS, 8e11)}
    return KernelRates(linear, {"float32": 1e11} | {t: 1e10 if t in slow else 2e11 for t in HALF_TYPES})


#: what tests choose kernels by, so that they do the same on every CPU
KERNELS = kernels(bfloat16="native", float16="widened", slow=("float16",))


def laptop(**changes) -> Profile:
    """Two cores, bf16, no GPU; round numbers."""
    values = {
        "machine": {"cpu": "two round cores"},
        "versions": {},
        "date": "2026-01-01",
        "command": "made up",
        "device": "cpu",
        "dtype": "bfloat16",
        "memory": {"gpu": 16 * GIB, "cpu": 16 * GIB, "disk": 200 * GIB},
        "links": {
            "disk_to_cpu": Link(2e9, 5e-11),
            "cpu_to_disk": Link(1e9, 2e-10),
            "cpu_to_gpu": Link(5e9, 1e-10),
            "gpu_to_cpu": Link(5e9, 1e-10),
        },
        "matmul": {"streamed": {(2048, 2048): {1: 1e10, 32: 3e11, 128: 8e11}}},
        "attention": {
            "prefill": {"full": AttentionRates({64: 2e11}), "h2o": AttentionRates({64: 1e11})},
            "decode": {"full": AttentionRates({64: 2e10}), "h2o": AttentionRates({64: 1.5e10})},
        },
        "step_seconds": 5e-4,
        "baseline_bytes": GIB // 4,
    }
    return Profile(**(values | changes))


@st.composite
def percents(draw, step: int):
    """Six percentages, in whole steps."""
    percent = []
    for _ in range(3):
        gpu = draw(st.sampled_from(range(0, 101, step)))
        percent += [gpu, draw(st.sampled_from(range(0, 101 - gpu, step)))]
    return tuple(percent)


@st.composite
def policies(draw, gpu: list[int], cpu: list[int], most: tuple[int, int], tokens: list[int]):
    """Arguments of a policy: percentages among those of `gpu` and `cpu`, at most so many sequences in a batch and
    batches, and `prefill_tokens` among `tokens`."""
    percent = []
    for _ in range(3):
        share = draw(st.sampled_from(gpu))
        percent += [share, draw(st.sampled_from([c for c in cpu if c + share <= 100]))]
    return dict(
        percent=tuple(percent),
        gpu_batch_size=draw(st.integers(1, most[0])),
        num_gpu_batches=draw(st.integers(1, most[1])),
        overlap=draw(st.booleans()),
        cpu_cache_compute=draw(st.booleans()),
        prefill_tokens=draw(st.sampled_from(tokens)),
    )


def search(
    profile: Profile,
    model: str = "facebook/opt-1.3b",
    prompts: int = 64,
    prompt_len: int = 128,
    gen_len: int = 32,
    hh_ratio: float | None = None,
    gpu: float | None = None,
    cpu: float | None = None,
    disk: float | None = None,
    **constraints,
) -> Search:
    """The search for a job of equal prompts with random weights; `gpu`, `cpu`, `disk`: caps in GiB."""
    caps = {tier: None if cap is None else int(cap * GIB) for tier, cap in zip(TIERS, (gpu, cpu, disk))}
    workload = Workload((prompt_len,) * prompts, gen_len)
    planner = planner_of(profile, model, **constraints)
    budget = None if hh_ratio is None else KVBudget.from_ratio(hh_ratio)
    rule = rule_for(budget, workload.longest, workload.gen_len, planner.model.spec)
    shapes = planner.model.shapes(rule, workload)
    return Search(profile, shapes, workload, Resources.of(profile, caps), planner.constraints)


def plan_of(planner: Planner, policy: Policy, rule: CacheRule, workload: Workload, resources: Resources):
    """The placement and the memory plan of a policy, whether it fits or not."""
    planned = planner.constraints.planned(workload, policy)
    return plan_policy(policy, planner.model.shapes(rule, workload), planned, resources)


def planner_of(profile: Profile, model: str, stored: str | None = None, dummy: bool = True, **constraints) -> Planner:
    """The planner of a model whose sizes are built in, with weights as wide as the profile's type."""
    stored = stored or ("bfloat16" if profile.dtype == "bfloat16" else "float16")
    data = ModelData.of(named_spec(model), profile.dtype, stored, profile.device == "cuda", dummy)
    return Planner({None: data}, Constraints(**constraints), profile)
