"""What would make a planned job faster: the job is planned again with one change at a time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from h2o_flexgen.commands.options import option
from h2o_flexgen.errors import UserError
from h2o_flexgen.policy import KVBudget

#: the least gain that is worth a line
MIN_GAIN = 1.05
#: a variant with less loss is preferred if the fastest one is at most this much faster
CLOSE_ENOUGH = 1.05
#: the most suggestions
MOST = 4
#: no other kind of change is planned after this many seconds
SECONDS = 10
#: a KV budget to suggest, and prompts of a job that has few
HH_RATIO = 0.2
PROMPTS = 64
#: rise of the perplexity (least, most) that was measured with SmolLM2-135M: docs/formats.md, docs/quality.md
MEASURED = {
    "--compute int8": (0.012, 0.012),
    "--compress-weight int8": (0.006, 0.006),
    "--compress-weight int8 --compute int8": (0.014, 0.014),
    "--compress-cache int8": (0.001, 0.001),
    "--compress-cache int4": (0.001, 0.001),
    f"--hh-ratio {HH_RATIO}": (0.021, 0.083),
}
MODEL = "SmolLM2-135M"

#: {argument: value}
Change = dict[str, str | float | int]


@dataclass(frozen=True)
class Suggestion:
    """A change to the options of a job.

    Attributes:
        options: the options to add.
        tokens_per_s: predicted with them; gain: over the prediction without.
        perplexity_rise: least and most that was measured, as fractions; None if nothing was.
    """

    options: str
    tokens_per_s: float
    gain: float
    perplexity_rise: tuple[float, float] | None


def suggest(
    args: argparse.Namespace,
    choice,
    is_quantised: bool,
    plan: Callable[[argparse.Namespace, KVBudget | None], object],
) -> list[Suggestion]:
    """The changes that gain most, the best first.

    Args:
        args: the options that led to `choice`, an ExecutionPlan; is_quantised: some of its weights are.
        plan: the ExecutionPlan that other options and a KV budget lead to.
    """
    found = []
    now = choice.prediction.tokens_per_s
    policy = choice.policy
    fixed = {"compress_weight": choice.compress_weight, "compress_cache": choice.compress_cache}
    fixed["num_prompts"] = len(choice.workload.prompt_lens)
    sizes = {}
    if choice.plan.shared:  # without CUDA the batches of the plan suit its variants too, and keep their searches short
        sizes = {"gpu_batch_size": policy.gpu_batch_size, "prefill_tokens": policy.prefill_tokens}
    begin = time.monotonic()
    for variants in changes(args, choice, is_quantised):
        if time.monotonic() - begin > SECONDS:
            break
        speeds = {}
        for change in variants:
            kept = fixed if "num_prompts" in change else fixed | sizes
            budget = KVBudget.from_ratio(HH_RATIO) if "hh_ratio" in change else choice.kv_budget
            changed = argparse.Namespace(**vars(args) | kept | change)
            with suppress(UserError):  # the model cannot have this format, or no policy fits
                planned = plan(changed, budget)
                planned.plan.check()
                speeds[text_of(change)] = planned.prediction.tokens_per_s
        for text, speed in speeds.items():
            if speed >= MIN_GAIN * now and CLOSE_ENOUGH * speed >= max(speeds.values()):
                loss = (0.0, 0.0) if text.startswith("--num-prompts") else MEASURED.get(text)
                found.append(Suggestion(text, speed, speed / now, loss))
                break
    return sorted(found, key=lambda suggestion: -suggestion.gain)[:MOST]


def changes(args: argparse.Namespace, choice, is_quantised: bool) -> Iterator[list[Change]]:
    """For each kind of change its variants, the least loss first."""
    if not is_quantised:
        yield [{"compress_weight": kind} for kind in ("int8", "int4")]
    if choice.plan.shared and args.compute != "int8":  # on CUDA int8 matmuls are no faster (docs/formats.md)
        kinds = [{}] if is_quantised else [{"compress_weight": kind} for kind in ("int8", "int4")]
        yield [kind | {"compute": "int8"} for kind in kinds]
    if choice.kv_budget is None:
        yield [{"hh_ratio": HH_RATIO}]
    if choice.compress_cache is None:
        yield [{"compress_cache": kind} for kind in ("int8", "int4")]
    prompts = len(choice.workload.prompt_lens)
    if args.percent is None and prompts <= choice.policy.block_size:
        yield [{"num_prompts": max(PROMPTS, 4 * prompts)}]


def text_of(change: Change) -> str:
    return " ".join(f"{option(name)} {value}" for name, value in change.items())


def describe_suggestions(suggestions: list[Suggestion]) -> str:
    """A line for each: predicted gain, options, and the measured loss."""
    width = max(len(suggestion.options) for suggestion in suggestions)
    lines = [f"speed-up   {'':7}{'':{width}}  rise of the perplexity of {MODEL}"]
    for each in suggestions:
        lines.append(f"{'':11}{each.gain:4.2f}x  {each.options:{width}}  {describe_rise(each.perplexity_rise)}")
    return "\n".join(lines)


def describe_rise(rise: tuple[float, float] | None) -> str:
    if rise is None:
        return "not measured"
    least, most = rise
    if most == 0:
        return "none: the texts stay the same"
    return f"+{100 * least:.2g} %" if least == most else f"+{100 * least:.2g} to +{100 * most:.2g} %"
