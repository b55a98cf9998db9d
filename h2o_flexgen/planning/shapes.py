"""A model and the cache of a job as plan and cost count them: shapes, formats and bytes, without any data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from math import prod
from operator import add
from typing import NamedTuple, TypeVar

import torch

from h2o_flexgen.formats import Dense, Format, KVFormat
from h2o_flexgen.formats.forms import COPY, Form, cache_format, forms
from h2o_flexgen.kv_cache import rule_for
from h2o_flexgen.kv_cache.layout import KVLayout
from h2o_flexgen.kv_cache.rule import CacheRule
from h2o_flexgen.models.registry import family
from h2o_flexgen.models.spec import Layer, ModelSpec, Unit, shapes_of, units_of
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.policy import TIERS
from h2o_flexgen.storage.staging import StagingBytes, slice_bytes, staging_bytes

T = TypeVar("T")
#: indices into a model's layers: a decoder layer, which stands for all of them, and the head
DECODER = -2
HEAD = -1


class TensorBytes(NamedTuple):
    """The bytes of a tensor."""

    memory: int  # on the device and host tiers
    stored: int  # in the checkpoint
    staging: dict[str, StagingBytes]  # of its part of a staging buffer, by the tensor's tier
    sliced: StagingBytes  # of a slice of the head
    retyped: int  # (CUDA) of the stored tensor on the device while its type is changed


@dataclass(frozen=True, eq=False)
class ModelData:
    """A model as plan and cost count it; equal to itself alone.

    Attributes:
        layers: the tensors of embedding, decoder layers and head (`tensors` of the family).
        dtype: name of the computation's type.
        ways: the forms in which the tensors may be kept, as from `formats.forms.forms`.
        forms: those that are counted, by name.
        cuda: whether the compute device is a GPU.
        dummy: random weights, which are first written to disk.
        copy_bytes: bytes of a converted copy of the checkpoint in the cache folder.
        compress_cache: as for `LLM`.
    """

    spec: ModelSpec
    layers: list[Layer]
    dtype: str
    ways: list[dict[str, Form]]
    forms: dict[str, Form]
    cuda: bool
    dummy: bool = False
    copy_bytes: int = 0
    compress_cache: str | None = None

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        dtype: str,
        stored: str,
        cuda: bool,
        dummy: bool = False,
        formats: dict[str, Format] | None = None,
        operands: dict[str, str] | None = None,
        decodes: bool = True,
        **others,
    ) -> ModelData:
        """A model as it is stored, with the layers of its family. `stored`: name of the checkpoint's type, for matrices
        that are not in `formats`; `operands`, `decodes`: as for `formats.forms.forms`; `others`: attributes with
        defaults."""
        layers = family(spec.model_type).tensors(spec)
        vector = Dense(getattr(torch, dtype))  # never streamed
        matrix = Dense(getattr(torch, stored))
        found: dict[str, Format] = {}
        for layer in layers:
            found |= {name: vector if len(shape) == 1 else matrix for name, shape in layer.shapes.items()}
        found |= formats or {}
        ways = forms(found, vector.dtype, operands, layers[0].shapes, layers[-1].streamed_shapes, decodes)
        return cls(spec, layers, dtype, ways, ways[-1], cuda, dummy, **others)

    def decoded(self) -> list[ModelData]:
        """The model in the other ways: quantised matrices are decoded when they are loaded, the fastest first."""
        return [replace(self, layers=_with_copies(self.layers, way), forms=way) for way in self.ways[:-1]]

    def shapes(self, rule: CacheRule, workload: Workload) -> Shapes:
        """The model with the cache of a job."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return Shapes(**values, rule=rule, workload=workload)

    @property
    def kv_format(self) -> KVFormat:
        """The format of K and V in the cache."""
        return self.kv_format_of(self.spec.head_dim)

    def kv_format_of(self, head_dim: int) -> KVFormat:
        """The format of K and V of heads of this size."""
        return cache_format(self.compress_cache, self.torch_dtype, head_dim)

    @property
    def device(self) -> str:
        """The compute device, as torch names its type."""
        return "cuda" if self.cuda else "cpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the computation."""
        return self.torch_dtype.itemsize

    @cached_property
    def units(self) -> list[Unit]:
        """The tensors of each unit."""
        return units_of(self.layers)

    @cached_property
    def streamed(self) -> list[dict[str, tuple[int, ...]]]:
        """{name: shape} per layer of what is needed whole (of the embedding only rows are gathered)."""
        return [layer.streamed_shapes for layer in self.layers]

    @cached_property
    def experts(self) -> dict[str, int]:
        """How many experts are below each other in a tensor, by the names of those that have some."""
        return {name: len(unit.experts) for unit in self.units if unit.experts for name in unit.shapes}

    def multiplied(self, layer: int) -> dict[str, tuple[int, ...]]:
        """{name: shape} of the matrices and vectors of a layer, of experts the shape of each."""
        found = self.streamed[layer].items()
        return {name: (shape[0] // self.experts.get(name, 1), *shape[1:]) for name, shape in found}

    @cached_property
    def tensor_bytes(self) -> dict[str, TensorBytes]:
        """The bytes of every tensor, by name."""
        found = {}
        for name, shape in shapes_of(self.layers).items():
            form = self.forms[name]
            stored = form.stored.nbytes(shape)
            retyped = stored if form.stored.is_dense and form.stored != form.kept else 0
            staging = {tier: staging_bytes(tier, form, shape, self.cuda, self.experts.get(name, 0)) for tier in TIERS}
            sliced = slice_bytes(form, shape) if name == self.head else StagingBytes()
            found[name] = TensorBytes(form.kept.nbytes(shape), stored, staging, sliced, retyped)
        return found

    @cached_property
    def head(self) -> str:
        """The largest matrix of the head."""
        return max(self.streamed[HEAD], key=lambda name: prod(self.streamed[HEAD][name]))

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor on the device and host tiers."""
        return self.tensor_bytes[name].memory

    def stored_bytes(self, name: str) -> int:
        """Bytes of a tensor in the checkpoint."""
        return self.tensor_bytes[name].stored

    @property
    def is_quantised(self) -> bool:
        """Whether some matrices are quantised in the checkpoint."""
        return not all(form.stored.is_dense for form in self.forms.values())

    @cached_property
    def converts_by_compute(self) -> bool:
        """Whether floats from disk stay in the checkpoint's type on the device until compute converts their layer."""
        dense = {form.stored for form in self.forms.values() if form.stored.is_dense}
        return dense != {Dense(self.torch_dtype)} and not self.cuda

    @property
    def may_widen(self) -> bool:
        """Whether matmuls may go through fp32, as on CPUs without fast 16-bit ones (`kernels.linear`)."""
        return not self.cuda and self.itemsize == 2

    @cached_property
    def stored_ratio(self) -> float:
        """Bytes in the checkpoint per byte in memory, of tensors that can stream."""
        names = [name for layer in self.streamed for name in layer]
        return sum(map(self.stored_bytes, names)) / sum(map(self.nbytes, names))


@dataclass(frozen=True, eq=False, kw_only=True)
class Shapes(ModelData):
    """A model and the cache of a job."""

    rule: CacheRule
    workload: Workload

    def layouts(self, batches: list[int]) -> dict[tuple[int, int], KVLayout]:
        """The KV block of every (layer, batch), for batches of these sizes."""
        blocks = [(size, self.workload.longest) for size in batches]
        return self.rule.layouts(self.spec, self.kv_format_of, blocks, self.workload.gen_len)

    @cached_property
    def kinds(self) -> list[tuple[int, Shapes]]:
        """(number of layers, their sizes and rule) of each kind of layers; the slots of a kind are those of its average
        layer."""
        if not (self.spec.kinds or self.rule.attention):
            return [(self.spec.layers, self)]
        rule = self.rule.average()
        counts = Counter((self.spec.at(layer), rule.in_layer(layer)) for layer in range(self.spec.layers))
        return [(count, replace(self, spec=spec, rule=rule)) for (spec, rule), count in counts.items()]

    def mean(self, value: Callable[[Shapes], T]) -> T:
        """A number, or Traffic, of the average layer, given that of a layer of each kind."""
        return reduce(add, (layers / self.spec.layers * value(kind) for layers, kind in self.kinds))

    def most(self, value: Callable[[Shapes], int]) -> int:
        """The largest value of any kind of layers."""
        return max(value(kind) for _, kind in self.kinds)

    @cached_property
    def kv(self) -> KVLayout:
        """The cache of one sequence in a layer, if all are alike."""
        return self.rule.layout(self.spec, self.kv_format, 1, self.workload.longest, self.workload.gen_len)

    @cached_property
    def most_slots(self) -> int:
        """The most slots of a sequence in any layer."""
        return max(layout.slots for layout in self.layouts([1]).values())

    @cached_property
    def largest_cache(self) -> int:
        """Bytes of K and V of a sequence in the layer with the largest cache."""
        return max(layout.kv_bytes for layout in self.layouts([1]).values())

    @property
    def kv_bytes(self) -> int:
        """Bytes of a sequence's cache in all layers."""
        return sum(layout.kv_bytes + layout.meta_bytes for layout in self.layouts([1]).values())


def _with_copies(layers: list[Layer], way: dict[str, Form]) -> list[Layer]:
    """The layers of a model with these forms: its head may be a copy."""
    head = {}
    for short, (name, shape) in layers[-1].streamed.items():
        head[short] = (name + COPY if name + COPY in way else name, shape)
    return [*layers[:-1], replace(layers[-1], streamed=head)]


def sizes(model: ModelData, stored: str) -> dict:
    """A model's sizes as plain data. `stored`: name of the type of most of its weights."""
    spec = model.spec
    shapes = shapes_of(model.layers)
    names = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "positions")
    return {
        "family": spec.model_type,
        "parameters": sum(map(prod, shapes.values())),
        **{name: getattr(spec, name) for name in names},
        "stored_dtype": stored,
        "weight_bytes": sum(map(model.stored_bytes, shapes)),
    }


def kv_bytes(
    model: ModelData, workload: Workload, rule: CacheRule, compress_cache: str | None = None
) -> dict[str, int]:
    """Bytes of a sequence's cache in all layers at its end: the full cache in floats, and the job's."""
    full_rule = rule_for(None, workload.longest, workload.gen_len, model.spec)
    full = replace(model, compress_cache=None).shapes(full_rule, workload)
    job = replace(model, compress_cache=compress_cache).shapes(rule, workload)
    return {"full": full.kv_bytes, "job": job.kv_bytes}
