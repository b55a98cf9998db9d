"""The command `lm_eval`: EleutherAI's lm-evaluation-harness, with this engine as one of its models."""

from __future__ import annotations

import argparse
import sys

from h2o_flexgen.commands import options
from h2o_flexgen.errors import UserError, reason


class PassedOn(options.Parser):
    """Leaves all options to the harness."""

    def parse_args(self, argv: list[str] | None = None, namespace: argparse.Namespace | None = None):
        return argparse.Namespace(argv=sys.argv[1:] if argv is None else argv)


def make_parser(prog: str) -> options.Parser:
    return PassedOn(prog, "Run lm-evaluation-harness with a model named h2o_flexgen.")


def run(args: argparse.Namespace) -> None:
    """Raises UserError without the harness; what the harness raises is its own."""
    from h2o_flexgen.evaluation import harness  # noqa: F401  its import registers the model

    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as e:
        raise UserError(f"lm-evaluation-harness cannot be loaded ({reason(e)}): pip install lm-eval") from None
    sys.argv = ["lm-eval", *args.argv]  # the only place that the harness reads them from
    cli_evaluate()
