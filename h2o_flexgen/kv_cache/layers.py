"""Different numbers of slots in different layers: the same total, but more where few slots hurt most."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isfinite

import numpy as np

from h2o_flexgen.errors import UserError
from h2o_flexgen.utils.files import read_json


@dataclass(frozen=True)
class LayerLosses:
    """The loss of each layer of a model at several budgets, as measured by `h2o-flexgen calibrate`."""

    budgets: tuple[float, ...]  # slots as fractions of a text, ascending
    losses: tuple[tuple[float, ...], ...]  # of each layer, with each budget
    model: str | None = None  # what was measured, if known
    rule: str | None = None

    @classmethod
    def from_file(cls, path: str) -> LayerLosses:
        """Raises UserError for a file that cannot be read or holds something else."""
        data = read_json("`kv_rule`", path)
        try:
            budgets = tuple(float(x) for x in data["budgets"])
            losses = tuple(tuple(map(float, each)) for each in data["losses"])
            rising = all(a < b for a, b in pairwise((0.0, *budgets)))
            if not (len(budgets) > 1 and rising and losses and all(len(each) == len(budgets) for each in losses)):
                raise ValueError
            if not all(isfinite(x) for each in (budgets, *losses) for x in each):
                raise ValueError
            return cls(budgets, losses, data.get("model"), data.get("rule"))
        except (KeyError, TypeError, ValueError):
            made = "h2o-flexgen calibrate --output FILE makes one"
            raise UserError(f"`kv_rule`: {path} contains no losses of layers: {made}") from None

    def slots(self, heavy: int, recent: int, length: int) -> tuple[tuple[int, int], ...]:
        """(heavy, recent) of each layer that minimise the sum of the losses; their means and their ratio are as given.
        `length`: tokens of the longest text. Raises UserError if the budget is outside the measured range."""
        mean = heavy + recent
        if not self.budgets[0] <= mean / length <= self.budgets[-1]:
            known = f"{self.budgets[0]:.1%} to {self.budgets[-1]:.1%}"
            raise UserError(
                f"`kv_rule`: `layers` was measured for budgets of {known} of a text, not for {mean} slots of {length}: "
                "leave it out, or choose a budget in that range"
            )
        least = max(1.0, self.budgets[0] * length)
        sizes = [least, *(x * length for x in self.budgets if x * length > least)]
        known = [x * length for x in self.budgets]
        steps = []  # (slope, layer, slots)
        for layer, losses in enumerate(self.losses):
            corners = _convex(list(zip(sizes, np.interp(sizes, known, losses))))
            steps += [(_slope(a, b), layer, b[0] - a[0]) for a, b in pairwise(corners)]
        steps.sort()
        slots = [least] * len(self.losses)
        left = (mean - least) * len(self.losses)
        for _, layer, width in steps:  # greedy is optimal: the first steps of a convex curve are the steepest
            taken = min(width, left)
            slots[layer] += taken
            left -= taken
        ends = [int(end + 0.5) for end in accumulate(slots, initial=0)]  # rounded without changing the sum
        whole = [b - a for a, b in pairwise(ends)]
        recents = [round(n * recent / mean) for n in whole]
        return tuple((n - r, r) for n, r in zip(whole, recents))


def _convex(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of the lower convex hull of the points, taken as a falling curve."""
    corners = []
    least = points[0][1]
    for x, y in points:
        least = min(least, y)
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) >= _slope(corners[-1], (x, least)):
            corners.pop()
        corners.append((x, least))
    return corners


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
