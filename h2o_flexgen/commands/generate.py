"""The command `generate`: text for many prompts, with a model that need not fit into memory."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from h2o_flexgen.commands import options
from h2o_flexgen.commands.budget import add_budget_options, check_model, make_budget, make_losses
from h2o_flexgen.commands.options import JOB, LLM_OPTIONS, MACHINE, PLACEMENT
from h2o_flexgen.commands.output import (
    by_link,
    by_memory,
    describe_curve,
    describe_job,
    describe_policy,
    name_at,
    print_text,
)
from h2o_flexgen.engine.messages import content_text
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.input import Rows, builtin_rows, read_rows
from h2o_flexgen.jobs.output import Failures
from h2o_flexgen.jobs.parts import check_form, export, journal_of
from h2o_flexgen.planning.budget import MIN_HH_RATIO
from h2o_flexgen.planning.losses import weights_text
from h2o_flexgen.policy import SEARCHED, Policy, gib
from h2o_flexgen.utils.files import read_json, write_text

#: options that LLM takes under the same names
PASSED = [*LLM_OPTIONS, "compress_cache", "max_latency", "chat_template_kwargs"]
#: options that SamplingParams takes under the same names
SAMPLED = (
    "temperature top_k top_p min_p min_tokens ignore_eos seed stop stop_token_ids n "
    "presence_penalty frequency_penalty repetition_penalty bad_words structured"
).split()


def make_parser(prog: str) -> options.Parser:
    parser = options.Parser(prog, "Generate text for many prompts with a model that need not fit into memory.")
    options.add_model_options(parser)
    add = parser.add_argument
    rows = '{"prompt": "text"}, {"prompt_token_ids": [..]} or {"messages": [..]}'
    rows = f"JSON lines, may be gzipped: {rows}, or OpenAI's batch format; Parquet, or a folder of parts; - is stdin"
    add("--input-file", metavar="FILE", help=rows)
    done = "JSON lines in input order, or FILE.jsonl.gz, FILE.parquet, FOLDER/; a job that was begun goes on"
    add("--output-file", metavar="FILE", help=done)
    add_sampling_options(parser)
    add_engine_options(parser)
    options.add_worker_options(parser)
    add("--report", metavar="FILE", help="write the measurements to this file as JSON")
    add("--verbose", action="store_true", help="print the policy and the memory plan before the run")

    add = parser.group(JOB)
    add("--restart", action="store_true", help="start over; the old output file is kept as FILE~")
    add("--retry-errors", action="store_true", help="run the rows again that failed in an earlier run")
    add("--num-prompts", type=options.count, help="built-in prompts (default: one block, or 4 if that is searched)")
    add("--prompt-len", type=options.count, help="tokens of a built-in prompt (default: 512)")
    return parser


def add_sampling_options(parser: options.Parser) -> None:
    """What a row does not set itself, for `make_params`."""
    add = parser.add_argument
    add("--gen-len", type=options.count, metavar="N", default=32, help="output tokens, where a row says no other (32)")
    add("--temperature", type=float, default=0.0, help="0 (default) takes the most likely token")
    add("--stop", action="append", metavar="TEXT", help="end a text before this one; may be given several times")
    add("--json-schema", metavar="FILE", help="every output is JSON that this schema describes")
    add("--choice", action="append", metavar="TEXT", help="every output is one of these; given several times")
    add = parser.group(JOB)
    add("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    add("--stop-token-ids", type=int, nargs="+", metavar="ID", help="end a text at one of these tokens")
    add("--top-k", type=int, default=0, help="sample among the k most likely tokens; 0: all")
    add("--top-p", type=float, default=1.0, help="sample among the most likely tokens that reach p together")
    add("--min-p", type=float, default=0.0, help="sample among tokens p times as likely as the most likely one")
    add("--min-tokens", type=int, default=0, help="nothing ends an output before it has as many")
    add("--n", type=options.count, default=1, help="answers to each prompt (default: 1)")
    add("--presence-penalty", type=float, default=0.0, help="less of each token that the output has")
    add("--frequency-penalty", type=float, default=0.0, help="the same, times how often it has it")
    add("--repetition-penalty", type=float, default=1.0, help="above 1: less of the tokens of prompt and output")
    add("--bad-words", action="append", metavar="TEXT", help="no output contains it; may be given several times")
    add("--regex", metavar="TEXT", help="every output matches this regular expression as a whole")
    add("--seed", type=int, default=0, help="of the sampling (default: 0); a prompt's text depends on it and its place")
    options.add_template_option(add)
    options.add_length_option(add)


def add_engine_options(parser: options.Parser) -> None:
    """What runs a job, and where, for `llm_arguments`."""
    add_budget_options(parser)
    options.add_machine_options(parser)
    options.add_cache_option(parser)
    path = "folder of the weights; _DUMMY_ for random weights of the named size, without download"
    parser.group(MACHINE)("--path", help=path)
    parser.group(PLACEMENT)("--policy", help="a policy as JSON, or auto (default): the fastest found for this machine")
    options.add_policy_options(parser)


def make_params(args: argparse.Namespace):
    """The `SamplingParams` of what a row does not set itself."""
    from h2o_flexgen.engine.sampling import SamplingParams

    return SamplingParams(max_tokens=args.gen_len, **{name: getattr(args, name) for name in SAMPLED})


def llm_arguments(args: argparse.Namespace, num_prompts: int | None = None) -> dict:
    """The arguments of `LLM`. `num_prompts`: of the job, if it is known. Raises UserError for options that contradict
    each other."""
    losses = make_losses(args)
    policy = options.make_policy(args, num_prompts)
    budget = make_budget(args, losses)  # before the other options: it may set one
    found = {name: getattr(args, name) for name in (PASSED if policy else [*PASSED, *SEARCHED])}
    found |= {"policy": policy or args.policy or "auto", "kv_budget": budget, "losses": losses}
    return found | {"min_hh_ratio": args.min_hh_ratio or MIN_HH_RATIO, "observer": planned(args)}


@contextmanager
def open_llm(args: argparse.Namespace, arguments: dict) -> Iterator:
    """The `LLM` of a command with these `llm_arguments`, which warns of measurements of another model."""
    with make_llm(args, arguments) as llm:
        llm.expect_len = args.expect_len
        weights = weights_text(llm.model.compress_weight, llm.model.compute)
        check_model(arguments["losses"], args.kv_rule, llm.model.name, weights)
        yield llm


def make_llm(args: argparse.Namespace, arguments: dict):
    """An `LLM`, or one whose jobs run on workers if the command has options for them, and one is given."""
    if getattr(args, "workers", None) is None and getattr(args, "ray", None) is None:
        from h2o_flexgen.llm import LLM

        return LLM(**arguments)
    from h2o_flexgen.jobs.cluster import Workers
    from h2o_flexgen.jobs.ray import RayLLM

    return RayLLM(Workers(args.workers, args.ray, args.worker_cpus, args.worker_mem), **arguments)


def resumed(job, args: argparse.Namespace) -> dict:
    """The arguments of `LLM` with which a `Job` began, for those that the options leave open."""
    return job.matmuls | ({"dtype": job.dtype} if job.dtype and args.dtype == "auto" else {})


def rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.1f}" if tokens_per_s >= 10 else f"{tokens_per_s:.2f}"


def describe_workers(report: dict) -> str:
    """The report of a job that several workers have run, for humans."""
    work = report["workload"]
    total = report["total"]
    prompts = f"{work['num_prompts']} prompts of up to {work['prompt_len']} tokens, {work['gen_len']} tokens each"
    lines = [f"model      {report['model']}, {report['dtype']}", f"workload   {prompts}"]
    for n, worker in enumerate(report["workers"]):
        died = f", died {worker['deaths']} times" if worker["deaths"] else ""
        done = f"{worker['rows']} rows, {worker['generated_tokens']} tokens in {worker['seconds']:.2f} s{died}"
        lines.append(f"{f'worker {n}':<11}on {worker['host']}: {done}")
    speed = f"{rate(total['tokens_per_s'])} tokens/s"
    lines.append(f"total      {total['seconds']:.2f} s, {total['generated_tokens']} tokens, {speed}")
    return "\n".join(lines)


def describe(report: dict) -> str:
    """The report for humans."""
    if "workers" in report:
        return describe_workers(report)
    policy = Policy(**report["policy"])
    cuda = report["device"].startswith("cuda")
    predicted = report.get("predicted")
    model = name_at(report["model"], report.get("model_revision"))
    job = (model, report["dtype"], report["device"], report["workload"], describe_policy(policy, cuda))
    lines = [describe_job(*job, report["kv_budget"], report.get("compress_cache"))]
    if "weights" in report:
        blocks = ", blocks as stored" if report.get("in_blocks") else ""
        lines.append(f"weights    {', '.join(report['weights'])}; {report.get('compute', 'exact')} matmuls{blocks}")
    for name in ("prefill", "decode"):
        forecast = f" (predicted {predicted[f'{name}_seconds']:.2f} s)" if predicted else ""
        phase = report[name]
        lines.append(f"{name:<11}{phase['seconds']:.2f} s, {rate(phase['tokens_per_s'])} tokens/s{forecast}")
    total = report["total"]
    forecast = f" (predicted {rate(predicted['tokens_per_s'])}, bound by {predicted['bound_by']})" if predicted else ""
    speed = f"{rate(total['tokens_per_s'])} tokens/s{forecast}"
    lines.append(f"total      {total['seconds']:.2f} s, {total['generated_tokens']} tokens, {speed}")
    peaks = by_memory(report["peak_memory_bytes"], cuda)
    plans = by_memory(report["planned_memory_bytes"], cuda)
    used = [name for name in peaks if peaks[name] or plans[name]]
    memory = [f"{name} peak {gib(peaks[name])}, planned {gib(plans[name])}" for name in used]
    lines.append("memory     " + "; ".join(memory))
    moved = by_link(report["bytes_moved"], cuda)
    if any(moved.values()):
        lines.append("moved      " + ", ".join(f"{link} {gib(nbytes)}" for link, nbytes in moved.items() if nbytes))
    stalls = report["stall_seconds"]
    lines.append(f"waited     {stalls['weights']:.2f} s for weights, {stalls['cache']:.2f} s for cache")
    return "\n".join(lines)


def show(tokenizer, outputs: list) -> str:
    """The first three completions, each after the end of its prompt, or of the last question of a conversation."""
    parts = []
    bold = sys.stdout is not None and sys.stdout.isatty()  # None: it is closed
    for output in [o for o in outputs if o.error is None][:3]:
        done = output.outputs[0]
        if tokenizer is None:
            parts.append(f"--- prompt {output.index}: {done.token_ids}")
            continue
        text = f"\033[1m{done.text}\033[0m" if bold else f"⟦{done.text}⟧"
        if isinstance(output.prompt, list):
            asked = _last_lines(last_question(output.prompt)[-400:])
            parts.append(f"--- prompt {output.index} asks, and the model answers:\n{asked}\n{text}")
        else:
            tail = _last_lines(tokenizer.decode(output.prompt_token_ids[-60:], skip_special_tokens=True))
            parts.append(f"--- prompt {output.index} ends, and the model goes on:\n{tail}{text}")
    return "\n".join(parts)


def last_question(messages: list[dict]) -> str:
    """The user's last message; without one the last message of all."""
    asked = [message for message in messages if message["role"] == "user"]
    return content_text((asked or messages)[-1]["content"])


