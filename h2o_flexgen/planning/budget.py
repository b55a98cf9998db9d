"""How large a KV budget the machine can afford for free."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from h2o_flexgen.errors import PlanError, UserError
from h2o_flexgen.policy import KVBudget
from h2o_flexgen.utils.progress import bar

T = TypeVar("T")
#: of a cache and of weights, by what they lose
FORMATS = (None, "int8", "int4")
#: the floor of an automatic budget: heavy hitters, and as many recent tokens, as a fraction of the longest prompt
MIN_HH_RATIO = 0.1
#: each budget that is tried has this many times the slots of the one before
GROWTH = 1.25
#: throughput that a larger budget may cost and still count as free
FREE = 0.03


@dataclass(frozen=True)
class BudgetPoint:
    """A KV budget, the block that fits with it, and its predicted throughput.

    Attributes:
        ratio: heavy hitters over the longest prompt; None for the full cache.
        slots: heavy and recent slots together, or those of the full cache, per sequence, layer and KV head.
        compress_cache: the format of the cache: int8, int4, or None for floats.
        compress_weight: that of the weights; None: as the checkpoint has them.
        loss: the measured rise of the perplexity, as a fraction; None if it is not known.
        allowed: the loss is within what the user accepts.
    """

    ratio: float | None
    slots: int
    gpu_batch_size: int
    num_gpu_batches: int
    tokens_per_s: float
    compress_cache: str | None = None
    compress_weight: str | None = None
    loss: float | None = None
    allowed: bool = True


def budget_choices(floor: float, longest: int, total: int) -> list[tuple[float | None, KVBudget | None]]:
    """Budgets from the floor to the full cache, smallest first: [(ratio, budget)].

    Args:
        longest, total: tokens of the longest prompt, and with its output.

    Raises:
        UserError: a floor outside (0, 0.5].
    """
    if not 0 < floor <= 0.5:  # above that half, heavy and recent tokens are the whole prompt
        raise UserError(f"`min_hh_ratio` must lie in (0, 0.5], not {floor:g}")
    choices = []
    ratio = floor
    while not choices or 2 * max(1, int(ratio * longest)) < total:  # an output may be longer than its prompt
        budget = KVBudget.from_ratio(ratio) if ratio <= 1 else KVBudget.from_size(int(ratio * longest))
        choices.append((ratio, budget))
        ratio = float(f"{GROWTH * ratio:.3g}")
    return [*choices, (None, None)]


def size_budget(
    choices: Sequence[tuple], find: Callable[..., tuple[BudgetPoint, T]], progress: bool
) -> tuple[T, list[BudgetPoint]]:
    """Search with every budget, or budget and formats.

    Args:
        choices: arguments of `find`, for each format the fewest slots first.
        find: gives the point of the curve, and the choice that belongs to it.

    Returns:
        The choice that is `largest_free`, and the curve.

    Raises:
        PlanError: nothing fits, not even with the smallest budget.
        UserError: nothing that fits is allowed.
    """
    found = {}
    errors = []
    for each in bar(choices, "sizing the KV cache", unit="choices", show=progress):
        try:
            point, choice = find(*each)
            found[point] = choice
        except PlanError as e:
            errors.append(e)
    if not found:
        raise errors[0]
    if not any(point.allowed for point in found):
        raise UserError(
            "nothing that fits into memory is known to lose at most `max_loss`: raise it, or measure larger budgets "
            "for `quality`"
        )
    curve = list(found)
    return found[largest_free(curve)], curve


def largest_free(curve: list[BudgetPoint]) -> BudgetPoint:
    """Of the points that are allowed, and whose throughput is within 3 % of the highest, that with the least loss:
    quality that costs nothing. Where losses are not known it is that with most slots, and then with most bits, for a
    model misses bits less than tokens; but weights of 4 bits come last, which may cost more than either."""
    allowed = [point for point in curve if point.allowed]
    least = (1 - FREE) * max(point.tokens_per_s for point in allowed)

    def quality(point: BudgetPoint) -> tuple:
        loss = math.inf if point.loss is None else point.loss
        bits = [-FORMATS.index(kind) for kind in (point.compress_cache, point.compress_weight)]
        return -loss, point.compress_weight != "int4", point.slots, *bits, point.ratio is None

    return max(reversed([point for point in allowed if point.tokens_per_s >= least]), key=quality)
