"""How fast each kernel was measured to be on a CPU, and which kernels these rates choose: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

#: rows (tokens) of the matmuls that are timed: a decode step of one sequence up to the prefill of a micro-batch
ROWS = (1, 8, 32, 128, 512)
#: rows at which types and layouts are compared, as if the same number of tokens went through the model at each of them
MIX = ROWS[1:]
#: rows of a batch
MANY = ROWS[2:]
#: a kernel must be more than this many times faster to replace the plain one
MARGIN = 1.1
#: types in which a matmul has more than one exact kernel
HALF_TYPES = ("bfloat16", "float16")
#: how matmuls in int8 are named among float types: with weights in 8 bits, and in blocks of 4 bits
INT8 = "int8"
INT4 = "int4"
#: kernels that can be chosen; the rates of others, in a profile of another version, are ignored
KERNELS = ("native", "widened", "packed", "transposed", "tiled", "floats")


@dataclass(frozen=True)
class KernelRates:
    """Measured rates of one CPU, as `timing.measure` finds them."""

    #: {dtype, or in int8 the format of the weights: {kernel: {rows: flops per second}}}, without those that cannot run
    linear: dict[str, dict[str, dict[int, float]]]
    attention: dict[str, float]  # {dtype: flops per second} of the batched matmuls in attention over a prompt

    @classmethod
    def from_dict(cls, data: dict) -> KernelRates:
        """The inverse of `dataclasses.asdict`, also through JSON. Raises KeyError, TypeError, ValueError or
        AttributeError for other data."""
        linear = {}
        for dtype, kernels in data["linear"].items():
            linear[dtype] = {kernel: _by_rows(kernels[kernel]) for kernel in KERNELS if kernel in kernels}
        return cls(linear, {dtype: float(rate) for dtype, rate in data["attention"].items()})

    def kernel(self, dtype: str, rows: int) -> str:
        """The kernel for a matrix that is not packed: "native", or another one that is clearly faster."""
        nearest = min(ROWS, key=lambda n: abs(log(n / rows)))
        rates = {kernel: table[nearest] for kernel, table in self.linear[dtype].items() if kernel != "packed"}
        best = max(rates, key=rates.get)
        return best if rates[best] > MARGIN * rates["native"] else "native"

    def packs(self, dtype: str) -> bool:
        """Whether a matrix that stays in RAM is better kept packed: it then has no other kernel."""
        packed = self.linear.get(dtype, {}).get("packed")
        return packed is not None and MARGIN * _seconds(packed) < self._unpacked_seconds(dtype)

    def takes_blocks(self, form: str = INT4) -> bool:
        """Whether int8 matmuls of many rows are at most MARGIN slower with weights in blocks of a format than with
        codes of 8 bits, which must be made from them first. If the format was not measured, int4 stands for it."""
        blocks = self.linear.get(form) or self.linear.get(INT4)
        if blocks is None:
            return False
        fastest = {rows: self._fastest(INT8, rows) for rows in MANY}
        return _seconds(blocks["tiled"], MANY) < MARGIN * _seconds(fastest, MANY)

    def gains_by_int8(self, dtype: str) -> bool:
        """Whether matmuls in int8, with weights in 8 bits or in blocks of 4 bits, are clearly faster than in a float
        type, or were not measured."""
        if INT8 not in self.linear:
            return True
        found = [self._unpacked_seconds(INT8)]
        found += [_seconds(self.linear[INT4]["tiled"])] if self.takes_blocks() else []
        return MARGIN * min(found) < self._unpacked_seconds(dtype)

    def prefers_fp32(self, dtype: str) -> bool:
        """Whether attention in this 16-bit type is better computed in fp32."""
        return dtype in HALF_TYPES and self.attention[dtype] < MARGIN * self.attention["float32"]

    def dtype(self, stored: str | None = None) -> str:
        """The type to compute in: the 16-bit one with the least seconds over MIX, or float32 if that is faster still.

        Among types within MARGIN of each other, the checkpoint's own (`stored`, if known) comes first, then bfloat16
        for its range, and float32 last for its memory. A checkpoint in bfloat16 is never computed in float16, whose
        range is too small.
        """
        order = [stored] if stored in HALF_TYPES else []
        order += [t for t in HALF_TYPES if t not in order and not (t == "float16" and stored == "bfloat16")]
        seconds = {t: self.seconds(t) for t in (*order, "float32")}
        return next(t for t, s in seconds.items() if s <= MARGIN * min(seconds.values()))

    def seconds(self, dtype: str) -> float:
        """For one flop at each of the rows of MIX, with the best kernels."""
        return _seconds(self.linear[dtype]["packed"]) if self.packs(dtype) else self._unpacked_seconds(dtype)

    def _unpacked_seconds(self, dtype: str) -> float:
        return _seconds({n: self.linear[dtype][self.kernel(dtype, n)][n] for n in MIX})

    def _fastest(self, dtype: str, rows: int) -> float:
        return max(table[rows] for table in self.linear[dtype].values())


def _by_rows(table: dict[str, float]) -> dict[int, float]:
    return {rows: float(table[str(rows)]) for rows in ROWS}


def _seconds(rates: dict[int, float], rows: tuple[int, ...] = MIX) -> float:
    return sum(1 / rates[n] for n in rows)
