"""A model and the cache of a job as plan and cost count them: shapes, formats and bytes, without any data."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

from h2o_flexgen.formats import Blocks, Dense, Format, KVFormat
from h2o_flexgen.formats.forms import cache_format, in_memory
from h2o_flexgen.kernels.linear import matmul_format
from h2o_flexgen.kv_cache import rule_for
from h2o_flexgen.kv_cache.layout import KVLayout
from h2o_flexgen.kv_cache.rule import CacheRule
from h2o_flexgen.models.registry import family
from h2o_flexgen.models.spec import Layer, ModelSpec
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.policy import TIERS
from h2o_flexgen.storage.decoded import Decoding
from h2o_flexgen.storage.staging import StagingBytes, staging_bytes


class TensorBytes(NamedTuple):
    """The bytes of a tensor.

    Attributes:
        memory: on the gpu and cpu tiers; stored: in the checkpoint.
        staging: of its place in a staging buffer, by its tier.
        retyped: of the copy of what is stored that CUDA makes to change its type.
    """

    memory: int
    stored: int
    staging: dict[str, StagingBytes]
    retyped: int


@dataclass(frozen=True)
class ModelData:
    """A model as plan and cost count it.

    Attributes:
        layers: the tensors of embedding, transformer blocks and head (`tensors` of the family).
        dtype: name of the type of the computation.
        formats: in which every tensor is stored.
        cuda: whether the compute device is one of CUDA.
        compress_cache: as for `LLM`.
        dummy: random weights, which are written to disk first.
        copy_bytes: of a copy of the checkpoint in the cache folder.
        compute: "exact", or "int8" for matmuls in int8 with what is quantised; in_blocks: 4 bits as they are stored.
        compressed: the formats were asked for, by `compress_weight`; else they are those of the checkpoint.
        decoding: how quantised matrices were decoded, if layers and formats are those after that.
    """

    spec: ModelSpec
    layers: list[Layer]
    dtype: str
    formats: dict[str, Format]
    cuda: bool
    dummy: bool = False
    copy_bytes: int = 0
    compute: str = "exact"
    compress_cache: str | None = None
    compressed: bool = False
    decoding: Decoding | None = None
    in_blocks: bool = False

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        dtype: str,
        stored: str,
        cuda: bool,
        dummy: bool = False,
        formats: dict[str, Format] | None = None,
        copy_bytes: int = 0,
        compute: str = "exact",
        compressed: bool = False,
        in_blocks: bool = False,
    ) -> ModelData:
        """`dtype` and `stored`: names of the type of the computation, and of that in the checkpoint, for matrices that
        `formats` does not name."""
        layers = family(spec.model_type).tensors(spec)
        types = {1: Dense(getattr(torch, dtype)), 2: Dense(getattr(torch, stored))}  # vectors are never streamed
        found = {name: types[min(2, len(shape))] for layer in layers for name, shape in layer.shapes.items()}
        found |= formats or {}
        how = dict(compressed=compressed, in_blocks=in_blocks)
        return cls(spec, layers, dtype, found, cuda, dummy, copy_bytes, compute, **how)

    def decodings(self) -> list[ModelData]:
        """With the quantised matrices of the checkpoint decoded when they are loaded, the fastest way first. Empty if
        there are none, they are wanted as they are, or matmuls read all as they are stored."""
        if self.compressed or all(map(self.is_dense, self.formats)):
            return []
        model = (self.formats, self.layers, self.torch_dtype, self.compute, self.in_blocks)
        copied = Decoding.of(*model)
        shared = Decoding.of(*model, copies=False)
        as_stored = Decoding(self.layers, {name: self.formats[name] for name in shared.formats})
        ways = [way for way in ([copied] if copied == shared else [copied, shared]) if way != as_stored]
        return [replace(self, layers=x.layers, formats=self.formats | x.formats, decoding=x) for x in ways]

    def shapes(self, rule: CacheRule, workload: Workload) -> Shapes:
        """With the cache of a job."""
        mine = {each.name: getattr(self, each.name) for each in fields(self)}
        return Shapes(**mine, rule=rule, workload=workload)

    @property
    def kv_format(self) -> KVFormat:
        """Of K and V in the cache."""
        return cache_format(self.compress_cache, self.torch_dtype, self.spec.head_dim)

    @property
    def device(self) -> str:
        """The compute device, as torch names its type."""
        return "cuda" if self.cuda else "cpu"

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the computation."""
        return getattr(torch, self.dtype).itemsize

    @cached_property
    def streamed(self) -> list[dict[str, tuple[int, ...]]]:
        """{name: shape} per layer of what is needed whole (the embedding only gathers rows)."""
        return [layer.streamed_shapes for layer in self.layers]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @cached_property
    def tensor_bytes(self) -> dict[str, TensorBytes]:
        """By name, of all tensors."""
        found = {}
        dtype = self.torch_dtype
        head = self.streamed[-1]
        for name, shape in (item for layer in self.layers for item in layer.shapes.items()):
            form, read = self.formats[name], self.read(name, name in head)
            stored = form.nbytes(shape)
            other = form.is_dense and form != Dense(dtype)
            staging = {tier: staging_bytes(tier, form, shape, dtype, self.cuda, read) for tier in TIERS}
            found[name] = TensorBytes(in_memory(form, dtype).nbytes(shape), stored, staging, stored * other)
        return found

    def nbytes(self, name: str) -> int:
        """Of a tensor on the gpu and cpu tiers."""
        return self.tensor_bytes[name].memory

    def stored_bytes(self, name: str) -> int:
        """Of a tensor in the checkpoint."""
        return self.tensor_bytes[name].stored

    def is_dense(self, name: str) -> bool:
        return self.formats[name].is_dense

    def in_int8(self, name: str) -> bool:
        """Whether a matrix is multiplied in int8."""
        return self.compute == "int8" and not self.is_dense(name)

    def read(self, name: str, is_head: bool = False) -> Format:
        """In which matmuls are given a matrix."""
        return matmul_format(self.formats[name], self.torch_dtype, self.compute, self.in_blocks, is_head)

    def read_as_kept(self, name: str) -> bool:
        """Whether matmuls read a matrix as it is in memory; of others they need floats, or codes of 8 bits."""
        return self.is_dense(name) or self.read(name) == self.formats[name]

    def reads_blocks(self, name: str) -> bool:
        """Whether matmuls in int8 read a matrix in blocks of 4 bits."""
        return self.in_int8(name) and isinstance(self.read(name), Blocks)

    @cached_property
    def converts_by_compute(self) -> bool:
        """Whether floats from disk are on the device as they are stored, and compute converts a layer to use it."""
        dense = {form for form in self.formats.values() if form.is_dense}
        return dense != {Dense(self.torch_dtype)} and not self.cuda

    @property
    def may_widen(self) -> bool:
        """Whether matmuls go through float32 where the CPU has none in 16 bits (kernels/linear.py)."""
        return not self.cuda and self.itemsize == 2

    @cached_property
    def stored_ratio(self) -> float:
        """Bytes in the checkpoint per byte in memory, of what streams."""
        names = [name for layer in self.streamed for name in layer]
        return sum(map(self.stored_bytes, names)) / sum(map(self.nbytes, names))


