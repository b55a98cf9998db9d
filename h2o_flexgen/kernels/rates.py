"""How fast each exact matmul kernel is on a CPU, and which of them that makes the best. Pure data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite, log

#: rows (tokens) of the matmuls that are timed: a decode step of one sequence up to the prefill of a micro-batch
ROWS = (1, 8, 32, 128, 512)
#: rows by which types and layouts are compared, as if as many tokens went through the model at each of them
MIX = (8, 32, 128, 512)
#: what is less than this many times faster is no reason to leave the plain kernel
MARGIN = 1.1
#: types in which a matmul has more than one exact kernel
HALF_TYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class KernelRates:
    """Measured rates of one CPU, as `kernels.linear.measure` finds them.

    Attributes:
        linear: {dtype: {kernel: {rows: flops per second}}}. A kernel that cannot run here is not in it.
        attention: {dtype: flops per second} of the batched matmuls in attention over a prompt.
    """

    linear: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    attention: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: dict) -> KernelRates:
        """What `dataclasses.asdict` and JSON made of one. Raises KeyError, TypeError, ValueError or AttributeError if
        it is none."""
        linear = {
            dtype: {kernel: {int(n): float(rate) for n, rate in table.items()} for kernel, table in kernels.items()}
            for dtype, kernels in data["linear"].items()
        }
        attention = {dtype: float(rate) for dtype, rate in data["attention"].items()}
        tables = [table for kernels in linear.values() for table in kernels.values()]
        if not all(set(ROWS) == set(table) for table in tables):
            raise ValueError(f"a kernel was not timed with {ROWS} rows")
        if not all("native" in kernels for kernels in linear.values()):
            raise ValueError("the native kernel was not timed")
        if not all(isfinite(rate) and rate > 0 for table in (attention, *tables) for rate in table.values()):
            raise ValueError("the rate of a kernel is not a positive number")
        return cls(linear, attention)

    def kernel(self, dtype: str, rows: int) -> str:
        """The kernel for a matrix that is not packed: "native", or "widened" where that is clearly faster."""
        rates = self.linear.get(dtype, {})
        if "widened" not in rates:
            return "native"
        nearest = min(ROWS, key=lambda n: abs(log(n / rows)))
        return "widened" if rates["widened"][nearest] > MARGIN * rates["native"][nearest] else "native"

    def packs(self, dtype: str) -> bool:
        """Whether a matrix that stays in RAM is better kept packed: it then has no other kernel."""
        packed = self.linear.get(dtype, {}).get("packed")
        return packed is not None and MARGIN * _seconds(packed) < self._unpacked_seconds(dtype)

    def is_slow(self, dtype: str) -> bool:
        """Whether attention in this 16-bit type is better computed in fp32."""
        if dtype not in HALF_TYPES or not {dtype, "float32"} <= self.attention.keys():
            return False
        return self.attention[dtype] < MARGIN * self.attention["float32"]

    def dtype(self, stored: str | None = None) -> str:
        """The type to compute in: the 16-bit one with the least seconds over MIX, or float32 if that is faster still.

        Of types within MARGIN of each other, the one the checkpoint is stored in comes first, then bfloat16 for its
        range, and float32 last for its memory. A checkpoint in bfloat16 is never computed in float16, whose range
        is too small for it.

        Args:
            stored: of the checkpoint, if that is known.
        """
        order = [stored] if stored in HALF_TYPES else []
        order += [t for t in HALF_TYPES if t not in order and not (t == "float16" and stored == "bfloat16")]
        seconds = {t: self.seconds(t) for t in (*order, "float32")}
        return next(t for t, s in seconds.items() if s <= MARGIN * min(seconds.values()))

    def seconds(self, dtype: str) -> float:
        """For a flop at each of the rows of MIX, with the best kernels; infinite if the type was not measured."""
        return _seconds(self.linear[dtype]["packed"]) if self.packs(dtype) else self._unpacked_seconds(dtype)

    def _unpacked_seconds(self, dtype: str) -> float:
        if dtype not in self.linear:
            return float("inf")
        return _seconds({n: self.linear[dtype][self.kernel(dtype, n)][n] for n in MIX})


def _seconds(rates: dict[int, float]) -> float:
    return sum(1 / rates[n] for n in MIX)
