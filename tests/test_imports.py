"""Imports run downwards only: command lines, jobs, llm, engine and planning, stores, models, sizes, policy, errors.

The order itself stands in pyproject.toml. It covers every import, also those inside functions.
"""

from __future__ import annotations

import subprocess
import sys

from machines import ROOT

LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports('pyproject.toml', no_cache=True))"


def test_imports_run_downwards_only():
    # in a process of its own: the linter disables the loggers of the one it runs in
    done = subprocess.run([sys.executable, "-c", LINT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
