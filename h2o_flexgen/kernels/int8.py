"""x @ W.T + b in int8: products of codes add up to int32 exactly, by torch's own operators or a compiled loop.

    out = (scale * (codes @ W.T) + kept @ W.T[columns with outliers]) * scales of W's rows + b

with x as in `operands.py`. Each row adds up its own outliers in order, so its result does not depend on the other rows
of a block, to the bit. Every kernel is tried out before its first use, and timed by `kernels.timing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.compiled.threads import compiled, float_array, in_threads
from h2o_flexgen.formats import Int4, Quantised
from h2o_flexgen.kernels.exact import WIDEN_BYTES
from h2o_flexgen.kernels.operands import Grouped, Int8Activations, Int8Weight, quantise

#: rows of a matmul in int8 at once, whose sums are in int32
INT8_ROWS = 512
#: CUDA's `_int_mm` requires more rows than this, and multiples of 8 in all dimensions
CUDA_ROWS = 16
CUDA_MULTIPLE = 8
#: the sum of this many products of codes stays below 2^24, up to which fp32 has every integer
EXACT_COLUMNS = 1024
#: products that a compiled loop adds up in the time that other loops take for one element
PRODUCTS = 32

#: in codes of 8 bits, or in blocks of 4 bits, also a group of the latter
Weight = Int8Weight | Quantised | Grouped
#: a weight with its bias, also in a group
Layer = tuple[Weight, Tensor | Grouped | None]


class Product(NamedTuple):
    """x @ weight.T + bias, into out (R, O) of any float type."""

    weight: Weight
    bias: Tensor | Grouped | None
    out: Tensor


def int8_linear(
    x: Tensor, weight: Weight, bias: Tensor | None = None, outliers: bool = True, kernel: str = "transposed"
) -> Tensor:
    """As `linear`, with the rows of x in int8 and, with `outliers`, a few of their elements as floats; by one of
    KERNELS, or another one if it does not accept the weight."""
    return int8_linears(x, [(weight, bias)], outliers, kernel)[0]


def int8_linears(x: Tensor, layers: list[Layer], outliers: bool = True, kernel: str = "transposed") -> list[Tensor]:
    """The same of several weights with their biases: x is quantised once, INT8_ROWS rows at a time. The rows of a group
    are no more than that."""
    rows = x.reshape(-1, x.shape[-1])
    outs = [x.new_empty(len(rows), weight.height) for weight, _ in layers]
    for part, *part_outs in zip(rows.split(INT8_ROWS), *(out.split(INT8_ROWS) for out in outs)):
        quantised = quantise(part.contiguous(), outliers)
        multiply(quantised, [Product(*layer, out) for layer, out in zip(layers, part_outs)], kernel)
    return [out.view(*x.shape[:-1], out.shape[1]) for out in outs]


def multiply(x: Int8Activations, products: list[Product], kernel: str) -> None:
    """Compute each product by one of KERNELS, or if that does not accept its weight by the first that does."""
    by_kernel = {}
    for product in products:
        accepting = (each for each in (KERNELS[kernel], *KERNELS.values()) if each.accepts(product.weight))
        by_kernel.setdefault(next(accepting), []).append(product)
    for each, accepted in by_kernel.items():
        each.run(x, accepted)


def prepare(dtype: torch.dtype) -> None:
    """Compile the loops for activations in `dtype`, or read them from numba's cache, before memory is measured."""
    x = torch.ones(2, 64, dtype=dtype)
    x[0, 0] = 100  # an outlier
    codes = torch.ones(8, 64, dtype=torch.int8)
    for kernel in UNPACKED:
        int8_linear(x, Int8Weight(codes, torch.ones(8)), kernel=kernel)
    if can_pack():
        int8_linear(x, Int8Weight(pack(codes), torch.ones(8)))
    if takes_blocks():
        form = Int4(64)
        int8_linear(x, form.view(torch.zeros(form.nbytes((8, 64)), dtype=torch.uint8), (8, 64)))


# the kernels


