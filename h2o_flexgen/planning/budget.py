"""The largest KV budget that costs no throughput."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from h2o_flexgen.errors import UserError
from h2o_flexgen.policy import KVBudget

#: formats of a cache and of weights, from the least loss to the most
FORMATS = (None, "int8", "int4")
#: the smallest automatic budget: heavy hitters, and equally many recent tokens, as a fraction of the longest prompt
MIN_HH_RATIO = 0.1
#: growth of the slots from one automatic budget to the next
GROWTH = 1.25
#: fraction of the throughput that a larger budget may cost and still count as free
FREE = 0.03


class BudgetChoice(NamedTuple):
    """A KV budget that a job may have; everything is None for the full cache.

    Attributes:
        ratio, share: heavy slots, and all slots, over the tokens of the longest prompt.
    """

    kv_budget: KVBudget | None = None
    ratio: float | None = None
    share: float | None = None

    @classmethod
    def of(cls, kv_budget: KVBudget | None, longest: int) -> BudgetChoice:
        if kv_budget is None:
            return cls()
        heavy, recent = kv_budget.slots(longest)
        return cls(kv_budget, heavy / longest, (heavy + recent) / longest)


@dataclass(frozen=True)
class BudgetPoint:
    """A KV budget, the block that fits with it, and its predicted throughput.

    Attributes:
        ratio: heavy hitters over the longest prompt; None for the full cache.
        slots: heavy and recent slots together, or those of the full cache, per sequence, layer and KV head.
        compress_cache: format of the cache: int8, int4, or None for floats.
        compress_weight: format of the weights; None: as in the checkpoint.
        loss: the measured rise of the perplexity, as a fraction; None if unknown.
        allowed: whether the user accepts that loss.
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


def budget_choices(floor: float, longest: int, total: int) -> list[BudgetChoice]:
    """Budgets from the ratio `floor` to the full cache, smallest first. Raises UserError for a floor outside (0, 0.5].
    `longest`, `total`: tokens of the longest prompt, and with its output."""
    if not 0 < floor <= 0.5:  # at 0.5 heavy and recent slots hold the whole prompt
        raise UserError(f"`min_hh_ratio` must lie in (0, 0.5], not {floor:g}")
    choices = []
    ratio = floor
    while not choices or 2 * max(1, int(ratio * longest)) < total:  # an output may be longer than its prompt
        budget = KVBudget.from_ratio(ratio) if ratio <= 1 else KVBudget.from_size(int(ratio * longest))
        choices.append(BudgetChoice(budget, ratio, 2 * ratio))
        ratio = float(f"{GROWTH * ratio:.3g}")
    return [*choices, BudgetChoice()]


def largest_free(curve: list[BudgetPoint]) -> BudgetPoint:
    """The point of best quality whose throughput is within 3 % of the highest.

    The best quality is the least loss. Where losses are unknown it is the most slots, then the most bits, since a model
    misses tokens more than bits; 4-bit weights rank last, since they may cost more than either. Of equals the last of
    `curve` wins. Raises UserError if no point is allowed.
    """
    allowed = [point for point in curve if point.allowed]
    if not allowed:
        raise UserError(
            "nothing that fits into memory is known to lose at most `max_loss`: raise it, or measure larger budgets "
            "for `quality`"
        )
    least = (1 - FREE) * max(point.tokens_per_s for point in allowed)
    free = [point for point in allowed if point.tokens_per_s >= least]
    return max(reversed(free), key=_quality)


def _quality(point: BudgetPoint) -> tuple:
    return (
        -inf if point.loss is None else -point.loss,
        point.compress_weight != "int4",
        point.slots,
        -FORMATS.index(point.compress_cache),
        -FORMATS.index(point.compress_weight),
        point.ratio is None,
    )
