"""What a machine can do, as numbers that `h2o_flexgen.hardware` measures. Plain data, to and from JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, astuple, dataclass, field, fields
from pathlib import Path

from h2o_flexgen.errors import UserError
from h2o_flexgen.files import read_json

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
LINKS = ("disk_to_cpu", "cpu_to_disk", "cpu_to_gpu", "gpu_to_cpu")
ATTENTION = ("full", "h2o")
#: part of the time that a process may wait for a processor while it measures: 0.03 at rest, 0.4 beside a busy program
CROWDED = 0.2


@dataclass(frozen=True)
class Link:
    """One direction of traffic.

    Attributes:
        bytes_per_s: its rate while nothing computes.
        compute_seconds_per_byte: what a byte takes away from compute that runs meanwhile (the processor's time, or the
            whole transfer where the two do not overlap).
        slowed_by_compute: the part of its rate that is lost while something computes, in [0, 1].
        request_seconds: what a request costs whatever its size (of the disk only).
        compute_seconds_per_request: what it takes away from compute whatever its size.
    """

    bytes_per_s: float
    compute_seconds_per_byte: float = 0.0
    slowed_by_compute: float = 0.0
    request_seconds: float = 0.0
    compute_seconds_per_request: float = 0.0


@dataclass(frozen=True)
class Profile:
    """Measured hardware. Without CUDA the compute device is the processor, and links to and from `gpu` copy in RAM.

    Attributes:
        machine, versions, date, command: where the numbers come from.
        device: "cpu" or "cuda"; dtype: of the computation.
        memory: bytes of each tier; without CUDA gpu and cpu are the same RAM.
        links: by name (LINKS); disk past the page cache, in requests as large as those for a cache.
        layer: hidden size -> [(tokens, flops per second)] of a decoder layer without its attention.
        prefill_attention: "full" or "h2o" -> {head size: flops per second}, 4 flops per query, key and number.
        decode_attention: likewise {head size: bytes of K and V per second}.
        cpu_attention: decode attention on the CPU beside a CUDA device, likewise; None without one.
        head_seconds: "prefill", "decode" or "cpu" -> "full" or "h2o" -> seconds of attention for each head of each
            sequence, whatever its work.
        visit_seconds: what a visit of a cache piece from disk takes from compute besides its bytes and requests.
        step_seconds: what a step of one batch through one layer costs whatever its size.
        logit_seconds: to turn one logit into a part of a choice.
        head_efficiency: the rate of the product with the vocabulary over that of a layer's products.
        convert_seconds_per_byte: to make a byte of weights out of those of another dtype, on the compute device.
        baseline_bytes: RAM of the process before it holds anything; workspace_bytes: of the device, by its libraries.
        crowded: part of the time that the process waited for a processor while this was measured.
    """

    machine: dict
    versions: dict
    date: str
    command: str
    device: str
    dtype: str
    memory: dict[str, int]
    links: dict[str, Link]
    layer: dict[int, list[tuple[int, float]]]
    prefill_attention: dict[str, dict[int, float]]
    decode_attention: dict[str, dict[int, float]]
    cpu_attention: dict[str, dict[int, float]] | None = None
    head_seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    visit_seconds: float = 0.0
    step_seconds: float = 0.0
    logit_seconds: float = 0.0
    head_efficiency: float = 1.0
    convert_seconds_per_byte: float = 0.0
    baseline_bytes: int = 0
    workspace_bytes: int = 0
    crowded: float = 0.0

    @property
    def is_crowded(self) -> bool:
        """Whether other programs took so much of the processors that the rates are not the machine's."""
        return self.crowded > CROWDED

    def matmul_rate(self, hidden: int, tokens: int) -> float:
        """Flops per second of the matrix products of `tokens` rows in a model of that hidden size."""
        return between({size: between(dict(table), tokens) for size, table in self.layer.items()}, hidden)

    def attention_seconds(self, phase: str, kind: str, work: float, heads: int, head_dim: int) -> float:
        """Of one sequence; `work`: flops in prefill, else bytes of K and V. `phase` "cpu": a decode step there."""
        rate = between(getattr(self, f"{phase}_attention")[kind], head_dim)
        return work / rate + heads * self.head_seconds.get(phase, {}).get(kind, 0.0)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_dict(cls, data: dict) -> Profile:
        """Raises UserError: something is missing, or a number is not what it should be."""
        try:
            names = {f.name for f in fields(cls)}
            values = {name: data[name] for name in names & set(data)}
            if not isinstance(data["machine"], dict) or not isinstance(data["versions"], dict):
                raise TypeError("machine and versions must be objects")
            values["memory"] = {tier: int(data["memory"][tier]) for tier in ("gpu", "cpu", "disk")}
            values["links"] = {name: Link(**data["links"][name]) for name in LINKS}
            values["layer"] = {int(size): [(int(n), float(r)) for n, r in t] for size, t in data["layer"].items()}
            for name in ("prefill_attention", "decode_attention", "cpu_attention"):
                if data.get(name) is not None:
                    values[name] = {k: {int(d): float(r) for d, r in data[name][k].items()} for k in ATTENTION}
            profile = cls(**values)
            profile._check()
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
            raise UserError(f"not a hardware profile ({type(e).__name__}: {e})") from None
        return profile

    def _check(self) -> None:
        """Raises ValueError or TypeError for numbers that a search would stumble over."""
        if self.device not in ("cpu", "cuda") or self.dtype not in ITEMSIZE:
            raise ValueError("device or dtype is not understood")
        if self.device == "cuda" and self.cpu_attention is None:
            raise ValueError("cpu_attention is missing")
        by_dim = [
            t for a in (self.prefill_attention, self.decode_attention, self.cpu_attention or {}) for t in a.values()
        ]
        tables = [*(dict(table) for table in self.layer.values()), *by_dim]
        sizes = [*self.layer, *(n for table in tables for n in table)]
        rates = [link.bytes_per_s for link in self.links.values()] + [r for table in tables for r in table.values()]
        if (
            not self.layer
            or not all(tables)
            or not all(math.isfinite(x) and x > 0 for x in (*rates, *sizes, self.head_efficiency))
        ):
            raise ValueError("a rate or a size is missing or not a positive number")
        others = [x for link in self.links.values() for x in astuple(link)[1:]]
        others += [x for each in self.head_seconds.values() for x in each.values()]
        others += [self.visit_seconds, self.step_seconds, self.logit_seconds, self.convert_seconds_per_byte]
        others += [self.baseline_bytes, self.workspace_bytes, self.crowded]
        if not all(math.isfinite(x) and x >= 0 for x in (*others, *self.memory.values())):
            raise ValueError("a number is negative or not finite")
        if any(link.slowed_by_compute > 1 for link in self.links.values()):
            raise ValueError("slowed_by_compute is more than 1")

    @classmethod
    def from_file(cls, path: str | Path) -> Profile:
        """Raises UserError: cannot be read, or is no profile."""
        data = read_json("the hardware profile", path)
        try:
            return cls.from_dict(data)
        except UserError as e:
            raise UserError(f"{path}: {e}") from None


def between(table: dict[float, float], x: float) -> float:
    """The value at `x`, by straight lines in log-log between the entries, constant beyond them."""
    points = sorted(table.items())
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if x <= x1:
            part = math.log(x / x0) / math.log(x1 / x0)
            return math.exp(math.log(y0) + part * math.log(y1 / y0))
    return points[-1][1]
