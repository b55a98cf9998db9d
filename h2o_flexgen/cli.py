"""What the commands share: options, checks, and how they end."""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr

from h2o_flexgen import interrupts
from h2o_flexgen.errors import UserError
from h2o_flexgen.planning.budget import MIN_HH_RATIO, BudgetPoint, check_floor, largest_free
from h2o_flexgen.policy import GIB, TIERS, KVBudget, Policy


class Parser(argparse.ArgumentParser):
    """Errors are the user's, and end as all of those do."""

    def error(self, message: str):
        raise UserError(f"{message} (--help lists the options)")


def add_limit_options(add) -> None:
    """What may be used of each tier; `add` is a group's `add_argument`."""
    add(
        "--gpu-mem",
        type=float,
        metavar="GIB",
        help="use at most this much of the device's memory (RAM without CUDA)",
    )
    add(
        "--cpu-mem",
        type=float,
        metavar="GIB",
        help="use at most this much RAM for the cpu tier, with CUDA",
    )
    add("--disk-mem", type=float, metavar="GIB", help="use at most this much disk")


def limits(args: argparse.Namespace) -> dict[str, int | None]:
    """The bytes that `add_limit_options` allow on each tier, or None."""
    given = {tier: getattr(args, f"{tier}_mem") for tier in TIERS}
    return {tier: None if gibibytes is None else int(gibibytes * GIB) for tier, gibibytes in given.items()}


def check_sizes(args: argparse.Namespace) -> None:
    """Raises UserError for counts below 1, and limits that are not positive."""
    for name in ("prompt_len", "gen_len", "num_prompts", "gpu_batch_size", "num_gpu_batches"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be 1 or more, not {value}")
    for name in ("gpu_mem", "cpu_mem", "disk_mem", "max_latency"):
        value = getattr(args, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            unit = "s" if name == "max_latency" else "GiB"
            raise UserError(f"--{name.replace('_', '-')} must be more than 0 {unit}, not {value:g}")


def add_budget_options(parser: argparse.ArgumentParser) -> None:
    """The options that `make_budget` reads."""

    def ratio(text: str) -> float | str:
        return text if text == "auto" else float(text)

    add = parser.add_argument_group("KV budget (H2O); without these the cache is full").add_argument
    add(
        "--hh-ratio",
        type=ratio,
        help="heavy hitters as a fraction of the longest prompt (default: 0); auto: as many as cost no throughput",
    )
    add("--recent-ratio", type=float, help="recent tokens, likewise (default: as --hh-ratio)")
    add("--hh-size", type=int, help="heavy hitters in slots")
    add("--recent-size", type=int, help="recent tokens in slots (default: as --hh-size)")
    add("--min-hh-ratio", type=float, help=f"for auto: the floor (default: {MIN_HH_RATIO})")


def make_budget(args: argparse.Namespace) -> KVBudget | str | None:
    """The KV budget, "auto", or None for a full cache."""
    given = (args.hh_ratio, args.recent_ratio, args.hh_size, args.recent_size)
    if args.min_hh_ratio is not None and args.hh_ratio != "auto":
        raise UserError("--min-hh-ratio is the floor of --hh-ratio auto")
    if args.hh_ratio == "auto":
        if any(value is not None for value in given[1:]):
            raise UserError("--hh-ratio auto sizes the whole KV budget: leave --recent-ratio and the sizes out")
        if args.min_hh_ratio is not None:
            check_floor(args.min_hh_ratio)
        return "auto"
    return None if all(value is None for value in given) else KVBudget(*given)


def describe_budget(slots: dict[str, int] | None) -> str:
    """`slots`: "heavy" and "recent"; None for a full cache."""
    return f"{slots['heavy']} heavy + {slots['recent']} recent slots (H2O)" if slots else "full"


def describe_percent(policy: Policy) -> str:
    return " ".join(f"{x:g}" for x in policy.percent)


def describe_curve(curve: list[BudgetPoint]) -> str:
    """A table for people: KV budget, block, tokens per second. An arrow marks the largest budget that is free."""
    chosen = largest_free(curve)
    lines = ["   hh-ratio  slots       block  tokens/s"]
    for point in curve:
        mark = "=>" if point == chosen else "  "
        ratio = "full" if point.ratio is None else f"{point.ratio:g}"
        block = f"{point.gpu_batch_size} x {point.num_gpu_batches}"
        lines.append(f"{mark} {ratio:>8}{point.slots:>7}{block:>12}{point.tokens_per_s:>10.2f}")
    return "\n".join(lines)


def check_distinct(args: argparse.Namespace, *options: str) -> None:
    """No two of the files may be one: the second to be written would destroy the first."""
    seen = {}
    for option in options:
        path = getattr(args, option.strip("-").replace("-", "_"))
        if path is None:
            continue
        path = os.path.realpath(path)
        if path in seen:
            raise UserError(f"{seen[path]} and {option} name the same file: {path}")
        seen[path] = option


def say(*parts: str) -> None:
    """To stdout, whose reader may have gone."""
    try:
        print(*parts, sep="", end="", flush=True)
    except OSError as e:
        _discard(sys.stdout)
        if not isinstance(e, BrokenPipeError):
            raise UserError(f"cannot write to stdout: {e.strerror}") from None


def _discard(stream) -> None:
    """What is buffered, too: it would fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def warn(text: str) -> None:
    """To stderr, if anybody reads it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass


class _ToStderr(logging.Handler):
    """What the library has to say, as the commands' own warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        warn(self.format(record))


class Lossy:
    """A stream whose disk may be full: what it has no room for is lost, and ends no job."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    @staticmethod
    def _try(act: Callable, *args) -> None:
        try:
            act(*args)
        except BrokenPipeError:  # nobody reads it any more: `main` ends
            raise
        except OSError:
            pass


def name_options(text: str, parser: argparse.ArgumentParser) -> str:
    """A message of the library with its arguments (`gpu_mem`) under the names of the parser's options (--gpu-mem)."""
    known = parser.format_help()

    def named(found: re.Match) -> str:
        option = f"--{found[1].replace('_', '-')}"
        return option if option in known else found[1]

    return re.sub("`([a-z_]+)`", named, text)


def main(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None], argv: list[str] | None) -> int:
    """Run a command to its end; returns the exit code: 0, 2 for an error of the user, 128 + the signal."""
    interrupts.take_over()
    logger = logging.getLogger("h2o_flexgen")
    if not any(isinstance(handler, _ToStderr) for handler in logger.handlers):
        logger.addHandler(_ToStderr())
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 must not end a job
    stderr = sys.stderr or open(os.devnull, "w")
    with redirect_stderr(Lossy(stderr)):
        code = _exit_code(parser, run, argv)
    try:
        stderr.flush()
    except OSError:
        _discard(stderr)
    return code


def _exit_code(parser: argparse.ArgumentParser, run: Callable, argv: list[str] | None) -> int:
    try:
        run(parser.parse_args(argv))
    except UserError as e:
        warn(f"error: {name_options(' '.join(str(e).split()), parser)}")
        return 2
    except KeyboardInterrupt as e:
        warn("interrupted")
        return 128 + getattr(e, "signum", signal.SIGINT)
    except BrokenPipeError:  # who read stderr has gone: end as other programs do
        _discard(sys.stderr)
        return 128 + signal.SIGPIPE
    return 0
