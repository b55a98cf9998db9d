"""The command `calibrate`: how many KV slots each head of a model needs."""

from __future__ import annotations

import argparse
from contextlib import closing

from h2o_flexgen.commands import options
from h2o_flexgen.commands.options import JOB, MACHINE
from h2o_flexgen.commands.output import print_text
from h2o_flexgen.policy import DEFAULT_RULE
from h2o_flexgen.utils.files import rounded, to_json, write_text


def make_parser(prog: str) -> options.Parser:
    what = "Measure how many KV slots each head of a model needs: some look back far, others do not."
    parser = options.Parser(prog, what, "[FILE]")
    add = parser.add_argument
    add("text", nargs="?", metavar="FILE", help="a text (default: Python's language reference)")
    output = "write the result to this file, for --kv-rule NAME:layers=FILE"
    add("-o", "--output", metavar="FILE", required=True, help=output)
    options.add_model_options(parser)
    mem = "stream the weights from disk if they take more than half of this RAM (default: of all that is free)"
    add("--mem", type=options.gibibytes, metavar="GIB", help=mem)

    add = parser.group(JOB)
    add("--windows", type=options.count, default=4, help="passages of the text, evenly spaced (default: 4)")
    add("--window", type=options.count, default=1024, help="tokens of a passage, as in a job's texts (default: 1024)")
    rule = f"the rule that decides which tokens keep a slot, with options NAME:first=4 (default: {DEFAULT_RULE})"
    add("--kv-rule", metavar="NAME", default=DEFAULT_RULE, help=rule)

    add = parser.group(MACHINE)
    add("--path", help="folder of the weights, if it is not the model's")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="to compute in")
    return parser


def run(args: argparse.Namespace) -> None:
    options.check_files(args, reads=(), writes=("output",), texts=[args.text])

    import torch

    from h2o_flexgen.engine.model import load_model
    from h2o_flexgen.evaluation.origin import origin
    from h2o_flexgen.models import inspect
    from h2o_flexgen.profiling import calibration, windows
    from h2o_flexgen.profiling.layer_model import LayerModel, fits

    calibration.check(args.window, args.kv_rule)
    text, name = windows.read(args.text)
    spec = inspect.find(args.model, args.path).spec
    spec.check_length(args.window)
    calibration.check_heads(spec)
    dtype = getattr(torch, args.dtype)
    model = load_model(args.model, args.path, lambda stored: dtype, progress=True)
    ids = windows.cut(text, model.tokenizer, args.windows, args.window)
    with closing(LayerModel(model, streams=not fits(model.spec, dtype, args.mem))) as layers:
        losses = calibration.measure(layers, ids, args.kv_rule)
    result = origin(args) | {
        "model": model.name,
        "model_revision": model.revision,
        "dtype": args.dtype,
        "text": name,
        "windows": args.windows,
        "text_len": args.window,
        "rule": args.kv_rule,
        "budgets": losses.budgets,
        "losses": losses.losses,
    }
    write_text("--output", args.output, to_json(rounded(result, 4)) + "\n")
    print_text(describe(args, losses, args.window // 5, spec))


def describe(args: argparse.Namespace, losses, mean: int, spec) -> str:
    """The slots of each KV head, `mean` on average, or fewer if some layers have a window."""
    each = " ".join("+".join(map(str, layer)) for layer in losses.slots(mean, args.window, spec.windows))
    use = f"--hh-ratio 0.2 --kv-rule {args.kv_rule}:layers={args.output}"
    return f"with {mean} slots on average, the KV heads of each layer would have\n{each}\nuse it     {use}"
