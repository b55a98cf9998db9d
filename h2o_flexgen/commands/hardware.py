"""The command `hardware`: measure this machine for the policy search, in about a minute."""

from __future__ import annotations

import argparse
from pathlib import Path

from h2o_flexgen.commands import options
from h2o_flexgen.commands.output import print_text
from h2o_flexgen.utils.files import write_text


def make_parser(prog: str) -> options.Parser:
    parser = options.Parser(prog, "Measure this machine for the policy search, in about a minute.")
    parser.add_argument("-o", "--output", help="write the profile here (default: print it)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--dtype", default="auto", help="that jobs compute in: auto, float16, bfloat16, float32")
    parser.add_argument("--offload-dir", help="a folder on the disk to measure")
    return parser


def run(args: argparse.Namespace) -> None:
    options.check_files(args, reads=(), writes=("output",))

    from h2o_flexgen.machine.device import open_device
    from h2o_flexgen.profiling.measure import job_dtype, measure
    from h2o_flexgen.storage.disk import default_root

    device = open_device(args.device)
    root = Path(args.offload_dir) if args.offload_dir else default_root()
    text = measure(device, job_dtype(device, args.dtype), root).to_json()
    if args.output is None:
        print_text(text)
    else:
        write_text("--output", args.output, text + "\n")
