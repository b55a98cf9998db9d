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
from h2o_flexgen.jobs.parts import journal_of
from h2o_flexgen.jobs.progress import Progress

#: seconds; a run that seems to take longer began while the clock stood at 1970
YEAR = 365 * 24 * 3600


def make_parser(prog: str) -> options.Parser:
    what = "Report how far a job is: rows done, failed and left, tokens per second, time left."
    parser = options.Parser(prog, what, "OUT")
    parser.add_argument("output_file", metavar="OUT", help="the --output-file of the job")
    return parser


def run(args: argparse.Namespace) -> None:
    path = Path(os.path.realpath(journal_of(args.output_file)))
    manifest = Manifest.read(manifest_path(path))
    if manifest is None:
        raise UserError(f"{args.output_file} is not the output file of a job: there is no {manifest_path(path)}")
    with open_done(path) as file:
        rows = (row for _, row in read_done(path, file))
        print_text(describe(manifest, rows, path, is_running(manifest_path(path))))


def describe(manifest: Manifest, rows: Iterable[DoneRow], path: Path, running: bool) -> str:
    """The state of a job. `rows`: those in the output file, the newest last unless all are there."""
    run = manifest.runs[-1]
    seconds = path.stat().st_mtime - run["start"]
    progress = progress_of(rows, len(manifest.rows), run["done"], seconds)
    done = f"{progress.completed} of {progress.total} rows are done"
    text = f"{done}, {progress.failed} failed, {progress.left} are left"
    if not progress.left:
        return f"finished: {text}"
    if not running:
        return f"stopped: {text}; run the same command again to go on"
    if not progress.new:
        return f"runs: {text}; no row of this run has finished yet"
    if not 0 < seconds < YEAR:
        return f"runs: {text}; this machine's clock was changed meanwhile: the speed is unknown"
    remaining = timedelta(seconds=round(progress.seconds_left))
    speed = f"{progress.tokens_per_s:.1f} tokens/s" if progress.tokens else f"{progress.rows_per_s:.1f} rows/s"
    return f"runs: {text}; {speed}, about {remaining} (h:mm:ss) left at this rate"


def progress_of(rows: Iterable[DoneRow], total: int, before: int, seconds: float) -> Progress:
    """How far a job of `total` rows is, `before` of which an earlier run had done."""
    count = failed = new = tokens = 0
    for count, row in enumerate(rows, 1):
        failed += row.error is not None
        if count > before and row.error is None:  # rows that were refused took no time
            new += 1
            tokens += row.tokens
    return Progress(total, count, failed, new, tokens, seconds)
