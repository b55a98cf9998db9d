"""Provenance of a result: command, date, machine and versions."""

from __future__ import annotations

import argparse
from datetime import date

from h2o_flexgen.profiling.machine import described, installed

#: packages whose versions are noted in every result
PACKAGES = ("torch", "transformers", "h2o_flexgen")


def origin(args: argparse.Namespace, more: tuple[str, ...] = ()) -> dict:
    """As plain data. `more`: other packages whose versions matter."""
    versions = {name: version for name, version in installed(*PACKAGES, *more).items() if name != "python"}
    return {"command": args.command, "date": date.today().isoformat(), "machine": described(), "versions": versions}
