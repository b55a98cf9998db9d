"""The tier of every tensor and KV block, from sizes alone.

They are not split: a percentage is met by spreading them, with what one layer could not meet carried over to the next
(error diffusion), so that every layer costs the same I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np

from h2o_flexgen.policy import TIERS, Policy

#: a layer with more tensors than this is placed one by one instead of by trying every assignment
_MOST_TRIED = 7


@dataclass
class Placement:
    """The tier of everything under a policy.

    Attributes:
        weights: tier by tensor name; vectors (biases, norms: 0.03 % of the bytes) stay on the compute device.
        cache: tier by (decoder layer, batch).
        activations: tier by batch.
    """

    weights: dict[str, str]
    cache: dict[tuple[int, int], str]
    activations: list[str]

    @classmethod
    def of(
        cls,
        policy: Policy,
        layers: list[dict[str, tuple[int, ...]]],
        num_decoder: int,
        batches: int,
        weights: dict[str, str] | None = None,
    ) -> Placement:
        """`layers`: {name: shape} of everything each layer needs, embedding first, head last. `weights`: their tiers,
        if they are known from another policy with the same percentages."""
        if weights is None:
            matrices = [{n: prod(s) for n, s in layer.items() if len(s) > 1} for layer in layers]
            weights = {n: "gpu" for layer in layers for n, s in layer.items() if len(s) == 1}
            weights |= place_weights(matrices, policy.fractions("weights"))
        keys = [(layer, k) for layer in range(num_decoder) for k in range(batches)]
        cache = spread(keys, policy.fractions("cache"))
        activations = spread(range(batches), policy.fractions("activations"))
        return cls(weights, cache, [activations[k] for k in range(batches)])


class Diffusion:
    """Assigns sizes to tiers so that after every call the bytes placed are near the fractions."""

    def __init__(self, fractions: tuple[float, float, float]):
        self.fractions = fractions
        self.placed = [0.0, 0.0, 0.0]

    def place(self, sizes: list[float]) -> list[str]:
        """Tiers for the tensors of one layer, chosen together."""
        if len(sizes) > _MOST_TRIED:
            return [tier for size in sizes for tier in self.place([size])]
        total = sum(self.placed) + sum(sizes)
        due = tuple(f * total - p for f, p in zip(self.fractions, self.placed))
        unit = max(sizes, default=0) or 1  # rounding keeps equal layers equal
        best = _nearest(tuple(s / unit for s in sizes), tuple(round(d / unit, 6) for d in due))
        for size, tier in zip(sizes, best):
            self.placed[tier] += size
        return [TIERS[tier] for tier in best]


@lru_cache(maxsize=4096)
def _nearest(sizes: tuple[float, ...], due: tuple[float, ...]) -> tuple[int, ...]:
    """The tier of each size so that the sums are nearest to `due`."""
    assignments, got = _assignments(sizes)
    return assignments[int(((got - due) ** 2).sum(1).argmin())]


@lru_cache(maxsize=64)
def _assignments(sizes: tuple[float, ...]) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Ways to put sizes on tiers, and the sums (n, 3); one way of those with equal sums."""
    ways = {}
    for assignment in product(range(3), repeat=len(sizes)):
        got = [0.0, 0.0, 0.0]
        for size, tier in zip(sizes, assignment):
            got[tier] += size
        ways.setdefault(tuple(got), assignment)
    return list(ways.values()), np.array(list(ways)).reshape(-1, 3)


def spread(keys: Iterable, fractions: tuple[float, float, float]) -> dict:
    """{key: tier} of things of equal size, in order."""
    keys = list(keys)
    return dict(zip(keys, _pattern(len(keys), fractions)))


@lru_cache(maxsize=1024)
def _pattern(count: int, fractions: tuple[float, float, float]) -> tuple[str, ...]:
    if 1 in fractions:
        return (TIERS[fractions.index(1)],) * count
    diffusion = Diffusion(fractions)
    return tuple(diffusion.place([1])[0] for _ in range(count))


def place_weights(layers: list[dict[str, int]], fractions: tuple[float, float, float]) -> dict[str, str]:
    """{name: tier} of a model's weights.

    Args:
        layers: {name: bytes} of the matrices of each layer; the first and the last are embedding and head
            (a tied matrix, which stands in both, is placed once).
        fractions: gpu, cpu, disk, summing to 1.

    The head goes to the fastest tier whose share holds it whole: in small models it is larger than any layer, and
    staging buffers are as large as the largest layer that streams. The embedding, of which only rows are needed, takes
    the nearest tier. The layers between them make up for the rest, all alike.
    """
    tiers: dict[str, str] = {}
    ends = {**layers[0], **layers[-1]}
    total = sum(ends.values()) + sum(sum(layer.values()) for layer in layers[1:-1])
    if not total:
        return tiers
    edge = Diffusion(fractions)
    for name, size in sorted(ends.items(), key=lambda item: (item[0] not in layers[-1], -item[1])):
        holding = [t for t, f in enumerate(fractions) if size <= f * total - edge.placed[t]]
        if name in layers[-1] and holding:
            edge.placed[holding[0]] += size
            tiers[name] = TIERS[holding[0]]
        else:
            tiers[name] = edge.place([size])[0]
    inner = total - sum(ends.values())
    if inner:
        left = [max(0.0, f * total - p) for f, p in zip(fractions, edge.placed)]
        left = [0.0 if f == 0 else x for f, x in zip(fractions, left)]
        diffusion = Diffusion(tuple(x / sum(left) for x in left) if sum(left) else fractions)
        for layer in layers[1:-1]:
            tiers.update(zip(layer, diffusion.place(list(layer.values()))))
    return tiers
