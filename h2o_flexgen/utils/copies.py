"""Converted copies of a model's files: made once, kept in the cache folder, and identified by the files' contents."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from h2o_flexgen.utils import interrupts
from h2o_flexgen.utils.files import cache_folder, make_private, open_regular, read_bytes, samples, sync

#: to be increased when the result of a conversion changes, so that old copies are not used
CONVERSION = 3
#: the file in a copy that records its sources and a digest of each of its files
RECORD = "copy.json"
#: names of copies
NAME = re.compile("[0-9a-f]{16}")
#: of a file larger than SMALL bytes only the first HEAD bytes are checked, which hold the header of weights
SMALL = 1 << 25
HEAD = 1 << 16

log = logging.getLogger(__name__)


def converted(sources: list[Path], kind: str, make: Callable[[Path], None], room: str = "converted") -> Path:
    """The folder with the result of `make(folder)`: made once, and again if sources change or the copy is damaged. A
    copy of earlier versions of the sources is removed.

    Two processes make the same copy only once; a process that is killed leaves nothing that looks complete.

    Args:
        kind: what is made from the files.
        room: a folder in the cache folder; only one process at a time makes copies in it.

    Raises:
        UserError: a source cannot be read, or the cache folder belongs to another user.
        OSError: the folder cannot be written; and what `make` raises.
    """
    key = hashlib.sha256(f"{CONVERSION} {kind}".encode())
    for source in sources:
        key.update(samples(source))
        key.update(str(source.stat().st_mtime_ns).encode())  # samples miss an edit of a few bytes
    root = cache_folder(room)
    target = root / key.hexdigest()[:16]
    if _is_whole(target):
        return target
    make_private(root)
    origin = {"kind": hashlib.sha256(kind.encode()).hexdigest(), "sources": [str(path.resolve()) for path in sources]}
    with open(open_regular(root / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW), "rb") as lock:
        _wait_for(lock, root)
        if not _is_whole(target):  # another process may have made it
            if os.path.lexists(target):
                log.warning("the copy %s is damaged: making it again", target)
                _remove(target)
            _remove_older(root, origin)
            _make(target, origin, make)
    return target


def _wait_for(lock, root: Path) -> None:
    """Lock a file, so that only one process converts at a time: each needs the whole disk."""
    has_warned = False
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not has_warned:
                log.warning("waiting for another process, which converts a model into %s", root)
            has_warned = True
            interrupts.check()
            time.sleep(0.1)


def _make(target: Path, origin: dict, make: Callable[[Path], None]) -> None:
    """Make a complete copy or none."""
    partial = target.with_name("partial")
    _remove(partial)  # left by a process that was killed
    partial.mkdir()
    try:
        make(partial)
        (partial / RECORD).write_text(json.dumps({**origin, "files": _files_of(partial)}))
        for path in (*partial.rglob("*"), partial):  # otherwise a power failure could leave a name without bytes
            sync(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(target)


def _remove_older(root: Path, origin: dict) -> None:
    """Remove copies of earlier versions of the same files, and copies without a record."""
    for folder in root.iterdir():
        record = _record(folder)
        is_old = NAME.fullmatch(folder.name) and record is None
        if is_old or (record and origin.items() <= record.items()):
            _remove(folder)


def _remove(path: Path) -> None:
    """Remove a folder with its contents, or whatever has its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_whole(folder: Path) -> bool:
    """Whether a copy still has all its files, judging by their sizes and headers."""
    record = _record(folder)
    try:
        return record is not None and record.get("files") == _files_of(folder)
    except OSError:
        return False


def _record(folder: Path) -> dict | None:
    try:
        record = json.loads(read_bytes(folder / RECORD))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _files_of(folder: Path) -> dict[str, list]:
    """{name: [bytes, digest of the file or its header]} of all files except the record."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or path.name == RECORD:
            continue
        with open(open_regular(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(size if size <= SMALL else HEAD)
        found[str(path.relative_to(folder))] = [size, hashlib.sha256(content).hexdigest()]
    return found
