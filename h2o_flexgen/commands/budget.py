"""The KV budget of a command line: its options, and the budget they come to."""

from __future__ import annotations

import argparse
import sys

from h2o_flexgen.commands.options import BUDGET, Parser, amount
from h2o_flexgen.errors import UserError
from h2o_flexgen.planning.budget import MIN_HH_RATIO
from h2o_flexgen.planning.losses import Losses
from h2o_flexgen.policy import DEFAULT_RULE, KVBudget


def ratio(text: str) -> float | str:
    return text if text == "auto" else float(text)


def add_budget_options(parser: Parser) -> None:
    """The options that `make_losses` and `make_budget` read."""
    heavy = "keep heavy hitters, this fraction of the longest prompt, and as many recent tokens"
    heavy += " (default: all tokens); auto: as many as cost no throughput"
    parser.add_argument("--hh-ratio", type=ratio, help=heavy)
    add = parser.group(BUDGET)
    add("--recent-ratio", type=float, help="recent tokens as a fraction of the longest prompt (default: --hh-ratio)")
    add("--hh-size", type=int, help="heavy hitters in slots")
    add("--recent-size", type=int, help="recent tokens in slots (default: --hh-size)")
    rule = f"the rule that decides which tokens keep a slot, with options NAME:first=4 (default: {DEFAULT_RULE})"
    add("--kv-rule", metavar="NAME", help=rule)
    loss = "the cheapest rule and budget in --quality that cost at most this: 0.02 is 2 %% more perplexity"
    add("--max-loss", type=float, metavar="LOSS", help=f"{loss}; with --hh-ratio auto an upper bound")
    add("--quality", metavar="FILE", help="what budgets cost, by h2o-flexgen quality --output FILE")
    add("--min-hh-ratio", type=amount, help=f"the floor of --hh-ratio auto (default: {MIN_HH_RATIO})")
    rolling = "positions count the tokens in the cache, so that outputs may outgrow the model's context (RoPE only)"
    add("--position-rolling", action="store_true", help=rolling)


def make_losses(args: argparse.Namespace) -> Losses | None:
    """What budgets cost, and how much of that is accepted; None without --quality."""
    if args.quality is None:
        if args.max_loss is not None:
            raise UserError("--max-loss needs to know what budgets cost: give a --quality FILE too")
        return None
    if args.max_loss is None and args.hh_ratio != "auto":
        raise UserError("--quality is for --max-loss and for --hh-ratio auto: give one of them too")
    return Losses.from_file(args.quality, args.max_loss)


def check_model(losses: Losses | None, kv_rule: str | None, model: str, weights: str) -> None:
    """Warn if the losses, or the layers of a rule, were measured with another model, with other weights and matmuls
    (`losses.weights_text`), or with another rule than the job's."""
    if losses is not None:
        for measured, used in (losses.model, model), (losses.weights, weights):
            if measured != used:
                print(f"warning: --quality {losses.path} is of {measured}, this job is of {used}", file=sys.stderr)
    if kv_rule is not None:
        from h2o_flexgen.kv_cache import head_losses

        layers = head_losses(kv_rule)
        name = kv_rule.partition(":")[0]
        if layers is not None and layers.model not in (None, model):
            print(f"warning: the layers of --kv-rule are of {layers.model}, this job is of {model}", file=sys.stderr)
        if layers is not None and layers.rule and layers.rule.partition(":")[0] != name:
            print(f"warning: the layers of --kv-rule are of {layers.rule}, this job has {name}", file=sys.stderr)


def make_budget(args: argparse.Namespace, losses: Losses | None = None) -> KVBudget | str | None:
    """The KV budget, "auto", or None for a full cache. One that is chosen for its loss is reported on stderr, and the
    cache format measured with it becomes that of `args`."""
    if args.kv_rule is not None:
        from h2o_flexgen.kv_cache import check_rule

        check_rule(args.kv_rule)
    given = (args.hh_ratio, args.recent_ratio, args.hh_size, args.recent_size)
    if args.position_rolling and (args.hh_ratio == "auto" or losses is not None):
        raise UserError(
            "--position-rolling needs a KV budget in numbers: --hh-ratio auto may take the full cache, which cannot "
            "roll, and --quality has been measured without"
        )
    if args.hh_ratio == "auto":
        if any(value is not None for value in given[1:]):
            raise UserError("--hh-ratio auto sizes the whole KV budget: leave --recent-ratio and the sizes out")
        if args.kv_rule not in (None, DEFAULT_RULE):
            raise UserError(f"--hh-ratio auto is for --kv-rule {DEFAULT_RULE}: with another rule give a number")
        return "auto"
    if args.min_hh_ratio is not None:
        raise UserError("--min-hh-ratio is the floor of --hh-ratio auto")
    if losses is not None:
        if args.kv_rule is not None or any(value is not None for value in given):
            raise UserError("--max-loss chooses the rule and the budget: leave --kv-rule, ratios and sizes out")
        found = losses.cheapest(args.compress_cache)
        args.compress_cache = found.compress_cache
        print(f"KV budget  {found}: the cheapest in {losses.path} within {losses.max_loss:.3g}", file=sys.stderr)
        return found.kv_budget
    if any(value is not None for value in given):
        return KVBudget(*given, args.kv_rule or DEFAULT_RULE, args.position_rolling)
    if args.position_rolling:
        raise UserError("--position-rolling needs a KV budget: a full cache ends with the model's positions")
    if args.kv_rule is not None:
        raise UserError("--kv-rule says which tokens a KV budget keeps: give one too, such as --hh-ratio 0.2")
    return None
