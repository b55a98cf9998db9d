"""Files: parallel reads and writes at offsets, and the files of what a job offloads."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import PriorityQueue
from uuid import uuid4

import numpy as np

from h2o_flexgen.errors import UserError
from h2o_flexgen.machine.pages import PAGE, aligned
from h2o_flexgen.utils.files import cache_folder, make_private, open_regular

#: bytes of a disk request: larger ones are read no faster, smaller ones cost CPU time (docs/benchmarks/disk.json)
REQUEST = 4 << 20
LEAST_REQUEST = 1 << 20
#: threads that keep the disk's queue full
THREADS = 4


class File:
    """A file that several threads read and write at offsets. All calls raise UserError if the system refuses them.

    `direct` requests bypass the page cache (O_DIRECT) if offset and address are multiples of 4096 and the file system
    allows it; others go through it.

    Args:
        writable: make a new file, which nobody else may read.
    """

    def __init__(self, path: Path, writable: bool = False):
        self.path = path
        self.fd: int | None = None
        self.direct_fd: int | None = None
        flags = os.O_RDWR if writable else os.O_RDONLY
        try:
            self.fd = open_regular(path, flags | (os.O_CREAT | os.O_EXCL if writable else 0))
        except OSError as e:
            if writable:
                raise _cannot_write(path.parent, e) from None
            raise UserError(f"cannot open {path}: {e.strerror}") from None
        with suppress(OSError, AttributeError):  # no O_DIRECT on this file system or this system
            # not by its path, where another file may be by now
            self.direct_fd = os.open(f"/proc/self/fd/{self.fd}", flags | os.O_DIRECT | os.O_CLOEXEC)
        self.device = os.fstat(self.fd).st_dev

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def allocate(self, nbytes: int) -> None:
        """Reserve the space, so that a full disk is found before the run."""
        if nbytes:
            try:
                os.posix_fallocate(self.fd, 0, nbytes)
            except OSError as e:
                raise _cannot_write(self.path.parent, e) from None

    def read_at(self, view: memoryview, offset: int, direct: bool = False) -> int:
        """Fill `view`; returns its bytes. Raises UserError if the file is too short."""
        try:
            return self._move(lambda fd, part, at: os.preadv(fd, [part], at), view, offset, direct)
        except OSError as e:
            raise UserError(f"cannot read {self.path}: {e.strerror}") from None

    def write_at(self, view: memoryview, offset: int, direct: bool = False) -> int:
        """Write all of `view`; returns its bytes."""
        try:
            return self._move(os.pwrite, view, offset, direct)
        except OSError as e:
            raise _cannot_write(self.path.parent, e) from None

    def _move(self, call, view: memoryview, offset: int, direct: bool) -> int:
        """Repeat `call(fd, part, at)` until all is moved; if `direct`, whole pages past the page cache."""
        whole = len(view) - len(view) % PAGE if direct and self.direct_fd is not None else 0
        done = 0
        while done < len(view):
            fd, end = (self.direct_fd, whole) if done < whole else (self.fd, len(view))
            try:
                count = call(fd, view[done:end], offset + done)
            except OSError as e:
                if fd == self.fd or e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                whole = 0  # the file system refuses all direct requests, or this one
                continue
            if count == 0:
                raise UserError(f"{self.path} ended at byte {offset + done}: the file was cut short")
            done += count
            if count % PAGE:
                whole = 0
        return done

    def close(self) -> None:
        for fd in (self.fd, self.direct_fd):
            if fd is not None:
                os.close(fd)
        self.fd = self.direct_fd = None

    def __del__(self):
        self.close()


#: urgency of requests: a write holds memory until done; a read is needed next; a prefetch is needed a layer later
WRITE, READ, PREFETCH = range(3)
#: bytes of a large prefetch: 8 MiB of a tensor, and one page more for a tensor that begins within a page
LARGE = (8 << 20) + PAGE


class RequestQueue:
    """Threads that take requests to one file system: the most urgent first, and among those the oldest."""

    def __init__(self, threads: int):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="disk")
        self._waiting = PriorityQueue()  # of (urgency, number, work, future)
        self._numbers = itertools.count()

    def submit(self, urgency: int, work: Callable, *args) -> Future:
        future = Future()
        self._waiting.put((urgency, next(self._numbers), partial(work, *args), future))
        self._pool.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        _, _, work, future = self._waiting.get()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as e:
            future.set_exception(e)
            del work, future  # the error's traceback holds this frame, and with it the buffer

    def close(self) -> None:
        """The running requests end, waiting ones are cancelled."""
        for *_, future in list(self._waiting.queue):
            future.cancel()
        self._pool.shutdown()


class DiskIO:
    """Reads and writes C-contiguous arrays in requests of up to `request` bytes, with `threads` threads for each file
    system. Counts the bytes moved.

    Attributes:
        large_prefetches: prefetch in requests of LARGE bytes. They take less time from compute, but reads of the KV
            cache would wait longer for running ones.
    """

    def __init__(self, threads: int = THREADS, request: int = REQUEST):
        self.threads = threads
        self.request = request
        self.large_prefetches = False
        self.read_bytes = self.written_bytes = 0
        self._queues: dict[int, RequestQueue] = {}  # by file system
        self._lock = threading.Lock()

    def read(
        self, file: File, array: np.ndarray, offset: int, direct: bool = False, prefetch: bool = False
    ) -> list[Future]:
        """Start to fill `array` from `offset`. Returns a future for each request, in the order of their parts of the
        array; its result is their bytes. `prefetch`: start only while no other request waits."""
        with self._lock:
            self.read_bytes += array.nbytes
            return self._submit(PREFETCH if prefetch else READ, file.read_at, file, array, offset, direct)

    def write(self, file: File, array: np.ndarray, offset: int, direct: bool = False) -> list[Future]:
        """Start to write `array` at `offset`."""
        with self._lock:
            self.written_bytes += array.nbytes
            return self._submit(WRITE, file.write_at, file, array, offset, direct)

    def _submit(
        self, urgency: int, move: Callable, file: File, array: np.ndarray, offset: int, direct: bool
    ) -> list[Future]:
        if file.device not in self._queues:
            self._queues[file.device] = RequestQueue(self.threads)
        queue = self._queues[file.device]
        view = memoryview(array).cast("B")
        if urgency == PREFETCH and self.large_prefetches:
            step = request_bytes(len(view), LARGE, 1)
        else:
            step = request_bytes(len(view), self.request, self.threads)
        starts = range(0, len(view), step)
        return [queue.submit(urgency, move, view[at : at + step], offset + at, direct) for at in starts]

    def close(self) -> None:
        for queue in self._queues.values():
            queue.close()


def wait(futures: list[Future]) -> None:
    """Wait for all requests, then raise the first error: none may still use its buffer afterwards."""
    errors = [e for f in futures if (e := f.exception()) is not None]
    if errors:
        raise errors[0]


class OffloadFolder:
    """What one job keeps on disk: files in the folder `root` whose names are removed at once. Nobody else can open such
    a file, and the system frees its space when this process ends, even if it is killed. So it does not matter who owns
    the folder; a missing one is made private to this user."""

    def __init__(self, root: Path):
        self.root = root
        self._files: list[File] = []

    def file(self, name: str, nbytes: int) -> File:
        """A new file of `nbytes`, its space reserved. Raises UserError if the folder is full or cannot be written."""
        try:
            make_private(self.root)
        except OSError as e:
            raise _cannot_write(self.root, e) from None
        file = File(self.root / f"{name}-{uuid4().hex}", writable=True)
        file.path.unlink(missing_ok=True)
        self._files.append(file)
        file.allocate(nbytes)
        return file

    def size(self) -> int:
        """Bytes of the files that are open."""
        return sum(file.size for file in self._files if file.fd is not None)

    def close(self) -> None:
        """Close all files, and so free their space; nothing may use them any more."""
        for file in self._files:
            file.close()
        self._files.clear()


def _cannot_write(folder: Path, e: OSError) -> UserError:
    reason = f"cannot write to the offload folder {folder}: {e.strerror}"
    return UserError(f"{reason}; free disk space or name another `offload_dir`")


def default_root() -> Path:
    """The offload folder of jobs that name none."""
    named = os.environ.get("H2O_FLEXGEN_OFFLOAD")
    return Path(named) if named else cache_folder("offload")


def request_bytes(nbytes: int, most: int = REQUEST, threads: int = THREADS) -> int:
    """Size of the requests that `nbytes` are read or written in: a part for every thread, but no less than
    LEAST_REQUEST."""
    return min(most, max(LEAST_REQUEST, aligned(-(-nbytes // threads))))


def requests(nbytes: int) -> int:
    """Number of requests that `nbytes` are read or written in."""
    return -(-nbytes // request_bytes(nbytes))
