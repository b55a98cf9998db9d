"""Different numbers of slots in different KV heads: the same total, but more where few slots hurt most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice, pairwise
from math import inf, isfinite

from h2o_flexgen.errors import UserError
from h2o_flexgen.utils.files import read_json

#: how many different numbers of slots the heads of a model may have
SIZES = 3
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

        A head has one of at most SIZES measured budgets, so that the heads of a layer form few groups. If even the
        smallest of these is too large, all heads have the same.

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
        heads: list[_Head] = []
        for layer, window in zip(self.losses, windows, strict=True):
            sizes = self._sizes(length, window)
            heads += [_Head(curve, sizes, min(mean, _most(window))) for curve in layer]
        choices = chain.from_iterable(combinations(range(len(self.budgets)), count) for count in range(1, SIZES + 1))
        allocations = [each for choice in choices if (each := _allocated(choice, heads))]
        alike = _Allocation(inf, [head.share for head in heads])
        best = min([*allocations, alike], key=lambda each: (each.loss, -sum(each.slots)))
        chosen = iter(best.slots)
        return tuple(tuple(islice(chosen, len(layer))) for layer in self.losses)

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
class _Head:
    curve: Curve
    sizes: list[int]  # its slots with each budget
    share: int  # its slots if all heads got the same

    def has_all(self, choice: tuple[int, ...]) -> bool:
        """Whether these budgets are different numbers of slots."""
        return len({self.sizes[n] for n in choice}) == len(choice)


def _allocated(choice: tuple[int, ...], heads: list[_Head]) -> _Allocation | None:
    """The slots of all heads, each with one of the budgets that are the `choice`; None if even the smallest take too
    many, or two are the same."""
    least = choice[0]
    slots = [head.sizes[least] for head in heads]
    left = sum(head.share for head in heads) - sum(slots)
    if left < 0 or not any(head.has_all(choice) for head in heads):
        return None
    steps = []
    for number, head in enumerate(heads):
        corners = _convex([(head.sizes[n], head.curve[n]) for n in choice])
        steps += [_Step(_slope(a, b), number, b[0], b[0] - a[0], a[1] - b[1]) for a, b in pairwise(corners)]
    loss = sum(head.curve[least] for head in heads)
    for step in sorted(steps):  # greedy: the first steps of a convex curve are the steepest
        if step.width > left:
            break
        slots[step.head] = step.size
        left -= step.width
        loss -= step.gain
    return _Allocation(loss, slots)


@dataclass(frozen=True)
class _Allocation:
    loss: float
    slots: list[int]


@dataclass(frozen=True, order=True)
class _Step:
    """More slots for a head: up to `size`, which are `width` more."""

    slope: float
    head: int
    size: int
    width: int
    gain: float


def _curve(values: list[float]) -> Curve:
    curve = tuple(map(float, values))
    if not all(map(isfinite, curve)):
        raise ValueError
    return curve


def _convex(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of the lower convex hull of the points, taken as a falling curve."""
    corners = []
    least = points[0][1]
    for x, y in points:
        if corners and x == corners[-1][0]:  # both are all that a window holds
            continue
        least = min(least, y)
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) >= _slope(corners[-1], (x, least)):
            corners.pop()
        corners.append((x, least))
    return corners


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
