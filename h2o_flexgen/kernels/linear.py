"""x @ W.T + b by the kernel that was measured to be the fastest here: one of `exact` for floats, of `int8` for codes.

CPU flags do not show which kernel is fastest: on some CPUs with bf16 instructions `F.linear` is slower in bf16 than in
fp32. So each kernel is timed, once per process or, kept with the profile, once per machine. Matmuls in int8, which are
not exact, run only where they are asked for. fp32, and all floats on CUDA, always go to `F.linear`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from itertools import compress

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.compiled.threads import in_order
from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import Blocks, Dense, Format, Int8, Quantised, dtype_name
from h2o_flexgen.formats.forms import operand_key
from h2o_flexgen.kernels import exact, int8
from h2o_flexgen.kernels.int8 import int8_linears
from h2o_flexgen.kernels.operands import Grouped, Int8Weight, SlicedWeight
from h2o_flexgen.kernels.rates import HALF_TYPES, INT8, ROWS, KernelRates
from h2o_flexgen.kernels.timing import measure

#: bytes of a head that are decoded or read at once, and what divides the rows of such a slice
SLICE_BYTES = 16 << 20
SLICE_MULTIPLE = 16

_HALVES = tuple(getattr(torch, name) for name in HALF_TYPES)
_rates: KernelRates | None = None


def linear(
    x: Tensor, weight: Tensor | Quantised | Int8Weight | SlicedWeight, bias: Tensor | None = None, outliers: bool = True
) -> Tensor:
    """`F.linear` by the fastest kernel; in int8 with an `Int8Weight`, or a quantised weight marked for it.

    Args:
        x: (..., I); weight: (O, I), floats, from `exact.pack`, quantised, or in slices; bias: (O,). All floats are of
            one dtype.
        outliers: as for `int8_linears`.

    Returns:
        (..., O), contiguous.
    """
    return linears(x, [(weight, bias)], outliers)[0]


def linears(
    x: Tensor,
    layers: list[tuple[Tensor | Quantised | Int8Weight | Grouped, Tensor | Grouped | None]],
    outliers: bool = True,
) -> list[Tensor]:
    """The same for several weights with their biases; some may be in int8, and all be groups."""
    first, _ = layers[0]
    if isinstance(first, Grouped) and not _is_int8(first):
        return _by_member(x, layers, outliers)
    are_int8 = [_is_int8(weight) for weight, _ in layers]
    outs = iter(())
    if any(are_int8):
        kernel = "cuda" if x.is_cuda else _chosen_int8(x.numel() // x.shape[-1])
        outs = iter(int8_linears(x, list(compress(layers, are_int8)), outliers, kernel))
    return [next(outs) if is_int8 else _linear(x, *layer, outliers) for is_int8, layer in zip(are_int8, layers)]


def _is_int8(weight: Tensor | Quantised | Int8Weight | Grouped) -> bool:
    """Whether the kernels of `int8` read a weight directly."""
    if isinstance(weight, Grouped):
        return isinstance(weight.members[0], Quantised) and _is_int8(weight.members[0])
    return isinstance(weight, Int8Weight) or (isinstance(weight, Quantised) and weight.operand == weight.format)


def _by_member(x: Tensor, layers: list[tuple[Grouped, Grouped | None]], outliers: bool) -> list[Tensor]:
    """`linears` of groups. With few rows a core for each member is faster than all cores for one after the other, but
    only one at a time is decoded."""
    counts = layers[0][0].counts
    works = []
    for n, rows in enumerate(x.split(counts)):
        members = [(weight.members[n], bias and bias.members[n]) for weight, bias in layers]
        works.append(partial(linears, rows, members, outliers))
    is_alone = x.is_cuda or isinstance(layers[0][0].members[0], Quantised)
    results = (work() for work in works) if is_alone else in_order(works, torch.get_num_threads() + 1)
    outs = [x.new_empty(len(x), weight.height) for weight, _ in layers]
    for *targets, result in zip(*(out.split(counts) for out in outs), results):
        for target, found in zip(targets, result):
            target.copy_(found)
    return outs


def _linear(x: Tensor, weight: Tensor | Quantised | SlicedWeight, bias: Tensor | None, outliers: bool) -> Tensor:
    if isinstance(weight, (Quantised, SlicedWeight)):
        return sliced(x, weight, bias, outliers)
    if weight.is_mkldnn:
        return exact.packed(x, weight, bias)
    if x.dtype not in _HALVES or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    return exact.KERNELS[_chosen(x.dtype, x.numel() // x.shape[-1])](x, weight, bias)


def sliced(x: Tensor, weight: Quantised | SlicedWeight, bias: Tensor | None = None, outliers: bool = True) -> Tensor:
    """As `linear`, a slice of the weight at a time; a quantised one has no `heads`."""
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_empty(len(rows), weight.height)
    for begin, part in weight.slices() if isinstance(weight, SlicedWeight) else _decoded(weight, x.dtype):
        end = begin + (len(part) if isinstance(part, Tensor) else part.height)
        out[:, begin:end] = linear(rows, part, None if bias is None else bias[begin:end], outliers)
    return out.view(*x.shape[:-1], -1)


def _decoded(weight: Quantised, dtype: torch.dtype) -> Iterator[tuple[int, Tensor | Int8Weight]]:
    """The slices of a quantised weight, decoded or converted to codes of 8 bits, SLICE_BYTES at a time."""
    (height, width) = weight.shape
    in_int8 = weight.operand is not None
    form = weight.operand or Dense(dtype)
    step = slice_rows(width, form.dtype.itemsize)
    buffer = torch.empty(form.nbytes((min(step, height), width)), dtype=torch.uint8, device=weight.device)
    for begin in range(0, height, step):
        shape = min(step, height - begin), width
        part = form.view(buffer[: form.nbytes(shape)], shape)
        weight.decode_into(part, begin)
        yield begin, Int8Weight(*Int8().parts(part.raw, shape)) if in_int8 else part


# the choice


def prefers_fp32(x: Tensor) -> bool:
    """Whether attention over tensors like x is better computed in fp32."""
    return x.device.type == "cpu" and x.dtype in _HALVES and rates().prefers_fp32(dtype_name(x.dtype))


def packs(dtype: torch.dtype) -> bool:
    """Whether matrices of this type that stay in RAM should go through `exact.pack`."""
    return dtype in _HALVES and rates().packs(dtype_name(dtype)) and exact.can_pack(dtype)


def packs_int8() -> bool:
    """Whether int8 matrices that stay in RAM should go through `int8.pack`."""
    return rates().packs(INT8) and int8.can_pack()


def int8_operands(
    formats: Iterable[Format], cuda: bool, asked: bool | dict[str, str] | None = None, of_experts: bool = False
) -> dict[str, str]:
    """What matmuls in int8 read of matrices in these formats: {`operand_key` of a quantised format: its name if they
    read it as stored, else that of `Int8`}. Blocks are read as stored (`block_tiles`) on CPUs where that is hardly
    slower, by experts always, or as `asked`: for all blocks, or for each format, as in an earlier result. Raises
    UserError if it is asked for and this CPU cannot."""
    found: dict[str, str] = {}
    for form in formats:
        if not form.is_dense:
            key = operand_key(form, of_experts)
            found.setdefault(key, Int8.name)
            given = asked.get(key) == form.name if isinstance(asked, dict) else asked
            if _is_read_as_stored(form, cuda, given, of_experts):
                found[key] = form.name
    return found


def _is_read_as_stored(form: Format, cuda: bool, asked: bool | None, of_experts: bool) -> bool:
    if form == Int8():
        return True
    if cuda or asked is False or not isinstance(form, Blocks) or form.tile is None:
        return False
    if asked and not int8.takes_blocks():
        raise UserError("`in_blocks`, or the job that is resumed, needs a CPU with AVX2, to multiply weights as stored")
    return int8.takes_blocks() and (asked or of_experts or rates().takes_blocks(form.name))


def always_tiles() -> bool:
    """Whether `int8.Tiled`, which holds no sums, is the kernel of all matmuls in int8 that it covers."""
    return not packs_int8() and all(_chosen_int8(rows) == "tiled" for rows in ROWS)


# the rates


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
    """The rates that choose kernels, measured now if none are known."""
    if _rates is None:
        use(measure())
    return _rates


@lru_cache(maxsize=4096)
def _chosen(dtype: torch.dtype, rows: int) -> str:
    return rates().kernel(dtype_name(dtype), rows)


@lru_cache(maxsize=4096)
def _chosen_int8(rows: int) -> str:
    return rates().kernel(INT8, rows) if INT8 in rates().linear else "transposed"


def slice_rows(width: int, itemsize: int) -> int:
    """Rows of a slice, a multiple of what int8 kernels prefer. `itemsize`: bytes of an element as kernels read it."""
    return max(SLICE_MULTIPLE, SLICE_BYTES // (width * itemsize) // SLICE_MULTIPLE * SLICE_MULTIPLE)
