"""The library logs, or shows progress on stderr; only command lines print."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from command_tools import environment

import h2o_flexgen
from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.commands.main import execute
from h2o_flexgen.commands.options import Parser

pytest_plugins = ["command_tools"]

ROOT = Path(h2o_flexgen.__file__).parent
#: what may print: commands, and lines of progress
PRINTS = [*ROOT.glob("commands/*.py"), ROOT / "utils" / "progress.py"]
LIBRARY = [path for path in ROOT.rglob("*.py") if path not in PRINTS]


def test_no_module_of_the_library_prints():
    for path in LIBRARY:
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        assert not [f for f in calls if isinstance(f, ast.Name) and f.id == "print"], path
        loggers = [f for f in calls if isinstance(f, ast.Attribute) and f.attr == "getLogger"]
        assert not loggers or "log = logging.getLogger(__name__)" in path.read_text(), path


def test_a_job_by_the_library_prints_nothing_to_stdout(model, capfd):
    for progress in (True, False):
        with LLM(str(model), device="cpu", dtype="float32", progress=progress) as llm:
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
            llm.score([[5, 6, 7]])
        out, err = capfd.readouterr()
        assert out == "" and ("generating" in err) == progress


def test_a_command_shows_warnings_once_and_plain(capsys):
    def run(args):
        logging.getLogger("h2o_flexgen.storage.disk").warning("the disk is nearly %s", "full")

    for _ in range(2):
        execute(Parser("x", "y"), run, [])
        assert capsys.readouterr().err == "the disk is nearly full\n"


@pytest.mark.parametrize(
    "locale",
    [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=["latin-1", "C"],
)
def test_characters_missing_from_the_locale_do_not_end_a_job(locale):
    """As under cron."""
    code = r"""
import logging, sys
from h2o_flexgen import errors
from h2o_flexgen.commands import main, options, output
def run(args):
    output.print_text("\u27e6\U0001f600 gr\u00fc\u00dfe\u27e7")
    logging.getLogger("h2o_flexgen").warning("\u27e6")
    raise errors.UserError("\u27e6")
sys.exit(main.execute(options.Parser("x", "y"), run, []))
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(**locale), capture_output=True)
    assert done.returncode == 2 and b"Traceback" not in done.stderr and b"error: " in done.stderr
    assert b"gr" in done.stdout and done.stdout.endswith(b"\n")
