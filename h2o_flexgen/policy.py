"""Policy and KVBudget: where everything is placed, and how many tokens a cache keeps. Plain data, no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from h2o_flexgen.errors import UserError
from h2o_flexgen.utils.files import read_json

TIERS = ("gpu", "cpu", "disk")
#: parts of a policy that a search keeps if they are given, and chooses if not
SEARCHED = ("gpu_batch_size", "num_gpu_batches", "overlap", "prefill_tokens", "cpu_cache_compute")
#: {tier, or "ram" for all RAM: the option that limits it}
LIMITS = {"gpu": "gpu_mem", "cpu": "cpu_mem", "disk": "disk_mem", "ram": "mem"}
#: what is placed
KINDS = ("weights", "cache", "activations")
GIB = 1 << 30
MIB = 1 << 20
#: fraction of a tier's memory that a plan may use
MARGIN = 0.95
#: the cache rule of a KV budget that names none
DEFAULT_RULE = "voted"
#: that of `h2o-flexgen stream`, whose questions may stand anywhere
STREAM_RULE = "smoothed"
#: the same in files, which used to name none while this was the only rule
FIRST_RULE = "h2o"
#: a budget in slots is taken to be for texts so many times as long
TEXT = 5


def gib(nbytes: float) -> str:
    """A human-readable number of bytes, for example `1.25 GiB`."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= 0.01 * GIB else f"{nbytes / MIB:.2f} MiB"


