"""Command line: what `generate` would run with the same options, before anything is loaded.

h2o-flexgen plan facebook/opt-30b --num-prompts 512 --hh-ratio 0.2
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict

from h2o_flexgen.commands import options
from h2o_flexgen.errors import PlanError, UserError
from h2o_flexgen.planning.budget import FORMATS, MIN_HH_RATIO
from h2o_flexgen.planning.losses import weights_text
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.policy import DEFAULT_RULE, GIB, TIERS, Policy, gib
from h2o_flexgen.utils.files import write_text

#: prompts of a search without --num-prompts: long enough for any block
MANY = 4096


def make_parser(prog: str = "python -m h2o_flexgen.commands.plan") -> argparse.ArgumentParser:
    parser = options.Parser(prog, "Show what `generate` would run with the same options, before anything is loaded.")
    add = parser.add_argument_group("job").add_argument
    whole = "folder or Hugging Face name, of which only the config is fetched; the demo model if left out"
    add("positional", nargs="?", metavar="MODEL", help=whole)
    options.add_model_options(add, "the same as MODEL")
    add("--path", help="folder of the weights; _DUMMY_ for random weights")
    add_options(parser, add, "as many as generate would take")
    parser.set_defaults(search=False)
    return parser


def add_options(parser: options.Parser, add, default_prompts: str) -> None:
    """The options that `run` reads beside the model; `add` is the `add_argument` of the job's group."""
    add("--prompt-len", type=options.count, help="tokens of the longest prompt (default: 512)")
    add("--gen-len", type=options.count, default=32, help="output tokens per prompt (default: 32)")
    add("--num-prompts", type=options.count, help=f"prompts of the job (default: {default_prompts})")
    options.add_budget_options(parser)
    add = parser.add_argument_group("machine").add_argument
    options.add_machine_options(add, weights=("int8", "int4", "auto"))
    options.add_cache_option(add)
    add = parser.add_argument_group("policy; what is not given is searched").add_argument
    options.add_policy_options(add)
    options.add_length_option(add)
    add = parser.add_argument_group("output").add_argument
    add("-o", "--output", help="write the result to this file as JSON")
    add("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> None:
    """`args.search`: for the policy search, which always searches, and counts the weights of a name on the disk: they
    need not be there yet."""
    if args.hardware is not None and (args.device, args.dtype) != ("auto", "auto"):
        raise UserError("--device and --dtype are of this machine: --hardware brings its own")
    options.check_files(args, reads=("hardware", "quality"), writes=("output",))
    args.compute = args.compute or "exact"
    if args.compress_weight == "auto" and args.quality is not None:
        raise UserError("--compress-weight auto does not go with --quality, which is of one format of the weights")
    losses = options.make_losses(args)
    budget = options.make_budget(args, losses)
    policy = options.make_policy(args, args.num_prompts)

    args.model = args.model or getattr(args, "positional", None)

    from h2o_flexgen.models import inspect
    from h2o_flexgen.planning import shapes

    found = inspect.find(args.model, args.path)
    options.check_model(losses, args.kv_rule, found.name, weights_text(args.compress_weight, args.compute))
    length = options.prompt_len(args, found.spec.positions, args.position_rolling)
    found.spec.check_length(length, args.gen_len, args.position_rolling)
    profile = profile_for(args, found)
    models = models_of(args, found, profile)

    def sizes_of(kind: str | None) -> dict:
        sizes = shapes.sizes(models[kind], kind or found.stored(profile.dtype)) | {"to_fetch": found.to_fetch}
        return sizes | ({"revision": found.revision} if found.revision else {})

    try:
        choice = choose(args, length, models, profile, policy, budget, losses)
    except PlanError:  # a newcomer wants to know how large the model is
        if not args.json:
            options.say(describe_sizes(sizes_of(next(iter(models)))))
        raise
    model = models[choice.compress_weight]
    sizes = sizes_of(choice.compress_weight)
    prompts = args.num_prompts or (choice.policy.block_size if args.search else len(choice.workload.prompt_lens))
    workload = {"prompt_len": length, "gen_len": args.gen_len, "num_prompts": prompts}
    sizes["kv_bytes_per_sequence"] = shapes.kv_bytes(model, choice.workload, choice.rule, choice.compress_cache)
    result = result_of(choice, args.compute, sizes, command_for(args, workload, choice, profile))
    if choice.curve:
        result["curve"] = [asdict(point) for point in choice.curve]
    if args.json:
        options.say(json.dumps(result))
    else:
        tell(found.name, choice, profile, workload, result)
    choice.plan.check()
    if args.output is not None:
        write_text("--output", args.output, json.dumps(result, indent=1) + "\n")


def profile_for(args: argparse.Namespace, found):
    """Of the machine that is asked about."""
    from h2o_flexgen.kernels import linear
    from h2o_flexgen.machine.profile import Profile
    from h2o_flexgen.profiling.measure import this_machine

    if args.hardware is not None:
        profile = Profile.from_file(args.hardware)
        if profile.kernels is not None:  # how much a matmul holds depends on its kernel
            linear.use(profile.kernels)
        return profile
    is_quantised = args.compress_weight is not None or bool(found.formats(None)[0])
    return this_machine(args.device, args.dtype, args.offload_dir, found.declared, args.compute, is_quantised)


def models_of(args: argparse.Namespace, found, profile) -> dict:
    """{compress_weight: the model as the planner counts it}; one, but all that it can have for auto."""
    from h2o_flexgen.formats.forms import check_compute
    from h2o_flexgen.kernels.linear import takes_in_blocks
    from h2o_flexgen.models.registry import named_spec
    from h2o_flexgen.planning.shapes import ModelData

    to_come = args.search and named_spec(args.model) is not None
    is_new = found.is_dummy or to_come
    stored = found.stored(profile.dtype)
    cuda = profile.device == "cuda"
    models = {}
    errors = []
    for kind in FORMATS if args.compress_weight == "auto" else (args.compress_weight,):
        try:
            formats, copied = found.formats(kind)
            check_compute(args.compute, formats)
        except UserError as e:
            errors.append(e)
            continue
        in_blocks = takes_in_blocks(formats.values(), args.compute, cuda)
        others = dict(copy_bytes=copied, compute=args.compute, compressed=kind is not None, in_blocks=in_blocks)
        models[kind] = ModelData.of(found.spec, profile.dtype, stored, cuda, is_new, formats, **others)
    if not models:
        raise errors[0]
    return models


def choose(args: argparse.Namespace, length: int, models: dict, profile, policy, budget, losses):
    """The choice for prompts of `length` tokens on a profile's machine, by the planner that a job asks."""
    from h2o_flexgen.planning.memory import Resources
    from h2o_flexgen.planning.planner import Planner, check_cpu_cap
    from h2o_flexgen.planning.search import Constraints

    caps = {tier: getattr(args, f"{tier}_mem") for tier in TIERS}
    check_cpu_cap(caps, profile.device != "cuda", policy is None)
    size = args.gpu_batch_size
    batches = args.num_gpu_batches
    constraints = Constraints(
        size,
        batches,
        args.cpu_cache_compute,
        args.prefill_tokens,
        args.overlap is not False,
        args.max_latency,
        args.min_hh_ratio or MIN_HH_RATIO,
        losses,
        resident=not args.search,
        one_block=args.search and args.num_prompts is None,
    )
    prompts = args.num_prompts or (size * batches if size and batches else MANY)
    if not args.search:
        prompts = options.num_prompts(args, policy)
    planner = Planner(models, constraints, profile, progress=not args.json)
    workload = Workload((length,) * prompts, args.gen_len, mean_len=args.expect_len)
    return planner.choose(workload, Resources.of(profile, caps), policy, budget, args.compress_cache)


def result_of(choice, compute: str, sizes: dict, command: str) -> dict:
    """The result as plain data."""
    p = choice.prediction
    plan = choice.plan
    rule = choice.rule
    formats = {"compress_weight": choice.compress_weight, "compress_cache": choice.compress_cache}
    formats["compute"] = None if compute == "exact" else compute
    return {
        "model": sizes,
        "policy": asdict(choice.policy),
        "kv_budget": rule.to_dict(),
        **{name: kind for name, kind in formats.items() if kind is not None},
        "predicted": {
            "prefill_seconds": p.prefill_seconds,
            "decode_seconds": p.decode_seconds,
            "tokens_per_s": p.block_tokens_per_s,
        },
        "memory_bytes": {tier: {"needed": plan.needed(tier), "limit": plan.limits[tier]} for tier in TIERS},
        "bound_by": p.bound_by,
        "command": command,
    }


def describe_sizes(sizes: dict) -> str:
    """A model, for people."""
    heads = f"{sizes['heads']} heads on {sizes['kv_heads']} of K and V"
    parameters = f"{sizes['parameters'] / 1e6:,.0f} M parameters in {sizes['layers']} layers"
    return (
        f"sizes      {sizes['family']}, {parameters}, {heads}, context {sizes['positions']}\n"
        f"weights    {gib(sizes['weight_bytes'])} in {sizes['stored_dtype']}"
        + (", not on this machine yet" if sizes["to_fetch"] else "")
    )


def tell(name: str, choice, profile, workload: dict, result: dict) -> None:
    """The result for people."""
    if choice.curve:
        options.say(options.describe_curve(choice.curve) + "\n")
    machine = profile.machine.get("gpu" if profile.device == "cuda" else "cpu", "the profile's machine")
    cache = (result["kv_budget"], choice.compress_cache)
    name = options.name_at(name, result["model"].get("revision"))
    job = options.describe_job(name, profile.dtype, machine, workload, choice.policy, *cache)
    nbytes = result["model"]["kv_bytes_per_sequence"]
    each = f"each       {gib(nbytes['full'])} of KV cache for a sequence"
    kept = [result["kv_budget"]["rule"]] if result["kv_budget"] else []
    kept += [f"K and V in {choice.compress_cache}"] if choice.compress_cache else []
    if kept:
        each += f" if it were full, {gib(nbytes['job'])} with {' and '.join(kept)}"
    options.say(f"{describe_sizes(result['model'])}\n{job}\n{each}\n{describe(choice)}\nrun it     {result['command']}")


def describe(choice) -> str:
    """The costs and the bytes of a policy, for people."""
    p = choice.prediction
    plan = choice.plan
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


def command_for(args: argparse.Namespace, workload: dict, choice, profile) -> str:
    """The command that runs a policy."""
    policy = choice.policy
    budget = asdict(choice.kv_budget) if choice.kv_budget else {}
    rule = budget.pop("rule", DEFAULT_RULE)
    rolling = budget.pop("position_rolling", False)
    arguments = {"model": args.model, "path": args.path, **workload}
    arguments |= {**budget, "kv_rule": None if rule == DEFAULT_RULE else rule}
    arguments |= {"gpu_batch_size": policy.gpu_batch_size, "num_gpu_batches": policy.num_gpu_batches}
    arguments |= {"device": profile.device if args.device == "auto" else args.device, "dtype": profile.dtype}
    arguments |= {"compress_weight": choice.compress_weight, "compress_cache": choice.compress_cache}
    arguments |= {"compute": args.compute if args.compute != "exact" else None}
    arguments |= {"offload_dir": args.offload_dir}
    for tier in TIERS:
        nbytes = getattr(args, f"{tier}_mem")
        arguments[f"{tier}_mem"] = None if nbytes is None else f"{nbytes / GIB:g}"
    words = ["h2o-flexgen", "generate"]
    for name, value in arguments.items():
        if value is not None:
            words += [options.option(name), str(value)]
    words += ["--position-rolling"] * rolling
    words += ["--percent", *(f"{x:g}" for x in policy.percent)]
    if policy.prefill_tokens != Policy.prefill_tokens:
        words += ["--prefill-tokens", str(policy.prefill_tokens)]
    words += ["--cpu-cache-compute"] * policy.cpu_cache_compute + ["--no-overlap"] * (not policy.overlap)
    return shlex.join(words)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, as `options.main` says."""
    return options.main(make_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
