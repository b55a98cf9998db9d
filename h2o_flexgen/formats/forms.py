"""Which format each tensor of a job has: what `compress_weight`, `compress_cache` and `compute` mean."""

from __future__ import annotations

import torch

from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import Blocks, Dense, Format, Int4, Int8, KVFormat, Shape

#: sizes of groups for `Int4`, the best first: a larger one takes fewer bytes
GROUPS = (64, 32)
#: of head sizes, for each format of a cache: else scales in fp16 would be at odd addresses
DIVISORS = {None: 1, "int8": 2, "int4": 4}
#: what `compress_weight` and `compress_cache` may be
COMPRESSED = ("int8", "int4")
#: what `compute` may be
COMPUTE = ("exact", "int8")


# the weights


def compressed(kind: str, layers: list[dict[str, Shape]]) -> dict[str, Format]:
    """{name: format} of the matrices of a model under `compress_weight`: int8, or int4 but for those of embedding and
    head, the first and the last layer.

    Raises:
        UserError: another kind, or inputs that no group divides.
    """
    if kind not in COMPRESSED:
        raise UserError(f"`compress_weight` is one of {', '.join(COMPRESSED)}, not {kind!r}")
    ends = {**layers[0], **layers[-1]}
    found = {}
    for name, shape in {name: shape for layer in layers for name, shape in layer.items()}.items():
        if len(shape) < 2:
            continue
        groups = [group for group in GROUPS if shape[1] % group == 0]
        if kind == "int4" and name not in ends and not groups:
            raise UserError(
                f"`compress_weight` int4 is for groups of {' or '.join(map(str, GROUPS))} inputs, and the {shape[1]} "
                f"of {name!r} cannot be cut into them: use int8"
            )
        found[name] = Int4(groups[0]) if kind == "int4" and name not in ends else Int8()
    return found


def in_memory(form: Format, dtype: torch.dtype) -> Format:
    """In which a tensor is kept in RAM and on a GPU, for a job that computes in `dtype`."""
    return Dense(dtype) if form.is_dense else form


def check_compute(compute: str, formats: dict[str, Format]) -> None:
    """Raises UserError unless `compute` is known, and for int8 there are matrices in 8 or 4 bits among `formats`."""
    if compute not in COMPUTE:
        raise UserError(f"`compute` is one of {', '.join(COMPUTE)}, not {compute!r}")
    if compute == "int8" and all(form.is_dense for form in formats.values()):
        raise UserError(
            "`compute` int8 is for weights in 8 or 4 bits, and these are in floats: add `compress_weight` int8 or int4"
        )


# the cache


def cache_format(kind: str | None, dtype: torch.dtype, head_dim: int) -> KVFormat:
    """Of a cache under `compress_cache`, for a job that computes in `dtype`. A vector of K or V, one token's in one
    head, has one scale, in fp16, and of 4 bits one minimum. K is in 8 bits in both: a model bears 4 bits in V, and not
    in K (docs/formats.md).

    Raises:
        UserError: another kind, or a head size that it does not fit.
    """
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
    eight = Blocks("int8", 8, head_dim, False)
    return KVFormat(eight, eight if kind == "int8" else Int4(head_dim))


def cache_formats(kind: str | None, dtype: torch.dtype, head_dim: int) -> list[KVFormat]:
    """That of `cache_format`; of "auto" those that heads of this size can have."""
    kinds = [each for each in COMPRESSED if has_cache_format(each, head_dim)] if kind == "auto" else [kind]
    return [cache_format(each, dtype, head_dim) for each in kinds]


def has_cache_format(kind: str | None, head_dim: int) -> bool:
    """Whether heads of this size can be cached so."""
    return head_dim % DIVISORS[kind] == 0