@dataclass(frozen=True)
class KVBudget:
    """The fixed number of KV slots per sequence, layer and head (H2O, arXiv 2306.14048, section 4).

    Given as ratios of the job's longest prompt or as sizes in slots; a size wins over a ratio. The recent window
    defaults to the size of the heavy hitters; without heavy hitters the cache is a local window.

    Attributes:
        rule: the cache rule that decides which tokens keep their slots: a name in `kv_cache.RULES`, optionally with
            options, as "mean:first=4".
        position_rolling: the cached tokens of a head take the positions 0, 1, 2 ..., whatever was evicted between them
            (RoPE only).

        by_head: slots of each KV head, by layer, so many on average; one number stands for all heads of a layer. None:
            as the option `layers` of the rule says; empty: all have the same.

    Raises:
        UserError: a ratio outside [0, 1], a negative size, or neither given.
    """

    hh_ratio: float | None = None
    recent_ratio: float | None = None
    hh_size: int | None = None
    recent_size: int | None = None
    rule: str = DEFAULT_RULE
    position_rolling: bool = False
    by_head: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self):
        amounts = {name: getattr(self, name) for name in ("hh_ratio", "recent_ratio", "hh_size", "recent_size")}
        given = {name: value for name, value in amounts.items() if value is not None}
        if not given:
            raise UserError("a KV budget needs a ratio or a size; leave it out for a full cache")
        for name, value in given.items():
            if name.endswith("ratio") and not 0 <= value <= 1:
                percent = f": for {value:g} % give {value / 100:g}" if 1 < value <= 100 else ""
                raise UserError(f"`{name}` must lie in [0, 1], not {value}{percent}")
            if name.endswith("size") and not (value >= 0 and value % 1 == 0):
                raise UserError(f"`{name}` must be a whole number of slots, 0 or more, not {value}")
        if not isinstance(self.rule, str):
            raise UserError(f"the rule of a KV budget is a name, not {self.rule!r}")
        self._check_by_head()
        if not isinstance(self.position_rolling, bool):
            raise UserError(f"`position_rolling` must be true or false, not {self.position_rolling!r}")

    def _check_by_head(self) -> None:
        layers = self.by_head or ()
        is_tuple = isinstance(layers, tuple) and all(isinstance(each, tuple) and each for each in layers)
        slots = [n for each in layers for n in each] if is_tuple else []
        if not is_tuple or not all(type(n) is int and n >= 1 for n in slots):
            raise UserError("the slots of each KV head must be tuples of whole numbers, 1 or more, one tuple a layer")

    @classmethod
    def from_ratio(cls, hh_ratio: float, recent_ratio: float | None = None, rule: str = DEFAULT_RULE) -> KVBudget:
        """Slots as fractions of the longest prompt; `recent_ratio` defaults to `hh_ratio`."""
        return cls(hh_ratio=hh_ratio, recent_ratio=recent_ratio, rule=rule)

    @classmethod
    def from_size(cls, heavy: int, recent: int | None = None, rule: str = DEFAULT_RULE) -> KVBudget:
        """Slots given directly; `recent` defaults to `heavy`."""
        return cls(hh_size=heavy, recent_size=recent, rule=rule)

    @classmethod
    def from_dict(cls, data: dict) -> KVBudget:
        """The inverse of `to_dict`, for policy files and reports. Raises KeyError or UserError."""
        rule = data.get("rule", FIRST_RULE)
        rolling = data.get("position_rolling", False)
        layers = data.get("layers")
        if layers is not None:
            layers = tuple(tuple(each) if isinstance(each, list) else (each,) for each in layers)
        return cls(
            hh_size=data["heavy"], recent_size=data["recent"], rule=rule, position_rolling=rolling, by_head=layers
        )

    def to_dict(self, longest_prompt: int) -> dict:
        """As slots, for a job whose longest prompt has `longest_prompt` tokens."""
        heavy, recent = self.slots(longest_prompt)
        rolling = {"position_rolling": True} if self.position_rolling else {}
        layers = [list(each) if len(set(each)) > 1 else each[0] for each in self.by_head or ()]
        by_head = {"layers": layers} if layers else {}
        return {"heavy": heavy, "recent": recent, "rule": self.rule} | rolling | by_head

    def text_len(self, longest_prompt: int, gen_len: int) -> int:
        """Tokens of the texts that slots are shared out for among KV heads. With a budget in slots they do not depend
        on the job, so that a prompt's tokens do not depend on its neighbours."""
        if self.hh_ratio is None and self.recent_ratio is None:
            return TEXT * sum(self.slots(longest_prompt))
        return longest_prompt + gen_len

    def slots(self, longest_prompt: int) -> tuple[int, int]:
        """(heavy, recent) for a job whose longest prompt has `longest_prompt` tokens. Raises UserError if both are
        0."""
        heavy = _slots(self.hh_size, self.hh_ratio, longest_prompt, default=0)
        recent = _slots(self.recent_size, self.recent_ratio, longest_prompt, default=heavy)
        if heavy + recent == 0:
            raise UserError("the KV budget is empty: heavy and recent slots cannot both be 0")
        return heavy, recent


def _slots(size: int | None, ratio: float | None, longest_prompt: int, default: int) -> int:
    if size is not None:
        return int(size)
    if ratio is None:
        return default
    return max(1, int(ratio * longest_prompt)) if ratio > 0 else 0


