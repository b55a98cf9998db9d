"""Files that a user names: read, or seen to be writable, with errors that say what is wrong. Folders of processes that
died: removed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
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


def sweep(root: Path, prefix: str) -> None:
    """Remove folders under `root` whose owner no longer lives: that whose `lock` is not held, and old ones without."""
    try:
        folders = [root / name for name in os.listdir(root) if name.startswith(prefix)]
    except OSError:
        return  # there is none, or none of ours
    for folder in folders:
        try:
            lock = os.open(folder / "lock", os.O_RDWR)
        except FileNotFoundError:
            # made, not yet locked: its owner may be about to; a dead one is swept once it is old
            if _age(folder) > 60:
                shutil.rmtree(folder, ignore_errors=True)
            continue
        except OSError:
            continue  # another user's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _age(folder: Path) -> float:
    try:
        return time.time() - folder.stat().st_mtime
    except OSError:
        return 0.0
