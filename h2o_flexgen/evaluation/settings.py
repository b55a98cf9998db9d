"""The settings that are compared: cache rules with budgets, and the full cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.observer import Observer, TokenCounter
from h2o_flexgen.errors import UserError
from h2o_flexgen.formats.forms import cache_format
from h2o_flexgen.kv_cache import rule_for
from h2o_flexgen.llm import LLM
from h2o_flexgen.models.spec import ModelSpec
from h2o_flexgen.planning.shapes import kv_bytes
from h2o_flexgen.policy import KVBudget
from h2o_flexgen.utils.progress import bar


@dataclass(frozen=True)
class Setting:
    """A cache rule with its slots, and a format of the cache. Without a budget the cache is full."""

    rule: str
    budget: KVBudget | None = None
    compress_cache: str | None = None


FULL = Setting("full")


def make_settings(
    rules: list[str],
    ratios: list[float],
    sizes: list[int],
    hh_share: float = 0.5,
    formats: list[str | None] | None = None,
) -> list[Setting]:
    """Every rule with every budget, and the full cache, in every format, except the full cache as floats. Raises
    UserError for a number out of range.

    Args:
        ratios: slots, heavy and recent ones together, as fractions of the longest prompt.
        sizes: slots.
        hh_share: fraction of the slots for heavy hitters; the rest are for recent tokens.
        formats: of the cache; default: floats.
    """
    if not 0 <= hh_share <= 1:
        raise UserError(f"`hh_share` must lie in [0, 1], not {hh_share:g}")
    for ratio in ratios:
        if not 0 < ratio <= 1:
            raise UserError(f"each of `ratios` must lie in (0, 1], not {ratio:g}: for more slots give `sizes`")
    for size in sizes:
        if size < 1:
            raise UserError(f"each of `sizes` must be 1 or more, not {size}")
    settings = []
    for rule in rules:
        settings += [KVBudget.from_ratio(hh_share * ratio, (1 - hh_share) * ratio, rule) for ratio in ratios]
        settings += [KVBudget.from_size(int(hh_share * n), n - int(hh_share * n), rule) for n in sizes]
    budgets = [(budget.rule, budget) for budget in dict.fromkeys(settings)]
    formats = formats or [None]
    full = [replace(FULL, compress_cache=kind) for kind in formats if kind is not None]
    return full + [Setting(*each, kind) for kind in formats for each in budgets]


def allowed(
    settings: list[Setting], longest_prompt: int, gen_len: int, spec: ModelSpec, is_strict: bool
) -> list[Setting]:
    """The settings with room for the tokens that their rule protects. Raises UserError if none has room, or with
    `is_strict` not all have, or if this model cannot have a format."""
    found = []
    refused = None
    for setting in settings:
        for head_dim in spec.head_dims:
            cache_format(setting.compress_cache, torch.float32, head_dim)
        try:
            rule_for(setting.budget, longest_prompt, gen_len, spec)
            found.append(setting)
        except UserError as e:
            refused = e
            if is_strict:
                raise
    if refused is not None and not found:
        raise refused
    return found


def measure_each(llm: LLM, settings: list[Setting], tokens: int, job: Callable[[], dict]) -> Iterator[dict]:
    """Run a job, which generates at most `tokens` tokens, with the full cache, then with each setting, under one
    progress bar. Yields for each, as soon as its job has ended, `row_of` with the values that the job returned."""
    settings = [FULL, *settings]
    with bar(desc="measuring", total=len(settings) * tokens, unit="tokens", leave=True) as shown:
        for n, setting in enumerate(settings):
            llm.kv_budget = setting.budget
            llm.compress_cache = setting.compress_cache
            llm.observer = _Count(shown)
            shown.set_postfix_str(f"setting {n + 1}/{len(settings)}, {setting.rule}", refresh=True)
            found = job()
            shown.update((n + 1) * tokens - shown.n)  # outputs may end early
            yield row_of(llm, setting) | found


def check_outputs(outputs: list, name: str) -> None:
    """Raises UserError for the first output or score with an error. `name`: what they belong to, as "passage"."""
    for output in outputs:
        if output.error is not None:
            raise UserError(f"{name} {output.index}: {output.error}")


class _Count(Observer):
    """Advances a bar by the tokens of a job."""

    def __init__(self, shown):
        self.shown = shown
        self.counter = TokenCounter()

    def on_pass(self, rows: list[Sequence]) -> None:
        self.counter.begin(rows)

    def on_layer(self, j: int) -> None:
        self.shown.update(self.counter.new())


def row_of(llm: LLM, setting: Setting) -> dict:
    """The cache of the job that has just ended, for a row of results: rule, slots; heavy, recent and hh_ratio,
    recent_ratio, as fractions of the longest prompt; compress_cache; and kv_bytes of a sequence in all layers. For the
    full cache slots, heavy, recent and ratios are None."""
    choice = llm.choice
    row = {"rule": setting.rule} | dict.fromkeys(("slots", "heavy", "recent", "hh_ratio", "recent_ratio"))
    nbytes = kv_bytes(llm.planner.model, choice.workload, choice.rule, choice.compress_cache)
    row |= {"compress_cache": choice.compress_cache, "kv_bytes": nbytes["job"]}
    budget = setting.budget
    longest = choice.workload.longest
    if budget is None:
        return row
    heavy, recent = budget.slots(longest)
    ratios = {"hh_ratio": budget.hh_ratio, "recent_ratio": budget.recent_ratio}
    if budget.hh_ratio is None:
        # half a slot more where there is room: else rounding would lose one when a ratio becomes slots again
        share = lambda n: (n + 0.5 * (0 < n < longest)) / longest
        ratios = {"hh_ratio": share(heavy), "recent_ratio": share(recent)}
    return row | {"slots": heavy + recent, "heavy": heavy, "recent": recent, **ratios}
