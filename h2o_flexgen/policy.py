"""Policy and KVBudget: what placement decides, and how many tokens a cache keeps. Plain data, no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from h2o_flexgen.errors import UserError
from h2o_flexgen.files import read_json

TIERS = ("gpu", "cpu", "disk")
#: what is placed
KINDS = ("weights", "cache", "activations")
GIB = 1 << 30
#: of what a tier has, this much may be planned for
MARGIN = 0.95


def gib(nbytes: float) -> str:
    """Bytes as text for people, for example `1.25 GiB`."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= 0.01 * GIB else f"{nbytes / (1 << 20):.2f} MiB"


@dataclass(frozen=True)
class KVBudget:
    """The fixed number of KV slots per sequence, layer and head (H2O, arXiv 2306.14048, section 4).

    Either ratios of the longest prompt of the job, or sizes in slots; a size wins over a ratio. The recent window is as
    large as the heavy hitters where it is not given. Without heavy hitters the cache is a local window.

    Raises:
        UserError: a ratio outside [0, 1], a negative size, or nothing given at all.
    """

    hh_ratio: float | None = None
    recent_ratio: float | None = None
    hh_size: int | None = None
    recent_size: int | None = None

    def __post_init__(self):
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if not given:
            raise UserError("a KV budget needs a ratio or a size; leave it out for a full cache")
        for name, value in given.items():
            if name.endswith("ratio") and not 0 <= value <= 1:
                raise UserError(f"{name} must lie in [0, 1], not {value}")
            if name.endswith("size") and not (value >= 0 and value % 1 == 0):
                raise UserError(f"{name} must be a whole number of slots, 0 or more, not {value}")

    @classmethod
    def from_ratio(cls, hh_ratio: float, recent_ratio: float | None = None) -> KVBudget:
        """Slots as fractions of the longest prompt; `recent_ratio` defaults to `hh_ratio`."""
        return cls(hh_ratio=hh_ratio, recent_ratio=recent_ratio)

    @classmethod
    def from_size(cls, heavy: int, recent: int | None = None) -> KVBudget:
        """Slots given directly; `recent` defaults to `heavy`."""
        return cls(hh_size=heavy, recent_size=recent)

    def slots(self, longest_prompt: int) -> tuple[int, int]:
        """(heavy, recent) for a job whose longest prompt has `longest_prompt` tokens.

        Raises:
            UserError: the budget comes to no slot at all.
        """

        def count(size: int | None, ratio: float | None, default: int) -> int:
            if size is not None:
                return int(size)
            if ratio is None:
                return default
            return max(1, int(ratio * longest_prompt)) if ratio > 0 else 0

        heavy = count(self.hh_size, self.hh_ratio, 0)
        recent = count(self.recent_size, self.recent_ratio, heavy)
        if heavy + recent == 0:
            raise UserError("the KV budget is empty: heavy and recent slots cannot both be 0")
        return heavy, recent


