"""What is compared: cache rules with budgets, and the full cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.observer import Observer
from h2o_flexgen.errors import UserError
from h2o_flexgen.forecast import kv_bytes
from h2o_flexgen.kv_cache import rule_for
from h2o_flexgen.llm import LLM
from h2o_flexgen.models.spec import ModelSpec
from h2o_flexgen.policy import KVBudget
from h2o_flexgen.progress import bar
from h2o_flexgen.sizes import Workload


@dataclass(frozen=True)
class Setting:
    """A cache rule with its slots; `budget` None: the full cache."""

    rule: str
    budget: KVBudget | None = None


FULL = Setting("full")


def make_settings(rules: list[str], ratios: list[float], sizes: list[int], hh_share: float = 0.5) -> list[Setting]:
    """Every rule with every budget, without the full cache.

    Args:
        ratios: slots, heavy and recent ones together, as fractions of the longest prompt.
        sizes: slots.
        hh_share: the part of the slots that is for heavy hitters; the rest is for recent tokens.

    Raises:
        UserError: a number out of range.
    """
    if not 0 <= hh_share <= 1:
        raise UserError(f"`hh_share` must lie in [0, 1], not {hh_share:g}")
    for ratio in ratios:
        if not 0 < ratio <= 1:
            raise UserError(f"each of `ratios` must lie in (0, 1], not {ratio:g}: more slots than that take `sizes`")
    for size in sizes:
        if size < 1:
            raise UserError(f"each of `sizes` must be 1 or more, not {size}")
    settings = []
    for rule in rules:
        settings += [KVBudget.from_ratio(hh_share * ratio, (1 - hh_share) * ratio, rule) for ratio in ratios]
        settings += [KVBudget.from_size(int(hh_share * n), n - int(hh_share * n), rule) for n in sizes]
    return [Setting(budget.rule, budget) for budget in dict.fromkeys(settings)]


def check_settings(settings: list[Setting], longest_prompt: int, gen_len: int, spec: ModelSpec) -> None:
    """Raises UserError for a rule that is not known or not for this model, or a budget that does not suffice for it."""
    for setting in settings:
        rule_for(setting.budget, Workload((longest_prompt,), gen_len), spec)


def measure_each(llm: LLM, settings: list[Setting], tokens: int, job: Callable[[], dict]) -> Iterator[dict]:
    """Run a job with the full cache, and then with each setting, while a bar shows the time left.

    Args:
        llm: gets each KV budget in turn.
        tokens: the most that the job takes.

    Returns:
        for each setting, as soon as its job has ended, `row_of` with what the job returned.
    """
    settings = [FULL, *settings]
    with bar(desc="measuring", total=len(settings) * tokens, unit="tokens", leave=True) as shown:
        for n, setting in enumerate(settings):
            llm.kv_budget, llm.observer = setting.budget, _Count(shown)
            shown.set_postfix_str(f"setting {n + 1}/{len(settings)}, {setting.rule}", refresh=True)
            found = job()
            shown.update((n + 1) * tokens - shown.n)  # outputs may end early
            yield row_of(llm, setting) | found


class _Count(Observer):
    """Moves a bar on by the tokens of a job."""

    def __init__(self, shown):
        self.shown = shown

    def on_block(self, block: int, blocks: int, sequences: list[Sequence]) -> None:
        self.sequences, self.before = sequences, self.shown.n

    def on_progress(self, i: int, j: int, batches: list[int]) -> None:
        self.shown.update(self.before + sum(len(s.tokens) for s in self.sequences) - self.shown.n)


def row_of(llm: LLM, setting: Setting) -> dict:
    """How the job that has just ended kept its cache, as a row of results has it.

    Returns:
        rule, slots; heavy, recent and hh_ratio, recent_ratio, as fractions of the longest prompt; and kv_bytes of a
        sequence in all layers. Of the full cache slots and what follows from them are None.
    """
    choice = llm.choice
    row = {"rule": setting.rule} | dict.fromkeys(("slots", "heavy", "recent", "hh_ratio", "recent_ratio"))
    nbytes = kv_bytes(llm.planner.model, choice.workload, choice.rule)
    budget, longest = setting.budget, choice.workload.longest
    if budget is None:
        return row | {"kv_bytes": nbytes["full"]}
    heavy, recent = budget.slots(longest)
    ratios = {"hh_ratio": budget.hh_ratio, "recent_ratio": budget.recent_ratio}
    if budget.hh_ratio is None:
        ratios = {"hh_ratio": heavy / longest, "recent_ratio": recent / longest}
    return row | {"slots": heavy + recent, "heavy": heavy, "recent": recent, **ratios, "kv_bytes": nbytes["job"]}
