"""Reading and writing files that a user names."""

from __future__ import annotations

import fcntl
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


def check_writable(name: str, path: Path) -> None:
    """Raises UserError, which calls the file `name`, if it could not be written at the end of a job. A link is
    followed."""
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    written = [path] if os.path.exists(path) else []
    if os.path.isdir(path):
        raise UserError(f"{name} {path} is a folder")
    if not written or os.path.isfile(path):  # not a device or a pipe
        if not os.path.isdir(folder):
            raise UserError(f"{name} {path}: the folder {folder} does not exist")
        try:
            os.lstat(f"{target}.partial")
        except FileNotFoundError:
            pass
        except OSError as e:
            raise UserError(f"{name} {path} cannot be written: {e.strerror}") from None
        written.append(folder)
    if not all(os.access(each, os.W_OK) for each in written):
        raise UserError(f"{name} {path} cannot be written")


def write_text(path: str, text: str, name: str | None = None) -> None:
    """Raises UserError, which calls the file `name`, or by its path."""
    try:
        Path(path).write_text(text)
    except OSError as e:
        raise UserError(f"cannot write {name or path}: {e.strerror}") from None


def is_held(path: Path) -> bool:
    """Whether a process that lives has locked a file."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # no such file, or a file system without locks
    return False
