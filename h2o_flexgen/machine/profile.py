"""What a machine can do: the rates that `h2o_flexgen.profiling` measures, as plain data, to and from JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, astuple, dataclass, field, fields
from pathlib import Path

from h2o_flexgen.errors import UserError
from h2o_flexgen.kernels.rates import HALF_TYPES, KernelRates
from h2o_flexgen.policy import TIERS
from h2o_flexgen.utils.files import read_json

#: directions of traffic
LINKS = ("disk_to_cpu", "cpu_to_disk", "cpu_to_gpu", "gpu_to_cpu")
#: query heads to a KV head in the attention that `AttentionRates.grouped` is measured with
GROUP = 4
#: names of the cache rules whose attention is measured
RULES = ("full", "h2o")

#: (out, in) of a matrix
Shape = tuple[int, int]
#: {rows of a matmul, or elements of a head: flops or bytes per second}
Rates = dict[int, float]


@dataclass(frozen=True)
class Link:
    """One direction of traffic.

    Attributes:
        bytes_per_s: its rate while nothing computes.
        compute_seconds_per_byte: compute that a byte takes away from what runs meanwhile (the CPU's time, or the whole
            transfer where the two do not overlap).
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
class AttentionRates:
    """Of attention in one phase under one cache rule.

    Attributes:
        rates: {head size: per second}, in prefill flops, 4 per query, key and element, else bytes of K and V.
        head_seconds: of each KV head of each sequence, whatever its work.
        grouped: how many times longer attention over a cache takes where GROUP query heads share a head of K and V than
            where each has its own; the bytes are the same.
    """

    rates: Rates
    head_seconds: float = 0.0
    grouped: float = 1.0

    def seconds(self, work: float, heads: int, head_dim: int, group: int = 1) -> float:
        """Of one sequence.

        Args:
            work: flops in prefill, else bytes of K and V.
            heads: of K and V, or of queries in prefill; `group`: query heads to each.
        """
        seconds = work / between(self.rates, head_dim) + heads * self.head_seconds
        return seconds * between({1: 1.0, GROUP: self.grouped}, group)