class Kernel:
    """One way to multiply. Most compute the sums of codes by one of torch's operators, which are scaled afterwards."""

    def accepts(self, weight: Weight) -> bool:
        """Most accept weights in 8 bits on the CPU that are not packed."""
        return isinstance(weight, Int8Weight) and not (weight.is_cuda or weight.codes.is_mkldnn) and self.works

    def run(self, x: Int8Activations, products: list[Product]) -> None:
        for product in products:
            _scale_back(*self.sums_and_columns(x, product.weight.codes), x, product)

    def sums_and_columns(self, x: Int8Activations, weight: Tensor) -> tuple[Tensor, Tensor]:
        """`sums` of the codes of x, and the columns of the weight at `x.places`, (U, O)."""
        return self.sums(x.codes, weight), weight.index_select(1, x.places).t().contiguous()

    def sums(self, codes: Tensor, weight: Tensor) -> Tensor:
        """codes (R, I) @ weight.T (O, I) -> (R, O), integers as int32 or floats."""
        raise NotImplementedError

    @cached_property
    def works(self) -> bool:
        """Whether it is right on this CPU, with codes whose sums overflow 16 bits, as happens on some older CPUs."""
        codes = torch.tensor([[-127], [127]], dtype=torch.int8).repeat(12, 192)
        weight = torch.arange(72 * 192).remainder(255).sub(127).to(torch.int8).view(72, 192)
        weight[::3] = 127
        try:
            return torch.equal(self.sums(codes, weight).double(), codes.double() @ weight.double().t())
        except (AttributeError, RuntimeError):
            return False


class Native(Kernel):
    """`torch._int_mm` with W.T as the right operand, which every call copies to another layout."""

    def sums(self, codes: Tensor, weight: Tensor) -> Tensor:
        return torch._int_mm(codes, weight.t())


class Transposed(Kernel):
    """`torch._int_mm` with W as the left operand and x.T as the right one: several times faster with few rows."""

    def sums(self, codes: Tensor, weight: Tensor) -> Tensor:
        return torch._int_mm(weight, codes.t()).t().contiguous()


class Cuda(Kernel):
    """As `Native`, padded to the rows that CUDA requires."""

    def accepts(self, weight: Weight) -> bool:
        return weight.is_cuda and not any(size % CUDA_MULTIPLE for size in weight.codes.shape)

    def sums(self, codes: Tensor, weight: Tensor) -> Tensor:
        missing = max(CUDA_ROWS + CUDA_MULTIPLE - len(codes), -len(codes) % CUDA_MULTIPLE)
        return torch._int_mm(F.pad(codes, (0, 0, 0, missing)), weight.t())[: len(codes)]


class Floats(Kernel):
    """Through fp32, where no other can: a slice of W and EXACT_COLUMNS of it at a time, so that no sum is rounded."""

    def accepts(self, weight: Weight) -> bool:
        return isinstance(weight, Int8Weight) and not weight.codes.is_mkldnn

    def sums(self, codes: Tensor, weight: Tensor) -> Tensor:
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