def _last_lines(text: str) -> str:
    return "\n".join(text.split("\n")[-6:])


def run(args: argparse.Namespace) -> None:
    check(args)
    args.structured = structured(args)

    from h2o_flexgen.jobs.job import Job

    params = make_params(args)
    with nullcontext() if args.output_file is None else Job(journal_of(args.output_file), args.restart) as job:
        rows = None if args.input_file is None else read_rows(args.input_file, before=job and job.known)
        arguments = llm_arguments(args, len(rows) if rows else args.num_prompts)
        if job is not None:
            arguments |= resumed(job, args)
        with open_llm(args, arguments) as llm:
            rows = rows_of_builtin_text(llm, args) if rows is None else rows
            if job is None:
                show_texts(llm, args, rows, params)
            else:
                job.run(llm, rows, params, args.retry_errors)
                export(args.output_file)
                finish(llm, args, job.failures)


def structured(args: argparse.Namespace):
    """What every output must match, unless its row says it. Raises UserError for several, and for a schema that cannot
    be read or used."""
    from h2o_flexgen.engine.structured import Structured

    schema = None if args.json_schema is None else read_json("--json-schema", args.json_schema)
    given = {"json": schema, "choice": args.choice, "regex": args.regex}
    if all(value is None for value in given.values()):
        return None
    found = Structured(**given)
    found.check()
    return found


