"""Command line: measure how many KV slots each layer of a model needs.

h2o-flexgen calibrate --output layers.json
h2o-flexgen generate --hh-ratio 0.2 --kv-rule smoothed:layers=layers.json
"""

from __future__ import annotations

import argparse
import os
import sys

from h2o_flexgen import cli
from h2o_flexgen.errors import UserError
from h2o_flexgen.files import read_text, rounded, to_json, write_text
from h2o_flexgen.policy import DEFAULT_RULE

#: options that LLM takes as they are
PASSED = "model device dtype path offload_dir gpu_mem cpu_mem disk_mem hardware".split()


def make_parser(prog: str = "python -m h2o_flexgen.calibrate") -> argparse.ArgumentParser:
    parser = cli.Parser(prog, "Measure how many KV slots each layer of a model needs: some look back far, others do not.")
    add = parser.add_argument_group("what is measured").add_argument
    add("text", nargs="?", metavar="FILE", help="a text (default: Python's language reference)")
    add("--windows", type=cli.count, default=4, help="passages of the text, at even distances (default: 4)")
    add("--window", type=cli.count, default=1024, help="tokens of a passage, those of a job's texts (default: 1024)")
    rule = f"the rule that says which tokens have the slots, with options NAME:first=4 (default: {DEFAULT_RULE})"
    add("--kv-rule", metavar="NAME", default=DEFAULT_RULE, help=rule)
    slots = "slots of the average layer as a fraction of a passage (default: 0.2)"
    add("--ratio", type=float, default=0.2, help=slots)
    add("-o", "--output", metavar="FILE", required=True, help="write the result to this file, for --kv-rule NAME:layers=FILE")

    add = parser.add_argument_group("model and machine").add_argument
    add("--model", help="folder or Hugging Face name; the demo model if left out")
    add("--path", help="folder of the weights, if it is not the model's")
    cli.add_machine_options(add)
    return parser


def run(args: argparse.Namespace) -> None:
    cli.check_files(args, reads=("hardware",), writes=("output",))
    cli.check_not_written(args, [args.text] if args.text is not None else [], ("output",))

    from h2o_flexgen.evaluation import calibration
    from h2o_flexgen.evaluation.origin import origin
    from h2o_flexgen.evaluation.passages import BUILTIN, windows_of
    from h2o_flexgen.jobs.input import builtin_text
    from h2o_flexgen.kv_cache import check_rule
    from h2o_flexgen.llm import LLM

    check_rule(args.kv_rule)
    calibration.check(args.window, args.ratio)
    text = builtin_text() if args.text is None else read_text(args.text, args.text)
    with LLM(progress=False, **{name: getattr(args, name) for name in PASSED}) as llm:
        llm.spec.check_length(args.window)
        texts = windows_of(text, llm.tokenizer, args.windows, args.window)
        errors = calibration.measure(llm, texts, args.kv_rule)
        name = llm.model.name
    layers = calibration.shares(errors, args.ratio)
    result = origin(args) | {
        "model": name,
        "text": os.path.basename(args.text) if args.text else BUILTIN,
        "windows": args.windows,
        "window": args.window,
        "rule": args.kv_rule,
        "ratio": args.ratio,
        "layers": layers,
        "budgets": list(calibration.GRID),
        "errors": errors,
    }
    write_text("--output", args.output, to_json(rounded(result, 4)) + "\n")
    cli.say(describe(layers, args))


def describe(layers: list[float], args: argparse.Namespace) -> str:
    """The shares, for people."""
    shares = " ".join(f"{share:.2g}" for share in layers)
    use = f"--hh-ratio 0.2 --kv-rule {args.kv_rule}:layers={args.output}"
    return f"slots of each layer, 1 being the average:\n{shares}\nuse them   {use}"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, as `cli.main` says."""
    return cli.main(make_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