class Packed(Kernel):
    """oneDNN's, on a W that `pack` laid out for it, with codes + 128 in uint8: on signed ones it is slow."""

    def accepts(self, weight: Weight) -> bool:
        return isinstance(weight, Int8Weight) and weight.codes.is_mkldnn

    def sums_and_columns(self, x: Int8Activations, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The columns are the sums of unit vectors."""
        units = x.codes.new_zeros(len(x.places), x.codes.shape[1]).scatter_(1, x.places[:, None], 1)
        return self.sums(torch.cat([x.codes, units]), weight).tensor_split([len(x.codes)])

    def sums(self, codes: Tensor, weight: Tensor) -> Tensor:
        weight = weight if weight.is_mkldnn else pack(weight)  # to be tried out
        x = codes.view(torch.uint8) ^ 128  # codes + 128
        ones, zeros = _ones(weight.shape[1])  # it is transposed
        return torch.ops.onednn.qlinear_pointwise(
            x, 1.0, 128, weight, ones, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )


class Task(NamedTuple):
    """Some outputs of a product."""

    parts: int  # that threads may share
    compute: Callable[[int, int], None]  # (begin, end), in parts


class Tiled(Kernel):
    """Loops compiled for this CPU, which read W in its stored layout and scale sums while these are in the CPU's cache:
    `tiles` for 8 bits, `block_tiles` for blocks, which round elements less than codes of 8 bits with one scale per
    row do."""

    def accepts(self, weight: Weight) -> bool:
        return isinstance(weight, Quantised | Grouped) or (super().accepts(weight) and may_tile(weight.codes.shape))

    def run(self, x: Int8Activations, products: list[Product]) -> None:
        """The threads share the outputs of all products."""
        arranged = cache(x.for_blocks)
        tasks = [self._task(x, product, arranged) for product in products]
        ends = list(accumulate(task.parts for task in tasks))

        def work(begin: int, end: int) -> None:
            for task, last in zip(tasks, ends):
                first = last - task.parts
                if begin < last and end > first:
                    task.compute(max(begin - first, 0), min(end - first, task.parts))

        in_threads(work, ends[-1], x.codes.shape[1] * sum(out.numel() for _, _, out in products) // PRODUCTS)

    def _task(self, x: Int8Activations, product: Product, arranged: Callable) -> Task:
        """arranged: (elements of a chunk) -> x for blocks."""
        weight, bias, out = product
        out = float_array(out)
        height = weight.height
        if isinstance(weight, Int8Weight):
            arrays = [t.numpy() for t in (weight.codes.contiguous(), weight.scale)]
            compute = partial(compiled().tiles.multiply, x.for_tiles, x.row_floats, *arrays, _fp32(bias, height))
            tall = compiled().tiles.TILE_OUT
            return Task(-(-height // tall), lambda a, b: compute(a * tall, min(b * tall, height), out))
        group = weight if isinstance(weight, Grouped) else Grouped([weight], [len(x.codes)])
        biases = bias.members if isinstance(bias, Grouped) else [bias] * len(group.members)
        bias = np.stack([_fp32(each, height) for each in biases])
        codes = arranged(group.members[0].format.chunk)
        loops = compiled().block_tiles
        compute = partial(loops.multiply, codes, x.row_floats, *group.blocks(), bias)
        return Task(len(biases) * -(-height // loops.PART), lambda a, b: compute(a, b, out))

    def sums(self, codes: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty(len(codes), len(weight))
        self.run(Int8Activations.of(codes), [Product(Int8Weight(weight, torch.ones(len(weight))), None, out)])
        return out


#: by name; where the kernel asked for does not accept a weight, the first one that does takes its place
KERNELS: dict[str, Kernel] = {
    "packed": Packed(),
    "cuda": Cuda(),
    "floats": Floats(),
    "tiled": Tiled(),
    "native": Native(),
    "transposed": Transposed(),
}
#: kernels of a CPU for weights in 8 bits that are not packed
UNPACKED = ("native", "transposed", "floats", "tiled")


def _scale_back(sums: Tensor, columns: Tensor, x: Int8Activations, product: Product) -> None:
    weight, bias, out = product
    loops = None if sums.is_cuda else compiled()
    if loops is None:
        wide = (x.scale[:, None] * sums).addmm_(x.kept, columns.float()).mul_(weight.scale)
        out.copy_(wide if bias is None else wide.add_(bias))
        return
    arrays = [sums.numpy(), columns.numpy(), x.row_floats, weight.scale.numpy(), _fp32(bias, weight.height)]
    target = float_array(out)
    in_threads(lambda a, b: loops.tiles.scale_back(*arrays, a, b, target), len(out), out.numel())


def _fp32(bias: Tensor | None, height: int) -> np.ndarray:
    return np.zeros(height, np.float32) if bias is None else bias.float().numpy()


def may_tile(shape: Sequence[int]) -> bool:
    """Whether `tiles` covers a weight (O, I), and works on this CPU."""
    if not KERNELS["tiled"].works:
        return False
    tiles = compiled().tiles
    return shape[0] >= tiles.TILE_OUT and shape[1] % tiles.TILES[tiles.CODES.name].inputs == 0


@cache
def takes_blocks() -> bool:
    """Whether matmuls can read weights in blocks of 4 bits directly, on this CPU."""
    loops = compiled()
    if loops is None or not loops.block_rows.IS_POSSIBLE:
        return False
    codes = torch.tensor([[-127], [127]], dtype=torch.int8).repeat(12, 192)
    form = Int4(64)
    floats = torch.arange(72 * 192).remainder(16).sub(8).float().view(72, 192)
    weight = form.view(torch.empty(form.nbytes(floats.shape), dtype=torch.uint8), floats.shape)
    form.encode(floats, weight.raw)
    out = torch.empty(len(codes), len(floats))
    KERNELS["tiled"].run(Int8Activations.of(codes), [Product(weight, None, out)])
    return torch.allclose(out.double(), codes.double() @ floats.double().t(), rtol=1e-5)


def can_pack() -> bool:
    """Whether `pack` and its kernel work here: their operators belong to torch's compiler and are not public."""
    return KERNELS["packed"].works


def pack(weight: Tensor) -> Tensor:
    """A matrix (O, I) of int8 in RAM in oneDNN's layout, for `multiply` only; as many bytes."""
    return torch.ops.onednn.qlinear_prepack(weight, None)


@cache
def _ones(size: int) -> tuple[Tensor, Tensor]:
    return torch.ones(size), torch.zeros(size, dtype=torch.int32)
