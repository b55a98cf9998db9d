"""Different numbers of slots in different KV heads: the same total, but more where few slots hurt most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from math import inf, isfinite

import numpy as np

from h2o_flexgen.errors import UserError
from h2o_flexgen.utils.files import read_json

#: how many different numbers of slots the heads of a layer may have
SIZES = 3
#: halvings of the range of prices of a slot
HALVINGS = 50
#: slots of each KV head, by layer; a single number stands for all heads of a layer
ByHead = tuple[tuple[int, ...], ...]
#: a loss with each budget
Curve = tuple[float, ...]


@dataclass(frozen=True)
class HeadLosses:
    """The loss of each KV head of a model at several budgets, as `profiling.calibration` measures it."""

    budgets: tuple[float, ...]  # slots as fractions of a text, ascending
    losses: tuple[tuple[Curve, ...], ...]  # of each head, by layer; a single one stands for all heads of a layer
    model: str | None = None  # what was measured, if known
    rule: str | None = None
    text_len: int | None = None  # tokens of a text

    @classmethod
    def from_file(cls, path: str) -> HeadLosses:
        """Raises UserError for a file that cannot be read or holds something else."""
        data = read_json("`kv_rule`", path)
        try:
            return cls.from_dict(data)
        except (KeyError, TypeError, ValueError):
            made = "h2o-flexgen calibrate --output FILE makes one"
            raise UserError(f"`kv_rule`: {path} contains no losses of layers: {made}") from None

    @classmethod
    def from_dict(cls, data: dict) -> HeadLosses:
        """Raises KeyError, TypeError or ValueError for other data."""
        budgets = _curve(data["budgets"])
        # files of earlier versions have one curve a layer
        layers = [layer if isinstance(layer[0], list) else [layer] for layer in data["losses"] if layer]
        if len(layers) < len(data["losses"]):
            raise ValueError
        losses = tuple(tuple(map(_curve, layer)) for layer in layers)
        rising = all(a < b for a, b in pairwise((0.0, *budgets)))
        curves = [curve for layer in losses for curve in layer]
        if not (len(budgets) > 1 and rising and curves and all(len(curve) == len(budgets) for curve in curves)):
            raise ValueError
        text_len = data.get("text_len", data.get("window"))  # what earlier versions called it
        if text_len is not None and (type(text_len) is not int or text_len < 1):
            raise ValueError
        return cls(budgets, losses, data.get("model"), data.get("rule"), text_len)

    def measures(self, mean: int, length: int) -> bool:
        """Whether `mean` slots are in the measured range for texts of `length` tokens."""
        return self.budgets[0] <= mean / length <= self.budgets[-1]

    def slots(self, mean: int, length: int, windows: Sequence[int | None]) -> ByHead:
        """The slots that minimise the sum of the losses, at most as many in all as if each head had `mean`, or what its
        window holds.

        A head has one of the measured budgets, and those of a layer have at most SIZES different ones, so that they
        form few groups. If even the smallest budget is too large, all heads have the same.

        Args:
            length: tokens of the longest text.
            windows: the sliding window of each layer, or None: in which no more slots than its tokens are of use.

        Raises:
            UserError: the budget is outside the measured range, or another number of layers was measured.
        """
        if len(windows) != len(self.losses):
            raise UserError(f"`kv_rule`: `layers` is of a model of {len(self.losses)} layers, not {len(windows)}")
        if not self.measures(mean, length):
            known = f"{self.budgets[0]:.1%} to {self.budgets[-1]:.1%}"
            raise UserError(
                f"`kv_rule`: `layers` was measured for budgets of {known} of a text, not for {mean} slots of {length}: "
                "choose a budget in that range, or `layers=none`"
            )
        layers = [
            _Layer(np.minimum.accumulate(curves, axis=1), np.array(self._sizes(length, window)))
            for curves, window in zip(self.losses, windows, strict=True)
        ]
        shares = [[min(mean, _most(window))] * len(layer) for layer, window in zip(self.losses, windows)]
        found = _allocated(layers, sum(map(sum, shares)))
        return tuple(map(tuple, found or shares))

    def _sizes(self, length: int, window: int | None) -> list[int]:
        """The budgets in slots for texts of `length` tokens: as large a part of what a query sees as when measured."""
        if window is None:
            return [max(1, int(part * length)) for part in self.budgets]
        measured = self.text_len or length
        seen = min(length, window) / min(measured, window)
        return [min(max(1, int(part * measured * seen)), _most(window)) for part in self.budgets]


def _most(window: int | None) -> float:
    """The most slots of use in a layer with this window."""
    return inf if window is None else max(1, window - 1)  # beside a new token


@dataclass(frozen=True)
class _Layer:
    """The KV heads of a layer."""

    losses: np.ndarray  # (heads, budgets), falling
    sizes: np.ndarray  # (budgets,) in slots, rising

    @cached_property
    def _choices(self) -> np.ndarray:
        """(choices, SIZES): all budgets that the heads may have."""
        budgets = range(len(self.sizes))
        return np.array(list(combinations(budgets, min(SIZES, len(self.sizes)))))

    def cheapest(self, price: float) -> np.ndarray:
        """The budget of each head for which the losses, and the price for each slot, add up to the least."""
        costs = (self.losses + price * self.sizes)[:, self._choices]
        choice = costs.min(2).sum(0).argmin()
        return self._choices[choice][costs[:, choice].argmin(1)]

    def upgrades(self, budgets: np.ndarray, left: int) -> Iterator[tuple[float, int, int]]:
        """(gain of each slot, head, budget) of what a head could have instead, for at most `left` more slots."""
        for head, now in enumerate(budgets):
            for budget in range(now + 1, len(self.sizes)):
                width = self.sizes[budget] - self.sizes[now]
                if 0 < width <= left and self.losses[head, budget] < self.losses[head, now]:
                    yield (self.losses[head, now] - self.losses[head, budget]) / width, head, budget

    def upgrade(self, budgets: np.ndarray, head: int, budget: int, left: int) -> int:
        """Give a head another budget, if the layer may have it; returns how many more slots that takes."""
        width = int(self.sizes[budget] - self.sizes[budgets[head]])
        others = {*budgets[:head], *budgets[head + 1 :]}
        if not 0 < width <= left or len(others | {budget}) > SIZES:
            return 0
        budgets[head] = budget
        return width


def _allocated(layers: list[_Layer], most: int) -> list[list[int]] | None:
    """The slots of each head, at most `most` in all; None if even the smallest budgets take more.

    Every slot has the same price, at which each layer takes what is cheapest for it: no other slots lose less that are
    as many in all (Everett 1963, generalized Lagrange multipliers). The price is halved towards the one at which `most`
    are taken. Then what is left goes where it gains most.
    """
    at = lambda price: [layer.cheapest(price) for layer in layers]
    slots = lambda budgets: sum(int(layer.sizes[own].sum()) for layer, own in zip(layers, budgets))
    high = 1.0 + max((layer.losses[:, 0] - layer.losses[:, -1]).max() for layer in layers)  # no slot is worth that
    if slots(at(high)) > most:
        return None
    low = high * 2.0**-HALVINGS
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if slots(at(middle)) > most else (low, middle)
    budgets = at(high)
    left = most - slots(budgets)
    taken = True
    while taken:
        steps = [(*step, n) for n, layer in enumerate(layers) for step in layer.upgrades(budgets[n], left)]
        taken = 0
        for _, head, budget, n in sorted(steps, reverse=True):
            taken += layers[n].upgrade(budgets[n], head, budget, left - taken)
        left -= taken
    return [layer.sizes[own].tolist() for layer, own in zip(layers, budgets)]


def _curve(values: list[float]) -> Curve:
    curve = tuple(map(float, values))
    if not all(map(isfinite, curve)):
        raise ValueError
    return curve
