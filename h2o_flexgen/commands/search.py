"""Command line: find the policy with the highest predicted throughput, or predict a given one. Runs no model.

h2o-flexgen search --model facebook/opt-30b --prompt-len 512 --gen-len 32 --hh-ratio 0.2
"""

from __future__ import annotations

import argparse
import sys

from h2o_flexgen.commands import options
from h2o_flexgen.commands.plan import add_options, run


def make_parser(prog: str = "python -m h2o_flexgen.policy_search") -> argparse.ArgumentParser:
    description = "Find the policy with the highest predicted throughput for a model, a job and a machine."
    parser = options.Parser(prog, description)
    add = parser.add_argument_group("job").add_argument
    options.add_model_options(add, "only the config is fetched", required=True)
    add_options(parser, add, "as many as the largest block takes")
    parser.set_defaults(search=True, path=None)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, as `options.main` says."""
    return options.main(make_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
