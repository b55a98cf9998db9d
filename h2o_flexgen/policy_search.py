"""Command line: find the policy with the highest predicted throughput, or predict a given one. Runs no model.

python -m h2o_flexgen.policy_search --model facebook/opt-30b --prompt-len 512 --gen-len 32 --hh-ratio 0.2
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from h2o_flexgen import cli
from h2o_flexgen.errors import UserError
from h2o_flexgen.files import check_writable, write_text
from h2o_flexgen.kernels.linear import dtype_name
from h2o_flexgen.models.registry import known_names, named_spec, read_spec, stored_dtype
from h2o_flexgen.models.spec import ModelSpec
from h2o_flexgen.offload import memory
from h2o_flexgen.offload.device import Device
from h2o_flexgen.offload.disk import default_root
from h2o_flexgen.planning.budget import MIN_HH_RATIO, BudgetPoint, largest_free
from h2o_flexgen.planning.memory import ModelData, Resources
from h2o_flexgen.planning.planner import Choice, Planner, check_cpu_cap
from h2o_flexgen.planning.profile import Profile
from h2o_flexgen.planning.search import Constraints
from h2o_flexgen.policy import TIERS, KVBudget, Policy, gib
from h2o_flexgen.profiling.kernels import job_dtype
from h2o_flexgen.profiling.measure import load_or_measure
from h2o_flexgen.sizes import Workload

#: a tier of which this much is needed keeps the block from growing
_FULL = 0.97
#: without --num-prompts the job is long enough for any block
_MANY = 4096


def make_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m h2o_flexgen.policy_search",
        description="Find the policy with the highest predicted throughput for a model, a job and a machine.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("job").add_argument
    add("--model", required=True, help="a built-in name, as facebook/opt-30b, or a folder with a config.json")
    add("--prompt-len", type=int, default=512, help="tokens of the longest prompt (default: 512)")
    add("--gen-len", type=int, default=32, help="output tokens per prompt (default: 32)")
    add("--num-prompts", type=int, help="prompts of the job (default: as many as the largest block takes)")
    cli.add_budget_options(parser)
    add = parser.add_argument_group("machine").add_argument
    add("--hardware", help="a profile by python -m h2o_flexgen.hardware (default: this machine, measured once)")
    cli.add_limit_options(add)
    add("--device", default="auto", help="of this machine: auto, cpu, cuda, cuda:N")
    add("--dtype", default="auto", help="of this machine: auto, float16, bfloat16, float32")
    add("--offload-dir", help="folder whose disk counts, of this machine")
    add = parser.add_argument_group("policy; what is given is not searched").add_argument
    add("--gpu-batch-size", type=int, help="sequences per batch")
    add("--num-gpu-batches", type=int, help="batches per block")
    add("--percent", nargs=6, type=float, metavar="P", help="with both batch sizes: only predict this policy")
    on_off = argparse.BooleanOptionalAction
    add("--cpu-cache-compute", action=on_off, help="attention on the CPU")
    add("--overlap", action=on_off, default=True, help="move data while computing (default: on)")
    add("--max-latency", type=float, metavar="SECONDS", help="the most that a block may take")
    add = parser.add_argument_group("output").add_argument
    add("-o", "--output", help="write the result to this file as JSON")
    add("--json", action="store_true", help="print the result as JSON")
    add("--plot", help="draw the curve of --hh-ratio auto to this PNG file")
    return parser


def slots_of(choice: Choice) -> dict[str, int] | None:
    rule = choice.rule
    return None if rule.budget is None else {"heavy": rule.heavy, "recent": rule.recent}


def result_of(choice: Choice, command: str) -> dict:
    """The result as plain data."""
    p, plan = choice.prediction, choice.plan
    return {
        "policy": asdict(choice.policy),
        "kv_budget": slots_of(choice),
        "predicted": {
            "prefill_seconds": p.prefill_seconds,
            "decode_seconds": p.decode_seconds,
            "tokens_per_s": p.block_tokens_per_s,
        },
        "memory_bytes": {tier: {"needed": plan.needed(tier), "limit": plan.limits[tier]} for tier in TIERS},
        "bound_by": p.bound_by,
        "command": command,
    }


def describe(choice: Choice, title: str, command: str) -> str:
    """The result for people."""
    policy, p, plan = choice.policy, choice.prediction, choice.plan
    full = [tier for tier in TIERS if plan.needed(tier) > _FULL * plan.limits[tier]]
    room = (
        f"; no room for a larger block on {' and '.join(full)}" if full and p.num_prompts >= policy.block_size else ""
    )
    lines = [
        title,
        f"policy     {policy.gpu_batch_size} x {policy.num_gpu_batches}, percent {cli.describe_percent(policy)}"
        + (", attention on the CPU" if policy.cpu_cache_compute else "")
        + ("" if policy.overlap else ", no overlap"),
        f"KV cache   {cli.describe_budget(slots_of(choice))}",
        f"prefill    {p.prefill_seconds:.1f} s of a block",
        f"decode     {p.decode_seconds:.1f} s of a block",
        f"predicted  {p.block_tokens_per_s:.2f} tokens/s",
        f"bound by   {p.bound_by}{room}",
    ]
    busy = [f"{name} {seconds:.1f} s" for name, seconds in p.busy[:4] if seconds]
    lines.append(f"busy       {', '.join(busy)}")
    lines += [f"{tier:<11}{gib(plan.needed(tier))} of {gib(plan.limits[tier])}" for tier in TIERS]
    if plan.shared:
        lines.append(f"RAM        {gib(plan.needed('ram'))} of {gib(plan.limits['ram'])}, gpu and cpu together")
    return "\n".join([*lines, f"run it     {command}"])


def command_for(args: argparse.Namespace, choice: Choice, num_prompts: int, dtype: str) -> str:
    """The flex_opt command that runs a policy."""
    policy, budget = choice.policy, choice.kv_budget
    options = {"model": args.model, "prompt_len": args.prompt_len, "gen_len": args.gen_len, "num_prompts": num_prompts}
    options |= {} if budget is None else asdict(budget)
    options |= {"gpu_batch_size": policy.gpu_batch_size, "num_gpu_batches": policy.num_gpu_batches}
    options |= {"percent": policy.percent, "dtype": dtype}
    options |= {name: getattr(args, name) for name in ("device", "offload_dir", "gpu_mem", "cpu_mem", "disk_mem")}
    words = ["python", "-m", "h2o_flexgen.flex_opt"]
    for name, value in options.items():
        if value not in (None, "auto"):
            words.append(f"--{name.replace('_', '-')}")
            words += [f"{x:g}" for x in value] if name == "percent" else [str(value)]
    words += ["--cpu-cache-compute"] * policy.cpu_cache_compute + ["--no-overlap"] * (not policy.overlap)
    return shlex.join(words)


def run(args: argparse.Namespace) -> None:
    cli.check_sizes(args)
    budget = cli.make_budget(args)
    policy = given_policy(args)
    if policy is not None and budget == "auto":
        raise UserError("--percent and --hh-ratio auto contradict each other: give one of the two")
    cli.check_distinct(args, "hardware", "output", "plot")
    if args.plot is not None and args.hh_ratio != "auto":
        raise UserError("--plot draws the curve of --hh-ratio auto")
    for option, path in (("--output", args.output), ("--plot", args.plot)):
        if path is not None:
            check_writable(option, Path(path))
    spec, stored, dummy = find_spec(args.model)
    spec.check_length(args.prompt_len, args.gen_len)
    profile = this_machine(args, stored) if args.hardware is None else profile_of(args)
    if args.hardware is not None and profile.device == "cpu":
        args.device = "cpu"  # in the command, which would take a GPU where there is one
    model = ModelData.of(spec, profile.dtype, [stored], cuda=profile.device == "cuda", dummy=dummy)
    choice = choose(args, policy, budget, model, profile)
    num_prompts = args.num_prompts or choice.policy.block_size
    command = command_for(args, choice, num_prompts, profile.dtype)
    result = result_of(choice, command)
    if args.json:
        cli.say(json.dumps(result) + "\n")
    else:
        if choice.curve:
            cli.say(cli.describe_curve(choice.curve) + "\n\n")
        cli.say(describe(choice, title(args, profile, num_prompts), command) + "\n")
    choice.plan.check()
    seconds = choice.prediction.block_seconds
    if args.max_latency is not None and seconds > args.max_latency:
        raise UserError(f"a block of this policy takes {seconds:.1f} s, more than --max-latency {args.max_latency:g}")
    if choice.curve:
        result["curve"] = [asdict(point) for point in choice.curve]
    if args.output is not None:
        write_text(args.output, json.dumps(result, indent=1) + "\n")
    if args.plot is not None:
        plot_curve(choice.curve, args.plot)


def find_spec(model: str) -> tuple[ModelSpec, str, bool]:
    """The sizes of a model, the type of its weights, and whether they are to be counted as random ones: those of a name
    need not be on this machine."""
    spec, stored = named_spec(model), "float16"  # as facebook/opt publishes its weights
    if spec is not None:
        return spec, stored, True
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise UserError(f"--model {model}: neither a folder nor one of: {', '.join(known_names())}")
    return read_spec(folder), stored_dtype(folder) or stored, False


def given_policy(args: argparse.Namespace) -> Policy | None:
    """The policy of --percent."""
    if args.percent is None:
        return None
    if None in (args.gpu_batch_size, args.num_gpu_batches):
        raise UserError("--percent needs --gpu-batch-size and --num-gpu-batches too")
    percent, on_cpu = tuple(args.percent), bool(args.cpu_cache_compute)
    return Policy(args.gpu_batch_size, args.num_gpu_batches, percent, args.overlap, on_cpu)


def choose(
    args: argparse.Namespace, policy: Policy | None, budget: KVBudget | str | None, model: ModelData, profile: Profile
) -> Choice:
    """The policy, given or searched, for a job on a profile's machine."""
    size, batches, caps = args.gpu_batch_size, args.num_gpu_batches, cli.limits(args)
    check_cpu_cap(caps, profile.device != "cuda", policy is None)
    constraints = Constraints(
        size, batches, args.cpu_cache_compute, args.overlap, args.max_latency, args.min_hh_ratio or MIN_HH_RATIO
    )
    constraints = replace(constraints, resident=False, one_block=args.num_prompts is None)
    prompts = args.num_prompts or (size * batches if size and batches else _MANY)
    workload = Workload((args.prompt_len,) * prompts, args.gen_len)
    planner = Planner(model, constraints, profile, progress=not args.json)
    return planner.choose(workload, Resources.of(profile, caps), policy, budget)


