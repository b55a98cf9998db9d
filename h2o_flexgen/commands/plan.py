"""The command `plan`: what `generate` would run with the same options, before anything is loaded."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict, replace
from functools import partial

from h2o_flexgen.commands import fleet, options
from h2o_flexgen.commands.budget import add_budget_options, check_model, make_budget, make_losses
from h2o_flexgen.commands.options import MACHINE
from h2o_flexgen.commands.output import describe_curve, describe_job, describe_policy, name_at, print_text
from h2o_flexgen.commands.suggestions import describe_suggestions, suggest
from h2o_flexgen.errors import PlanError, UserError
from h2o_flexgen.planning.budget import FORMATS, MIN_HH_RATIO
from h2o_flexgen.planning.losses import weights_text
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.policy import GIB, LIMITS, TIERS, KVBudget, Policy, gib
from h2o_flexgen.utils.files import write_text

#: prompts of a search without --num-prompts: enough for any block
MANY = 4096


def make_parser(prog: str) -> options.Parser:
    what = "Show what `generate` would run with the same options, before anything is loaded, and what would be faster."
    parser = options.Parser(prog, what, "[MODEL]")
    whole = "folder or Hugging Face name (only its config is fetched); the demo model if left out"
    parser.add_argument("positional", nargs="?", metavar="MODEL", help=whole)
    options.add_model_options(parser, "the same as MODEL")
    parser.group(MACHINE)("--path", help="folder of the weights; _DUMMY_ for random weights")
    add_options(parser, "as many as generate would take")
    fleet.add_options(parser)
    parser.set_defaults(search=False)
    return parser


def add_options(parser: options.Parser, default_prompts: str) -> None:
    """The options that `run` reads beside the model."""
    add = parser.add_argument
    add("--num-prompts", type=options.count, metavar="N", help=f"prompts of the job (default: {default_prompts})")
    add("--prompt-len", type=options.count, metavar="N", help="tokens of the longest prompt (default: 512)")
    add("--gen-len", type=options.count, metavar="N", default=32, help="output tokens per prompt (default: 32)")
    add_budget_options(parser)
    options.add_machine_options(parser, weights=("int8", "int4", "auto"))
    options.add_cache_option(parser)
    add("-o", "--output", metavar="FILE", help="write the result to this file as JSON")
    add("--json", action="store_true", help="print the result as JSON")
    options.add_length_option(parser.group(options.JOB))
    options.add_policy_options(parser)


def run(args: argparse.Namespace) -> None:
    """`args.search`: for the policy search, which always searches, and counts the weights of a named model as disk
    space: they need not be there yet."""
    check(args)
    losses = make_losses(args)
    budget = make_budget(args, losses)
    policy = options.make_policy(args, args.num_prompts)

    from h2o_flexgen.models import inspect
    from h2o_flexgen.profiling.head_slots import KnownHeadSlots

    found = inspect.find(args.model, args.path)
    check_model(losses, args.kv_rule, found.name, weights_text(args.compress_weight, args.compute))
    length = options.prompt_len(args, found.spec.positions, args.position_rolling)
    found.spec.check_length(length, args.gen_len, args.position_rolling)
    profile = profile_for(args, found)
    planner = planner_for(args, found, profile, policy, losses)
    plan = partial(choose, length=length, policy=policy, heads=KnownHeadSlots(found))
    try:
        choice = plan(args, planner=planner, budget=budget)
    except PlanError:  # a newcomer wants to know how large the model is
        if not args.json:
            kind, model = next(iter(planner.models.items()))
            print_text(describe_sizes(sizes_of(model, kind, found, profile)))
        raise
    model = planner.models[choice.compress_weight]
    prompts = args.num_prompts or (choice.policy.block_size if args.search else len(choice.workload.prompt_lens))
    workload = {"prompt_len": length, "gen_len": args.gen_len, "num_prompts": prompts}
    command = command_for(args, workload, choice, profile)
    result = result_of(choice, args.compute, sizes_of(model, choice.compress_weight, found, profile, choice), command)
    if not args.json:
        print_result(found.name, choice, profile, workload, result)

    def plan_again(changed: argparse.Namespace, budget: KVBudget | None):
        return plan(changed, planner=planner_for(changed, found, profile, policy, None), budget=budget)

    def plan_elsewhere(worker: argparse.Namespace):
        other = profile_for(worker, found)
        return plan(worker, planner=planner_for(worker, found, other, policy, losses), budget=budget), name_of(other)

    if not args.search and not choice.plan.missing():
        fleet.add_fleet(args, result, plan_elsewhere)
        suggestions = suggest(args, choice, model.is_quantised, plan_again)
        result["suggestions"] = [asdict(suggestion) for suggestion in suggestions]
        if suggestions and not args.json:
            print_text(describe_suggestions(suggestions))
    if args.json:
        print_text(json.dumps(result))
    choice.plan.check()
    if args.output is not None:
        write_text("--output", args.output, json.dumps(result, indent=1) + "\n")


def check(args: argparse.Namespace) -> None:
    """Raises UserError for options that contradict each other; fills in --model and --compute."""
    if args.hardware is not None and (args.device, args.dtype) != ("auto", "auto"):
        raise UserError("--device and --dtype are for this machine: --hardware brings its own")
    if not args.search:
        fleet.check(args)
    options.check_files(args, reads=("hardware", "quality"), writes=("output",))
    if args.compress_weight == "auto" and args.quality is not None:
        raise UserError("--compress-weight auto does not go with --quality, which is of one format of the weights")
    args.compute = args.compute or "exact"
    args.model = args.model or getattr(args, "positional", None)


def profile_for(args: argparse.Namespace, found):
    """The rates of the machine that is asked about."""
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


def models_of(args: argparse.Namespace, found, dtype: str) -> dict:
    """{compress_weight: `StoredModel`}: one entry, or for auto one for each format the model can have."""
    from h2o_flexgen.engine_args import StoredModel
    from h2o_flexgen.formats.forms import check_compute
    from h2o_flexgen.models.registry import named_spec

    to_come = args.search and named_spec(args.model) is not None
    models = {}
    errors = []
    for kind in FORMATS if args.compress_weight == "auto" else (args.compress_weight,):
        try:
            formats, copied = found.formats(kind)
            check_compute(args.compute, formats)
        except UserError as e:
            errors.append(e)
            continue
        models[kind] = StoredModel(found.spec, found.stored(dtype), formats, found.is_dummy or to_come, copied)
    if not models:
        raise errors[0]
    return models


def planner_for(args: argparse.Namespace, found, profile, policy: Policy | None, losses):
    """The planner of a job with these options on a profile's machine."""
    from h2o_flexgen.engine_args import AUTO, EngineArgs, planner_of

    names = ("compute", *LIMITS.values(), *(() if policy else AUTO))
    job = EngineArgs(
        policy=policy or "auto",
        device=args.device,
        losses=losses,
        min_hh_ratio=args.min_hh_ratio or MIN_HH_RATIO,
        progress=not args.json,
        **{name: getattr(args, name) for name in names},
    )
    cuda = profile.device == "cuda"
    job.check_caps(cuda)
    one_block = args.search and args.num_prompts is None
    job.constraints = replace(job.constraints, resident=not args.search, one_block=one_block)
    return planner_of(job, models_of(args, found, profile.dtype), profile.dtype, cuda, profile)


