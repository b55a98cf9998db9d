"""Command line: find the policy with the highest predicted throughput, or predict a given one. Runs no model.

python -m h2o_flexgen.policy_search --model facebook/opt-30b --prompt-len 512 --gen-len 32 --hh-ratio 0.2
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from h2o_flexgen import cli
from h2o_flexgen.errors import UserError
from h2o_flexgen.files import check_writable, write_text
from h2o_flexgen.models.registry import family, known_names, named_spec, read_spec, stored_dtype
from h2o_flexgen.models.spec import ModelSpec
from h2o_flexgen.planning.budget import MIN_HH_RATIO, BudgetPoint, describe_curve, largest_free, plot_curve, size_budget
from h2o_flexgen.planning.memory import Shapes
from h2o_flexgen.planning.planner import cap_limits, check_cpu_cap
from h2o_flexgen.planning.profile import ITEMSIZE, Profile
from h2o_flexgen.planning.search import Candidate, Search
from h2o_flexgen.policy import MARGIN, TIERS, KVBudget, Policy, gib
from h2o_flexgen.sizes import Workload


def make_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m h2o_flexgen.policy_search",
        description="Find the policy with the highest predicted throughput for a model, a job and a machine.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("job").add_argument
    add("--model", required=True, help="a facebook/opt name, or a folder with a config.json")
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
    add("--cpu-cache-compute", action=argparse.BooleanOptionalAction, default=None, help="attention on the CPU")
    add(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="move data while computing (default: on)",
    )
    add("--max-latency", type=float, metavar="SECONDS", help="the most that a block may take")
    add = parser.add_argument_group("output").add_argument
    add("-o", "--output", help="write the result to this file as JSON")
    add("--json", action="store_true", help="print the result as JSON")
    add("--plot", help="draw the curve of --hh-ratio auto to this PNG file")
    return parser


#: a tier of which this much is needed keeps the block from growing
_FULL = 0.97
#: without --num-prompts the job is long enough for any block
_MANY = 4096


class Planner:
    """The policy search for a model, a job and a profile, without the model's weights. They count as a checkpoint of
    dtype `stored`, whose space on disk is spent already; with `dummy` as weights that take it."""

    def __init__(
        self,
        spec: ModelSpec,
        workload: Workload,
        profile: Profile,
        limits: dict[str, int],
        dummy: bool = False,
        one_block: bool = False,
        stored: str = "float16",
    ):
        self.spec, self.workload, self.profile, self.limits = spec, workload, profile, limits
        self.dummy, self.one_block, self.stored = dummy, one_block, stored
        self.layers = family(spec.model_type).tensors(spec)

    def rule(self, budget: KVBudget | None):
        """The cache rule of a budget."""
        from h2o_flexgen.kv_cache import rule_for

        return rule_for(budget, self.workload.longest, self.spec.positions)

    def shapes(self, budget: KVBudget | None) -> Shapes:
        dtype = self.profile.dtype
        return Shapes.of(
            self.spec,
            self.layers,
            self.rule(budget),
            self.workload,
            compute_itemsize=ITEMSIZE[dtype],
            stored_itemsize=ITEMSIZE[self.stored],
            converts=dtype != self.stored,
            cuda=self.profile.device == "cuda",
            bf16=dtype == "bfloat16",
            dummy=self.dummy,
        )

    def search(self, budget: KVBudget | None, max_latency: float | None = None) -> Search:
        return Search(
            self.profile,
            self.shapes(budget),
            self.workload,
            self.limits,
            self.profile.baseline_bytes,
            self.profile.workspace_bytes,
            max_latency,
            self.one_block,
        )


def profile_limits(profile: Profile, caps: dict[str, int | None]) -> dict[str, int]:
    """What may be planned for on each tier of a profile's machine."""
    there = {tier: int(MARGIN * profile.memory[tier]) for tier in TIERS}
    return cap_limits(there, caps, shared=profile.device != "cuda")


def result_of(found: Candidate, rule, command: str) -> dict:
    """The result as plain data."""
    p, plan = found.prediction, found.plan
    return {
        "policy": asdict(found.policy),
        "kv_budget": {"heavy": rule.heavy, "recent": rule.recent} if rule.scored else None,
        "predicted": {
            "prefill_seconds": p.prefill_seconds,
            "decode_seconds": p.decode_seconds,
            "tokens_per_s": p.block_tokens_per_s,
        },
        "memory_bytes": {tier: {"needed": plan.needed(tier), "limit": plan.limits[tier]} for tier in TIERS},
        "bound_by": p.bound_by,
        "command": command,
    }


