"""The hardware profile: the rates of a machine that `h2o_flexgen.profiling` measures, as plain data and JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, astuple, dataclass, field, fields
from pathlib import Path

from h2o_flexgen.errors import UserError
from h2o_flexgen.kernels.rates import HALF_TYPES, KernelRates
from h2o_flexgen.policy import TIERS
from h2o_flexgen.utils.files import read_json

#: directions of traffic between tiers
LINKS = ("disk_to_cpu", "cpu_to_disk", "cpu_to_gpu", "gpu_to_cpu")
#: query heads per KV head for which `AttentionRates.grouped` is measured
GROUP = 4
#: cache rules whose attention is measured
RULES = ("full", "h2o")

#: (out, in) of a matrix
Shape = tuple[int, int]
#: rate (flops or bytes per second) by rows of a matmul, or by head size
Rates = dict[int, float]


@dataclass(frozen=True)
class Link:
    """One direction of traffic."""

    bytes_per_s: float  # rate while nothing computes
    #: compute time lost per byte transferred meanwhile: by the CPU that copies, or all of it without overlap
    compute_seconds_per_byte: float = 0.0
    slowed_by_compute: float = 0.0  # fraction of the rate lost while something computes, in [0, 1]
    request_seconds: float = 0.0  # fixed cost of a request (disk only)
    compute_seconds_per_request: float = 0.0  # compute time lost per request


@dataclass(frozen=True)
class AttentionRates:
    """Speed of attention in one phase under one cache rule."""

    rates: Rates  # by head size; in prefill flops per second (4 per query, key and element), else bytes of K and V
    head_seconds: float = 0.0  # fixed cost per KV head and sequence
    #: slowdown of attention over a cache of the same bytes where GROUP query heads, and not one, share each KV head
    grouped: float = 1.0

    def seconds(self, work: float, heads: int, head_dim: int, group: int = 1) -> float:
        """Of one sequence in one layer: `work` in flops and query heads in prefill, else bytes of K and V and KV heads;
        `group` query heads share each KV head."""
        seconds = work / interpolate(self.rates, head_dim) + heads * self.head_seconds
        return seconds * interpolate({1: 1.0, GROUP: self.grouped}, group)


@dataclass(frozen=True)
class Profile:
    """Measured hardware, and where its rates come from. Without CUDA the compute device is the CPU, and links to and
    from `gpu` copy within RAM."""

    machine: dict
    versions: dict
    date: str
    command: str
    device: str  # "cpu" or "cuda"
    dtype: str  # of the computation
    #: bytes by tier, or of several devices by device instead of "gpu"; without CUDA gpu and cpu are the same RAM
    memory: dict[str, int]
    links: dict[str, Link]  # by name (LINKS); the disk's bypass the page cache, in requests as large as for a KV block
    #: rates of x @ W.T by kind and shape of W, including one more pass over the output (norm, activation or sum) or the
    #: choice of tokens. Kinds: "streamed"; "resident", where resident matrices are packed; "int8" and "int8 resident"
    #: for int8 arithmetic; "int4" for int8 arithmetic on 4-bit weights; of a group of experts `experts_kind` of these
    matmul: dict[str, dict[Shape, Rates]]
    #: by phase and cache rule; phases: "prefill", "decode", and "cpu" for decode steps on the CPU beside a CUDA device
    attention: dict[str, dict[str, AttentionRates]]
    #: matrices to floats: {name of a format: elements per second}
    decode: dict[str, float] = field(default_factory=dict)
    unpack: dict[str, float] = field(default_factory=dict)  # likewise to int8
    step_seconds: float = 0.0  # fixed cost of taking one batch, or micro-batch, through one layer
    baseline_bytes: int = 0  # RAM of the idle process
    workspace_bytes: int = 0  # device memory that libraries take
    crowded: float = 0.0  # fraction of the time that the measuring process waited for a core
    kernels: KernelRates | None = None  # rates by which CPU kernels are chosen; None for CUDA and unmeasured machines

    def matmul_seconds(
        self, shape: Shape, rows: float, resident: bool = False, codes: str | None = None, of_experts: bool = False
    ) -> float:
        """Of x @ W.T for `rows` rows of x and W of this (out, in) shape.

        The rate is that of the measured shape nearest in log-log distance: it predicts unmeasured shapes within 7 % on
        average, interpolating by number of elements within 9 %. `codes`: the name of the weight's format, for int8
        arithmetic; if that was not measured, the rates of int4, int8 or floats stand in. `of_experts`: it is one of a
        group of matrices, which are multiplied with rows of their own.
        """
        kinds = [f"{codes} resident"] * resident + [codes, "int4", "int8"] if codes else []
        kinds += ["resident"] * resident
        kinds += ["streamed"]
        tables = next(self.matmul[kind] for kind in kinds if kind in self.matmul)
        if of_experts:
            tables = tables | next((self.matmul[e] for e in map(experts_kind, kinds) if e in self.matmul), {})
        out, width = shape
        nearest = min(tables, key=lambda s: math.hypot(math.log(s[0] / out), math.log(s[1] / width)))
        return 2 * out * width * rows / interpolate(tables[nearest], rows)

    def decode_rate(self, form: str) -> float:
        """Elements of matrices in a format, given by its name, decoded to floats per second. If unmeasured, that of
        int4, or of a 16-bit copy."""
        return self.decode.get(form) or self.decode.get("int4") or self.links["cpu_to_gpu"].bytes_per_s / 2

    def unpack_rate(self, form: str) -> float:
        """Elements unpacked to int8 per second; if unmeasured, that of int4, or of decoding."""
        return self.unpack.get(form) or self.unpack.get("int4") or self.decode_rate(form)

    def to_json(self) -> str:
        data = asdict(self)
        data["matmul"] = {kind: _shapes_to_json(tables) for kind, tables in self.matmul.items()}
        return json.dumps(data, indent=1)

    @classmethod
    def from_dict(cls, data: dict) -> Profile:
        """The inverse of `to_json`. Raises UserError if a value is missing or invalid."""
        try:
            values = {f.name: data[f.name] for f in fields(cls) if f.name in data}
            values["links"] = {name: Link(**data["links"][name]) for name in LINKS}
            values["matmul"] = {kind: _shapes_from_json(tables) for kind, tables in data["matmul"].items()}
            values["attention"] = {phase: _attention(rules) for phase, rules in data["attention"].items()}
            values |= {name: _by_format(data.get(name, {})) for name in ("decode", "unpack")}
            if data.get("kernels") is not None:
                values["kernels"] = KernelRates.from_dict(data["kernels"])
            profile = cls(**values)
            profile._check()
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise UserError(f"not a hardware profile ({type(e).__name__}: {e})") from None
        return profile

    def _check(self) -> None:
        """Raises ValueError or KeyError for values that would break a search."""
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
        links = self.links.values()
        positive = [x for table in tables for entry in table.items() for x in entry]
        positive += [x for shapes in self.matmul.values() for shape in shapes for x in shape]
        positive += [*self.decode.values(), *self.unpack.values()]
        positive += [link.bytes_per_s for link in links] + [rates.grouped for rates in attention]
        non_negative = [x for link in links for x in astuple(link)] + [rates.head_seconds for rates in attention]
        non_negative += [self.step_seconds, self.baseline_bytes, self.workspace_bytes, self.crowded]
        non_negative += [self.memory[tier] for tier in TIERS]
        if not all(math.isfinite(x) and x > 0 for x in positive):
            raise ValueError("a rate or a size is not a positive number")
        if not all(math.isfinite(x) and x >= 0 for x in non_negative):
            raise ValueError("a number is negative or not finite")
        if any(link.slowed_by_compute > 1 for link in links):
            raise ValueError("slowed_by_compute is more than 1")

    @classmethod
    def from_file(cls, path: str | Path) -> Profile:
        """Raises UserError if the file cannot be read or is no profile."""
        data = read_json("the hardware profile", path)
        try:
            return cls.from_dict(data)
        except UserError as e:
            raise UserError(f"{path}: {e}") from None


def experts_kind(kind: str) -> str:
    """The kind of `Profile.matmul` for groups of experts."""
    return f"{kind} experts"


def _rates(table: dict[str, float]) -> Rates:
    return {int(n): float(rate) for n, rate in table.items()}


def _by_format(table: dict[str, float]) -> dict[str, float]:
    """Rates by name of a format; older profiles have them by the bits of a code."""
    old = {"8": "int8", "4": "int4"}
    return {old.get(name, name): float(rate) for name, rate in table.items()}


def _attention(rules: dict[str, dict]) -> dict[str, AttentionRates]:
    return {rule: AttentionRates(**data | {"rates": _rates(data["rates"])}) for rule, data in rules.items()}


def _shapes_to_json(tables: dict[Shape, Rates]) -> dict[str, Rates]:
    return {f"{out}x{width}": rates for (out, width), rates in tables.items()}


def _shapes_from_json(tables: dict[str, dict]) -> dict[Shape, Rates]:
    return {tuple(map(int, shape.split("x"))): _rates(table) for shape, table in tables.items()}


def interpolate(table: dict[float, float], x: float) -> float:
    """The value at `x`, linear between the entries in log-log scale and constant beyond them."""
    points = sorted(table.items())
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if x <= x1:
            weight = math.log(x / x0) / math.log(x1 / x0)
            return math.exp(math.log(y0) + weight * math.log(y1 / y0))
    return points[-1][1]