def choose(args: argparse.Namespace, length: int, planner, policy, budget, heads):
    """The plan for prompts of `length` tokens. `heads`: the `KnownHeadSlots` of the model."""
    from h2o_flexgen.planning.memory import Resources

    size = args.gpu_batch_size
    batches = args.num_gpu_batches
    prompts = args.num_prompts or (size * batches if size and batches else MANY)
    if not args.search:
        prompts = options.num_prompts(args, policy)
    workload = Workload((length,) * prompts, args.gen_len, mean_len=args.expect_len)
    caps = {tier: getattr(args, name) for tier, name in LIMITS.items()}
    asked = (workload, Resources.of(planner.profile, caps), policy)
    if isinstance(budget, KVBudget):
        return planner.choose(*asked, heads.shared(budget, workload), args.compress_cache)
    choice = planner.choose(*asked, budget, args.compress_cache)
    shared = choice.kv_budget and heads.shared(choice.kv_budget, workload)
    if not (shared and shared.by_head):
        return choice
    again = planner.only(choice.compress_weight).choose(*asked, shared, choice.compress_cache)
    return replace(again, curve=choice.curve)


def sizes_of(model, compress_weight: str | None, found, profile, choice=None) -> dict:
    """The sizes of a model as plain data; with a choice those of its cache too."""
    from h2o_flexgen.planning import shapes

    stored = found.method.name if found.method else found.stored(profile.dtype)
    sizes = shapes.sizes(model, compress_weight or stored) | {"to_fetch": found.to_fetch}
    if found.revision:
        sizes["revision"] = found.revision
    if choice is not None:
        kept = (choice.workload, choice.rule, choice.compress_cache)
        sizes["kv_bytes_per_sequence"] = shapes.kv_bytes(model, *kept)
    return sizes


