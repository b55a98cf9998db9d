"""What a machine can do, as numbers that `h2o_flexgen.hardware` measures. Plain data, to and from JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from h2o_flexgen.errors import UserError

LINKS = ("disk_to_cpu", "cpu_to_disk", "cpu_to_gpu", "gpu_to_cpu")
ATTENTION = ("full", "h2o")


@dataclass(frozen=True)
class Link:
    """One direction of traffic.

    Attributes:
        bytes_per_s: its rate while nothing computes.
        compute_seconds_per_byte: what a byte takes away from compute that runs meanwhile (the processor's time, or the
            whole transfer where the two do not overlap).
        slowed_by_compute: the part of its rate that is lost while something computes, in [0, 1].
        transfer_seconds: what a transfer costs whatever its size (the queue fills and drains).
    """

    bytes_per_s: float
    compute_seconds_per_byte: float = 0.0
    slowed_by_compute: float = 0.0
    transfer_seconds: float = 0.0


@dataclass(frozen=True)
class Profile:
    """Measured hardware. Without CUDA the compute device is the processor, and links to and from `gpu` copy in RAM.

    Attributes:
        machine, versions, date, command: where the numbers come from.
        device: "cpu" or "cuda"; dtype: of the computation.
        memory: bytes of each tier; without CUDA gpu and cpu are the same RAM.
        links: by name (LINKS); requests as large as the engine's, disk past the page cache.
        layer: hidden size -> [(tokens, flops per second)] of a decoder layer without its attention.
        prefill_attention: "full" or "h2o" -> {head size: flops per second}, 4 flops per query, key and number.
        decode_attention: likewise {head size: bytes of K and V per second}.
        cpu_attention: decode attention on the CPU beside a CUDA device, likewise; None without one.
        step_seconds: what a step of one batch through one layer costs whatever its size.
        logit_seconds: to turn one logit into a part of a choice.
        baseline_bytes: RAM of the process before it holds anything; workspace_bytes: of the device, by its libraries.
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
    step_seconds: float = 0.0
    logit_seconds: float = 0.0
    baseline_bytes: int = 0
    workspace_bytes: int = 0

    def layer_rate(self, hidden: int, tokens: int) -> float:
        """Flops per second of the matrix products of `tokens` rows in a model of that hidden size."""
        return between({size: between(dict(table), tokens) for size, table in self.layer.items()}, hidden)

    def attention_rate(self, phase: str, kind: str, head_dim: int) -> float:
        return between(getattr(self, f"{phase}_attention")[kind], head_dim)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_dict(cls, data: dict) -> Profile:
        """Raises UserError: something is missing, or a rate is not a positive number."""
        try:
            names = {f.name for f in fields(cls)}
            values = {name: data[name] for name in names & set(data)}
            values["links"] = {name: Link(**data["links"][name]) for name in LINKS}
            values["layer"] = {int(size): [(int(n), float(r)) for n, r in t] for size, t in data["layer"].items()}
            for name in ("prefill_attention", "decode_attention", "cpu_attention"):
                if data.get(name) is not None:
                    values[name] = {k: {int(d): float(r) for d, r in data[name][k].items()} for k in ATTENTION}
            profile = cls(**values)
            rates = [link.bytes_per_s for link in profile.links.values()]
            rates += [rate for table in profile.layer.values() for _, rate in table]
            dims = [profile.prefill_attention, profile.decode_attention, profile.cpu_attention or {}]
            rates += [rate for kinds in dims for by_dim in kinds.values() for rate in by_dim.values()]
            tables = [profile.layer, *profile.layer.values(), *(x for kinds in dims[:2] for x in kinds.values())]
            if not all(math.isfinite(rate) and rate > 0 for rate in rates) or not all(tables):
                raise ValueError("a rate is missing or not a positive number")
            if profile.device not in ("cpu", "cuda") or not {"gpu", "cpu", "disk"} <= set(profile.memory):
                raise ValueError("device or memory is not understood")
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise UserError(f"not a hardware profile ({type(e).__name__}: {e})") from None
        return profile

    @classmethod
    def from_file(cls, path: str | Path) -> Profile:
        """Raises UserError: cannot be read, or is no profile."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except OSError as e:
            raise UserError(f"cannot read the hardware profile {path}: {e.strerror}") from None
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as e:
            raise UserError(f"the hardware profile {path} is not JSON: {e}") from None
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
