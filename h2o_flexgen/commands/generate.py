"""Command line: generate text with a model that need not fit into memory.

h2o-flexgen generate --model facebook/opt-30b --hh-ratio 0.2
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext

from h2o_flexgen.commands import options
from h2o_flexgen.engine.messages import content_text
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.input import Rows, builtin_rows, read_rows
from h2o_flexgen.jobs.output import Failures
from h2o_flexgen.planning.budget import MIN_HH_RATIO
from h2o_flexgen.planning.losses import weights_text
from h2o_flexgen.policy import Policy, gib
from h2o_flexgen.utils.files import write_text

#: options that LLM takes as they are
PASSED = "model device dtype compress_weight compress_cache compute path offload_dir gpu_mem cpu_mem disk_mem".split()
PASSED += ["hardware", "max_latency", "chat_template_kwargs"]
#: options that SamplingParams takes as they are
SAMPLED = "temperature top_k top_p ignore_eos seed stop stop_token_ids".split()
#: options of a search, and of the policy that --percent makes
SEARCHED = "gpu_batch_size num_gpu_batches prefill_tokens overlap cpu_cache_compute".split()


def make_parser(prog: str = "python -m h2o_flexgen.flex_opt") -> argparse.ArgumentParser:
    parser = options.Parser(prog, "Generate text in large batches with a model that need not fit into memory.")
    add = parser.add_argument_group("model and machine").add_argument
    options.add_model_options(add)
    add("--path", help="folder of the weights; _DUMMY_ for random weights of the named size, without download")
    options.add_machine_options(add)
    options.add_cache_option(add)

    add = parser.add_argument_group("prompts and outputs").add_argument
    rows = '{"prompt": "text"}, {"prompt_token_ids": [..]} or {"messages": [..]}'
    add("--input-file", help=f"JSON lines, may be gzipped: {rows}, or OpenAI's batch format; - is stdin")
    add("--output-file", help="JSON lines in input order; if it has some of them already, the job goes on")
    add("--restart", action="store_true", help="begin anew; the old output file is kept as FILE~")
    add("--retry-errors", action="store_true", help="run the rows again that failed in an earlier run")
    add("--num-prompts", type=options.count, help="built-in prompts (default: one block, or 4 if that is searched)")
    add("--prompt-len", type=options.count, help="tokens of a built-in prompt (default: 512)")
    add("--gen-len", type=options.count, default=32, help="output tokens of a row that says nothing else (default: 32)")
    add("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    add("--stop", action="append", metavar="TEXT", help="end a text before this one; may be given several times")
    add("--stop-token-ids", type=int, nargs="+", metavar="ID", help="end a text at one of these tokens")
    options.add_template_option(add)
    add("--temperature", type=float, default=0.0, help="0 takes the most likely token")
    add("--top-k", type=int, default=0, help="sample among the k most likely tokens; 0: all")
    add("--top-p", type=float, default=1.0, help="sample among the most likely tokens that reach p together")
    add("--seed", type=int, default=0, help="of the sampling (default: 0); a prompt's text depends on it and its place")
    add("--report", help="write the measurements to this file as JSON")
    add("--verbose", action="store_true", help="print the policy and the memory plan before the run")

    options.add_budget_options(parser)
    add = parser.add_argument_group("policy; what is not given is searched").add_argument
    add("--policy", help="a policy as JSON, or auto (default): the fastest found for this machine")
    options.add_policy_options(add)
    options.add_length_option(add)
    return parser


def rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.1f}" if tokens_per_s >= 10 else f"{tokens_per_s:.2f}"


def describe(report: dict) -> str:
    """The report for people."""
    policy = Policy(**report["policy"])
    predicted = report.get("predicted")
    model = options.name_at(report["model"], report.get("model_revision"))
    cache = (report["kv_budget"], report.get("compress_cache"))
    lines = [options.describe_job(model, report["dtype"], report["device"], report["workload"], policy, *cache)]
    if "weights" in report:
        blocks = ", 4 bits as they are stored" if report.get("in_blocks") else ""
        lines.append(f"weights    {', '.join(report['weights'])}; {report.get('compute', 'exact')} matmuls{blocks}")
    for name in ("prefill", "decode"):
        forecast = f" (predicted {predicted[f'{name}_seconds']:.2f} s)" if predicted else ""
        phase = report[name]
        lines.append(f"{name:<11}{phase['seconds']:.2f} s, {rate(phase['tokens_per_s'])} tokens/s{forecast}")
    total = report["total"]
    forecast = f" (predicted {rate(predicted['tokens_per_s'])}, bound by {predicted['bound_by']})" if predicted else ""
    speed = f"{rate(total['tokens_per_s'])} tokens/s{forecast}"
    lines.append(f"total      {total['seconds']:.2f} s, {total['generated_tokens']} tokens, {speed}")
    peaks = report["peak_memory_bytes"]
    plans = report["planned_memory_bytes"]
    used = [tier for tier in peaks if peaks[tier] or plans[tier]]
    lines.append("memory     " + "; ".join(f"{t} peak {gib(peaks[t])}, planned {gib(plans[t])}" for t in used))
    moved = {link.replace("_", " "): nbytes for link, nbytes in report["bytes_moved"].items() if nbytes}
    if moved:
        lines.append("moved      " + ", ".join(f"{link} {gib(nbytes)}" for link, nbytes in moved.items()))
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
    """The last message of the user, or if there is none the last one."""
    asked = [message for message in messages if message["role"] == "user"]
    return content_text((asked or messages)[-1]["content"])


def _last_lines(text: str) -> str:
    return "\n".join(text.split("\n")[-6:])


def run(args: argparse.Namespace) -> None:
    check(args)
    rows = read_rows(args.input_file) if args.input_file is not None else None
    losses = options.make_losses(args)
    policy = options.make_policy(args, len(rows) if rows else args.num_prompts)
    budget = options.make_budget(args, losses)

    from h2o_flexgen.engine.sampling import SamplingParams
    from h2o_flexgen.jobs.job import Job
    from h2o_flexgen.llm import LLM

    params = SamplingParams(max_tokens=args.gen_len, **{name: getattr(args, name) for name in SAMPLED})
    arguments = {name: getattr(args, name) for name in (PASSED if policy else PASSED + SEARCHED)}
    arguments |= {"min_hh_ratio": args.min_hh_ratio or MIN_HH_RATIO, "losses": losses, "observer": planned(args)}
    with nullcontext() if args.output_file is None else Job(args.output_file, args.restart) as job:
        if job is not None and job.dtype and args.dtype == "auto":
            arguments["dtype"] = job.dtype
        if job is not None:
            arguments["in_blocks"] = job.in_blocks
        with LLM(policy=policy or args.policy or "auto", kv_budget=budget, **arguments) as llm:
            llm.expect_len = args.expect_len
            weights = weights_text(llm.model.compress_weight, llm.model.compute)
            options.check_model(losses, args.kv_rule, llm.model.name, weights)
            rows = made_up_rows(llm, args) if rows is None else rows
            if job is None:
                show_texts(llm, args, rows, params)
            else:
                job.run(llm, rows, params, args.retry_errors)
                tell(llm, args, job.failures)


def check(args: argparse.Namespace) -> None:
    """Raises UserError for options that contradict each other."""
    for name in ("num_prompts", "prompt_len"):
        if args.input_file is not None and getattr(args, name) is not None:
            raise UserError(f"{options.option(name)} is for built-in prompts; --input-file brings its own")
    if args.percent is not None and args.policy is not None:
        raise UserError("--percent contradicts --policy: give one of the two")
    for name in ("restart", "retry_errors"):
        if getattr(args, name) and args.output_file is None:
            raise UserError(f"{options.option(name)} is for a job with an --output-file")
    options.check_files(args, reads=("input_file", "policy", "hardware", "quality"), writes=("output_file", "report"))


def planned(args: argparse.Namespace):
    """An observer that prints the policy before it is run."""
    from h2o_flexgen.engine.observer import Observer

    class Planned(Observer):
        def on_plan(self, choice) -> None:
            if choice.curve:
                print(options.describe_curve(choice.curve), file=sys.stderr)
            if args.verbose:
                print(f"policy: {choice.policy.to_json()}\n{choice.plan.describe()}", file=sys.stderr)

    return Planned()


def show_texts(llm, args: argparse.Namespace, rows: Rows, params) -> None:
    """Run a job without an output file."""
    from h2o_flexgen.jobs.admission import request

    # a bad row keeps its place: what the others get must not depend on it
    prompts, sampling, keys = zip(*((*request(row, params, llm.model), row.key) for row in rows))
    outputs = llm.generate(prompts, sampling, keys=keys, skip_errors=args.input_file is not None)
    failures = Failures()
    for output in outputs:
        failures.note(output.index, output.error)
    if failures.count and not llm.report:
        raise UserError(f"none of the {len(outputs)} rows of --input-file can be run; {failures.first}")
    tell(llm, args, failures, show(llm.tokenizer, outputs))


def made_up_rows(llm, args: argparse.Namespace) -> Rows:
    """The rows of a job without an input file."""
    length = options.prompt_len(args, llm.spec.positions, llm.position_rolling)
    llm.spec.check_length(length, args.gen_len, llm.position_rolling)
    return builtin_rows(llm.tokenizer, llm.spec.vocab, options.num_prompts(args, llm.policy), length)


def tell(llm, args: argparse.Namespace, failures: Failures, texts: str | None = None) -> None:
    """Report a job that has ended."""
    if failures.count:
        print(f"{failures.count} rows could not be run; {failures.first}", file=sys.stderr)
    if not llm.report:  # there was nothing left to do
        return
    try:
        if texts is not None:
            options.say(texts)
        options.say(describe(llm.report))
    finally:
        if args.report is not None:
            write_text("--report", args.report, json.dumps(llm.report, indent=2) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, as `options.main` says."""
    return options.main(make_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
