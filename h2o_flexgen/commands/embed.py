"""The command `embed`: a vector for each of many texts, made of the hidden states of any model."""

from __future__ import annotations

import argparse
import json
import sys

from h2o_flexgen.commands import options
from h2o_flexgen.commands.generate import planned, rate, resumed
from h2o_flexgen.commands.options import JOB, LLM_OPTIONS, MACHINE, PLACEMENT
from h2o_flexgen.commands.output import describe_policy, name_at, print_text
from h2o_flexgen.engine.params import POOLINGS, PoolingParams
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.input import parse_text, read_rows
from h2o_flexgen.jobs.output import Failures
from h2o_flexgen.jobs.parts import check_form, export, journal_of
from h2o_flexgen.policy import SEARCHED, Policy
from h2o_flexgen.utils.files import write_text

#: options that LLM takes under the same names
PASSED = [*LLM_OPTIONS, "max_latency", "chat_template_kwargs"]


def make_parser(prog: str) -> options.Parser:
    parser = options.Parser(prog, "Embed many texts: the hidden states of a model, pooled into one vector each.")
    options.add_model_options(parser)
    add = parser.add_argument
    rows = '{"prompt": "text"}, {"prompt_token_ids": [..]} or {"messages": [..]}'
    rows = f"JSON lines, may be gzipped: {rows}, or requests to /v1/embeddings; - is stdin"
    add("--input-file", required=True, metavar="FILE", help=rows)
    done = "JSON lines in input order; a job whose file has some of them already goes on"
    add("--output-file", required=True, metavar="FILE", help=done)
    add("--pooling", choices=POOLINGS, default="mean", help="the mean of all tokens (default), or the last one")
    unit = "vectors have length 1 (default)"
    add("--normalize", action=argparse.BooleanOptionalAction, default=True, help=unit)
    options.add_machine_options(parser)
    add("--report", metavar="FILE", help="write the measurements to this file as JSON")
    add("--verbose", action="store_true", help="print the policy and the memory plan before the run")
    add = parser.group(JOB)
    add("--restart", action="store_true", help="start over; the old output file is kept as FILE~")
    add("--retry-errors", action="store_true", help="run the rows again that failed in an earlier run")
    options.add_template_option(add)
    path = "folder of the weights; _DUMMY_ for random weights of the named size, without download"
    parser.group(MACHINE)("--path", help=path)
    parser.group(PLACEMENT)("--policy", help="a policy as JSON, or auto (default): the fastest found for this machine")
    options.add_policy_options(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    if args.percent is not None and args.policy is not None:
        raise UserError("--percent contradicts --policy: give one of the two")
    options.check_files(args, reads=("input_file", "policy", "hardware"), writes=("output_file", "report"))
    check_form(args.output_file)

    from h2o_flexgen.jobs.job import Job
    from h2o_flexgen.llm import LLM

    with Job(journal_of(args.output_file), args.restart) as job:
        rows = read_rows(args.input_file, parse_text, job.known)
        policy = options.make_policy(args, len(rows))
        arguments = {name: getattr(args, name) for name in (PASSED if policy else [*PASSED, *SEARCHED])}
        arguments |= resumed(job, args)
        with LLM(policy=policy or args.policy or "auto", observer=planned(args), **arguments) as llm:
            job.run(llm, rows, PoolingParams(args.pooling, args.normalize), args.retry_errors)
            export(args.output_file)
            finish(llm.report, args, job.failures)


def finish(report: dict, args: argparse.Namespace, failures: Failures) -> None:
    """Print what a finished job did, and write its report, which is empty if there was nothing left to do."""
    if failures.count:
        print(f"{failures.count} rows could not be run; {failures.first}", file=sys.stderr)
    if report:
        print_text(describe(report))
        if args.report is not None:
            write_text("--report", args.report, json.dumps(report, indent=2) + "\n")


def describe(report: dict) -> str:
    """The report for humans."""
    work = report["workload"]
    policy = describe_policy(Policy(**report["policy"]), report["device"].startswith("cuda"))
    prefill = report["prefill"]
    shared = f", {report['shared_tokens']} of them computed with another text's" if report["shared_tokens"] else ""
    tokens = f"{report['computed_tokens'] + report['shared_tokens']} tokens{shared}"
    model = name_at(report["model"], report.get("model_revision"))
    return (
        f"model      {model}, {report['dtype']} on {report['device']}\n"
        f"workload   {work['num_prompts']} texts of up to {work['prompt_len']} tokens\n"
        f"policy     {policy}\n"
        f"prefill    {prefill['seconds']:.2f} s, {tokens}, {rate(prefill['tokens_per_s'])} tokens/s"
    )
