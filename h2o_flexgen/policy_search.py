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
from h2o_flexgen.files import write_text
from h2o_flexgen.models.registry import known_names, named_dtype, named_spec, read_spec, stored_dtype
from h2o_flexgen.models.spec import ModelSpec
from h2o_flexgen.offload import memory
from h2o_flexgen.offload.device import Device
from h2o_flexgen.offload.disk import default_root
from h2o_flexgen.planning.budget import MIN_HH_RATIO
from h2o_flexgen.planning.memory import ModelData, Resources
from h2o_flexgen.planning.planner import Choice, Planner, check_cpu_cap
from h2o_flexgen.planning.profile import Profile
from h2o_flexgen.planning.search import Constraints
from h2o_flexgen.policy import DEFAULT_RULE, GIB, TIERS, KVBudget, gib
from h2o_flexgen.profiling.measure import job_dtype, load_or_measure
from h2o_flexgen.sizes import Workload

#: without --num-prompts the job is long enough for any block
MANY = 4096


def make_parser() -> argparse.ArgumentParser:
    description = "Find the policy with the highest predicted throughput for a model, a job and a machine."
    parser = cli.Parser("policy_search", description)
    add = parser.add_argument_group("job").add_argument
    add("--model", required=True, help="a built-in name, as facebook/opt-30b, or a folder with a config.json")
    add("--prompt-len", type=cli.count, default=512, help="tokens of the longest prompt (default: 512)")
    add("--gen-len", type=cli.count, default=32, help="output tokens per prompt (default: 32)")
    add("--num-prompts", type=cli.count, help="prompts of the job (default: as many as the largest block takes)")
    cli.add_budget_options(parser)
    cli.add_machine_options(parser.add_argument_group("machine").add_argument)
    cli.add_policy_options(parser.add_argument_group("policy; what is given is not searched").add_argument)
    add = parser.add_argument_group("output").add_argument
    add("-o", "--output", help="write the result to this file as JSON")
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def run(args: argparse.Namespace) -> None:
    budget = cli.make_budget(args)
    cli.check_files(args, reads=("hardware",), writes=("output",))
    spec, stored, dummy = find_spec(args.model)
    spec.check_length(args.prompt_len, args.gen_len)
    if args.hardware is not None and (args.device, args.dtype) != ("auto", "auto"):
        raise UserError("--device and --dtype are of this machine: --hardware brings its own")
    profile = this_machine(args, stored) if args.hardware is None else Profile.from_file(args.hardware)
    model = ModelData.of(spec, profile.dtype, [stored], cuda=profile.device == "cuda", dummy=dummy)
    choice = choose(args, budget, model, profile)
    num_prompts = args.num_prompts or choice.policy.block_size
    workload = {"prompt_len": args.prompt_len, "gen_len": args.gen_len, "num_prompts": num_prompts}
    result = result_of(choice, command_for(args, workload, choice, profile))
    if args.json:
        cli.say(json.dumps(result))
    else:
        if choice.curve:
            cli.say(cli.describe_curve(choice.curve) + "\n")
        machine = profile.machine.get("gpu" if profile.device == "cuda" else "cpu", "the profile's machine")
        job = cli.describe_job(args.model, profile.dtype, machine, workload, choice.policy, result["kv_budget"])
        cli.say(f"{job}\n{describe(choice)}\nrun it     {result['command']}")
    choice.plan.check()
    if choice.curve:
        result["curve"] = [asdict(point) for point in choice.curve]
    if args.output is not None:
        write_text("--output", args.output, json.dumps(result, indent=1) + "\n")


def find_spec(model: str) -> tuple[ModelSpec, str, bool]:
    """The sizes of a model, the type of its weights, and whether they are to be counted as random ones: those of a name
    need not be on this machine."""
    spec, stored = named_spec(model), named_dtype(model)
    if spec is not None:
        return spec, stored, True
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise UserError(f"--model {model}: neither a folder nor one of: {', '.join(known_names())}")
    return read_spec(folder), stored_dtype(folder) or stored, False


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


