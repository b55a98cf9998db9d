"""The command `analyse`: how a model's attention is spread over a text, and what that means for eviction."""

from __future__ import annotations

import argparse

from h2o_flexgen.commands import options
from h2o_flexgen.commands.output import describe_budget, print_text
from h2o_flexgen.errors import UserError
from h2o_flexgen.policy import KVBudget
from h2o_flexgen.utils.files import rounded, to_json, write_text

#: heavy hitters, and as many recent tokens, as fractions of the prompt: a fifth of it together
HH_RATIO = 0.1


def make_parser(prog: str) -> options.Parser:
    what = "Show how a model's attention is spread over a text, as the H2O paper does."
    parser = options.Parser(prog, what, "[FILE]")
    add = parser.add_argument
    add("text", nargs="?", metavar="FILE", help="a text (default: Python's language reference)")
    options.add_model_options(parser, "the demo model if left out. It must fit into RAM")
    add("--windows", type=options.count, default=4, help="passages of the text, evenly spaced (default: 4)")
    add("--prompt-len", type=options.count, default=512, help="tokens of a passage that are its prompt (default: 512)")
    add("--gen-len", type=options.count, default=256, help="tokens that follow the prompt (default: 256)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="to compute in")
    add("-o", "--output", metavar="FILE", help="write the figures to this file as JSON")
    add("--plot", metavar="FILE", help="draw them into this PNG")

    add = parser.group(options.BUDGET)
    add("--hh-ratio", type=float, help=f"heavy hitters as a fraction of the prompt (default: {HH_RATIO})")
    add("--recent-ratio", type=float, help="recent tokens, likewise (default: --hh-ratio)")
    add("--hh-size", type=int, help="heavy hitters in slots")
    add("--recent-size", type=int, help="recent tokens in slots (default: --hh-size)")
    rule = "which tokens keep a slot, with options NAME:first=4 (default: h2o, as in the paper)"
    add("--kv-rule", metavar="NAME", default="h2o", help=rule)
    return parser


def run(args: argparse.Namespace) -> None:
    check(args)

    import torch

    from h2o_flexgen.analysis import plot
    from h2o_flexgen.analysis.study import check_rule, study
    from h2o_flexgen.engine.model import load_model
    from h2o_flexgen.evaluation.extras import need
    from h2o_flexgen.evaluation.origin import origin
    from h2o_flexgen.kv_cache import rule_for
    from h2o_flexgen.models import inspect
    from h2o_flexgen.profiling import windows
    from h2o_flexgen.profiling.layer_model import LayerModel, check_attention, check_fits

    if args.plot is not None:
        need("matplotlib", "matplotlib", "a plot")
    text, name = windows.read(args.text)
    spec = inspect.find(args.model).spec
    dtype = getattr(torch, args.dtype)
    spec.check_length(args.prompt_len, args.gen_len)
    check_attention(spec, args.prompt_len + args.gen_len)
    if spec.experts:
        raise UserError("`analyse` is for models with an MLP in each layer, and this one has experts")
    rule = rule_for(make_budget(args), args.prompt_len, args.gen_len, spec)
    check_rule(rule, args.prompt_len)
    check_fits(spec, dtype, args.windows, args.prompt_len, args.gen_len)
    model = load_model(args.model, None, lambda stored: dtype, progress=True)
    ids = windows.cut(text, model.tokenizer, args.windows, args.prompt_len + args.gen_len)

    result = origin(args) | {
        "model": model.name,
        "model_revision": model.revision,
        "dtype": args.dtype,
        "text": name,
        "windows": args.windows,
        "prompt_len": args.prompt_len,
        "gen_len": args.gen_len,
        "kv_budget": rule.to_dict(),
    }
    result |= study(LayerModel(model), ids, args.prompt_len, rule)
    print_text(describe(result))
    if args.output is not None:
        write_text("--output", args.output, to_json(rounded(result, 4)) + "\n")
    if args.plot is not None:
        plot.draw(result, args.plot)


def check(args: argparse.Namespace) -> None:
    """Raises UserError for unwritable files, and for windows in which nothing is evicted."""
    options.check_files(args, reads=(), writes=("output", "plot"), texts=[args.text])
    if args.gen_len < 2:
        raise UserError("--gen-len must be 2 or more: with one token nothing is evicted")


def make_budget(args: argparse.Namespace) -> KVBudget:
    given = (args.hh_ratio, args.recent_ratio, args.hh_size, args.recent_size)
    if all(value is None for value in given):
        return KVBudget.from_ratio(HH_RATIO, rule=args.kv_rule)
    return KVBudget(*given, args.kv_rule)


def describe(result: dict) -> str:
    """The figures as lines of text."""
    low = min(result["sparsity"]["by_layer"])
    high = max(result["sparsity"]["by_layer"])
    ranks = result["ranks"]
    overlap = result["overlap"]
    neurons = result["neurons"]
    fit = ranks["fit"]
    words = result["words"]["correlation"]
    exponents = fit["exponent_by_layer"]
    lengths = f"{result['windows']} x ({result['prompt_len']} + {result['gen_len']}) tokens of {result['text']}"
    lines = [
        f"model      {result['model']}, {result['dtype']}; {lengths}",
        f"sparsity   {result['sparsity']['mean']:.1%} of attention is below "
        f"{result['sparsity']['threshold']:.0%} of its row's maximum (layers: {low:.0%} to {high:.0%})",
        f"ranks      a tenth of the tokens receives {ranks['top_tenth']:.0%}; share ~ rank ^ -{fit['exponent']:.2f} "
        f"over ranks {fit['ranks'][0]} to {fit['ranks'][1]}, R2 {fit['r2']:.2f} "
        f"(layers: {min(exponents):.2f} to {max(exponents):.2f})",
        f"words      attention and co-occurrence within {result['words']['reach']} tokens, rank correlation: "
        f"{words['summed']['spearman']:.2f} summed, {words['per_occurrence']['spearman']:.2f} of an occurrence",
        f"KV cache   {describe_budget(result['kv_budget'])}",
        f"overlap    {overlap['heavy_mean']:.0%} of the heavy hitters are those chosen with the future known "
        f"(by chance {overlap['heavy_by_chance']:.0%}), {overlap['mean']:.0%} of all slots",
        f"neurons    active for {neurons['mean']:.1%} of tokens ({neurons['is_active']}); "
        + ", ".join(f"the top {float(part):.0%} carry {share:.0%}" for part, share in neurons["carried"].items()),
        f"loss       {'':<42}perplexity    rise",
        *(f"           {row['cache']:<42}{row['perplexity']:>10.2f}{row['rise']:>+8.1%}" for row in result["loss"]),
    ]
    return "\n".join(lines)