def describe(result: dict, found: Candidate, title: str) -> str:
    """The result for people."""
    policy, predicted = found.policy, result["predicted"]
    full = [tier for tier, m in result["memory_bytes"].items() if m["needed"] > _FULL * m["limit"]]
    part = found.prediction.num_prompts > policy.block_size
    room = f"; no room for a larger block on {' and '.join(full)}" if full and part else ""
    percent = " ".join(f"{x:g}" for x in policy.percent)
    lines = [
        title,
        f"policy     {policy.gpu_batch_size} x {policy.num_gpu_batches}, percent {percent}"
        + (", attention on the CPU" if policy.cpu_cache_compute else "")
        + ("" if policy.overlap else ", no overlap"),
        f"KV cache   {cli.describe_budget(result['kv_budget'])}",
        f"prefill    {predicted['prefill_seconds']:.1f} s of a block",
        f"decode     {predicted['decode_seconds']:.1f} s of a block",
        f"predicted  {predicted['tokens_per_s']:.2f} tokens/s",
        f"bound by   {result['bound_by']}{room}",
    ]
    busy = [f"{name} {seconds:.1f} s" for name, seconds in found.prediction.busy[:4] if seconds]
    lines.append(f"busy       {', '.join(busy)}")
    for tier, memory in result["memory_bytes"].items():
        lines.append(f"{tier:<11}{gib(memory['needed'])} of {gib(memory['limit'])}")
    if found.plan.shared:
        both = found.plan.needed("gpu") + found.plan.needed("cpu")
        lines.append(f"RAM        {gib(both)} of {gib(found.plan.limits['ram'])}, gpu and cpu together")
    return "\n".join([*lines, f"run it     {result['command']}"])


def command_for(args: argparse.Namespace, policy: Policy, budget, num_prompts: int, dtype: str) -> str:
    """The flex_opt command that runs a policy."""
    words = ["python", "-m", "h2o_flexgen.flex_opt", "--model", args.model]
    words += ["--prompt-len", args.prompt_len, "--gen-len", args.gen_len, "--num-prompts", num_prompts]
    if budget is not None:
        for name in ("hh_ratio", "recent_ratio", "hh_size", "recent_size"):
            if getattr(budget, name) is not None:
                words += [f"--{name.replace('_', '-')}", getattr(budget, name)]
    words += ["--gpu-batch-size", policy.gpu_batch_size, "--num-gpu-batches", policy.num_gpu_batches]
    words += ["--percent", *(f"{x:g}" for x in policy.percent)]
    words += ["--dtype", dtype]
    for option in ("device", "offload_dir", "gpu_mem", "cpu_mem", "disk_mem"):
        if getattr(args, option) not in (None, "auto"):
            words += [f"--{option.replace('_', '-')}", getattr(args, option)]
    words += ["--cpu-cache-compute"] * policy.cpu_cache_compute + ["--no-overlap"] * (not policy.overlap)
    return shlex.join(map(str, words))


def find(
    args: argparse.Namespace, planner: Planner, budget: KVBudget | str | None
) -> tuple[Candidate, KVBudget | None, list[BudgetPoint]]:
    """The policy, its KV budget, and for the budget "auto" the curve."""
    given = (args.gpu_batch_size, args.num_gpu_batches, args.cpu_cache_compute, args.overlap)
    if budget != "auto":
        search = planner.search(budget, args.max_latency)
        if args.percent is None:
            return search.best(*given), budget, []
        size, batches, cpu, overlap = given
        found = search.candidate(Policy(size, batches, tuple(args.percent), overlap, bool(cpu)))
        return found, budget, []

    def size(ratio: float | None, budget: KVBudget | None) -> tuple[BudgetPoint, Candidate]:
        found = planner.search(budget, args.max_latency).best(*given)
        p = found.prediction
        speed = p.block_tokens_per_s if planner.one_block else p.tokens_per_s
        return BudgetPoint.of(ratio, planner.shapes(budget), found.policy, speed), found

    budget, found, curve = size_budget(
        args.min_hh_ratio or MIN_HH_RATIO, args.prompt_len, args.prompt_len + args.gen_len, size, not args.json
    )
    return found, budget, curve


