"""Files: parallel reads and writes at offsets, and a private folder for what a job offloads."""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from h2o_flexgen.errors import UserError
from h2o_flexgen.files import sweep
from h2o_flexgen.sizes import PAGE, REQUEST, THREADS, request_bytes

#: the end of messages about a disk that is full
FREE_SPACE = "free disk space or name another `offload_dir`"


class File:
    """A file that several threads read and write at offsets. All calls raise UserError where the system refuses.

    `direct` requests bypass the page cache (O_DIRECT) if offset and address are multiples of 4096 and the file system
    agrees; else they go through it.
    """

    def __init__(self, path: Path, writable: bool = False):
        self.path, self.fd, self.direct_fd = path, None, None
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC
        try:
            self.fd = os.open(path, flags | (os.O_CREAT if writable else 0), 0o600)
        except OSError as e:
            raise UserError(f"cannot open {path}: {e.strerror}") from None
        with suppress(OSError, AttributeError):  # this file system or this system has no O_DIRECT
            self.direct_fd = os.open(path, flags | os.O_DIRECT)
        self.device = os.fstat(self.fd).st_dev

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def allocate(self, nbytes: int) -> None:
        """Reserve the space, so that a full disk shows before the run."""
        if nbytes:
            try:
                os.posix_fallocate(self.fd, 0, nbytes)
            except OSError as e:
                folder = f"the offload folder {self.path.parent} ({e.strerror})"
                raise UserError(f"no space for {nbytes} bytes in {folder}: {FREE_SPACE}") from None

    def read_at(self, view: memoryview, offset: int, direct: bool = False) -> None:
        """Fill `view`. Raises UserError if the file ends before."""

        def read(fd: int, part: memoryview, at: int) -> int:
            count = os.preadv(fd, [part], at)
            if count <= 0:
                raise UserError(f"{self.path} ended at byte {at}: the file was cut short")
            return count

        try:
            self._move(read, view, offset, direct)
        except OSError as e:
            raise UserError(f"cannot read {self.path}: {e.strerror}") from None

    def write_at(self, view: memoryview, offset: int, direct: bool = False) -> None:
        """Write all of `view`."""
        try:
            self._move(os.pwrite, view, offset, direct)
        except OSError as e:
            folder = f"the offload folder {self.path.parent}"
            raise UserError(f"cannot write to {folder}: {e.strerror}; {FREE_SPACE}") from None

    def _move(self, call, view: memoryview, offset: int, direct: bool) -> None:
        """Repeat `call(fd, part, at)` until all is moved: whole pages directly, the rest through the page cache."""
        whole = len(view) - len(view) % PAGE if direct and self.direct_fd is not None else 0
        done = 0
        while done < len(view):
            fd, end = (self.direct_fd, whole) if done < whole else (self.fd, len(view))
            try:
                count = call(fd, view[done:end], offset + done)
            except OSError as e:
                if fd == self.fd or e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                whole = 0  # the file system refuses direct requests, or those at this offset or address
                continue
            done += count
            if count % PAGE:
                whole = 0

    def close(self) -> None:
        for fd in (self.fd, self.direct_fd):
            if fd is not None:
                os.close(fd)
        self.fd = self.direct_fd = None

    def __del__(self):
        self.close()


#: urgency of requests: a write holds memory until it is done; a read is wanted next; a prefetch is wanted a layer later
WRITE, READ, PREFETCH = range(3)
#: bytes of a large prefetch: 8 MiB of a tensor, and the page more that it takes if it begins within a page
LARGE = (8 << 20) + PAGE


class RequestQueue:
    """Threads that take requests to one file system: the most urgent ones first, of those the oldest."""

    def __init__(self, threads: int):
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="disk")
        self._waiting = deque(), deque(), deque()  # WRITE, READ, PREFETCH
        self._threads, self._active = threads, 0
        self._lock = threading.Lock()

    def submit(self, urgency: int, work: Callable, *args) -> Future:
        future = Future()
        self._waiting[urgency].append((future, partial(work, *args)))
        # a task of the pool takes whatever waits, not this request: an interrupt must leave no request that no task
        # takes, and tasks whose requests others have taken must not pile up in the pool
        with self._lock:
            if self._active < self._threads:
                self.pool.submit(self._take_all)
                self._active += 1  # afterwards: an interrupt in between must not cost a thread
        return future

    def _take(self) -> tuple[Future, Callable] | None:
        for waiting in self._waiting:
            with suppress(IndexError):  # other threads take from it too
                return waiting.popleft()
        return None

    def _take_all(self) -> None:
        while True:
            with self._lock:  # `submit` sees either that this thread goes on or that it has ended
                if (request := self._take()) is None:
                    self._active -= 1
                    return
            future, work = request
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as e:
                future.set_exception(e)
                del request, future, work  # the error's traceback holds them, and with them the buffer

    def close(self) -> None:
        """The running requests end, waiting ones are cancelled."""
        while (request := self._take()) is not None:
            request[0].cancel()
        self.pool.shutdown(wait=True, cancel_futures=True)