def result_of(choice, compute: str, sizes: dict, command: str) -> dict:
    """The result as plain data."""
    p = choice.prediction
    plan = choice.plan
    formats = {"compress_weight": choice.compress_weight, "compress_cache": choice.compress_cache}
    formats["compute"] = None if compute == "exact" else compute
    result = {
        "model": sizes,
        "policy": asdict(choice.policy),
        "kv_budget": choice.rule.to_dict(),
        **{name: kind for name, kind in formats.items() if kind is not None},
        "predicted": {
            "prefill_seconds": p.prefill_seconds,
            "decode_seconds": p.decode_seconds,
            "tokens_per_s": p.block_tokens_per_s,
        },
        "memory_bytes": {tier: {"needed": plan.needed(tier), "limit": plan.limits[tier]} for tier in TIERS},
        "bound_by": p.bound_by,
        "command": command,
        **({"devices": choice.devices()} if plan.pools else {}),
    }
    return result | ({"curve": [asdict(point) for point in choice.curve]} if choice.curve else {})


def describe_sizes(sizes: dict) -> str:
    """A model's sizes for humans."""
    heads = f"{sizes['heads']} query heads, {sizes['kv_heads']} KV heads"
    parameters = f"{sizes['parameters'] / 1e6:,.0f} M parameters in {sizes['layers']} layers"
    return (
        f"sizes      {sizes['family']}, {parameters}, {heads}, context {sizes['positions']}\n"
        f"weights    {gib(sizes['weight_bytes'])} in {sizes['stored_dtype']}"
        + (", not on this machine yet" if sizes["to_fetch"] else "")
    )


def print_result(name: str, choice, profile, workload: dict, result: dict) -> None:
    """The result for humans."""
    if choice.curve:
        print_text(describe_curve(choice.curve) + "\n")
    cuda = profile.device == "cuda"
    machine = name_of(profile)
    name = name_at(name, result["model"].get("revision"))
    job = (name, profile.dtype, machine, workload, describe_policy(choice.policy, cuda))
    p = choice.prediction
    lines = [
        describe_sizes(result["model"]),
        describe_job(*job, result["kv_budget"], choice.compress_cache),
        describe_cache(result, choice.compress_cache),
        f"prefill    {p.prefill_seconds:.1f} s for a block",
        f"decode     {p.decode_seconds:.1f} s for a block",
        f"predicted  {p.block_tokens_per_s:.2f} tokens/s",
        f"bound by   {p.bound_by}",
        *(f"{pool:<11}{gib(needed)} of {gib(limit)}" for pool, (needed, limit) in choice.plan.totals().items()),
        f"run it     {result['command']}",
    ]
    print_text("\n".join(lines))


def name_of(profile) -> str:
    """The machine of a profile."""
    return profile.machine.get("gpu" if profile.device == "cuda" else "cpu", "the profile's machine")


def describe_cache(result: dict, compress_cache: str | None) -> str:
    """The bytes of a sequence's cache for humans."""
    nbytes = result["model"]["kv_bytes_per_sequence"]
    text = f"cache      {gib(nbytes['full'])} of KV cache for a sequence"
    kept = [result["kv_budget"]["rule"]] if result["kv_budget"] else []
    kept += [f"K and V in {compress_cache}"] if compress_cache else []
    return text + (f" if it were full, {gib(nbytes['job'])} with {' and '.join(kept)}" if kept else "")


def command_for(args: argparse.Namespace, workload: dict, choice, profile) -> str:
    """The command that runs a policy."""
    policy = choice.policy
    budget = asdict(choice.kv_budget) if choice.kv_budget else {}
    rule = budget.pop("rule", None)
    rolling = budget.pop("position_rolling", False)
    budget.pop("by_head", None)  # the job finds the same
    arguments = {"model": args.model, "path": args.path, **workload}
    arguments |= {"kv_rule": rule, **budget}
    arguments |= {"gpu_batch_size": policy.gpu_batch_size, "num_gpu_batches": policy.num_gpu_batches}
    arguments |= {"device": profile.device if args.device == "auto" else args.device, "dtype": profile.dtype}
    arguments |= {"compress_weight": choice.compress_weight, "compress_cache": choice.compress_cache}
    arguments |= {"compute": args.compute if args.compute != "exact" else None}
    arguments |= {"offload_dir": args.offload_dir}
    for name in LIMITS.values():
        nbytes = getattr(args, name)
        each = nbytes if isinstance(nbytes, list) else [nbytes]
        arguments[name] = None if nbytes is None else ",".join(f"{one / GIB:g}" for one in each)
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
