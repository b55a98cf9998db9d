"""How large a KV budget the machine can afford for free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import TypeVar

from tqdm import tqdm

from h2o_flexgen.errors import PlanError, UserError
from h2o_flexgen.policy import KVBudget

T = TypeVar("T")
#: the floor of an automatic budget: heavy hitters, and as many recent tokens, as a fraction of the longest prompt
MIN_HH_RATIO = 0.1
#: throughput that a larger budget may cost and still count as free
FREE = 0.03
_RATIOS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0)
#: budgets that are tried between the largest free one and the next
_BETWEEN = 2
#: two budgets whose slots differ by no more than this factor need none between them
_NEAR = 1.2


@dataclass(frozen=True)
class BudgetPoint:
    """A KV budget, the block that fits with it, and its predicted throughput.

    Attributes:
        ratio: heavy hitters over the longest prompt; None for the full cache.
        slots: heavy and recent slots together, or those of the full cache, per sequence, layer and KV head.
    """

    ratio: float | None
    slots: int
    gpu_batch_size: int
    num_gpu_batches: int
    tokens_per_s: float


def budget_choices(floor: float, longest: int, total: int) -> list[tuple[float | None, KVBudget | None]]:
    """Budgets from the floor to the full cache, smallest first: [(ratio, budget)].

    Args:
        longest, total: tokens of the longest prompt, and with its output.

    Raises:
        UserError: a floor outside (0, 0.5].
    """
    check_floor(floor)
    ratios = sorted({floor, *(r for r in _RATIOS if r > floor)})
    while 2 * int(1.5 * ratios[-1] * longest) < total:  # an output may be longer than its prompt
        ratios.append(1.5 * ratios[-1])
    budgets = [(r, KVBudget.from_ratio(r) if r <= 1 else KVBudget.from_size(int(r * longest))) for r in ratios]
    return [*((r, b) for r, b in budgets if r == floor or sum(b.slots(longest)) < total), (None, None)]


def check_floor(floor: float) -> None:
    """Raises UserError for a floor outside (0, 0.5]: above that half, heavy and recent tokens are the whole prompt."""
    if not 0 < floor <= 0.5:
        raise UserError(f"`min_hh_ratio` must lie in (0, 0.5], not {floor:g}")


def size_budget(
    floor: float,
    longest: int,
    total: int,
    find: Callable[[float | None, KVBudget | None], tuple[BudgetPoint, T]],
    progress: bool,
) -> tuple[KVBudget | None, T, list[BudgetPoint]]:
    """Search with every budget, and with a few between the largest that is free and the next.

    Args:
        longest, total: tokens of the longest prompt, and with its output.
        find: (ratio, budget) -> the point of the curve, and the choice that belongs to it.

    Returns:
        The largest budget that costs nothing, its choice, and the curve, the fewest slots first.

    Raises:
        PlanError: nothing fits, not even with the smallest budget.
    """
    found = {}
    choices = budget_choices(floor, longest, total)
    bar = tqdm(total=len(choices) + _BETWEEN, desc="sizing the KV budget", leave=False, disable=not progress)

    def attempt(ratio: float | None, budget: KVBudget | None) -> PlanError | None:
        bar.update()
        try:
            point, choice = find(ratio, budget)
        except PlanError as e:
            return e
        found[point] = (budget, choice)
        return None

    with bar:
        errors = [attempt(ratio, budget) for ratio, budget in choices]
        if not found:
            raise errors[0]
        curve = sorted(found, key=lambda p: p.slots)
        for _ in range(_BETWEEN):
            free = largest_free(curve)
            larger = [p for p in curve if p.slots > _NEAR * free.slots]
            if not larger:
                break
            heavy = isqrt(free.slots * larger[0].slots) // 2
            if attempt(round(heavy / longest, 3), KVBudget.from_size(heavy)) is not None:
                break
            curve = sorted(found, key=lambda p: p.slots)
    return *found[largest_free(curve)], curve


def largest_free(curve: list[BudgetPoint]) -> BudgetPoint:
    """The largest budget whose throughput is within 3 % of the smallest one's: quality that costs nothing."""
    least = (1 - FREE) * curve[0].tokens_per_s
    return [point for point in curve if point.tokens_per_s >= least][-1]