def run(args: argparse.Namespace) -> None:
    cli.check_sizes(args)
    budget = cli.make_budget(args)
    if args.percent is not None:
        if budget == "auto":
            raise UserError("--percent and --hh-ratio auto contradict each other: give one of the two")
        if None in (args.gpu_batch_size, args.num_gpu_batches):
            raise UserError("--percent needs --gpu-batch-size and --num-gpu-batches too")
        Policy(args.gpu_batch_size, args.num_gpu_batches, tuple(args.percent))
    cli.check_distinct(args, "--hardware", "--output", "--plot")
    if args.plot is not None and args.hh_ratio != "auto":
        raise UserError("--plot draws the curve of --hh-ratio auto")
    for option, path in (("--output", args.output), ("--plot", args.plot)):
        if path is not None:
            check_writable(option, Path(path))
    spec = named_spec(args.model)
    dummy = spec is not None  # a name's weights may not be here: their space on disk counts
    stored = "float16"  # as facebook/opt publishes them
    if spec is None:
        folder = Path(args.model).expanduser()
        if not folder.is_dir():
            raise UserError(f"--model {args.model}: neither a folder nor one of: {', '.join(known_names())}")
        spec, stored = read_spec(folder), stored_dtype(folder) or stored
    spec.check_length(args.prompt_len, args.gen_len)
    profile = this_machine(args, stored) if args.hardware is None else profile_of(args)
    if args.hardware is not None and profile.device == "cpu":
        args.device = "cpu"  # in the command, which would take a card where there is one
    many = args.num_prompts or _MANY
    if args.num_prompts is None and None not in (args.gpu_batch_size, args.num_gpu_batches):
        many = args.gpu_batch_size * args.num_gpu_batches
    workload = Workload((args.prompt_len,) * many, args.gen_len)
    caps = cli.limits(args)
    check_cpu_cap(caps, profile.device != "cuda", args.percent is None)
    limits = profile_limits(profile, caps)
    planner = Planner(spec, workload, profile, limits, dummy, args.num_prompts is None, stored)
    found, budget, curve = find(args, planner, budget)
    num_prompts = args.num_prompts or found.policy.block_size
    command = command_for(args, found.policy, budget, num_prompts, profile.dtype)
    result = result_of(found, planner.rule(budget), command)
    if args.json:
        cli.say(json.dumps(result) + "\n")
    else:
        _print(args, result, found, curve, profile, num_prompts)
    found.plan.check()
    seconds = found.prediction.block_seconds
    if args.max_latency is not None and seconds > args.max_latency:
        raise UserError(f"a block of this policy takes {seconds:.1f} s, more than --max-latency {args.max_latency:g}")
    if curve:
        result["curve"] = [asdict(point) for point in curve]
    if args.output is not None:
        write_text(args.output, json.dumps(result, indent=1) + "\n")
    if args.plot is not None:
        plot_curve(curve, largest_free(curve), args.plot)


def _print(
    args: argparse.Namespace, result: dict, found: Candidate, curve: list, profile: Profile, prompts: int
) -> None:
    if curve:
        cli.say(describe_curve(curve, largest_free(curve)) + "\n\n")
    machine = profile.machine.get("gpu" if profile.device == "cuda" else "processor", "the profile's machine")
    title = (
        f"model      {args.model}, {profile.dtype} on {machine}\n"
        f"workload   {prompts} prompts of {args.prompt_len} tokens, {args.gen_len} tokens each"
    )
    cli.say(describe(result, found, title) + "\n")


def profile_of(args: argparse.Namespace) -> Profile:
    """The profile that is given, if no other option contradicts it."""
    from h2o_flexgen.offload.device import Device

    profile = Profile.from_file(args.hardware)
    dtype = args.dtype if args.dtype == "auto" else str(Device("cpu").dtype(args.dtype)).removeprefix("torch.")
    given = {"device": args.device.split(":")[0], "dtype": dtype}
    for option, there in (("device", profile.device), ("dtype", profile.dtype)):
        if given[option] not in ("auto", there):
            raise UserError(f"--{option} {getattr(args, option)} contradicts --hardware, a profile of {there}")
    return profile


def this_machine(args: argparse.Namespace, stored: str) -> Profile:
    """This machine's rates as they were measured, and its memory as it is now; `stored`: the checkpoint's type."""
    from dataclasses import replace

    import torch
    from transformers import AutoTokenizer  # noqa: F401  a job holds it

    from h2o_flexgen.offload import memory
    from h2o_flexgen.offload.device import Device
    from h2o_flexgen.offload.disk import default_root
    from h2o_flexgen.profiling.kernels import job_dtype
    from h2o_flexgen.profiling.measure import load_or_measure

    device = Device(args.device)
    if device.is_cuda:
        device.start(None)
    root = Path(args.offload_dir) if args.offload_dir else default_root()
    profile = load_or_measure(device, job_dtype(device, args.dtype, getattr(torch, stored)), root)
    ram = memory.ram_in_all()
    gpu = device.free_bytes() if device.is_cuda else ram
    there = {"gpu": gpu, "cpu": ram, "disk": memory.disk_free(root)}
    return replace(profile, memory=there, baseline_bytes=memory.baseline())


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, as `cli.main` says."""
    return cli.main(make_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
