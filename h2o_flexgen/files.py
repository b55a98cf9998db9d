"""Reading and writing files that a user names."""

from __future__ import annotations

import json
import os
from pathlib import Path

from h2o_flexgen.errors import UserError


def read_json(what: str, path: str | Path):
    """What a JSON file holds. Raises UserError, which calls the file `what`."""
    try:
        return json.loads(Path(path).read_text())
    except OSError as e:
        raise UserError(f"cannot read {what} {path}: {e.strerror}") from None
    except (ValueError, RecursionError) as e:  # ValueError: neither JSON nor text, or a number of thousands of digits
        raise UserError(f"{what} {path} is not JSON: {e}") from None


def check_writable(name: str, path: str) -> None:
    """Raises UserError, which calls the file `name`, if it could not be written at the end of a job. A link is
    followed."""
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if os.path.isdir(target):
        raise UserError(f"{name} {path} is a folder")
    if not os.path.isdir(folder):
        raise UserError(f"{name} {path}: the folder {folder} does not exist")
    if not os.access(target if os.path.exists(target) else folder, os.W_OK):
        raise UserError(f"{name} {path} cannot be written")


def write_text(name: str, path: str, text: str) -> None:
    """Raises UserError, which calls the file `name`."""
    try:
        Path(path).write_text(text)
    except OSError as e:
        raise UserError(f"cannot write {name} {path}: {e.strerror}") from None
