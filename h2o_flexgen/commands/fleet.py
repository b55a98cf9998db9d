"""What several workers would do with a job, and what it would cost: a part of the command `plan`."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from h2o_flexgen.commands import options
from h2o_flexgen.commands.output import print_text
from h2o_flexgen.errors import UserError

if TYPE_CHECKING:
    from h2o_flexgen.planning.execution_plan import ExecutionPlan

    Plan = Callable[[argparse.Namespace], tuple[ExecutionPlan, str]]

#: tokens that a price is for
MILLION = 1_000_000


@dataclass(frozen=True)
class Kind:
    """Workers that are alike: how many, and the file with the profile of each one's machine; None: the one that `plan`
    is about."""

    count: int
    hardware: str | None = None


@dataclass(frozen=True)
class Share:
    """What each worker of a kind does; `bound_by`: the resource that limits it."""

    count: int
    machine: str
    rows_per_s: float
    bound_by: str


@dataclass(frozen=True)
class Fleet:
    """What workers do together.

    Attributes:
        seconds: of the job.
        cost: of the job, in the unit of the prices; `cost_per_million`: of a million output tokens. None without
            prices.
    """

    shares: list[Share]
    rows: int
    rows_per_s: float
    seconds: float
    cost: float | None = None
    cost_per_million: float | None = None

    def to_dict(self) -> dict:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def describe(self) -> str:
        lines = []
        for share in self.shares:
            speed = f"{share.rows_per_s:.3g} rows/s each, bound by {share.bound_by}"
            lines.append(f"workers    {share.count} with {share.machine}: {speed}")
        hours = timedelta(seconds=round(self.seconds))
        lines.append(f"together   {self.rows_per_s:.3g} rows/s, {hours} (h:mm:ss) for {self.rows} rows")
        if self.cost is not None:
            lines.append(f"cost       {self.cost:.2f}, {self.cost_per_million:.3g} per million output tokens")
        return "\n".join(lines)


def kind(text: str) -> Kind:
    """The kind of "N" or "N:PROFILE"."""
    count, _, hardware = text.partition(":")
    return Kind(options.count(count), hardware or None)


def add_options(parser: options.Parser) -> None:
    add = parser.group(options.WORKERS)
    what = "what N workers would do, each on a machine or GPU of its own, with this or another profile; may be repeated"
    add("--workers", type=kind, action="append", metavar="N[:PROFILE]", help=what)
    price = "of an hour of a worker: one for all, or one for each --workers"
    add("--price", type=options.amount, action="append", metavar="PER_HOUR", help=price)


def check(args: argparse.Namespace) -> None:
    """Raises UserError unless there is one price, or one for each kind; or if workers get several devices."""
    if args.workers is not None and "," in args.device:
        raise UserError("--workers have one device each: name one with --device, or leave it out")
    if args.price is not None and args.workers is None:
        raise UserError("--price is for a plan with --workers")
    if args.price is not None and len(args.price) not in (1, len(args.workers)):
        given = f"--price is given {len(args.price)} times, --workers {len(args.workers)} times"
        raise UserError(f"{given}: give one price, or one for each")


def add_fleet(args: argparse.Namespace, result: dict, plan: Plan) -> None:
    """Add to the result of a plan what the workers of the options do, if they have any, and print it. Raises UserError
    as `fleet_of`."""
    if args.workers is None:
        return
    found = fleet_of(args, plan)
    result["workers"] = found.to_dict()
    if not args.json:
        print_text(found.describe())


def fleet_of(args: argparse.Namespace, plan: Plan) -> Fleet:
    """What the workers of the options do together. Rows go to whoever is free, so rates add up.

    Args:
        plan: the options of one worker -> its plan, and the name of its machine.

    Raises:
        UserError: the job does not fit on one of them.
    """
    workers = sum(kind.count for kind in args.workers)
    shares = []
    rows = args.num_prompts
    for kind in args.workers:
        own = copy.copy(args)
        own.num_prompts = rows and -(-rows // workers)
        own.hardware = kind.hardware or args.hardware
        choice, machine = plan(own)
        choice.plan.check()
        predicted = choice.prediction
        rate = predicted.num_prompts / predicted.job_seconds
        shares.append(Share(kind.count, machine, rate, predicted.bound_by))
        rows = rows or workers * predicted.num_prompts
    together = sum(share.count * share.rows_per_s for share in shares)
    found = Fleet(shares, rows, together, rows / together)
    if args.price is None:
        return found
    prices = args.price * (len(shares) if len(args.price) == 1 else 1)
    per_hour = sum(share.count * price for share, price in zip(shares, prices))
    cost = per_hour * found.seconds / 3600
    tokens = rows * (args.expect_len or args.gen_len)
    return replace(found, cost=cost, cost_per_million=cost / tokens * MILLION)
