"""What a machine can do: the rates that `h2o_flexgen.profiling` measures, as plain data, to and from JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, astuple, dataclass, field, fields
from pathlib import Path

from h2o_flexgen.errors import UserError
from h2o_flexgen.files import read_json
from h2o_flexgen.kernels.linear import KernelRates

#: bytes of an element
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
#: directions of traffic
LINKS = ("disk_to_cpu", "cpu_to_disk", "cpu_to_gpu", "gpu_to_cpu")
#: how a weight matrix reaches its matmul
MATMULS = ("streamed", "resident")
#: cache rules, by name
ATTENTION = ("full", "h2o")
#: query heads to a KV head in the attention that `grouped` is measured with
GROUP = 4
#: part of the time that a process may wait for a core while it measures: 0.03 at rest, 0.4 beside a busy program
CROWDED = 0.2

#: (out, in) of a matrix
Shape = tuple[int, int]
#: [(rows, flops per second)]
Rates = list[tuple[int, float]]


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
class Profile:
    """Measured hardware. Without CUDA the compute device is the CPU, and links to and from `gpu` copy in RAM.

    Attributes:
        machine, versions, date, command: where the rates come from.
        device: "cpu" or "cuda"; dtype: of the computation.
        memory: bytes of each tier; without CUDA gpu and cpu are the same RAM.
        links: by name (LINKS); disk past the page cache, in requests as large as those for a cache.
        matmul: "streamed" or "resident" -> {(out, in): [(rows, flops per second)]} of x @ W.T with the pass over its
            output that follows (norm, activation or sum). Where resident matrices are not packed, both are the same.
        prefill_attention: "full" or "h2o" -> {head size: flops per second}, 4 flops per query, key and element.
        decode_attention: likewise {head size: bytes of K and V per second}.
        cpu_attention: decode attention on the CPU beside a CUDA device, likewise; None without one.
        head_seconds: "prefill", "decode" or "cpu" -> "full" or "h2o" -> seconds of attention for each head of each
            sequence, whatever its work.
        grouped: "decode" or "cpu" -> "full" or "h2o" -> how many times longer attention over a cache takes where GROUP
            query heads share a head of K and V than where each has its own; the bytes are the same.
        visit_seconds: what a KV block from disk takes from compute besides its bytes and requests.
        step_seconds: what a step of one batch through one layer costs whatever its size.
        logit_seconds: to turn one logit into a part of a choice.
        convert_seconds_per_byte: to make a byte of weights out of those of another dtype, on the compute device.
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
    prefill_attention: dict[str, dict[int, float]]
    decode_attention: dict[str, dict[int, float]]
    cpu_attention: dict[str, dict[int, float]] | None = None
    head_seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    grouped: dict[str, dict[str, float]] = field(default_factory=dict)
    visit_seconds: float = 0.0
    step_seconds: float = 0.0
    logit_seconds: float = 0.0
    convert_seconds_per_byte: float = 0.0
    baseline_bytes: int = 0
    workspace_bytes: int = 0
    crowded: float = 0.0
    kernels: KernelRates | None = None

    @property
    def is_crowded(self) -> bool:
        """Whether other programs took so much of the CPU that the rates are not the machine's."""
        return self.crowded > CROWDED

    def matmul_seconds(self, shape: Shape, rows: int, resident: bool = False) -> float:
        """Of x @ W.T with x of `rows` rows and W of this (out, in) shape, at the rate of the measured shape that is
        nearest in the logarithms of both: that predicts other shapes within 7 % on average, an interpolation by
        elements within 9 %."""
        tables = self.matmul["resident" if resident else "streamed"]
        out, width = shape
        nearest = min(tables, key=lambda s: math.hypot(math.log(s[0] / out), math.log(s[1] / width)))
        return 2 * out * width * rows / between(dict(tables[nearest]), rows)

    def attention_seconds(self, phase: str, kind: str, work: float, heads: int, head_dim: int, group: int = 1) -> float:
        """Of one sequence.

        Args:
            phase: "prefill", "decode", or "cpu" for a decode step there.
            work: flops in prefill, else bytes of K and V.
            heads: of K and V, or of queries in prefill; `group`: query heads to each.
        """
        rate = between(getattr(self, f"{phase}_attention")[kind], head_dim)
        seconds = work / rate + heads * self.head_seconds.get(phase, {}).get(kind, 0.0)
        return seconds * between({1: 1.0, GROUP: self.grouped.get(phase, {}).get(kind, 1.0)}, group)

    def to_json(self) -> str:
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["links"] = {name: asdict(link) for name, link in self.links.items()}
        data["matmul"] = {
            kind: {f"{out}x{width}": rates for (out, width), rates in tables.items()}
            for kind, tables in self.matmul.items()
        }
        data["kernels"] = None if self.kernels is None else asdict(self.kernels)
        return json.dumps(data, indent=1)

    @classmethod
    def from_dict(cls, data: dict) -> Profile:
        """What `to_json` wrote. "resident" matmuls may be missing: they are then as fast as streamed ones. Raises
        UserError if something is missing, or not the number it should be."""
        try:
            values = {f.name: data[f.name] for f in fields(cls) if f.name in data}
            if not isinstance(data["machine"], dict) or not isinstance(data["versions"], dict):
                raise TypeError("machine and versions must be objects")
            values["memory"] = {tier: int(data["memory"][tier]) for tier in ("gpu", "cpu", "disk")}
            values["links"] = {name: Link(**data["links"][name]) for name in LINKS}
            matmul = {"resident": data["matmul"]["streamed"], **data["matmul"]}
            values["matmul"] = {
                kind: {
                    _shape(shape): [(int(n), float(rate)) for n, rate in rates] for shape, rates in matmul[kind].items()
                }
                for kind in MATMULS
            }
            for name in ("prefill_attention", "decode_attention", "cpu_attention"):
                if data.get(name) is not None:
                    values[name] = {k: {int(d): float(r) for d, r in data[name][k].items()} for k in ATTENTION}
            if data.get("kernels") is not None:
                values["kernels"] = KernelRates.from_dict(data["kernels"])
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
        attention = (self.prefill_attention, self.decode_attention, self.cpu_attention or {})
        tables = [table for by_rule in attention for table in by_rule.values()]
        tables += [dict(rates) for by_shape in self.matmul.values() for rates in by_shape.values()]
        if not all(self.matmul.values()) or not all(tables):
            raise ValueError("a table of rates is empty")
        links = self.links.values()
        sizes = [x for by_shape in self.matmul.values() for shape in by_shape for x in shape]
        rates = [x for table in (*tables, *self.grouped.values()) for x in table.values()]
        rates += [x for table in tables for x in table] + [link.bytes_per_s for link in links]
        if not all(math.isfinite(x) and x > 0 for x in sizes + rates):
            raise ValueError("a rate or a size is not a positive number")
        others = [x for link in links for x in astuple(link)] + list(self.memory.values())
        others += [x for each in self.head_seconds.values() for x in each.values()]
        others += [getattr(self, f.name) for f in fields(self) if f.default in (0, 0.0)]
        if not all(math.isfinite(x) and x >= 0 for x in others):
            raise ValueError("a number is negative or not finite")
        if any(link.slowed_by_compute > 1 for link in links):
            raise ValueError("slowed_by_compute is more than 1")

    @classmethod
    def from_file(cls, path: str | Path) -> Profile:
        """Raises UserError: cannot be read, or is no profile."""
        data = read_json("the hardware profile", path)
        try:
            return cls.from_dict(data)
        except UserError as e:
            raise UserError(f"{path}: {e}") from None


def _shape(text: str) -> Shape:
    """Of a key such as "768x3072"."""
    out, width = map(int, text.split("x"))
    return out, width


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
