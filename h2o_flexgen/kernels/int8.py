"""x @ W.T + b in int8: codes times codes add up to int32 exactly, by torch's own operators or a compiled loop.

Every row of x (a token) gets a scale of its own, so a token does not depend on its neighbours. A few elements far above
the others of their row would take the precision of all: they stay floats (LLM.int8(), arXiv 2208.07339). Which they are
is also decided row by row, and each row adds up its own in order: in whatever block it is, its result is the same to
the bit.

    out = (scale * (codes @ W.T) + kept @ W.T[columns with outliers]) * scales of W's rows + b

    native   `torch._int_mm` with W.T as its right operand, which it lays out anew in every call
    transposed   the same with W as its left operand, and x.T as the right one: several times faster with few rows
    tiled    a loop compiled for this CPU (`tiles.py`), which reads W as it is stored, and makes floats of sums while
             these are in the CPU's cache
    floats   through fp32, a slice of W at a time: where no other can, and what tiles do not cover
    packed   oneDNN's, on a W that was laid out for it beforehand, with codes + 128 in uint8: on signed ones it is slow

A W in blocks of 4 bits has a compiled loop of its own (`tiles4.py`), which reads it as it is stored: its elements are
rounded less there than as codes of 8 bits with a scale a row.

All are tried out first, and timed by `kernels.timing`; where torch's are wrong or missing, floats take their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.compiled.threads import compiled, float_array, in_threads
from h2o_flexgen.formats import Int4, Quantised
from h2o_flexgen.formats.codes import MOST, quantise_rows
from h2o_flexgen.kernels.exact import WIDEN_BYTES

#: rows of a matmul in int8 at once, whose sums are in int32
INT8_ROWS = 512

#: an outlier is more than this many times the mean absolute value of its row
TIMES = 8.0
#: outliers of a row at most
FEW = 16
#: CUDA's `_int_mm` wants more rows than this, and multiples of 8 of the rest
CUDA_ROWS = 16
CUDA_MULTIPLE = 8
#: products of as many codes add up to less than 2^24: fp32 has every whole number up to there
EXACT_COLUMNS = 1024
#: products that a compiled loop adds up in the time in which others pass over an element
PRODUCTS = 32


@dataclass
class Int8Weight:
    """A matrix (O, I) for matmuls in int8.

    Attributes:
        codes: (O, I), int8, or those from `pack`.
        scale: (O,), fp32.
    """

    codes: Tensor
    scale: Tensor

    @property
    def is_cuda(self) -> bool:
        return self.scale.is_cuda

    @property
    def nbytes(self) -> int:
        return self.codes.numel() + self.scale.nbytes

    @property
    def height(self) -> int:
        """Its outputs, O."""
        return len(self.scale)


#: a matrix for matmuls in int8; quantised ones are in blocks of 4 bits
Weight = Int8Weight | Quantised
#: one with its bias
Layer = tuple[Weight, Tensor | None]


def int8_linear(
    x: Tensor, weight: Weight, bias: Tensor | None = None, outliers: bool = True, kernel: str = "transposed"
) -> Tensor:
    """As `linear`, with the rows of x in int8.

    Args:
        outliers: keep a few elements of a row as floats.
        kernel: on a CPU, for a weight in 8 bits that is not packed.
    """
    return int8_linears(x, [(weight, bias)], outliers, kernel)[0]


def int8_linears(x: Tensor, layers: list[Layer], outliers: bool = True, kernel: str = "transposed") -> list[Tensor]:
    """The same of several weights with their biases: x is brought to int8 once. INT8_ROWS at a time."""
    rows = x.reshape(-1, x.shape[-1])
    outs = [x.new_empty(len(rows), weight.height) for weight, _ in layers]
    for part, *part_outs in zip(rows.split(INT8_ROWS), *(out.split(INT8_ROWS) for out in outs)):
        quantised = quantise(part.contiguous(), outliers)
        multiply(quantised, [(*layer, out) for layer, out in zip(layers, part_outs)], kernel)
    return [out.view(*x.shape[:-1], out.shape[1]) for out in outs]


@dataclass
class Rows:
    """Rows of activations in int8.

    Attributes:
        codes: (R, I) int8.
        scale: (R,) fp32.
        kept: (R, U) fp32, the outliers, 0 where an element is none.
        places: (U,), their columns.
    """

    codes: Tensor
    scale: Tensor
    kept: Tensor
    places: Tensor

    @classmethod
    def of(cls, codes: Tensor) -> Rows:
        """Whole numbers, without outliers."""
        return cls(codes, torch.ones(len(codes)), torch.empty(len(codes), 0), torch.arange(0))

    @cached_property
    def row_floats(self) -> tuple[np.ndarray, ...]:
        """As `tiles.RowFloats`, a plain tuple."""
        return self.scale.numpy(), self.kept.numpy(), self.places.numpy()

    @cached_property
    def for_tiles(self) -> np.ndarray:
        """The codes as tiles take them. By numpy: as fast as torch, whose threads would have to be woken up."""
        tiles = compiled().tiles
        codes = self.codes.numpy()
        return codes.view(np.uint8) ^ tiles.OFFSET if tiles.CODES == np.uint8 else codes.astype(tiles.CODES)

    def for_blocks(self, group: int) -> tuple[np.ndarray, np.ndarray]:
        """The codes, and sums of them, as `tiles4` takes them, for blocks of as many elements."""
        tiles4 = compiled().tiles4
        (rows, width) = self.codes.shape
        chunks = tiles4.padded(width // tiles4.CHUNK)
        codes = np.zeros((rows, chunks * tiles4.CHUNK // 4), np.int32)
        sums = np.zeros((rows, chunks), np.int16)
        words = self.codes.numpy().view(np.int32)
        in_threads(lambda a, b: tiles4.arrange(words, group // 2, a, b, codes, sums), rows, self.codes.numel())
        return codes.view(np.int8), sums


def quantise(x: Tensor, outliers: bool = True) -> Rows:
    """Of x (R, I), contiguous."""
    loops = None if x.is_cuda else compiled()
    if loops is None:
        return _quantise_by_torch(x.float(), outliers)
    (rows, width) = x.shape
    array = float_array(x)
    codes = torch.empty(rows, width, dtype=torch.int8)
    limit = torch.empty(rows)
    largest = torch.empty(rows)
    out = [t.numpy() for t in (codes, limit, largest)]
    few = FEW if outliers else 0
    found = []
    in_threads(lambda a, b: found.append(loops.codes.quantise(array, TIMES, few, a, b, *out)), rows, x.numel())
    places = torch.from_numpy(np.any(found, axis=0)).nonzero()[:, 0]
    kept = torch.empty(rows, len(places))
    if len(places):
        loops.codes.outliers(array, limit.numpy(), places.numpy(), kept.numpy())
    return Rows(codes, largest / MOST, kept, places)


def _quantise_by_torch(x: Tensor, outliers: bool) -> Rows:
    size = x.abs()
    limit = TIMES * size.mean(dim=1, keepdim=True)
    if not outliers:
        limit = torch.full_like(limit, torch.inf)
    elif x.shape[1] > FEW:  # it doubles until no more than FEW are above it
        next_one = size.topk(FEW + 1, dim=1).values[:, -1:]
        limit = limit * (next_one / limit).log2().ceil().clamp(min=0).nan_to_num().exp2()
    is_outlier = size > limit
    places = is_outlier.any(dim=0).nonzero()[:, 0]
    codes = torch.empty_like(x, dtype=torch.int8)
    scale = torch.empty_like(x[:, 0])
    quantise_rows(x.masked_fill(is_outlier, 0.0), codes, scale)
    return Rows(codes, scale, torch.where(is_outlier, x, 0.0)[:, places], places)


def prepare(dtype: torch.dtype) -> None:
    """Compile the loops for activations in `dtype`, or read them from numba's cache: once, before memory is
    measured."""
    weight = torch.ones(8, 64, dtype=torch.int8)
    x = torch.ones(2, 64, dtype=dtype)
    x[0, 0] = 100  # an outlier
    for codes in (weight, pack(weight)) if can_pack() else (weight,):
        int8_linear(x, Int8Weight(codes, torch.ones(8)))
    int8_linear(x, Int8Weight(weight, torch.ones(8)), kernel="tiled")
    if takes_blocks():
        form = Int4(64)
        int8_linear(x, form.view(torch.zeros(form.nbytes((8, 64)), dtype=torch.uint8), (8, 64)))
    for kernel in KERNELS:
        is_exact(kernel)


# the kernels


def multiply(x: Rows, layers: list[tuple[Weight, Tensor | None, Tensor]], kernel: str) -> None:
    """x @ weight.T + bias into out (R, O), of any float type, for each (weight, bias, out)."""
    by_tiles = []
    for weight, bias, out in layers:
        if isinstance(weight, Quantised) or (
            kernel == "tiled" and not weight.codes.is_mkldnn and may_tile(weight.codes.shape)
        ):
            by_tiles.append((weight, bias, out))
        else:
            _scale_back(*_sums(x, weight.codes, kernel), x, weight, bias, out)
    if by_tiles:
        tiled(x, by_tiles)


def _scale_back(sums: Tensor, columns: Tensor, x: Rows, weight: Int8Weight, bias: Tensor | None, out: Tensor) -> None:
    loops = None if sums.is_cuda else compiled()
    if loops is None:
        wide = (x.scale[:, None] * sums).addmm_(x.kept, columns.float()).mul_(weight.scale)
        out.copy_(wide if bias is None else wide.add_(bias))
        return
    arrays = [sums.numpy(), columns.numpy(), x.row_floats, weight.scale.numpy(), _fp32(bias, weight).numpy()]
    target = float_array(out)
    in_threads(lambda a, b: loops.tiles.scale_back(*arrays, a, b, target), len(out), out.numel())


def _fp32(bias: Tensor | None, weight: Weight) -> Tensor:
    return torch.zeros(weight.height) if bias is None else bias.float()


def _sums(x: Rows, weight: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
    """codes (R, I) @ weight.T (O, I) -> sums (R, O), int32 or floats that hold whole numbers, and the columns of the
    weight at x.places, as (U, O). Of a packed weight they are its sums of unit vectors."""
    codes = x.codes
    places = x.places
    if weight.is_mkldnn:
        units = codes.new_zeros(len(places), codes.shape[1]).scatter_(1, places[:, None], 1)
        return packed(torch.cat([codes, units]), weight).tensor_split([len(codes)])
    if codes.is_cuda:
        sums = _on_cuda(codes, weight)
    else:
        sums = SUMS["floats" if kernel == "tiled" or not is_exact(kernel) else kernel](codes, weight)
    return sums, weight.index_select(1, places).t().contiguous()


def native(codes: Tensor, weight: Tensor) -> Tensor:
    return torch._int_mm(codes, weight.t())


def transposed(codes: Tensor, weight: Tensor) -> Tensor:
    return torch._int_mm(weight, codes.t()).t().contiguous()


def floats(codes: Tensor, weight: Tensor) -> Tensor:
    """Through fp32, EXACT_COLUMNS of the weight at a time, so that no sum is rounded."""
    width = weight.shape[1]
    x = torch.empty(width, len(codes), device=codes.device).copy_(codes.t())
    sums = torch.empty(len(weight), len(codes), dtype=torch.int32, device=codes.device)
    step = min(max(1, WIDEN_BYTES // (4 * width)), len(weight))
    buffer = torch.empty(step, width, device=codes.device)
    for part, target in zip(weight.split(step), sums.split(step)):
        w = buffer[: len(part)].copy_(part)
        for at in range(0, width, EXACT_COLUMNS):
            few = torch.mm(w[:, at : at + EXACT_COLUMNS], x[at : at + EXACT_COLUMNS])
            target.add_(few.int()) if at else target.copy_(few)
    return sums.t().contiguous()


def may_tile(shape: Sequence[int]) -> bool:
    """Whether tiles cover a weight (O, I), and work on this CPU."""
    if not is_exact("tiled"):
        return False
    tiles = compiled().tiles
    return shape[0] >= tiles.TILE_OUT and shape[1] % tiles.TILES[tiles.CODES.name].inputs == 0


def tiled(x: Rows, layers: list[tuple[Weight, Tensor | None, Tensor]]) -> None:
    """As `multiply`, by compiled loops, whose threads share the outputs of all layers."""
    loops = compiled()
    jobs = []
    count = 0
    tall = loops.tiles.TILE_OUT
    groups = {weight.format.group for weight, _, _ in layers if isinstance(weight, Quantised)}
    in_order = {group: x.for_blocks(group) for group in groups}
    for weight, bias, out in layers:
        last = _fp32(bias, weight).numpy()
        if isinstance(weight, Quantised):
            codes = in_order[weight.format.group]
            work = partial(loops.tiles4.multiply, *codes, x.row_floats, weight.blocks(), last)
        else:
            arrays = [t.numpy() for t in (weight.codes.contiguous(), weight.scale)]
            work = partial(loops.tiles.multiply, x.for_tiles, x.row_floats, *arrays, last)
        jobs.append((count, work, float_array(out)))
        count += -(-out.shape[1] // tall)

    def part(begin: int, end: int) -> None:
        for first, work, target in jobs:
            height = target.shape[1]
            a = max(begin - first, 0) * tall
            b = min((end - first) * tall, height)
            if a < b:
                work(a, b, target)

    in_threads(part, count, x.codes.numel() * count * tall // PRODUCTS)


def _sums_by_tiles(codes: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty(len(codes), len(weight))
    tiled(Rows.of(codes), [(Int8Weight(weight, torch.ones(len(weight))), None, out)])
    return out


#: kernels that give sums, of weights that are not packed
SUMS = {"native": native, "transposed": transposed, "floats": floats}
#: all kernels of weights that are not packed
KERNELS = (*SUMS, "tiled")


def _on_cuda(codes: Tensor, weight: Tensor) -> Tensor:
    if any(size % CUDA_MULTIPLE for size in weight.shape):
        return floats(codes, weight)
    missing = max(CUDA_ROWS + CUDA_MULTIPLE - len(codes), -len(codes) % CUDA_MULTIPLE)
    return torch._int_mm(F.pad(codes, (0, 0, 0, missing)), weight.t())[: len(codes)]


def packed(codes: Tensor, weight: Tensor) -> Tensor:
    """Of a weight from `pack`."""
    x = codes.view(torch.uint8) ^ 128  # codes + 128
    out = weight.shape[1]  # it is transposed
    ones, zeros = _ones(out)
    return torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 128, weight, ones, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )


@cache
def _ones(size: int) -> tuple[Tensor, Tensor]:
    return torch.ones(size), torch.zeros(size, dtype=torch.int32)


def pack(weight: Tensor) -> Tensor:
    """A matrix (O, I) of int8 in RAM as oneDNN wants it; good for `multiply` only. Holds as many bytes."""
    return torch.ops.onednn.qlinear_prepack(weight, None)


def _extremes() -> tuple[Tensor, Tensor]:
    """Of which 16-bit sums would overflow, as those of some older CPUs do."""
    codes = torch.full((24, 192), 127, dtype=torch.int8)
    codes[::2] = -127
    weight = torch.arange(72 * 192).remainder(255).sub(127).to(torch.int8).view(72, 192)
    weight[::3] = 127
    return codes, weight


def _works(kernel) -> bool:
    codes, weight = _extremes()
    try:
        return torch.equal(kernel(codes, weight).double(), codes.double() @ weight.double().t())
    except (AttributeError, RuntimeError):
        return False


@cache
def is_exact(kernel: str) -> bool:
    """Whether one of KERNELS is right here."""
    return _works(SUMS.get(kernel, _sums_by_tiles))


def takes_blocks() -> bool:
    """Whether weights in blocks of 4 bits can be multiplied as they are stored, on this CPU."""
    loops = compiled()
    return loops is not None and loops.tiles4.IS_POSSIBLE and _is_exact_in_blocks()


@cache
def _is_exact_in_blocks() -> bool:
    (codes, _) = _extremes()
    shape = (72, 192)
    form = Int4(64)
    raw = torch.empty(form.nbytes(shape), dtype=torch.uint8)
    out = torch.empty(len(codes), shape[0])
    weight = torch.arange(72 * 192).remainder(16).sub(8).float().view(shape)
    form.encode(weight, raw)
    tiled(Rows.of(codes), [(form.view(raw, shape), None, out)])
    return torch.allclose(out.double(), codes.double() @ weight.double().t(), rtol=1e-5)


@cache
def can_pack() -> bool:
    """Whether `pack` and `packed` work here: their operators are those of torch's compiler, not public ones."""
    return _works(lambda codes, weight: packed(codes, pack(weight)))