class DiskIO:
    """Reads and writes C-contiguous arrays in requests of up to `request` bytes, with `threads` threads for each file
    system. Counts the bytes moved.

    Attributes:
        large_prefetches: prefetch in requests of LARGE bytes. They cost compute less; but reads of the KV cache would
            wait longer for those that run.
    """

    def __init__(self, threads: int = THREADS, request: int = REQUEST):
        self.threads, self.request = threads, request
        self.large_prefetches = False
        self.read_bytes = self.written_bytes = 0
        self.queues: dict[int, RequestQueue] = {}  # by file system
        self._lock = threading.Lock()
        self._closed = False

    def read(
        self, file: File, array: np.ndarray, offset: int, direct: bool = False, prefetch: bool = False
    ) -> list[Future]:
        """Start to fill `array` from `offset`. Each future's result is (begin, end), the bytes of the array that its
        request has read. `prefetch`: start only while no other request waits."""

        def work(view: memoryview, at: int) -> tuple[int, int]:
            file.read_at(view, at, direct)
            return at - offset, at - offset + len(view)

        with self._lock:
            self.read_bytes += array.nbytes
            return self._each(work, file, array, offset, PREFETCH if prefetch else READ)

    def write(self, file: File, array: np.ndarray, offset: int, direct: bool = False) -> list[Future]:
        """Start to write `array` at `offset`."""
        with self._lock:
            self.written_bytes += array.nbytes
            return self._each(partial(file.write_at, direct=direct), file, array, offset, WRITE)

    def _each(self, work: Callable, file: File, array: np.ndarray, offset: int, urgency: int) -> list[Future]:
        if self._closed:
            raise RuntimeError("no requests are taken any more")
        if file.device not in self.queues:
            self.queues[file.device] = RequestQueue(self.threads)
        submit = partial(self.queues[file.device].submit, urgency, work)
        view = memoryview(array).cast("B")
        most, threads = (LARGE, 1) if urgency == PREFETCH and self.large_prefetches else (self.request, self.threads)
        step = request_bytes(len(view), most, threads)
        return [submit(view[at : at + step], offset + at) for at in range(0, len(view), step)]

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for queue in self.queues.values():
            queue.close()


def wait(futures: list[Future]) -> None:
    """Wait for all requests, then raise the first error: none may still use its buffer afterwards."""
    errors = [e for f in futures if (e := f.exception()) is not None]
    if errors:
        raise errors[0]


class OffloadFolder:
    """A private folder (0700) for one job, under `root`. It is removed at exit; folders of jobs that were killed are
    removed when the next job starts: the lock in them is held by no process. Raises UserError if it cannot be made."""

    PREFIX = "h2o_flexgen-job-"

    def __init__(self, root: Path | None = None):
        self.root = Path(root) if root is not None else default_root()
        self._lock: int | None = None
        self._files: list[File] = []
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.sweep(self.root)
            self.path = Path(tempfile.mkdtemp(prefix=self.PREFIX, dir=self.root))  # 0700 by mkdtemp
            try:
                # locked under another name first: a job that sweeps removes folders whose `lock` is not held
                new = self.path / "lock.new"
                self._lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                new.rename(self.path / "lock")
            except BaseException:
                self.close()
                raise
        except OSError as e:
            folder = f"the offload folder {self.root} ({e.strerror})"
            raise UserError(f"cannot write to {folder}: name another `offload_dir`") from None
        atexit.register(self.close)  # for an LLM that is never closed

    @classmethod
    def sweep(cls, root: Path) -> None:
        """Remove the folders of killed jobs under `root`."""
        sweep(root, cls.PREFIX)

    def file(self, name: str, nbytes: int) -> File:
        """A new file of `nbytes`, its space reserved."""
        file = File(self.path / name, writable=True)
        self._files.append(file)
        file.allocate(nbytes)
        return file

    def size(self) -> int:
        """Bytes of the files in the folder."""
        return sum(file.stat().st_size for file in self.path.iterdir())

    def close(self) -> None:
        """Remove the folder with all its files; nothing may use them any more."""
        atexit.unregister(self.close)
        for file in self._files:
            file.close()  # an open file would keep its space on disk
        self._files.clear()
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def default_root() -> Path:
    """The folder for the offload folders of jobs, unless a job names one."""
    return Path(os.environ.get("H2O_FLEXGEN_OFFLOAD") or cache_root() / "offload")


def cache_root() -> Path:
    """The folder for what is kept between jobs. Raises UserError if there is none."""
    if home := os.environ.get("H2O_FLEXGEN_HOME"):
        return Path(home)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "h2o_flexgen"
    except RuntimeError:
        raise UserError("this user has no home folder: name one for what is kept in H2O_FLEXGEN_HOME") from None
