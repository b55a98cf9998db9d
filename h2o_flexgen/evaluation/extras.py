"""Optional packages, which only some measurements need."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from h2o_flexgen.errors import UserError


def need(module: str, package: str, what: str) -> ModuleType:
    """Import a module of a package. Raises UserError, which says how to install it, if it is missing."""
    try:
        return import_module(module)
    except ImportError:
        raise UserError(f"{what} needs the package {package}: pip install {package}") from None


def save(figure, path: str | Path, dpi: int) -> None:
    """Write a figure of matplotlib as PNG. Raises UserError if that fails."""
    try:
        figure.savefig(path, dpi=dpi, format="png")
    except OSError as e:
        raise UserError(f"cannot write the plot {path}: {e.strerror}") from None
