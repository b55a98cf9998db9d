"""The folder of a server: this user's alone, and one server's at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from h2o_flexgen.errors import UserError
from h2o_flexgen.utils.files import make_private, open_regular


def make_folder(path: Path) -> Path:
    """Make the folder, unless there is one. Raises UserError if it cannot be made, or others can use it."""
    try:
        make_private(path)
        found = path.stat()
    except OSError as e:
        raise UserError(f"cannot make `folder` {path}: {e.strerror}") from None
    if found.st_uid != os.geteuid():
        raise UserError(f"`folder` {path} belongs to another user: name one of your own")
    if found.st_mode & 0o077:
        raise UserError(f"`folder` {path} is open to other users: chmod 700 {path}")
    return path


def lock_folder(path: Path) -> BinaryIO:
    """Lock the folder against other servers until the returned file is closed. Raises UserError if another one has."""
    try:
        file = open(open_regular(path / "lock", os.O_RDWR | os.O_CREAT), "r+b")
    except OSError as e:
        raise UserError(f"cannot write in `folder` {path}: {e.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        file.close()
        is_busy = isinstance(e, BlockingIOError)
        why = "another server uses it: stop that one, or name another folder" if is_busy else e.strerror
        raise UserError(f"cannot lock `folder` {path}: {why}") from None
    return file
