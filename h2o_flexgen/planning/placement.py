"""The tier of every tensor and KV block, from sizes alone.

They are not split: a percentage is met by spreading them, with what one layer could not meet carried over to the next
(error diffusion), so that every layer costs the same I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from h2o_flexgen.policy import TIERS, Policy


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
        batches: int,
        nbytes: Callable[[str], int] | None = None,
    ) -> Placement:
        """`layers`: {name: shape} of everything each layer needs, embedding first, head last; `nbytes`: of a tensor in
        memory, or anything in proportion to that; by default its elements."""
        matrices = [
            {n: prod(s) if nbytes is None else nbytes(n) for n, s in layer.items() if len(s) > 1} for layer in layers
        ]
        weights = {n: "gpu" for layer in layers for n, s in layer.items() if len(s) == 1}
        weights |= place_weights(matrices, policy.fractions("weights"))
        blocks = [(layer, k) for layer in range(len(layers) - 2) for k in range(batches)]
        cache = spread(len(blocks), policy.fractions("cache"))
        return cls(weights, dict(zip(blocks, cache)), list(spread(batches, policy.fractions("activations"))))


class Diffusion:
    """Assigns sizes to tiers so that after every call the bytes placed are near the fractions."""

    def __init__(self, fractions: tuple[float, float, float]):
        self.fractions = fractions
        self.placed = [0.0, 0.0, 0.0]

    def place(self, sizes: list[float]) -> list[str]:
        """Tiers for the tensors of one layer: the largest first, each to the tier that most is due to."""
        total = sum(self.placed) + sum(sizes)
        due = [f * total - p for f, p in zip(self.fractions, self.placed)]
        used = [tier for tier, f in enumerate(self.fractions) if f > 0]
        found, unit = [""] * len(sizes), max(sizes, default=0) or 1  # rounding keeps equal layers equal
        for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
            tier = max(used, key=lambda tier: round(due[tier] / unit, 6))
            due[tier] -= sizes[n]
            self.placed[tier] += sizes[n]
            found[n] = TIERS[tier]
        return found


@lru_cache(maxsize=1024)
def spread(count: int, fractions: tuple[float, float, float]) -> tuple[str, ...]:
    """Tiers of `count` things of equal size, in order."""
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
    edge = Diffusion(fractions)
    for name, size in sorted(ends.items(), key=lambda item: (item[0] not in layers[-1], -item[1])):
        holding = [t for t, f in enumerate(fractions) if size <= f * total - edge.placed[t]]
        if name in layers[-1] and holding:
            edge.placed[holding[0]] += size
            tiers[name] = TIERS[holding[0]]
        else:
            tiers[name] = edge.place([size])[0]
    left = [max(0.0, f * total - p) for f, p in zip(fractions, edge.placed)]
    diffusion = Diffusion(tuple(x / sum(left) for x in left) if any(left) else fractions)
    for layer in layers[1:-1]:
        tiers.update(zip(layer, diffusion.place(list(layer.values()))))
    return tiers