def title(args: argparse.Namespace, profile: Profile, prompts: int) -> str:
    machine = profile.machine.get("gpu" if profile.device == "cuda" else "processor", "the profile's machine")
    return (
        f"model      {args.model}, {profile.dtype} on {machine}\n"
        f"workload   {prompts} prompts of {args.prompt_len} tokens, {args.gen_len} tokens each"
    )


def plot_curve(curve: list[BudgetPoint], path: str) -> None:
    """Draw the curve as PNG; needs matplotlib.

    Raises:
        UserError: no matplotlib, or the file cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install 'h2o_flexgen[plot]'") from None
    chosen = largest_free(curve)
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot([p.slots for p in curve], [p.tokens_per_s for p in curve], "o-", color="tab:blue")
    axes.plot([chosen.slots], [chosen.tokens_per_s], "o", color="tab:red", markersize=10, label="largest free budget")
    for p in curve:
        block, place = f"{p.gpu_batch_size}x{p.num_gpu_batches}", (p.slots, p.tokens_per_s)
        axes.annotate(block, place, xytext=(4, 6), textcoords="offset points", fontsize=8)
    axes.set(xlabel="KV slots per sequence and head", ylabel="predicted tokens/s", ylim=(0, None))
    axes.legend()
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as e:
        raise UserError(f"cannot write --plot {path}: {e.strerror}") from None
    finally:
        plt.close(figure)


def profile_of(args: argparse.Namespace) -> Profile:
    """The profile that is given, if no other option contradicts it."""
    profile = Profile.from_file(args.hardware)
    dtype = args.dtype if args.dtype == "auto" else dtype_name(Device("cpu").dtype(args.dtype))
    for option, given in (("device", args.device.split(":")[0]), ("dtype", dtype)):
        measured = getattr(profile, option)
        if given not in ("auto", measured):
            raise UserError(f"--{option} {getattr(args, option)} contradicts --hardware, a profile of {measured}")
    return profile


def this_machine(args: argparse.Namespace, stored: str) -> Profile:
    """This machine's rates as they were measured, and its memory as it is now; `stored`: the checkpoint's type."""
    from transformers import AutoTokenizer  # noqa: F401  a job holds it

    device = Device(args.device)
    if device.is_cuda:
        device.start(None)
    root = Path(args.offload_dir) if args.offload_dir else default_root()
    profile = load_or_measure(device, job_dtype(device, args.dtype, getattr(torch, stored)), root)
    ram = memory.ram_in_all()
    gpu = device.free_bytes() if device.is_cuda else ram
    available = {"gpu": gpu, "cpu": ram, "disk": memory.disk_free(root)}
    return replace(profile, memory=available, baseline_bytes=memory.baseline())


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, as `cli.main` says."""
    return cli.main(make_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
