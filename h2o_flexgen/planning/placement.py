"""The tier of every tensor and KV block, from sizes alone, and the device of every layer.

Tensors and KV blocks are never split: a percentage is met by spreading them, with what one layer could not meet carried
over to the next (error diffusion), so that every layer costs the same I/O. Several devices have a span of layers each:

    embedding, layers 0 1 2 3 | layers 4 5 6 7, head
    device 0                  | device 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import numpy as np

from h2o_flexgen.policy import TIERS, Policy

T = TypeVar("T")

#: fractions of what is placed on each of TIERS, summing to 1
Fractions = tuple[float, float, float]


@dataclass
class Placement:
    """The tier of everything under a policy.

    Attributes:
        weights: tier by tensor name; vectors (biases, norms: 0.03 % of the bytes) stay on the device.
        cache: tier by (decoder layer, batch).
        activations: tier by batch.
        sliced: the head's matrix if it is on disk and its matmul reads it a slice at a time, else None.
        spans: the decoder layers of each device; the first also has the embedding, the last the head.
    """

    weights: dict[str, str]
    cache: dict[tuple[int, int], str]
    activations: list[str]
    sliced: str | None = None
    spans: list[range] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        policy: Policy,
        layers: list[dict[str, tuple[int, ...]]],
        batches: int,
        nbytes: Callable[[str], int],
    ) -> Placement:
        """The placement of a model, and of `batches` batches, on one device.

        Args:
            layers: {name: shape} of everything that each layer needs, embedding first, head last.
            nbytes: bytes in memory of a tensor.
        """
        weights = {name: "gpu" for layer in layers for name in layer}
        weights |= place_weights([_matrices(layer, nbytes) for layer in layers], policy.fractions("weights"))
        blocks = [(layer, batch) for layer in range(len(layers) - 2) for batch in range(batches)]
        cache = spread(len(blocks), policy.fractions("cache"))
        activations = list(spread(batches, policy.fractions("activations")))
        return cls(weights, dict(zip(blocks, cache)), activations, spans=[range(len(layers) - 2)])

    def cache_of(self, span: range) -> dict[tuple[int, int], str]:
        """Tier by (decoder layer, batch), on the device of a span."""
        if len(self.spans) == 1:
            return self.cache
        return {key: tier for key, tier in self.cache.items() if key[0] in span}


def of_span(span: range, layers: Sequence[T]) -> Sequence[T]:
    """Of a model's layers, embedding first and head last, those of the device with a span of decoder layers."""
    begin = span.start + 1 if span.start else 0
    end = span.stop + 1 if span.stop < len(layers) - 2 else len(layers)
    return layers[begin:end]


def divide(sizes: Sequence[float], rooms: Sequence[float]) -> list[range]:
    """The span of layers of each device, none of them empty, that fills the fullest one least.

    Args:
        sizes: bytes that each decoder layer takes of a device, with embedding and head in the first and the last.
        rooms: bytes that each device has.
    """
    ends = np.cumsum([0, *sizes])
    layers = np.triu(np.ones((len(ends), len(ends)), bool), 1)  # (begin, end): whether a span has any
    taken = ends - ends[:, None]
    least = max(1, *rooms) / 1000  # a plan that does not fit says so
    fullest = np.where(np.arange(len(ends)) == 0, 0.0, np.inf)  # if the devices so far have the layers before `begin`
    begins = []  # of each device, by its span's end
    for room in rooms:
        fill = np.where(layers, np.maximum(fullest[:, None], taken / max(least, room)), np.inf)
        begins.append(fill.argmin(0))
        fullest = fill.min(0)
    spans: list[range] = []
    end = len(sizes)
    for begin in reversed(begins):
        spans.append(range(int(begin[end]), end))
        end = spans[-1].start
    return spans[::-1]


class Diffusion:
    """Assigns sizes to tiers so that after every call the bytes placed are near the fractions."""

    def __init__(self, fractions: Fractions):
        self.fractions = fractions
        self.placed = [0.0, 0.0, 0.0]  # bytes on each of TIERS

    def lacking(self, total: float) -> list[float]:
        """Bytes that each of TIERS lacks if `total` bytes are placed."""
        return [fraction * total - placed for fraction, placed in zip(self.fractions, self.placed)]

    def place(self, sizes: list[float]) -> list[str]:
        """Tiers for the tensors of one layer: the largest tensor first, each to the tier that lacks most."""
        total = sum(self.placed) + sum(sizes)
        lacking = self.lacking(total)
        used = [tier for tier, fraction in enumerate(self.fractions) if fraction > 0]
        unit = max(sizes, default=0) or 1
        found = [""] * len(sizes)
        for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
            tier = max(used, key=lambda tier: round(lacking[tier] / unit, 6))  # rounding keeps equal layers equal
            lacking[tier] -= sizes[n]
            self.placed[tier] += sizes[n]
            found[n] = TIERS[tier]
        return found


def _matrices(layer: dict[str, tuple[int, ...]], nbytes: Callable[[str], int]) -> dict[str, int]:
    """{name: bytes} of a layer's matrices."""
    return {name: nbytes(name) for name, shape in layer.items() if len(shape) > 1}


@lru_cache(maxsize=1024)
def spread(count: int, fractions: Fractions) -> tuple[str, ...]:
    """Tiers of `count` things of equal size, in order."""
    diffusion = Diffusion(fractions)
    return tuple(diffusion.place([1])[0] for _ in range(count))


def place_weights(layers: list[dict[str, int]], fractions: Fractions) -> dict[str, str]:
    """{name: tier} of a model's weights.

    The head goes to the fastest tier whose share holds it whole: in small models it is larger than any layer, and
    staging buffers are as large as the largest layer that streams. The embedding, which is only read by rows, goes
    to the tier that lacks most. The layers between them make up for the rest, all alike.

    Args:
        layers: {name: bytes} of the matrices of each layer, embedding first, head last; a tied matrix, which is in
            both, is placed once.
    """
    tiers: dict[str, str] = {}
    *decoders, head = layers[1:]
    ends = {**layers[0], **head}
    total = sum(ends.values()) + sum(sum(layer.values()) for layer in decoders)
    edge = Diffusion(fractions)
    for name, size in sorted(ends.items(), key=lambda item: (item[0] not in head, -item[1])):
        holding = [tier for tier, room in enumerate(edge.lacking(total)) if size <= room]
        if name in head and holding:
            edge.placed[holding[0]] += size
            tiers[name] = TIERS[holding[0]]
        else:
            tiers[name] = edge.place([size])[0]
    left = [max(0.0, nbytes) for nbytes in edge.lacking(total)]
    diffusion = Diffusion(tuple(nbytes / sum(left) for nbytes in left) if any(left) else fractions)
    for layer in decoders:
        tiers.update(zip(layer, diffusion.place(list(layer.values()))))
    return tiers
