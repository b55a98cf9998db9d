"""Errors that a user can cause, and what a running job raises when it is asked to stop."""

from __future__ import annotations

import os
from pathlib import Path


class UserError(ValueError):
    """Something the user can put right; the message says what and how (one line)."""


class PlanError(UserError):
    """The policy needs more of a tier than there is."""


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived while a job ran; `signum` says which."""

    def __init__(self, signum: int):
        super().__init__(f"interrupted by signal {signum}")
        self.signum = signum


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