@dataclass(frozen=True, kw_only=True)
class Shapes(ModelData):
    """A model and the cache of a job."""

    rule: CacheRule
    workload: Workload

    def layouts(self, batches: list[int]) -> dict[tuple[int, int], KVLayout]:
        """The cache of every (layer, batch), for batches of these sizes."""
        longest = self.workload.longest
        gen_len = self.workload.gen_len
        return self.rule.layouts(self.spec, self.kv_format, [(n, longest) for n in batches], gen_len)

    @cached_property
    def kv(self) -> KVLayout:
        """The cache of one sequence in the average layer."""
        longest = self.workload.longest
        gen_len = self.workload.gen_len
        return self.rule.layout(self.spec, self.kv_format, 1, longest, gen_len)

    @cached_property
    def most_slots(self) -> int:
        """Of a sequence in one layer."""
        return max(layout.slots for layout in self.layouts([1]).values())

    @property
    def kv_bytes(self) -> int:
        """Of a sequence in all layers."""
        return sum(layout.kv_bytes + layout.meta_bytes for layout in self.layouts([1]).values())


def sizes(model: ModelData, stored: str) -> dict:
    """Of a model most of whose weights are of the type `stored`, as plain data."""
    spec = model.spec
    shapes = {name: shape for layer in model.layers for name, shape in layer.shapes.items()}
    count = sum(map(prod, shapes.values()))
    nbytes = sum(map(model.stored_bytes, shapes))
    names = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "positions")
    found = {"family": spec.model_type, "parameters": count} | {name: getattr(spec, name) for name in names}
    return found | {"stored_dtype": stored, "weight_bytes": nbytes}


def kv_bytes(
    model: ModelData, workload: Workload, rule: CacheRule, compress_cache: str | None = None
) -> dict[str, int]:
    """Bytes of a sequence's KV cache in all layers at its end: full and as floats, and as the job has it."""
    full = rule_for(None, workload.longest, workload.gen_len, model.spec)
    each = {"full": (full, None), "job": (rule, compress_cache)}
    return {
        name: replace(model, compress_cache=kind).shapes(kept, workload).kv_bytes for name, (kept, kind) in each.items()
    }
