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

    Either ratios of the longest prompt of the job, or sizes in slots; a size wins over a ratio. Where only the heavy
    hitters are given, the recent window is as large. Without heavy hitters the cache is a local window.

    Raises:
        UserError: a ratio outside [0, 1], a negative size, or nothing given at all.
    """

    hh_ratio: float | None = None
    recent_ratio: float | None = None
    hh_size: int | None = None
    recent_size: int | None = None

    def __post_init__(self):
        for name in ("hh_ratio", "recent_ratio"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise UserError(f"{name} must lie in [0, 1], not {value}")
        for name in ("hh_size", "recent_size"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and value % 1 == 0):
                raise UserError(f"{name} must be a whole number of slots, 0 or more, not {value}")
        if all(getattr(self, f.name) is None for f in fields(self)):
            raise UserError("a KV budget needs a ratio or a size; leave it out for a full cache")

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
        heavy = self._count(self.hh_size, self.hh_ratio, longest_prompt)
        recent = self._count(self.recent_size, self.recent_ratio, longest_prompt)
        if recent is None:
            recent = heavy
        heavy = heavy or 0
        if heavy + recent == 0:
            raise UserError("the KV budget is empty: heavy and recent slots cannot both be 0")
        return heavy, recent

    @staticmethod
    def _count(size: int | None, ratio: float | None, longest_prompt: int) -> int | None:
        if size is not None:
            return int(size)
        if ratio is None:
            return None
        return max(1, int(ratio * longest_prompt)) if ratio > 0 else 0


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
        percent = tuple(self.percent)
        object.__setattr__(self, "percent", percent)
        if len(percent) != 6:
            raise UserError(
                f"percent takes six numbers (weights gpu cpu, cache gpu cpu, activations gpu cpu), not {len(percent)}"
            )
        for what, gpu, cpu in zip(KINDS, percent[::2], percent[1::2]):
            if not (0 <= gpu <= 100 and 0 <= cpu <= 100):
                raise UserError(f"percent of {what} must lie between 0 and 100: {gpu} {cpu}")
            if gpu + cpu > 100:
                raise UserError(f"percent of {what} exceeds 100: {gpu} + {cpu}")

    def fractions(self, what: str) -> tuple[float, float, float]:
        """(gpu, cpu, disk) of "weights", "cache" or "activations", each in [0, 1]."""
        at = 2 * KINDS.index(what)
        gpu, cpu = self.percent[at] / 100, self.percent[at + 1] / 100
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
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise UserError(f"unknown policy field {unknown[0]!r}; known: {', '.join(sorted(known))}")
        for name, value in data.items():
            wanted = bool if name in ("overlap", "cpu_cache_compute") else list if name == "percent" else int
            if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
                raise UserError(f"policy field {name!r} must be of type {wanted.__name__}, not {value!r}")
        if not all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in data.get("percent", [])):
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
    wanted = isinstance(budget, dict) and set(budget) == {"heavy", "recent"}
    if not wanted or not all(isinstance(n, int) for n in budget.values()):
        raise UserError(f'the policy {path}: \'kv_budget\' must hold "heavy" and "recent" slots, or be null')
    return policy, KVBudget.from_size(budget["heavy"], budget["recent"])