def check(args: argparse.Namespace) -> None:
    """Raises UserError for options that contradict each other."""
    for name in ("num_prompts", "prompt_len"):
        if args.input_file is not None and getattr(args, name) is not None:
            raise UserError(f"{options.option(name)} is for built-in prompts; --input-file brings its own")
    check_policy(args)
    for name in ("worker_cpus", "worker_mem"):
        if getattr(args, name) is not None and args.workers is None and args.ray is None:
            raise UserError(f"{options.option(name)} is for a job with --workers")
    for name in ("restart", "retry_errors"):
        if getattr(args, name) and args.output_file is None:
            raise UserError(f"{options.option(name)} is for a job with an --output-file")
    options.check_files(
        args, reads=("input_file", "json_schema", "policy", "hardware", "quality"), writes=("output_file", "report")
    )
    if args.output_file is not None:
        check_form(args.output_file)


def check_policy(args: argparse.Namespace) -> None:
    """Raises UserError for two policies."""
    if args.percent is not None and args.policy is not None:
        raise UserError("--percent contradicts --policy: give one of the two")


def planned(args: argparse.Namespace):
    """An observer that prints the policy before it is run."""
    from h2o_flexgen.engine.observer import Observer

    class Planned(Observer):
        def on_plan(self, choice) -> None:
            if choice.curve:
                print(describe_curve(choice.curve), file=sys.stderr)
            if args.verbose:
                print(f"policy: {choice.policy.to_json()}\n{choice.plan.describe()}", file=sys.stderr)

    return Planned()


