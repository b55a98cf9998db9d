"""Files that a user names, and what is kept between jobs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from h2o_flexgen.errors import UserError

#: of what `converted` keeps: raise it when a conversion gives something else
CONVERSION = 3


def read_json(what: str, path: str | Path):
    """What a JSON file holds. Raises UserError, which calls the file `what`."""
    try:
        return json.loads(Path(path).read_text())
    except OSError as e:
        raise UserError(f"cannot read {what} {path}: {e.strerror}") from None
    except (ValueError, RecursionError) as e:  # ValueError: neither JSON nor text, or a number of thousands of digits
        raise UserError(f"{what} {path} is not JSON: {e}") from None


def read_text(what: str, path: str | Path) -> str:
    """What a text file holds. Raises UserError, which calls the file `what`."""
    try:
        return Path(path).read_text("utf-8")
    except OSError as e:
        raise UserError(f"cannot read {what}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{what} is not a text in UTF-8") from None


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


def to_json(data, indent: int = 0, width: int = 110) -> str:
    """JSON in which whatever fits on a line stands on one."""
    flat = json.dumps(data)
    if not isinstance(data, (dict, list)) or len(flat) + indent <= width:
        return flat
    pad = "\n" + " " * (indent + 1)
    if isinstance(data, dict):
        parts = [f"{json.dumps(key)}: {to_json(value, indent + 1, width)}" for key, value in data.items()]
        return "{" + pad + f",{pad}".join(parts) + f"{pad[:-1]}}}"
    return "[" + pad + f",{pad}".join(to_json(value, indent + 1, width) for value in data) + f"{pad[:-1]}]"


def rounded(data, digits: int = 6):
    """Every float in `data` to so many significant digits."""
    if isinstance(data, float):
        return float(f"{data:.{digits}g}")
    if isinstance(data, dict):
        return {key: rounded(value, digits) for key, value in data.items()}
    return [rounded(value, digits) for value in data] if isinstance(data, list) else data


def cache_root() -> Path:
    """The folder for what is kept between jobs. Raises UserError if there is none."""
    if home := os.environ.get("H2O_FLEXGEN_HOME"):
        return Path(home)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "h2o_flexgen"
    except RuntimeError:
        raise UserError("this user has no home folder: name one for what is kept in H2O_FLEXGEN_HOME") from None


def sync(path: Path) -> None:
    """Let a file or a folder reach the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def converted(sources: list[Path], kind: str, make: Callable[[Path], None]) -> Path:
    """The folder of what `make(folder)` makes of some files: made once, and made anew when one of the files changes.

    Two processes that want the same make it once; one that is killed leaves nothing that another would take as whole.

    Args:
        kind: what is made of the files.

    Raises:
        OSError: the folder cannot be written; and what `make` raises.
    """
    key = hashlib.sha256(f"{CONVERSION} {kind}".encode())
    for source in sources:
        stat = source.stat()
        key.update(f"{source.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
    root = cache_root() / "converted"
    target, partial = root / key.hexdigest()[:16], root / "partial"
    if target.exists():
        return target
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(root / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():  # another process may have made it meanwhile
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
            partial.mkdir()
            try:
                make(partial)
                for path in (*partial.iterdir(), partial):  # else a loss of power might leave the name and no bytes
                    sync(path)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            partial.rename(target)
    return target
