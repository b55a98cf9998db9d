"""The command `search`: the policy with the highest predicted throughput, for any machine. Runs no model."""

from __future__ import annotations

from h2o_flexgen.commands import options
from h2o_flexgen.commands.plan import add_options, run

__all__ = ["make_parser", "run"]


def make_parser(prog: str) -> options.Parser:
    description = "Find the policy with the highest predicted throughput for a model, a job and a machine."
    parser = options.Parser(prog, description)
    options.add_model_options(parser, "only the config is fetched", required=True)
    add_options(parser, "as many as the largest block takes")
    parser.set_defaults(search=True, path=None)
    return parser
