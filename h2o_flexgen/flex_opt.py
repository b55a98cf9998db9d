"""Command line: generate text with a model that need not fit into memory.

python -m h2o_flexgen.flex_opt --model facebook/opt-30b --hh-ratio 0.2
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from h2o_flexgen import cli
from h2o_flexgen.errors import UserError
from h2o_flexgen.files import check_writable, write_text
from h2o_flexgen.jobs.builtin import builtin_prompts
from h2o_flexgen.jobs.input import read_prompts
from h2o_flexgen.jobs.output import OutputFile, row_of
from h2o_flexgen.planning.budget import MIN_HH_RATIO
from h2o_flexgen.policy import Policy, gib


def make_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m h2o_flexgen.flex_opt",
        description="Generate text in large batches with a model that need not fit into memory.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("model").add_argument
    add("--model", help="folder or Hugging Face name; the demo model if left out")
    add("--path", help="folder of the weights; _DUMMY_ for random weights of the named size, without download")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    add(
        "--dtype",
        default="auto",
        help="auto (fp16; on a CPU bf16 or fp32), float16, bfloat16, float32",
    )

    add = parser.add_argument_group("prompts and outputs").add_argument
    add("--input-file", help='JSON lines, each {"prompt": "text"} or {"prompt_token_ids": [..]}')
    add("--output-file", help='JSON lines in input order; what an interrupt cut short says "abort"')
    add("--num-prompts", type=int, help="how many built-in prompts (default: one block, or 4 if that is searched)")
    add("--prompt-len", type=int, help="tokens of a built-in prompt (default: 512)")
    add("--gen-len", type=int, default=32, help="output tokens per prompt (default: 32)")
    add("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    add("--temperature", type=float, default=0.0, help="0 takes the most likely token")
    add("--top-k", type=int, default=0, help="sample among the k most likely tokens; 0: all")
    add("--top-p", type=float, default=1.0, help="sample among the most likely tokens that reach p together")
    add("--seed", type=int, default=0, help="of the sampling (default: 0); a prompt's text depends on it and its place")
    add("--report", help="write the measurements to this file as JSON")
    add("--verbose", action="store_true", help="print the policy and the memory plan before the run")

    cli.add_budget_options(parser)
    add = parser.add_argument_group("placement").add_argument
    add("--policy", help="a policy as JSON, or auto (default): what the search finds fastest on this machine")
    add("--hardware", help="for auto: a profile by python -m h2o_flexgen.hardware (default: measured once)")
    add("--max-latency", type=float, metavar="SECONDS", help="for auto: the most that a block may take")
    add(
        "--percent",
        nargs=6,
        type=float,
        metavar="P",
        help="weights gpu cpu, cache gpu cpu, activations gpu cpu; the rest is on disk",
    )
    add("--gpu-batch-size", type=int, help="sequences per batch (default: searched; with --percent up to 32)")
    add("--num-gpu-batches", type=int, help="batches per block (default: searched; with --percent 1)")
    add(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="move data while computing (default: on)",
    )
    add(
        "--cpu-cache-compute",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="attention on the CPU for KV blocks in its RAM (default: searched; with --percent off)",
    )
    for what in ("weight", "cache"):
        add(f"--compress-{what}", action="store_true", help="not built yet: ends with an error")
    cli.add_limit_options(add)
    add("--offload-dir", help="folder for what is offloaded to disk (default: under the user's cache folder)")
    return parser


def make_policy(args: argparse.Namespace, num_prompts: int | None) -> Policy | str:
    """The policy that the options spell out, the file it is in, or "auto"."""
    if args.policy not in (None, "auto"):
        for option in ("percent", "gpu_batch_size", "num_gpu_batches", "overlap", "cpu_cache_compute", "max_latency"):
            if getattr(args, option) is not None:
                raise UserError(f"--{option.replace('_', '-')} contradicts --policy {args.policy}: give one of the two")
        return args.policy
    if args.percent is None:
        return "auto"
    for option in ("policy", "max_latency"):
        if getattr(args, option) is not None:
            raise UserError(f"--percent contradicts --{option.replace('_', '-')}: give one of the two")
    return Policy(
        gpu_batch_size=args.gpu_batch_size if args.gpu_batch_size is not None else min(32, num_prompts or 4),
        num_gpu_batches=args.num_gpu_batches if args.num_gpu_batches is not None else 1,
        percent=tuple(args.percent),
        overlap=args.overlap is not False,
        cpu_cache_compute=bool(args.cpu_cache_compute),
    )


def rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.1f}" if tokens_per_s >= 10 else f"{tokens_per_s:.2f}"


def describe(report: dict) -> str:
    """The report for people."""
    job, policy, predicted = report["workload"], Policy(**report["policy"]), report.get("predicted")
    lines = [
        f"model      {report['model']}, {report['dtype']} on {report['device']}",
        f"workload   {job['num_prompts']} prompts of up to {job['prompt_len']} tokens, {job['gen_len']} tokens each",
        f"policy     {policy.gpu_batch_size} x {policy.num_gpu_batches}, percent {cli.describe_percent(policy)}, "
        f"overlap {'on' if policy.overlap else 'off'}" + (", attention on the CPU" if policy.cpu_cache_compute else ""),
        f"KV cache   {cli.describe_budget(report['kv_budget'])}",
    ]
    for name in ("prefill", "decode"):
        beside = f" (predicted {predicted[f'{name}_seconds']:.2f} s)" if predicted else ""
        phase = report[name]
        lines.append(f"{name:<11}{phase['seconds']:.2f} s, {rate(phase['tokens_per_s'])} tokens/s{beside}")
    total = report["total"]
    beside = f" (predicted {rate(predicted['tokens_per_s'])}, bound by {predicted['bound_by']})" if predicted else ""
    speed = f"{rate(total['tokens_per_s'])} tokens/s{beside}"
    lines.append(f"total      {total['seconds']:.2f} s, {total['generated_tokens']} tokens, {speed}")
    peaks, plans = report["peak_memory_bytes"], report["planned_memory_bytes"]
    used = [tier for tier in peaks if peaks[tier] or plans[tier]]
    lines.append("memory     " + "; ".join(f"{t} peak {gib(peaks[t])}, planned {gib(plans[t])}" for t in used))
    moved = {link.replace("_", " "): nbytes for link, nbytes in report["bytes_moved"].items() if nbytes}
    if moved:
        lines.append("moved      " + ", ".join(f"{link} {gib(nbytes)}" for link, nbytes in moved.items()))
    stalls = report["stall_seconds"]
    lines.append(f"waited     {stalls['weights']:.2f} s for weights, {stalls['cache']:.2f} s for cache")
    return "\n".join(lines)


def show(llm, outputs: list, most: int = 3) -> str:
    """The first few completions, each after the end of its prompt."""
    parts = []
    bold = sys.stdout and sys.stdout.isatty()
    for output in [o for o in outputs if o.error is None and o.outputs][:most]:
        if llm.tokenizer is None:
            parts.append(f"--- prompt {output.index}: {output.outputs[0].token_ids}")
            continue
        prompt = llm.tokenizer.decode(output.prompt_token_ids[-60:], skip_special_tokens=True)
        tail = "\n".join(prompt.split("\n")[-6:])
        text = f"\033[1m{output.outputs[0].text}\033[0m" if bold else f"⟦{output.outputs[0].text}⟧"
        parts.append(f"--- prompt {output.index} ends, and the model goes on:\n{tail}{text}")
    return "\n".join(parts)


def run(args: argparse.Namespace) -> None:
    if args.compress_weight or args.compress_cache:
        raise UserError("compression of weights and cache is not built yet: leave --compress-weight and -cache out")
    cli.check_sizes(args)
    for name in ("num_prompts", "prompt_len"):
        if args.input_file is not None and getattr(args, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} is for built-in prompts; --input-file brings its own")
    cli.check_distinct(args, "--input-file", "--policy", "--hardware", "--output-file", "--report")
    rows = read_prompts(args.input_file) if args.input_file is not None else None
    policy, budget = make_policy(args, len(rows) if rows else args.num_prompts), cli.make_budget(args)
    output_file = OutputFile(args.output_file) if args.output_file is not None else None
    if args.report is not None:
        check_writable("--report", Path(args.report))

    from h2o_flexgen.engine.observer import Observer
    from h2o_flexgen.engine.sampling import SamplingParams
    from h2o_flexgen.llm import LLM

    params = SamplingParams(args.temperature, args.top_k, args.top_p, args.gen_len, args.ignore_eos, args.seed)

    class Planned(Observer):
        """Prints the policy before it is run."""

        def on_plan(self, choice) -> None:
            if choice.curve:
                print(cli.describe_curve(choice.curve), file=sys.stderr)
            if args.verbose:
                print(f"policy: {choice.policy.to_json()}\n{choice.plan.describe()}", file=sys.stderr)

    names = ("gpu_batch_size", "num_gpu_batches", "overlap", "cpu_cache_compute", "max_latency")
    searched = {name: getattr(args, name) for name in names} if policy == "auto" else {}
    with LLM(
        args.model,
        policy,
        budget,
        args.device,
        args.dtype,
        path=args.path,
        offload_dir=args.offload_dir,
        **{f"{tier}_mem": nbytes for tier, nbytes in cli.limits(args).items()},
        hardware=args.hardware,
        min_hh_ratio=args.min_hh_ratio or MIN_HH_RATIO,
        observer=Planned(),
        **searched,
    ) as llm:
        if rows is None:
            block = (args.gpu_batch_size or 4) * (args.num_gpu_batches or 1)
            block = block if policy == "auto" else llm.policy.block_size
            length = args.prompt_len or min(512, max(1, llm.spec.positions - args.gen_len))
            llm.spec.check_length(length, args.gen_len)
            rows = builtin_prompts(llm.tokenizer, llm.spec.vocab, args.num_prompts or block, length)
        _generate(llm, rows, params, output_file, args)


def _generate(llm, rows: list, params, output_file: OutputFile | None, args: argparse.Namespace) -> None:
    def keep(output) -> None:
        if output_file is not None:
            output_file.add(row_of(output.index, output))

    try:
        # a bad row keeps its place: what the others get must not depend on it
        outputs = llm.generate(rows, params, skip_errors=args.input_file is not None, on_output=keep)
        if output_file is not None:
            llm.close()  # what takes the space may be the offload folder
            output_file.finish(whole=True)
    except (KeyboardInterrupt, BrokenPipeError):
        if output_file is not None:
            output_file.finish(whole=False)
        raise
    except UserError as e:
        if output_file is not None and output_file.rows and str(output_file.partial) not in str(e):
            raise UserError(f"{e}; {output_file.where()}") from None
        raise
    except Exception:
        if output_file is not None:
            output_file.flush()  # the offload folder, which may have taken the space, has gone
        raise
    errors = [output for output in outputs if output.error is not None]
    if errors and not llm.report:
        raise UserError(f"none of the {len(rows)} rows can be run; row {errors[0].index}: {errors[0].error}")
    if errors:
        cli.warn(f"{len(errors)} rows could not be run; row {errors[0].index}: {errors[0].error}")
    try:
        cli.say("" if output_file is not None else show(llm, outputs) + "\n", describe(llm.report) + "\n")
    finally:
        if args.report is not None:
            write_text(args.report, json.dumps(llm.report, indent=2) + "\n", f"--report {args.report}")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, as `cli.main` says."""
    return cli.main(make_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
