"""Command line: how far a job is that writes an output file.

h2o-flexgen status texts.jsonl
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

from h2o_flexgen.commands import options
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.manifest import Manifest, is_running, manifest_path
from h2o_flexgen.jobs.output import DoneRow, open_done, read_done

#: no run takes as long, in seconds; one seems to if the clock stood at 1970 when it began
YEAR = 365 * 24 * 3600


def make_parser(prog: str = "python -m h2o_flexgen.commands.status") -> argparse.ArgumentParser:
    parser = options.Parser(prog, "Say how far a job is: rows done, failed and left, tokens per second, time left.")
    parser.add_argument("output_file", metavar="OUT", help="the --output-file of the job")
    return parser


def run(args: argparse.Namespace) -> None:
    path = Path(os.path.realpath(args.output_file))
    manifest = Manifest.read(manifest_path(path))
    if manifest is None:
        raise UserError(f"{args.output_file} is no output file of a job: there is no {manifest_path(path)}")
    with open_done(path) as file:
        rows = (row for _, row in read_done(path, file))
        options.say(describe(manifest, rows, path, is_running(manifest_path(path))))


def describe(manifest: Manifest, rows: Iterable[DoneRow], path: Path, running: bool) -> str:
    """The state of a job for people; `rows`: those in the output file, the newest last unless all are there."""
    run = manifest.runs[-1]
    count = failed = new = tokens = 0  # the last two of this run; refusing a row takes no time
    for count, row in enumerate(rows, 1):
        failed += row.error is not None
        new += row.error is None and count > run["done"]
        tokens += row.tokens if count > run["done"] else 0
    total = len(manifest.rows)
    left = max(0, total - count)
    text = f"{count - failed} of {total} rows are done, {failed} failed, {left} are left"
    if not left:
        return f"finished: {text}"
    if not running:
        return f"stopped: {text}; the command that began it goes on"
    if not tokens:
        return f"runs: {text}; no row of this run has finished yet"
    seconds = path.stat().st_mtime - run["start"]
    if not 0 < seconds < YEAR:
        return f"runs: {text}; this machine's clock was set meanwhile: how fast is not known"
    speed = tokens / seconds
    remaining = timedelta(seconds=round(left * seconds / new))
    return f"runs: {text}; {speed:.1f} tokens/s, about {remaining} (h:mm:ss) left at this rate"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, as `options.main` says."""
    return options.main(make_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