def choose(args: argparse.Namespace, budget: KVBudget | str | None, model: ModelData, profile: Profile) -> Choice:
    """The policy, given or searched, for a job on a profile's machine."""
    size, batches, policy = args.gpu_batch_size, args.num_gpu_batches, cli.make_policy(args, args.num_prompts)
    caps = {tier: getattr(args, f"{tier}_mem") for tier in TIERS}
    check_cpu_cap(caps, profile.device != "cuda", policy is None)
    constraints = Constraints(
        size,
        batches,
        args.cpu_cache_compute,
        args.overlap is not False,
        args.max_latency,
        args.min_hh_ratio or MIN_HH_RATIO,
        resident=False,
        one_block=args.num_prompts is None,
    )
    prompts = args.num_prompts or (size * batches if size and batches else MANY)
    workload = Workload((args.prompt_len,) * prompts, args.gen_len)
    planner = Planner(model, constraints, profile, progress=not args.json)
    return planner.choose(workload, Resources.of(profile, caps), policy, budget)


def result_of(choice: Choice, command: str) -> dict:
    """The result as plain data."""
    p, plan = choice.prediction, choice.plan
    return {
        "policy": asdict(choice.policy),
        "kv_budget": choice.rule.to_dict(),
        "predicted": {
            "prefill_seconds": p.prefill_seconds,
            "decode_seconds": p.decode_seconds,
            "tokens_per_s": p.block_tokens_per_s,
        },
        "memory_bytes": {tier: {"needed": plan.needed(tier), "limit": plan.limits[tier]} for tier in TIERS},
        "bound_by": p.bound_by,
        "command": command,
    }


def describe(choice: Choice) -> str:
    """The costs and the bytes of a policy, for people."""
    p, plan = choice.prediction, choice.plan
    lines = [
        f"prefill    {p.prefill_seconds:.1f} s of a block",
        f"decode     {p.decode_seconds:.1f} s of a block",
        f"predicted  {p.block_tokens_per_s:.2f} tokens/s",
        f"bound by   {p.bound_by}",
        *(f"{tier:<11}{gib(plan.needed(tier))} of {gib(plan.limits[tier])}" for tier in TIERS),
    ]
    if plan.shared:
        lines.append(f"RAM        {gib(plan.needed('ram'))} of {gib(plan.limits['ram'])}, gpu and cpu together")
    return "\n".join(lines)


def command_for(args: argparse.Namespace, workload: dict, choice: Choice, profile: Profile) -> str:
    """The flex_opt command that runs a policy."""
    policy, budget = choice.policy, asdict(choice.kv_budget) if choice.kv_budget else {}
    rule = budget.pop("rule", DEFAULT_RULE)
    options = {"model": args.model, **workload, **budget, "kv_rule": None if rule == DEFAULT_RULE else rule}
    options |= {"gpu_batch_size": policy.gpu_batch_size, "num_gpu_batches": policy.num_gpu_batches}
    options |= {"device": profile.device if args.device == "auto" else args.device, "dtype": profile.dtype}
    options |= {"offload_dir": args.offload_dir}
    for tier in TIERS:
        nbytes = getattr(args, f"{tier}_mem")
        options[f"{tier}_mem"] = None if nbytes is None else f"{nbytes / GIB:g}"
    words = ["python", "-m", "h2o_flexgen.flex_opt"]
    for name, value in options.items():
        if value is not None:
            words += [cli.option(name), str(value)]
    words += ["--percent", *(f"{x:g}" for x in policy.percent)]
    words += ["--cpu-cache-compute"] * policy.cpu_cache_compute + ["--no-overlap"] * (not policy.overlap)
    return shlex.join(words)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, as `cli.main` says."""
    return cli.main(make_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
