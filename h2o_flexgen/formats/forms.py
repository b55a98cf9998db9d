"""Which forms the tensors of a job have: what `compress_weight`, `compress_cache` and `compute` mean."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import NamedTuple

import torch

from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import GGUF, Codes8, Dense, Format, Int4, Int8, KVFormat, Shape

#: formats of 4 bits, the best first: larger groups take fewer bytes
FOUR_BITS = {"int4": (Int4(64), Int4(32)), "q4_0": (GGUF["Q4_0"],)}
#: what must divide the head size for each format of a cache, so that fp16 scales are at even addresses
DIVISORS = {None: 1, "int8": 2, "int4": 4}
#: what `compress_weight` and `compress_cache` may be
COMPRESSED = ("int8", "int4")
#: what `h2o-flexgen convert` writes
CONVERTED = (*COMPRESSED, "q4_0")
#: what `compute` may be
COMPUTE = ("exact", "int8")
#: ends the name of a copy of a tensor
COPY = " (copy)"


# the weights


def compressed(kind: str, layers: list[dict[str, Shape]], kinds: tuple[str, ...] = COMPRESSED) -> dict[str, Format]:
    """{name: format} of a model's matrices under `compress_weight`, or another of `kinds`. In 4 bits the embedding and
    the head, which are the first and the last layer, are still int8. Raises UserError if the kind is unknown, or no
    group size divides the inputs of a matrix."""
    if kind not in kinds:
        raise UserError(f"`compress_weight` is one of {', '.join(COMPRESSED)}, not {kind!r}")
    ends = {**layers[0], **layers[-1]}
    found = {}
    for name, shape in {name: shape for layer in layers for name, shape in layer.items()}.items():
        if len(shape) < 2:
            continue
        found[name] = Int8() if kind == "int8" or name in ends else _in_4_bits(kind, name, shape[1])
    return found


def _in_4_bits(kind: str, name: str, width: int) -> Format:
    form = next((form for form in FOUR_BITS[kind] if width % form.layout.size == 0), None)
    if form is None:
        sizes = " or ".join(str(form.layout.size) for form in FOUR_BITS[kind])
        raise UserError(
            f"{kind} is for groups of {sizes} inputs, and the {width} of {name!r} cannot be cut into them: use int8"
        )
    return form


class Form(NamedTuple):
    """How a tensor lies in the file, on its tier, and as its matmul reads it."""

    stored: Format
    kept: Format  # in RAM and on a GPU
    operand: Format
    is_sliced: bool = False  # its matmul makes the operand from what is kept, a slice at a time

    @property
    def in_int8(self) -> bool:
        """Whether it is multiplied in int8: by its codes, however many bits they have."""
        return not self.operand.is_dense

    @property
    def is_direct(self) -> bool:
        """Whether its matmul reads it as kept; others are decoded to floats or unpacked to int8 first."""
        return self.kept == self.operand

    @property
    def given(self) -> Format:
        """What its matmul is given."""
        return self.kept if self.is_sliced else self.operand


def forms(
    formats: dict[str, Format],
    dtype: torch.dtype,
    operands: dict[str, str] | None = None,
    gathered: Container[str] = (),
    head: Container[str] = (),
    decodes: bool = False,
) -> list[dict[str, Form]]:
    """{name: form} of a model's tensors in each way in which they may be kept. In the last one all are kept as stored;
    in those before it, the fastest first, quantised matrices are decoded when they are loaded, into their operands, so
    that no step has to decode; these need room for all weights on the device.

    Args:
        formats: those in which the tensors are stored.
        dtype: of the computation; floats are always kept in it.
        operands: as from `linear.int8_operands`; None for exact matmuls, which read floats.
        gathered: tensors of the embedding. For matmuls in int8 they are never decoded, since their rows are read as
            floats. A head that is tied to them becomes a copy, named with `COPY`, if there is room; else it stays, too.
        head: tensors of the head, which may be as large as many layers and so is decoded a slice at a time.
        decodes: whether anything may be decoded when it is loaded.
    """
    as_stored = {}
    for name, stored in formats.items():
        kept = Dense(dtype) if stored.is_dense else stored
        operand = _operand(name, stored, dtype, operands)
        as_stored[name] = Form(stored, kept, operand, is_sliced=name in head and kept != operand)
    ways = []
    for copies in (True, False) if decodes else ():
        found = {}
        for name, form in as_stored.items():
            stays = operands is not None and name in gathered
            found[name] = form if stays else form._replace(kept=form.operand, is_sliced=False)
            if stays and copies and form.is_sliced:
                found[name + COPY] = form._replace(kept=form.operand, is_sliced=False)
        if found not in (*ways, as_stored):
            ways.append(found)
    return [*ways, as_stored]


def experts_of(name: str) -> tuple[str, range]:
    """The name of a tensor with {} for the numbers of its experts, which are a range such as 16:32 in it, and these;
    no experts without a range."""
    before, numbers, after = (re.split(r"\.(\d+:\d+)\.", name) + ["", ""])[:3]
    return (f"{before}.{{}}.{after}", range(*map(int, numbers.split(":")))) if numbers else (name, range(0))


def names_of(name: str) -> list[str]:
    """The names of the same tensor of each expert in a range; none without a range."""
    template, experts = experts_of(name)
    return [template.format(n) for n in experts]


def operand_key(form: Format, of_experts: bool) -> str:
    """Of a format in `operands`: experts, whose matmuls have few rows, may read other operands than other matrices."""
    return f"{form.name} of experts" if of_experts else form.name


def _operand(name: str, form: Format, dtype: torch.dtype, operands: dict[str, str] | None) -> Format:
    if form.is_dense or operands is None:
        return Dense(dtype)
    # blocks of one name may differ in size, and only some of them have a tile
    key = operand_key(form, of_experts=bool(experts_of(name)[1]))
    is_stored = operands[key] == form.name and (form == Int8() or form.tile is not None)
    return form if is_stored else Int8()


def check_compute(compute: str, formats: dict[str, Format]) -> None:
    """Raises UserError if `compute` is unknown, or is int8 while all `formats` are floats."""
    if compute not in COMPUTE:
        raise UserError(f"`compute` is one of {', '.join(COMPUTE)}, not {compute!r}")
    if compute == "int8" and all(form.is_dense for form in formats.values()):
        raise UserError(
            "`compute` int8 is for weights in 8 or 4 bits, and these are in floats: add `compress_weight` int8 or int4"
        )


# the cache


def cache_format(kind: str | None, dtype: torch.dtype, head_dim: int) -> KVFormat:
    """The format of a cache under `compress_cache`, for a job that computes in `dtype`. Every vector of K or V has an
    fp16 scale, and in 4 bits an fp16 minimum. K is in 8 bits under both: models tolerate 4 bits in V, but not in K
    (docs/formats.md). Raises UserError if the kind is unknown, or does not fit the head size."""
    if kind is None:
        return KVFormat.dense(dtype)
    if kind not in COMPRESSED:
        raise UserError(f"`compress_cache` is one of {', '.join(COMPRESSED)}, not {kind!r}")
    if not has_cache_format(kind, head_dim):
        other = " or take int8" if has_cache_format("int8", head_dim) else ""
        divisor = DIVISORS[kind]
        raise UserError(
            f"`compress_cache` {kind} is for head sizes that {divisor} divides, not {head_dim}: leave it out{other}"
        )
    eight = Codes8(head_dim)
    return KVFormat(eight, eight if kind == "int8" else Int4(head_dim))


def cache_formats(kind: str | None, dtype: torch.dtype, head_dim: int) -> list[KVFormat]:
    """What `cache_format` gives; for "auto" all formats that fit heads of this size."""
    kinds = [each for each in COMPRESSED if has_cache_format(each, head_dim)] if kind == "auto" else [kind]
    return [cache_format(each, dtype, head_dim) for each in kinds]


def has_cache_format(kind: str | None, head_dim: int) -> bool:
    """Whether the format fits heads of this size."""
    return head_dim % DIVISORS[kind] == 0
