"""Copies of a model's files in a form that can be used as it is: made once, kept in the cache folder, and known by what
the files hold."""

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

#: a number to increase when a conversion gives something else than before, so that old copies are not used
CONVERSION = 3
#: the file in a copy that says what it is made of, and what each of its files is
RECORD = "copy.json"
#: how copies are called
NAME = re.compile("[0-9a-f]{16}")
#: of a file larger than SMALL bytes, the first HEAD bytes are checked, which hold the header of one of weights
SMALL = 1 << 25
HEAD = 1 << 16

log = logging.getLogger(__name__)


def converted(sources: list[Path], kind: str, make: Callable[[Path], None], room: str = "converted") -> Path:
    """The folder of what `make(folder)` makes of some files: made once, and again when the files change or the copy is
    not as it was made. One that the same files had before they changed is removed.

    Two processes that want the same make it once; one that is killed leaves nothing that another would take as whole.

    Args:
        kind: what is made of the files.
        room: the folder in the cache folder. One process at a time makes copies in each.

    Raises:
        UserError: a source cannot be read, or the cache folder is another user's.
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
        if not _is_whole(target):  # another process may have made it meanwhile
            if os.path.lexists(target):
                log.warning("the copy %s is damaged: it is made again", target)
                _remove(target)
            _remove_older(root, origin)
            _make(target, origin, make)
    return target


def _wait_for(lock, root: Path) -> None:
    """Lock a file; only one process converts at a time, since each wants the whole disk."""
    said = False
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not said:
                log.warning("waiting for another process, which converts a model into %s", root)
            said = True
            interrupts.check()
            time.sleep(0.1)


def _make(target: Path, origin: dict, make: Callable[[Path], None]) -> None:
    """All of it, or nothing."""
    partial = target.with_name("partial")
    _remove(partial)  # of a process that was killed
    partial.mkdir()
    try:
        make(partial)
        (partial / RECORD).write_text(json.dumps({**origin, "files": _files_of(partial)}))
        for path in (*partial.rglob("*"), partial):  # else a loss of power might leave the name and no bytes
            sync(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(target)


def _remove_older(root: Path, origin: dict) -> None:
    """The copies of what the same files held before, and those of versions that wrote no record."""
    for folder in root.iterdir():
        record = _record(folder)
        is_old = NAME.fullmatch(folder.name) and record is None
        if is_old or (record and origin.items() <= record.items()):
            _remove(folder)


def _remove(path: Path) -> None:
    """A folder with all that is in it, or what is in the place of one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_whole(folder: Path) -> bool:
    """Whether a copy has the files that it was made with, by their sizes and headers."""
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
    """{name: [bytes, digest of its header, or of all of it]} of all files but the record."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or path.name == RECORD:
            continue
        with open(open_regular(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(size if size <= SMALL else HEAD)
        found[str(path.relative_to(folder))] = [size, hashlib.sha256(content).hexdigest()]
    return found