@dataclass(frozen=True)
class Policy:
    """How a job is cut into batches, and on which tiers everything is placed (FlexGen, arXiv 2303.06865, section 4.2).

    Attributes:
        gpu_batch_size: sequences per batch. The KV block of a batch in a layer is moved, and attended to, as a whole;
            small batches share the matmuls of a decode step.
        num_gpu_batches: batches that pass through a layer before the next layer is needed.
        percent: weights gpu, weights cpu, cache gpu, cache cpu, activations gpu, activations cpu, each in percent;
            the rest is on disk. Activations are the hidden states of prefill; those of a decode step, one token per
            sequence, stay on the device.
        overlap: move weights and cache while computing.
        cpu_cache_compute: in decode attend to KV blocks on the host with the CPU, instead of moving them to the GPU.
        prefill_tokens: most tokens of a prefill micro-batch, which holds at least one sequence; the workspace of a
            layer grows with them.

    Raises:
        UserError: a size below 1, or percentages of a kind that are negative or exceed 100 together.
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
            if type(value) is not int or value < 1:
                raise UserError(f"{name} must be a whole number, 1 or more, not {value!r}")
        for name in ("overlap", "cpu_cache_compute"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} must be true or false, not {getattr(self, name)!r}")
        percent = self.percent
        numbers = isinstance(percent, (tuple, list)) and all(isinstance(x, (int, float)) for x in percent)
        if not numbers or len(percent) != 6:
            order = "weights gpu cpu, cache gpu cpu, activations gpu cpu"
            raise UserError(f"percent takes six numbers ({order}), not {percent!r}")
        object.__setattr__(self, "percent", tuple(percent))
        for kind, gpu, cpu in zip(KINDS, percent[::2], percent[1::2]):
            if not (gpu >= 0 and cpu >= 0 and gpu + cpu <= 100):
                raise UserError(f"percent of {kind}: gpu and cpu must be 0 or more, together at most 100: {gpu} {cpu}")

    def fractions(self, kind: str) -> tuple[float, float, float]:
        """(gpu, cpu, disk) of "weights", "cache" or "activations", each in [0, 1]."""
        n = 2 * KINDS.index(kind)
        gpu = self.percent[n] / 100
        cpu = self.percent[n + 1] / 100
        return gpu, cpu, max(0.0, 1 - gpu - cpu)

    @property
    def block_size(self) -> int:
        return self.gpu_batch_size * self.num_gpu_batches

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_dict(cls, data: dict) -> Policy:
        """From plain data, or from its "policy" entry. Raises UserError."""
        data = data.get("policy", data) if isinstance(data, dict) else data
        if not isinstance(data, dict):
            raise UserError("a policy is a JSON object")
        known = [f.name for f in fields(cls)]
        for name in data:
            if name not in known:
                raise UserError(f"unknown policy field {name!r}; known: {', '.join(known)}")
        return cls(**data)


class PolicySettings(NamedTuple):
    """A policy, and the settings that a policy file holds beside it because its block depends on them.

    Attributes:
        policy, kv_budget: may be "auto".
        compress_cache, compress_weight, compute: as for `LLM`.
    """

    policy: Policy | str
    kv_budget: KVBudget | str | None = None
    compress_cache: str | None = None
    compress_weight: str | None = None
    compute: str = "exact"

    @classmethod
    def from_file(cls, path: str | Path) -> PolicySettings:
        """What `Policy.to_json` or the policy search wrote. Raises UserError."""
        data = read_json("the policy", path)
        try:
            policy = Policy.from_dict(data)
            slots = data.get("kv_budget")
            kv_budget = None if slots is None else KVBudget.from_dict(slots)
        except UserError as e:
            raise UserError(f"the policy {path}: {e}") from None
        except (TypeError, KeyError, AttributeError):
            raise UserError(f"the policy {path}: kv_budget must be null or hold the slots heavy and recent") from None
        return cls(policy, kv_budget, **{name: data[name] for name in cls._fields[2:] if data.get(name)})


def given_policy(
    policy: Policy | str | Path,
    kv_budget: KVBudget | str | None = None,
    compress_cache: str | None = None,
    compress_weight: str | None = None,
    compute: str | None = None,
) -> PolicySettings:
    """The settings of a job by a policy, the path of a policy file, or "auto"; other arguments win over the file.
    Raises UserError for an argument of another type, or a file that cannot be read or is no policy."""
    is_file = isinstance(policy, (str, Path)) and policy != "auto"
    stored = PolicySettings.from_file(policy) if is_file else PolicySettings(policy)
    if stored.policy != "auto" and not isinstance(stored.policy, Policy):
        raise UserError(f'policy must be a Policy, a file or "auto", not {policy!r}')
    if kv_budget not in (None, "auto") and not isinstance(kv_budget, KVBudget):
        raise UserError(f'kv_budget must be a KVBudget, such as KVBudget.from_ratio(0.2), or "auto", not {kv_budget!r}')
    given = dict(kv_budget=kv_budget, compress_cache=compress_cache, compress_weight=compress_weight, compute=compute)
    return stored._replace(**{name: value for name, value in given.items() if value})
