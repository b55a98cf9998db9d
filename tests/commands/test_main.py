"""The console command: its sub-commands, its help, which is quick, and its exit codes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from command_tools import environment

from h2o_flexgen import __version__
from h2o_flexgen.commands.main import COMMANDS, execute, main
from h2o_flexgen.commands.options import Parser

#: commands with options of their own
OURS = [name for name in COMMANDS if name != "lm_eval"]


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]], ids=["alone", "--help", "-h"])
def test_it_lists_its_commands_and_an_example(argv, capsys):
    assert main(argv) == 0
    out = capsys.readouterr().out
    for name, what in COMMANDS.items():
        assert re.search(rf"^  {name} +{what}$", out, re.MULTILINE)
    assert "h2o-flexgen generate --hh-ratio 0.2" in out
    assert out.index("  generate ") < out.index("for example") < out.index("more commands") < out.index("  search ")


def test_common_options_come_first(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    out = capsys.readouterr().out
    names = ("--model", "--mem", "--top-k", "--hh-size", "--device", "--percent")
    places = [out.index(f"\n  {name}") for name in names]
    assert places == sorted(places)
    assert out.index("\nplacement; ") < out.index("\n  --gpu-mem")


def test_the_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"h2o-flexgen {__version__}\n"


@pytest.mark.parametrize(
    "word, message",
    [
        ("plna", "unknown command 'plna': did you mean plan?"),
        ("Generate", "unknown command 'Generate': did you mean generate?"),
        ("xyz", "unknown command 'xyz' (plan, generate, status"),
        ("--model", "--model before a command: begin with one, as in h2o-flexgen generate --model"),
    ],
)
def test_an_unknown_command(word, message, capsys):
    assert main([word, "--no-such-option"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.parametrize("name", OURS)
def test_help_and_errors_name_what_was_typed(name, capsys):
    with pytest.raises(SystemExit) as done:
        main([name, "--help"])
    assert done.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: h2o-flexgen {name} ")
    assert main([name, "--no-such-option"]) == 2
    assert capsys.readouterr().err.endswith(f"(h2o-flexgen {name} --help lists the options)\n")


def test_help_does_not_import_torch():
    code = f"""
import sys
from contextlib import suppress
from h2o_flexgen.commands.main import main
for name in {["", *OURS]}:
    with suppress(SystemExit):
        main([*filter(None, [name]), "--help"])
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("usage: h2o-flexgen") == 1 + len(OURS)


def test_it_runs_as_a_module():
    argv = [sys.executable, "-m", "h2o_flexgen", "search", "--help"]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m h2o_flexgen search ")


def no_memory_in_torch(args) -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def no_memory_in_python(args) -> None:
    bytes(1 << 60)


@pytest.mark.parametrize("run", [no_memory_in_torch, no_memory_in_python])
def test_a_lack_of_memory_is_one_line(run, capsys):
    assert execute(Parser("x", "y"), run, []) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: out of memory: ") and err.count("\n") == 1


def test_another_error_at_run_time_is_a_bug(capsys):
    def run(args):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        execute(Parser("x", "y"), run, [])