@dataclass(frozen=True)
class Policy:
    """Everything that placement decides (FlexGen, arXiv 2303.06865, section 4.2).

    Attributes:
        gpu_batch_size: sequences of a batch: its KV block of a layer moves, and is attended to, at once. Small batches
            share the matmuls of a decode step.
        num_gpu_batches: batches that go through a layer before the next layer is needed.
        percent: weights gpu, weights cpu, cache gpu, cache cpu, activations gpu, activations cpu, each in percent;
            the rest is on disk. Activations are the hidden states of prefill: those of a decode step, one token of
            each sequence, stay on the device.
        overlap: move weights and cache while computing.
        cpu_cache_compute: decode attention of KV blocks on the cpu tier runs on the CPU.
        prefill_tokens: tokens of one prefill micro-batch (at least one sequence).

    Raises:
        UserError: a size below 1, or percentages that are negative or exceed 100 together.
    """

    gpu_batch_size: int = 4
    num_gpu_batches: int = 1
    percent: tuple[float, ...] = (100, 0, 100, 0, 100, 0)
    overlap: bool = True
    cpu_cache_compute: bool = False
    prefill_tokens: int = 2048

    def __post_init__(self):
        for name in ("gpu_batch_size", "num_gpu_batches", "prefill_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name} must be a whole number, 1 or more, not {value}")
        object.__setattr__(self, "percent", tuple(self.percent))
        if len(self.percent) != 6:
            order = "weights gpu cpu, cache gpu cpu, activations gpu cpu"
            raise UserError(f"percent takes six numbers ({order}), not {len(self.percent)}")
        for kind, gpu, cpu in zip(KINDS, self.percent[::2], self.percent[1::2]):
            if not (0 <= gpu <= 100 and 0 <= cpu <= 100):
                raise UserError(f"percent of {kind} must lie between 0 and 100: {gpu} {cpu}")
            if gpu + cpu > 100:
                raise UserError(f"percent of {kind} exceeds 100: {gpu} + {cpu}")

    def fractions(self, kind: str) -> tuple[float, float, float]:
        """(gpu, cpu, disk) of "weights", "cache" or "activations", each in [0, 1]."""
        n = 2 * KINDS.index(kind)
        gpu, cpu = self.percent[n] / 100, self.percent[n + 1] / 100
        return gpu, cpu, max(0.0, 1 - gpu - cpu)

    @property
    def block_size(self) -> int:
        return self.gpu_batch_size * self.num_gpu_batches

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_dict(cls, data: dict) -> Policy:
        data = data.get("policy", data) if isinstance(data, dict) else data
        if not isinstance(data, dict):
            raise UserError("a policy is a JSON object")
        types = {f.name: type(f.default) for f in fields(cls)} | {"percent": list}
        for name, value in data.items():
            if name not in types:
                raise UserError(f"unknown policy field {name!r}; known: {', '.join(sorted(types))}")
            if type(value) is not types[name]:
                raise UserError(f"policy field {name!r} must be of type {types[name].__name__}, not {value!r}")
        if not all(type(x) in (int, float) for x in data.get("percent", [])):
            raise UserError("policy field 'percent' must hold six numbers")
        return cls(**data)


def read_policy(path: str | Path) -> tuple[Policy, KVBudget | None]:
    """A policy written by `Policy.to_json` or by the policy search, and the KV budget that the search wrote beside it:
    its block is as large as that budget allows. The budget is None if the file has none.

    Raises:
        UserError: no such file, not JSON, not a policy.
    """
    data = read_json("the policy", path)
    try:
        policy = Policy.from_dict(data)
    except UserError as e:
        raise UserError(f"the policy {path}: {e}") from None
    budget = data.get("kv_budget")
    if budget is None:
        return policy, None
    if not isinstance(budget, dict) or {n: type(x) for n, x in budget.items()} != {"heavy": int, "recent": int}:
        raise UserError(f'the policy {path}: \'kv_budget\' must hold "heavy" and "recent" slots, or be null')
    return policy, KVBudget.from_size(budget["heavy"], budget["recent"])


def given_policy(
    policy: Policy | str | Path, kv_budget: KVBudget | str | None
) -> tuple[Policy | str, KVBudget | str | None]:
    """The policy or "auto", and the KV budget, from what a user may give for them; a policy's file may bring a budget.

    Raises:
        UserError: anything else, or a file that cannot be read.
    """
    if kv_budget not in (None, "auto") and not isinstance(kv_budget, KVBudget):
        raise UserError(f'kv_budget must be a KVBudget, such as KVBudget.from_ratio(0.2), or "auto", not {kv_budget!r}')
    if isinstance(policy, (str, Path)) and policy != "auto":
        policy, budget = read_policy(policy)
        return policy, budget if kv_budget is None else kv_budget
    if not isinstance(policy, Policy) and policy != "auto":
        raise UserError(f'policy must be a Policy, a file or "auto", not {policy!r}')
    return policy, kv_budget
