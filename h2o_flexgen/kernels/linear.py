"""x @ W.T + b in 16 bits on a CPU: the same matmul by several kernels, the fastest of which is chosen by measuring.

native   torch's own `F.linear` in the 16-bit type
widened  through fp32, a slice of W at a time, which stays in the CPU's cache
packed   oneDNN's, on a W that was laid out for it beforehand; such a W has no other kernel

All are exact: 16-bit elements are multiplied and added up in fp32, and rounded once. bf16 through fp16 is no option:
its range is too small for bf16, so a value may overflow. fp32, and everything on CUDA, is always `F.linear`.

CPU flags do not tell which kernel is fastest: on some CPUs with bf16 instructions `F.linear` is slower in bf16 than in
fp32. So each kernel is timed, once in a process or, kept with the profile, on a machine. So are those of
`kernels.int8`, which are not exact and run only where they are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import compress, cycle, product
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import Blocks, Dense, Format, Int4, Int8, Quantised
from h2o_flexgen.kernels import int8
from h2o_flexgen.kernels.int8 import Int8Weight, int8_linears
from h2o_flexgen.sizes import WIDEN_BYTES, WIDEN_ROWS, slice_rows

#: rows (tokens) of the matmuls that are timed: a decode step of one sequence up to the prefill of a micro-batch
ROWS = (1, 8, 32, 128, 512)
#: rows by which types and layouts are compared, as if as many tokens went through the model at each of them
MIX = ROWS[1:]
#: those of a batch
MANY = ROWS[2:]
#: what is less than this many times faster is no reason to leave the plain kernel
MARGIN = 1.1
#: types in which a matmul has more than one exact kernel
HALF_TYPES = ("bfloat16", "float16")
#: the names of matmuls in int8 among those of float types: with weights in 8 bits, and in 4 as they are stored
INT8, INT4 = "int8", "int4"
#: `widened` has W, not x, as the left operand of its matmul up to so many rows
LEFT_ROWS = 256
#: (out, in) of the matrices that are timed: with few rows so large that they come from RAM, as those of a model do
FEW_ROWS_SHAPE, MANY_ROWS_SHAPE = (4096, 1024), (1024, 1024)
#: likewise of int8, and how many of them take turns: one alone would stay in the CPU's cache
INT8_SHAPE, INT8_MATRICES = (4096, 4096), 3
#: rows from which on the smaller matrix is timed: the CPU, not RAM, decides there
MANY_ROWS = 128
#: (heads, queries, head size) of the attention that is timed
ATTENTION_SHAPE = (8, 256, 64)
#: times that each kernel runs, of which the fastest counts; one that has taken so long does not run again
ROUNDS, SECONDS_EACH = 8, 0.03
#: one that takes longer than this is not timed with more rows, and keeps its rate
SECONDS_MOST = 0.2

_HALVES = tuple(getattr(torch, name) for name in HALF_TYPES)
_rates: KernelRates | None = None


def linear(
    x: Tensor, weight: Tensor | Quantised | Int8Weight, bias: Tensor | None = None, outliers: bool = True
) -> Tensor:
    """`F.linear` by the fastest kernel; in int8 with an `Int8Weight`, and what is quantised to be multiplied so.

    Args:
        x: (..., I); weight: (O, I), as it is, from `pack`, or quantised; bias: (O,). All else of one dtype.
        outliers: as for `int8_linears`.

    Returns:
        (..., O), contiguous.
    """
    return linears(x, [(weight, bias)], outliers)[0]


def linears(
    x: Tensor, layers: list[tuple[Tensor | Quantised | Int8Weight, Tensor | None]], outliers: bool = True
) -> list[Tensor]:
    """The same of several weights with their biases, some of which may be in int8."""
    are_int8 = [_is_int8(weight) for weight, _ in layers]
    outs = iter(())
    if any(are_int8):
        kernel = "native" if x.is_cuda else _chosen_int8(x.numel() // x.shape[-1])
        outs = iter(int8_linears(x, list(compress(layers, are_int8)), outliers, kernel))
    return [next(outs) if is_int8 else _linear(x, *layer, outliers) for is_int8, layer in zip(are_int8, layers)]


def _is_int8(weight: Tensor | Quantised | Int8Weight) -> bool:
    """Whether the kernels of `int8` take a weight as it is."""
    return isinstance(weight, Int8Weight) or (isinstance(weight, Quantised) and weight.in_blocks)


def _linear(x: Tensor, weight: Tensor | Quantised, bias: Tensor | None, outliers: bool) -> Tensor:
    if isinstance(weight, Quantised):
        return sliced(x, weight, bias, outliers)
    if weight.is_mkldnn:
        return packed(x, weight, bias)
    if x.dtype not in _HALVES or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    return KERNELS[_chosen(x.dtype, x.numel() // x.shape[-1])](x, weight, bias)


def is_slow(x: Tensor) -> bool:
    """Whether attention over tensors like x is better computed in fp32."""
    return x.device.type == "cpu" and x.dtype in _HALVES and rates().is_slow(dtype_name(x.dtype))


def packs(dtype: torch.dtype) -> bool:
    """Whether matrices of this type that stay in RAM should go through `pack`."""
    return dtype in _HALVES and rates().packs(dtype_name(dtype)) and can_pack(dtype)


def packs_int8() -> bool:
    """Whether int8 matrices that stay in RAM should go through `int8.pack`."""
    return rates().packs(INT8) and int8.can_pack()


def takes_in_blocks(formats: Iterable[Format], compute: str, cuda: bool, asked: bool | None = None) -> bool:
    """Whether matmuls of a model with matrices in these formats take blocks of 4 bits as they are stored (`tiles4`): as
    `asked`, or on CPUs where that is hardly slower.

    Raises:
        UserError: it is asked for, and this CPU cannot.
    """
    if compute != "int8" or cuda or asked is False or not any(map(_is_block, formats)):
        return False
    if asked and not int8.takes_blocks():
        raise UserError("`in_blocks`: weights in 4 bits are multiplied as they are stored on CPUs with AVX2 only")
    return int8.takes_blocks() and (asked or rates().takes_blocks())


def _is_block(form: Format) -> bool:
    return isinstance(form, Blocks) and form.bits == 4 and form.group in (32, 64)


def is_as_stored(form: Format, in_blocks: bool) -> bool:
    """Whether matmuls in int8 take a quantised matrix as it is stored."""
    return form == Int8() or (in_blocks and _is_block(form))


def matmul_format(form: Format, dtype: torch.dtype, compute: str, in_blocks: bool, is_head: bool = False) -> Format:
    """Which `linear` is given, of a matrix that is kept in `form`: floats, or with `compute` "int8" codes if it is
    quantised; a head as it is, of which `linear` makes these a slice at a time."""
    if isinstance(form, Dense):
        return Dense(dtype)
    if is_head or (compute == "int8" and is_as_stored(form, in_blocks)):
        return form
    return Int8() if compute == "int8" else Dense(dtype)


def always_tiles() -> bool:
    """Whether tiles, which hold no sums (`int8.tiled`), are the kernel of all matmuls in int8 that they cover."""
    return not packs_int8() and all(_chosen_int8(rows) == "tiled" for rows in ROWS)


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


# the kernels


def widened(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `linear`, through fp32: WIDEN_ROWS rows of x and WIDEN_BYTES of the weight at a time."""
    rows = x.numel() // x.shape[-1]
    out = x.new_empty(rows, len(weight))
    for x_part, out_part in zip(x.reshape(rows, -1).split(WIDEN_ROWS), out.split(WIDEN_ROWS)):
        _widen(out_part, x_part, weight, bias)
    return out.view(*x.shape[:-1], -1)


