"""Imports run downwards only: command lines, jobs, llm, engine and planning, stores, models, sizes, policy, errors.

The order itself stands in pyproject.toml. It covers every import, also those inside functions.
"""

from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports
from machines import ROOT


def test_imports_run_downwards_only(capsys):
    code = lint_imports(str(ROOT / "pyproject.toml"), no_cache=True)
    assert code == EXIT_STATUS_SUCCESS, capsys.readouterr().out
