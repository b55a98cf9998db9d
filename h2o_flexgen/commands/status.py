"""The command `status`: how far a job with an output file is."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

from h2o_flexgen.commands import options
from h2o_flexgen.commands.output import print_text
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.manifest import Manifest, is_running, manifest_path
from h2o_flexgen.jobs.output import DoneRow, open_done, read_done

#: seconds; a run that seems to take longer began while the clock stood at 1970
YEAR = 365 * 24 * 3600


def make_parser(prog: str) -> options.Parser:
    what = "Report how far a job is: rows done, failed and left, tokens per second, time left."
    parser = options.Parser(prog, what, "OUT")
    parser.add_argument("output_file", metavar="OUT", help="the --output-file of the job")
    return parser


def run(args: argparse.Namespace) -> None:
    path = Path(os.path.realpath(args.output_file))
    manifest = Manifest.read(manifest_path(path))
    if manifest is None:
        raise UserError(f"{args.output_file} is not the output file of a job: there is no {manifest_path(path)}")
    with open_done(path) as file:
        rows = (row for _, row in read_done(path, file))
        print_text(describe(manifest, rows, path, is_running(manifest_path(path))))


def describe(manifest: Manifest, rows: Iterable[DoneRow], path: Path, running: bool) -> str:
    """The state of a job. `rows`: those in the output file, the newest last unless all are there."""
    run = manifest.runs[-1]
    count = failed = 0
    new = tokens = 0  # of this run; rows that were refused took no time
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
        return f"stopped: {text}; run the same command again to go on"
    if not new:
        return f"runs: {text}; no row of this run has finished yet"
    seconds = path.stat().st_mtime - run["start"]
    if not 0 < seconds < YEAR:
        return f"runs: {text}; this machine's clock was changed meanwhile: the speed is unknown"
    speed = f"{tokens / seconds:.1f} tokens/s" if tokens else f"{new / seconds:.1f} rows/s"
    remaining = timedelta(seconds=round(left * seconds / new))
    return f"runs: {text}; {speed}, about {remaining} (h:mm:ss) left at this rate"
