"""Command line: measure how many KV slots each layer of a model needs.

h2o-flexgen calibrate --output layers.json
h2o-flexgen generate --hh-ratio 0.2 --kv-rule smoothed:layers=layers.json
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing

from h2o_flexgen.commands import options
from h2o_flexgen.policy import DEFAULT_RULE
from h2o_flexgen.utils.files import rounded, to_json, write_text


def make_parser(prog: str = "python -m h2o_flexgen.commands.calibrate") -> argparse.ArgumentParser:
    parser = options.Parser(
        prog, "Measure how many KV slots each layer of a model needs: some look back far, others do not."
    )
    add = parser.add_argument_group("what is measured").add_argument
    add("text", nargs="?", metavar="FILE", help="a text (default: Python's language reference)")
    add("--windows", type=options.count, default=4, help="passages of the text, at even distances (default: 4)")
    add(
        "--window", type=options.count, default=1024, help="tokens of a passage, those of a job's texts (default: 1024)"
    )
    rule = f"the rule that says which tokens have the slots, with options NAME:first=4 (default: {DEFAULT_RULE})"
    add("--kv-rule", metavar="NAME", default=DEFAULT_RULE, help=rule)
    add(
        "-o",
        "--output",
        metavar="FILE",
        required=True,
        help="write the result to this file, for --kv-rule NAME:layers=FILE",
    )

    add = parser.add_argument_group("model").add_argument
    options.add_model_options(add)
    add("--path", help="folder of the weights, if it is not the model's")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="to compute in")
    return parser


def run(args: argparse.Namespace) -> None:
    options.check_files(args, reads=(), writes=("output",))
    options.check_not_written(args, [args.text] if args.text is not None else [], ("output",))

    import torch

    from h2o_flexgen.analysis import calibration, windows
    from h2o_flexgen.analysis.model import LayerModel, fits
    from h2o_flexgen.engine.model import load_model
    from h2o_flexgen.evaluation.origin import origin
    from h2o_flexgen.models import inspect

    calibration.check(args.window, args.kv_rule)
    text, name = windows.read(args.text)
    inspect.find(args.model, args.path).spec.check_length(args.window)
    dtype = getattr(torch, args.dtype)
    model = load_model(args.model, args.path, lambda stored: dtype, progress=True)
    ids = windows.cut(text, model.tokenizer, args.windows, args.window)
    with closing(LayerModel(model, streams=not fits(model.spec, dtype))) as layers:
        losses = calibration.measure(layers, ids, args.kv_rule)
    result = origin(args) | {
        "model": model.name,
        "model_revision": model.revision,
        "dtype": args.dtype,
        "text": name,
        "windows": args.windows,
        "window": args.window,
        "rule": args.kv_rule,
        "budgets": losses.budgets,
        "losses": losses.losses,
    }
    write_text("--output", args.output, to_json(rounded(result, 3)) + "\n")
    options.say(describe(args, losses, args.window // 5))


def describe(args: argparse.Namespace, losses, mean: int) -> str:
    """What comes of it, for people: the slots of each layer, `mean` on average."""
    slots = losses.slots(mean - mean // 2, mean // 2, args.window)
    each = " ".join(str(heavy + recent) for heavy, recent in slots)
    use = f"--hh-ratio 0.2 --kv-rule {args.kv_rule}:layers={args.output}"
    return f"with {mean} slots on average, the layers would have\n{each}\nuse it     {use}"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, as `options.main` says."""
    return options.main(make_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
