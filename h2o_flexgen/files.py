"""Files that a user names: read, or seen to be writable, with errors that say what is wrong."""

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
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise UserError(f"{what} {path} is not JSON: {e}") from None


def check_writable(option: str, path: Path) -> None:
    """Raises UserError, before any work is done, if a file could not be written at its end."""
    folder = path.absolute().parent
    if not os.path.isdir(folder):
        raise UserError(f"{option} {path}: the folder {folder} does not exist")
    if os.path.isdir(path):
        raise UserError(f"{option} {path} is a folder")
    try:
        path.with_name(path.name + ".partial").exists()
    except OSError as e:
        raise UserError(f"{option} {path} cannot be written: {e.strerror}") from None
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise UserError(f"{option} {path} cannot be written")
