"""The console command `h2o-flexgen`: its sub-commands, exit codes and error lines."""

from __future__ import annotations

import argparse
import io
import logging
import signal
import sys
from collections.abc import Callable
from importlib import import_module

from h2o_flexgen import __version__
from h2o_flexgen.commands.options import Parser, did_you_mean
from h2o_flexgen.commands.output import discard
from h2o_flexgen.errors import UserError
from h2o_flexgen.utils import interrupts

#: what each command does; its module here has `make_parser(prog)` and `run(args)`
COMMON = {
    "plan": "show what generate would run, and what would make it faster, before anything is loaded",
    "generate": "generate text for many prompts",
    "status": "report how far a job with an output file is",
    "quality": "measure what a smaller KV cache costs in quality on your own texts",
}
OTHERS = {
    "serve": "run batches of OpenAI clients over HTTP, one after the other",
    "embed": "embed many texts: hidden states of a model, pooled into one vector each",
    "stream": "answer turns or read a text without end, over a KV cache of a fixed size",
    "calibrate": "measure how many KV slots each layer of a model needs",
    "search": "find the policy with the highest predicted throughput, for any machine",
    "hardware": "measure this machine, for plans made elsewhere",
    "convert": "write a smaller checkpoint, with weights in 8 or 4 bits",
    "analyse": "show how a model's attention is spread over a text, as in the H2O paper",
    "lm_eval": "run EleutherAI's lm-evaluation-harness with a model named h2o_flexgen",
}
COMMANDS = COMMON | OTHERS

#: what torch says when the RAM is full
TORCH_OUT_OF_MEMORY = "can't allocate memory"


def usage(prog: str) -> str:
    def listed(commands: dict[str, str]) -> str:
        return "\n".join(f"  {name:<10}{what}" for name, what in commands.items())

    return f"""usage: {prog} COMMAND [options]

Generates text for many prompts with models that do not fit in memory.

{listed(COMMON)}

for example, with the demo model:
  {prog} generate --hh-ratio 0.2
or a job of your own in at most 16 GiB of RAM:
  {prog} plan Qwen/Qwen2.5-7B-Instruct --mem 16 --num-prompts 1000
  {prog} generate --model Qwen/Qwen2.5-7B-Instruct --mem 16 --input-file in.jsonl --output-file out.jsonl
  {prog} status out.jsonl

more commands:
{listed(OTHERS)}

{prog} COMMAND --help lists the options of a command."""


def main(argv: list[str] | None = None, prog: str = "h2o-flexgen") -> int:
    """Run a sub-command; returns the exit code, as `execute`."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in COMMANDS:
        return run_command(name, rest, f"{prog} {name}")
    if name in ("-h", "--help"):
        print(usage(prog))
        return 0
    if name == "--version":
        print(f"h2o-flexgen {__version__}")
        return 0
    if name.startswith("-"):
        problem = f"{name} before a command: begin with one, as in {prog} generate {name} ..."
    else:
        problem = f"unknown command {name!r}{did_you_mean(name, COMMANDS)}"
    print(f"error: {problem} ({', '.join(COMMANDS)}; {prog} --help says what they do)", file=sys.stderr)
    return 2


def run_command(name: str, argv: list[str] | None, prog: str) -> int:
    """Run one of COMMANDS; returns the exit code, as `execute`."""
    module = import_module(f"h2o_flexgen.commands.{name}")
    return execute(module.make_parser(prog), module.run, argv)


def execute(parser: Parser, run: Callable[[argparse.Namespace], None], argv: list[str] | None = None) -> int:
    """Run a command to its end; returns the exit code: 0, 2 for an error of the user, 128 + the signal."""
    interrupts.take_over()
    for stream in (sys.stdout, sys.stderr):  # cron and old locales: what they cannot show must not end a job
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")
    logging.getLogger("h2o_flexgen").addHandler(logging.lastResort)  # plain warnings on stderr; added once
    try:
        run(parser.parse_args(argv))
    except UserError as e:
        print(f"error: {parser.name_options(' '.join(str(e).split()))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as e:
        print(": ".join(["interrupted", *getattr(e, "__notes__", [])]), file=sys.stderr)
        return 128 + getattr(e, "signum", signal.SIGINT)
    except BrokenPipeError:  # nobody reads the output any more: end quietly, as other programs do
        discard(sys.stdout)
        discard(sys.stderr)
        return 128 + signal.SIGPIPE
    except (MemoryError, RuntimeError) as e:
        if not (isinstance(e, MemoryError) or TORCH_OUT_OF_MEMORY in str(e)):
            raise
        advice = "end other programs, or take a smaller model, shorter texts or smaller batches"
        print(f"error: out of memory: {advice}", file=sys.stderr)
        return 2
    return 0