@dataclass(frozen=True)
class Profile:
    """Measured hardware. Without CUDA the compute device is the CPU, and links to and from `gpu` copy in RAM.

    Attributes:
        machine, versions, date, command: where the rates come from.
        device: "cpu" or "cuda"; dtype: of the computation.
        memory: bytes of each tier; without CUDA gpu and cpu are the same RAM.
        links: by name (LINKS); disk past the page cache, in requests as large as those for a cache.
        matmul: "streamed" -> {(out, in): {rows: flops per second}} of x @ W.T with what follows: a pass
            over its output (norm, activation or sum), or the choice of tokens; "resident" likewise, where resident
            matrices are packed; "int8" and "int8 resident" in int8, "int4" in int8 with weights in 4 bits.
        attention: "prefill", "decode", and "cpu" for decode steps on the CPU beside a CUDA device -> cache rule.
        decode, unpack: {bits of a code: elements per second} of quantised matrices, to floats and to int8.
        step_seconds: what a step of one batch through one layer costs whatever its size.
        baseline_bytes: RAM of the process before it holds anything; workspace_bytes: of the device, by its libraries.
        crowded: part of the time that the process waited for a core while this was measured.
        kernels: by which kernels were chosen on the CPU; None for CUDA, and for machines that were not measured.
    """

    machine: dict
    versions: dict
    date: str
    command: str
    device: str
    dtype: str
    memory: dict[str, int]
    links: dict[str, Link]
    matmul: dict[str, dict[Shape, Rates]]
    attention: dict[str, dict[str, AttentionRates]]
    decode: dict[int, float] = field(default_factory=dict)
    unpack: dict[int, float] = field(default_factory=dict)
    step_seconds: float = 0.0
    baseline_bytes: int = 0
    workspace_bytes: int = 0
    crowded: float = 0.0
    kernels: KernelRates | None = None

    def matmul_seconds(self, shape: Shape, rows: int, resident: bool = False, bits: int | None = None) -> float:
        """Of x @ W.T with x of `rows` rows and W of this (out, in) shape, at the rate of the measured shape that is
        nearest in the logarithms of both: that predicts other shapes within 7 % on average, an interpolation by
        elements within 9 %. `bits`: of the weight, for matmuls in int8; where these were not measured, they count as
        the others."""
        kinds = [f"int{bits} resident"] * resident + [f"int{bits}", "int8"] if bits else []
        kinds += ["resident"] * resident
        tables = next((self.matmul[kind] for kind in kinds if kind in self.matmul), self.matmul["streamed"])
        out, width = shape
        nearest = min(tables, key=lambda s: math.hypot(math.log(s[0] / out), math.log(s[1] / width)))
        return 2 * out * width * rows / between(tables[nearest], rows)

    def decode_rate(self, bits: int) -> float:
        """Elements per second, of quantised matrices; where it was not measured, as fast as a copy in 16 bits."""
        return self.decode.get(bits) or self.links["cpu_to_gpu"].bytes_per_s / 2

    def unpack_rate(self, bits: int) -> float:
        """Likewise, into int8."""
        return self.unpack.get(bits) or self.decode_rate(bits)

    def to_json(self) -> str:
        data = asdict(self)
        data["matmul"] = {
            kind: {f"{out}x{width}": rates for (out, width), rates in tables.items()}
            for kind, tables in self.matmul.items()
        }
        return json.dumps(data, indent=1)

    @classmethod
    def from_dict(cls, data: dict) -> Profile:
        """What `to_json` wrote. Raises UserError if something is missing, or not the number it should be."""
        try:
            values = {f.name: data[f.name] for f in fields(cls) if f.name in data}
            values["links"] = {name: Link(**data["links"][name]) for name in LINKS}
            values["matmul"] = {
                kind: {tuple(map(int, shape.split("x"))): _rates(table) for shape, table in tables.items()}
                for kind, tables in data["matmul"].items()
            }
            values["attention"] = {
                phase: {name: _attention(rates) for name, rates in by_rule.items()}
                for phase, by_rule in data["attention"].items()
            }
            values |= {name: _rates(data.get(name, {})) for name in ("decode", "unpack")}
            if data.get("kernels") is not None:
                values["kernels"] = KernelRates.from_dict(data["kernels"])
            profile = cls(**values)
            profile._check()
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise UserError(f"not a hardware profile ({type(e).__name__}: {e})") from None
        return profile

    def _check(self) -> None:
        """Raises an error for what a search would stumble over."""
        known = self.device in ("cpu", "cuda") and self.dtype in (*HALF_TYPES, "float32")
        if not known or not isinstance(self.machine, dict):
            raise ValueError("device, dtype or machine is not understood")
        phases = ("prefill", "decode", "cpu") if self.device == "cuda" else ("prefill", "decode")
        attention = [rates for phase in phases for rates in self.attention[phase].values()]
        if not all(set(RULES) <= self.attention[phase].keys() for phase in phases):
            raise ValueError("attention was not measured under all rules")
        tables = [rates for shapes in self.matmul.values() for rates in shapes.values()]
        tables += [rates.rates for rates in attention]
        if not self.matmul["streamed"] or not all(tables):
            raise ValueError("a table of rates is empty")
        positive = [x for table in tables for entry in table.items() for x in entry]
        positive += [x for shapes in self.matmul.values() for shape in shapes for x in shape]
        positive += [*self.decode.values(), *self.unpack.values()]
        positive += [link.bytes_per_s for link in self.links.values()] + [rates.grouped for rates in attention]
        others = [x for link in self.links.values() for x in astuple(link)] + [
            rates.head_seconds for rates in attention
        ]
        others += [self.step_seconds, self.baseline_bytes, self.workspace_bytes, self.crowded]
        others += [self.memory[tier] for tier in TIERS]
        if not all(math.isfinite(x) and x > 0 for x in positive):
            raise ValueError("a rate or a size is not a positive number")
        if not all(math.isfinite(x) and x >= 0 for x in others):
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


def _rates(table: dict[str, float]) -> Rates:
    return {int(n): float(rate) for n, rate in table.items()}


def _attention(data: dict) -> AttentionRates:
    return AttentionRates(**data | {"rates": _rates(data["rates"])})


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
