"""Files that a user names, and the cache folder."""

from __future__ import annotations

import errno
import grp
import hashlib
import json
import os
import pwd
import stat
from pathlib import Path

from h2o_flexgen.errors import UserError

#: end of a message about the cache folder
OTHER_HOME = "make room there, or name a folder that can be written in H2O_FLEXGEN_HOME"
#: end of a message about a cache folder that others can use
OWN_FOLDER = "name a new folder of your own, which may be below it, in H2O_FLEXGEN_HOME"
#: the most bytes of a JSON file and of a text
JSON_BYTES = 100 << 20
TEXT_BYTES = 1 << 30
#: size and number of the pieces that `samples` reads
PIECE = 4096
PIECES = 64


def open_regular(path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """A descriptor of a regular file, opened with `flags` and created with `mode` if they include O_CREAT. Raises
    OSError, also for anything that is not a regular file; never waits for a pipe or a device."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    except OSError as e:
        if e.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise OSError(errno.ELOOP, "it is a link", str(path)) from None
        raise
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_bytes(path: str | Path, most: int | None = None) -> bytes:
    """The contents of a regular file. Raises OSError if it cannot be read or has more than `most` bytes."""
    with open(open_regular(path), "rb") as file:
        content = file.read(-1 if most is None else most + 1)
    if most is not None and len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
    return content


def read_json(what: str, path: str | Path):
    """The contents of a JSON file, called `what` in messages. Raises UserError."""
    try:
        return json.loads(read_bytes(path, JSON_BYTES))
    except OSError as e:
        raise UserError(f"cannot read {what} {path}: {e.strerror}") from None
    except (ValueError, RecursionError) as e:  # ValueError: not JSON or not text, or thousands of digits
        raise UserError(f"{what} {path} is not JSON: {e}") from None


def read_text(what: str, path: str | Path) -> str:
    """The contents of a text file, called `what` in messages. Raises UserError."""
    try:
        return read_bytes(path, TEXT_BYTES).decode("utf-8")
    except OSError as e:
        raise UserError(f"cannot read {what}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{what} is not a text in UTF-8") from None


def check_small(what: str, path: Path) -> None:
    """Raises UserError for a file, called `what`, that no library should try to read: a pipe, a device, an unreadable
    file or a huge one. A missing file is fine."""
    try:
        fd = open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as e:
        raise UserError(f"cannot read {what} {path}: {e.strerror}") from None
    size = os.fstat(fd).st_size
    os.close(fd)
    if size > JSON_BYTES:
        raise UserError(f"cannot read {what} {path}: it is larger than {JSON_BYTES >> 20} MiB")


def samples(path: Path) -> bytes:
    """A digest of a file's size and of evenly spaced pieces of it; of all of it up to 256 KiB. Independent of its path
    and times. Raises UserError if it cannot be read."""
    try:
        fd = open_regular(path)
        try:
            size = os.fstat(fd).st_size
            found = hashlib.sha256(str(size).encode())
            for n in range(PIECES):
                found.update(os.pread(fd, PIECE, n * max(0, size - PIECE) // (PIECES - 1)))
            return found.digest()
        finally:
            os.close(fd)
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None


def check_writable(name: str, path: str) -> None:
    """Raises UserError if a file, called `name`, cannot be written at the end of a job. Links are followed."""
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if os.path.isdir(target):
        raise UserError(f"{name} {path} is a folder")
    if not os.path.isdir(folder):
        raise UserError(f"{name} {path}: the folder {folder} does not exist")
    if not os.access(target if os.path.exists(target) else folder, os.W_OK):
        raise UserError(f"{name} {path} cannot be written")


def write_text(name: str, path: str, text: str) -> None:
    """Raises UserError if the file, called `name`, cannot be written, or is a pipe that nobody reads."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        os.set_blocking(fd, True)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as e:
        raise UserError(f"cannot write {name} {path}: {e.strerror}") from None


def to_json(data, indent: int = 0, width: int = 120) -> str:
    """JSON with a line for each value that fits on one; consecutive plain values share lines."""
    flat = json.dumps(data)
    if not isinstance(data, (dict, list)) or len(flat) + indent <= width:
        return flat
    is_dict = isinstance(data, dict)
    names = [f"{json.dumps(key)}: " for key in data] if is_dict else [""] * len(data)
    values = list(data.values()) if is_dict else data
    lines: list[str] = []
    shares = False
    for name, value in zip(names, values):
        item = name + to_json(value, indent + 1, width)
        is_plain = not isinstance(value, (dict, list))
        if shares and is_plain and indent + len(lines[-1]) + len(item) + 4 <= width:
            lines[-1] += f", {item}"
        else:
            lines.append(item)
        shares = is_plain
    pad = "\n" + " " * (indent + 1)
    return flat[0] + pad + f",{pad}".join(lines) + pad[:-1] + flat[-1]


def rounded(data, digits: int = 6):
    """`data` with every float rounded to `digits` significant digits."""
    if isinstance(data, float):
        return float(f"{data:.{digits}g}")
    if isinstance(data, dict):
        return {key: rounded(value, digits) for key, value in data.items()}
    return [rounded(value, digits) for value in data] if isinstance(data, list) else data


def sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def cache_root() -> Path:
    """The cache folder. Raises UserError if there is no place for it, or as `check_private`."""
    if home := os.environ.get("H2O_FLEXGEN_HOME"):
        root = Path(home)
    else:
        try:
            root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "h2o_flexgen"
        except RuntimeError:
            raise UserError("this user has no home folder: name a cache folder in H2O_FLEXGEN_HOME") from None
    check_private(root)
    return root


def cache_folder(name: str) -> Path:
    """A folder in `cache_root`, not yet made. Raises UserError as that does."""
    folder = cache_root() / name
    check_private(folder)
    return folder


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents, for this user alone. Raises OSError."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def check_private(folder: Path) -> None:
    """Raises UserError for a folder in which another user could plant files. It must belong to this user or root, and
    nobody else may write in it, except a group with only this user, as with a umask of 002. A folder with the sticky
    bit, such as /tmp, is fine, since its contents are checked too."""
    try:
        found = folder.stat()
        owners = {found.st_uid, folder.lstat().st_uid}
    except OSError:  # it is made later, and any error is raised then
        return
    if not stat.S_ISDIR(found.st_mode):
        return
    if not owners <= {0, os.geteuid()}:
        raise UserError(f"the cache folder {folder} belongs to another user: {OWN_FOLDER}")
    is_shared = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid))
    if is_shared and not found.st_mode & stat.S_ISVTX:
        raise UserError(f"other users may write in the cache folder {folder}: chmod go-w {folder}, or {OWN_FOLDER}")


def _is_own_group(gid: int) -> bool:
    """Whether a group has the user's name and no other member, as many systems make one for each user."""
    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
