"""How often the neurons of the MLPs are active (appendix C.10 of the H2O paper)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from h2o_flexgen.models import parts

#: unless the activation function is ReLU, a neuron is active if its absolute activation exceeds this fraction of the
#: token's largest
THRESHOLD = 0.01


@contextmanager
def watched(report: Callable[[Tensor], None]) -> Iterator[None]:
    """Inside, every MLP reports its activations (B, T, inner), those of the gate if it has one. All families take their
    activation function from `parts.activation`, so that none has to know."""
    plain = parts.activation

    def activation(name: str) -> Callable[[Tensor], Tensor]:
        def apply(x: Tensor) -> Tensor:
            x = plain(name)(x)
            report(x)
            return x

        return apply

    parts.activation = activation
    try:
        yield
    finally:
        parts.activation = plain


def active(x: Tensor, is_relu: bool) -> Tensor:
    """(inner,) int64: the number of tokens of x (B, T, inner) for which each neuron is active: above 0 with a ReLU,
    else by THRESHOLD."""
    on = x > 0 if is_relu else x.abs() > THRESHOLD * x.abs().amax(-1, keepdim=True)
    return on.flatten(0, -2).sum(0)


def carried(frequency: Tensor, part: float) -> float:
    """The share of all activations that the most active `part` of the neurons (inner,) carries."""
    ranked = frequency.sort(descending=True).values
    return float(ranked[: max(1, int(part * len(ranked)))].sum() / ranked.sum())