def show_texts(llm, args: argparse.Namespace, rows: Rows, params) -> None:
    """Run a job without an output file."""
    from h2o_flexgen.jobs.admission import request

    # a bad row keeps its place: the outputs of the others must not depend on it
    prompts, sampling, keys = zip(*((*request(row, params, llm.model), row.key) for row in rows))
    outputs = llm.generate(prompts, sampling, keys=keys, skip_errors=args.input_file is not None)
    failures = Failures()
    for output in outputs:
        failures.note(output.index, output.error)
    if failures.count and not llm.report:
        raise UserError(f"none of the {len(outputs)} rows of --input-file can be run; {failures.first}")
    finish(llm, args, failures, show(llm.tokenizer, outputs))


def rows_of_builtin_text(llm, args: argparse.Namespace) -> Rows:
    """The rows of a job without an input file."""
    length = options.prompt_len(args, llm.spec.positions, llm.position_rolling)
    llm.spec.check_length(length, args.gen_len, llm.position_rolling)
    return builtin_rows(llm.tokenizer, llm.spec.vocab, options.num_prompts(args, llm.policy), length)


def finish(llm, args: argparse.Namespace, failures: Failures, texts: str | None = None) -> None:
    """Print what a finished job did, and write its report."""
    if failures.count:
        print(f"{failures.count} rows could not be run; {failures.first}", file=sys.stderr)
    if not llm.report:  # there was nothing left to do
        return
    try:
        if texts is not None:
            print_text(texts)
        print_text(describe(llm.report))
    finally:
        if args.report is not None:
            write_text("--report", args.report, json.dumps(llm.report, indent=2) + "\n")
