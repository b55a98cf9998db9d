"""The console command `h2o-flexgen`: its sub-commands by name."""

from __future__ import annotations

import sys
from importlib import import_module

from h2o_flexgen import __version__
from h2o_flexgen.commands import options

#: name: (module with `make_parser(prog)` and `run(args)`, what it does)
COMMANDS = {
    "generate": ("generate", "generate text for many prompts"),
    "status": ("status", "say how far a job is that writes an output file"),
    "stream": ("stream", "go through turns or a text without end, over a KV cache of a fixed size"),
    "quality": ("quality", "measure what KV budgets cost in quality on your own texts"),
    "calibrate": ("calibrate", "measure how many KV slots each layer of a model needs"),
    "plan": ("plan", "show what generate would run, before anything is loaded"),
    "search": ("search", "find the policy with the highest predicted throughput, for any machine"),
    "analyse": ("analyse", "show how a model's attention is spread over a text, as in the H2O paper"),
    "hardware": ("hardware", "measure this machine, for plans made elsewhere"),
}


def usage(prog: str) -> str:
    commands = "\n".join(f"  {name:<10}{what}" for name, (_, what) in COMMANDS.items())
    return f"""usage: {prog} COMMAND ...

Generates text in large batches with models that do not fit in memory.

{commands}

for example, with the demo model:
  {prog} generate --hh-ratio 0.2
and the options of a command:
  {prog} generate --help"""


def main(argv: list[str] | None = None, prog: str = "h2o-flexgen") -> int:
    """Run a sub-command; returns the exit code, as `options.main` says."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in COMMANDS:
        module = import_module(f"h2o_flexgen.commands.{COMMANDS[name][0]}")
        return options.main(module.make_parser(f"{prog} {name}"), module.run, rest)
    if name in ("-h", "--help"):
        print(usage(prog))
        return 0
    if name == "--version":
        print(f"h2o-flexgen {__version__}")
        return 0
    if name.startswith("-"):
        problem = f"{name} before a command: begin with one, as in {prog} generate {name} ..."
    else:
        problem = f"unknown command {name!r}{options.did_you_mean(name, COMMANDS)}"
    print(f"error: {problem} ({', '.join(COMMANDS)}; {prog} --help says what they do)", file=sys.stderr)
    return 2