def _widen(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    weight_left = len(x) <= LEFT_ROWS
    fp32 = {"dtype": torch.float32, "device": x.device}
    x = torch.empty(x.shape[1], len(x), **fp32).copy_(x.t()) if weight_left else x.float()
    step = max(1, WIDEN_BYTES // (4 * weight.shape[1]))
    buffer = torch.empty(min(step, len(weight)), weight.shape[1], **fp32)
    for begin in range(0, len(weight), step):
        end = min(begin + step, len(weight))
        w = buffer[: end - begin].copy_(weight[begin:end])
        y = torch.mm(w, x).t() if weight_left else torch.mm(x, w.t())
        out[:, begin:end] = y if bias is None else y.add_(bias[begin:end])


def sliced(x: Tensor, weight: Quantised, bias: Tensor | None = None, outliers: bool = True) -> Tensor:
    """As `linear`, of a quantised weight without heads, of which SLICE_BYTES are decoded, or turned into codes of 8
    bits, at a time."""
    rows, (height, width) = x.reshape(-1, x.shape[-1]), weight.shape
    out, form = x.new_empty(len(rows), height), Int8() if weight.in_int8 else Dense(x.dtype)
    step = slice_rows(width, 1 if weight.in_int8 else x.dtype.itemsize)
    buffer = torch.empty(form.nbytes((min(step, height), width)), dtype=torch.uint8, device=x.device)
    for begin in range(0, height, step):
        shape = min(step, height - begin), width
        part, target = form.view(buffer[: form.nbytes(shape)], shape), out[:, begin : begin + step]
        weight.into(part, begin)
        decoded = Int8Weight(*Int8().parts(part.raw, shape)) if weight.in_int8 else part
        target.copy_(linear(rows, decoded, None if bias is None else bias[begin : begin + step], outliers))
    return out.view(*x.shape[:-1], -1)


def packed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `linear`, of a weight from `pack`."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def pack(weight: Tensor) -> Tensor:
    """A 16-bit matrix (O, I) in RAM as oneDNN wants it; good for `linear` only. Holds as many bytes."""
    return torch.ops.mkldnn._reorder_linear_weight(weight)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether `pack` works here in this type: its operators are those of torch's compiler, not public ones, and oneDNN
    has fp16 on few CPUs."""
    rows, out, width = 33, 70, 48
    # small integers, so that every order of adding up is exact
    x, weight = (torch.arange(n * width).remainder(7).to(dtype).view(n, width) for n in (rows, out))
    bias = torch.arange(out).to(dtype)
    try:
        return torch.equal(packed(x, pack(weight), bias), F.linear(x, weight, bias))
    except (AttributeError, RuntimeError):
        return False


#: of matrices that are not packed
KERNELS: dict[str, Callable] = {"native": F.linear, "widened": widened}


# the choice


@dataclass(frozen=True)
class KernelRates:
    """Measured rates of one CPU, as `measure` finds them.

    Attributes:
        linear: {dtype, or "int8" and "int4": {kernel: {rows: flops per second}}}. A kernel that cannot run here is
            not in it.
        attention: {dtype: flops per second} of the batched matmuls in attention over a prompt.
    """

    linear: dict[str, dict[str, dict[int, float]]]
    attention: dict[str, float]

    @classmethod
    def from_dict(cls, data: dict) -> KernelRates:
        """What `dataclasses.asdict` and JSON made of one. Raises KeyError, TypeError, ValueError or AttributeError if
        it is none."""
        linear = {
            dtype: {kernel: {n: float(table[str(n)]) for n in ROWS} for kernel, table in kernels.items()}
            for dtype, kernels in data["linear"].items()
        }
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

    def takes_blocks(self) -> bool:
        """Whether matmuls in int8 of many rows are at most MARGIN slower with weights in 4 bits as they are stored than
        with codes of 8 bits, which must be made of them first."""
        if INT4 not in self.linear:
            return False
        best = {n: max(table[n] for table in self.linear[INT8].values()) for n in MANY}
        return _seconds(self.linear[INT4]["tiled"], MANY) < MARGIN * _seconds(best, MANY)

    def gains_by_int8(self, dtype: str) -> bool:
        """Whether matmuls in int8, be it with weights in 4 bits as they are stored, are clearly faster than in a float
        type, or were not measured."""
        if INT8 not in self.linear:
            return True
        found = [self._unpacked_seconds(INT8)]
        found += [_seconds(self.linear[INT4]["tiled"])] if self.takes_blocks() else []
        return MARGIN * min(found) < self._unpacked_seconds(dtype)

    def is_slow(self, dtype: str) -> bool:
        """Whether attention in this 16-bit type is better computed in fp32."""
        return dtype in HALF_TYPES and self.attention[dtype] < MARGIN * self.attention["float32"]

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
        """For a flop at each of the rows of MIX, with the best kernels."""
        return _seconds(self.linear[dtype]["packed"]) if self.packs(dtype) else self._unpacked_seconds(dtype)

    def _unpacked_seconds(self, dtype: str) -> float:
        return _seconds({n: self.linear[dtype][self.kernel(dtype, n)][n] for n in MIX})


def _seconds(rates: dict[int, float], rows: tuple[int, ...] = MIX) -> float:
    return sum(1 / rates[n] for n in rows)


def use(rates: KernelRates | None) -> None:
    """Choose kernels by these rates from now on; None: measure at the next use."""
    global _rates
    _rates = rates
    _chosen.cache_clear()
    _chosen_int8.cache_clear()


def are_known() -> bool:
    """Whether rates were given or measured."""
    return _rates is not None


def rates() -> KernelRates:
    """The rates that kernels are chosen by, measured now if there are none yet."""
    if _rates is None:
        use(measure())
    return _rates


@lru_cache(maxsize=4096)
def _chosen(dtype: torch.dtype, rows: int) -> str:
    return rates().kernel(dtype_name(dtype), rows)


@lru_cache(maxsize=4096)
def _chosen_int8(rows: int) -> str:
    return rates().kernel(INT8, rows) if INT8 in rates().linear else "turned"


# measuring


@torch.no_grad()
def measure() -> KernelRates:
    """Time every kernel on this CPU, in one or two seconds and 0.2 GB of RAM."""
    calls, found, slow = _calls(), {}, {}
    for rows in sorted({rows for _, _, rows in calls}):
        keys = [key for key in calls if key[2] == rows]
        taken: dict[tuple, list[float]] = {key: [] for key in keys if key[:2] not in slow}
        for _, (key, times) in product(range(ROUNDS), taken.items()):  # in turns, since other programs come and go
            if sum(times) < SECONDS_EACH:
                start = time.perf_counter()
                calls[key][0]()
                times.append(time.perf_counter() - start)
        for key in keys:
            found[key] = calls[key][1] / min(taken[key]) if key in taken else slow[key[:2]]
            if key in taken and min(taken[key]) > SECONDS_MOST:
                slow[key[:2]] = found[key]
    linear, attention = {}, {}
    for (dtype, kernel, rows), rate in found.items():
        if kernel == "attention":
            attention[dtype] = rate
        else:
            linear.setdefault(dtype, {}).setdefault(kernel, {})[rows] = rate
    return KernelRates(linear, attention)


def _multiply_next(x: Tensor, weights: Iterator[int8.Weight], kernel: str, out: Tensor) -> None:
    int8.multiply(int8.Rows.of(x), [(next(weights), None, out)], kernel)


def _calls() -> dict[tuple, tuple[Callable, int]]:
    """By (dtype, kernel, rows): calls and their flops."""
    calls = {}
    for dtype, few in product((*_HALVES, torch.float32), (True, False)):
        weight = torch.full(FEW_ROWS_SHAPE if few else MANY_ROWS_SHAPE, 0.01, dtype=dtype)
        kernels = {"native": partial(F.linear, weight=weight)}
        if dtype in _HALVES:
            kernels["widened"] = partial(widened, weight=weight)
            if can_pack(dtype):
                kernels["packed"] = partial(packed, weight=pack(weight))
        for rows, (name, kernel) in product(ROWS, kernels.items()):
            if few == (rows < MANY_ROWS):
                x = torch.full((rows, weight.shape[1]), 0.5, dtype=dtype)
                calls[dtype_name(dtype), name, rows] = partial(kernel, x), 2 * rows * weight.numel()
    matrices = [torch.ones(INT8_SHAPE, dtype=torch.int8) for _ in range(INT8_MATRICES)]
    # native is what others must beat; floats are for where tiles are not
    kernels = [name for name in int8.KERNELS if int8.is_exact(name) or name == "native"]
    scale = torch.ones(INT8_SHAPE[0])
    eights = [Int8Weight(codes, scale) for codes in matrices]
    weights = {(INT8, name): eights for name in kernels if name != "floats" or "tiled" not in kernels}
    if int8.can_pack():
        weights[INT8, "packed"] = [Int8Weight(int8.pack(codes), scale) for codes in matrices]
    if int8.takes_blocks():  # half as large
        form, count = Int4(64), 2 * INT8_MATRICES
        raws = [torch.ones(form.nbytes(INT8_SHAPE), dtype=torch.uint8) for _ in range(count)]
        weights[INT4, "tiled"] = [form.view(raw, INT8_SHAPE) for raw in raws]
    for rows, ((kind, name), turn) in product(ROWS, weights.items()):
        x, out = torch.ones(rows, INT8_SHAPE[1], dtype=torch.int8), torch.empty(rows, INT8_SHAPE[0])
        calls[kind, name, rows] = partial(_multiply_next, x, cycle(turn), name, out), 2 * rows * matrices[0].numel()
    for dtype in (*_HALVES, torch.float32):
        q = torch.full(ATTENTION_SHAPE, 0.1, dtype=dtype)
        call = partial(torch.bmm, q, q.transpose(1, 2))
        calls[dtype_name(dtype), "attention", 0] = call, 2 * q.numel() * q.shape[1]
    return calls
