"""Files: a private folder for what a job offloads, and large parallel reads and writes."""

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
from functools import partial
from pathlib import Path

import numpy as np

from h2o_flexgen.errors import UserError
from h2o_flexgen.files import sweep
from h2o_flexgen.sizes import PAGE, REQUEST, THREADS, request_bytes


class File:
    """A file that is read and written at offsets by several threads.

    `direct` reads and writes bypass the page cache (O_DIRECT): offset and address must be multiples of 4096.
    Where the file system refuses that, they are ordinary ones.
    """

    def __init__(self, path: Path, writable: bool = False):
        self.path = path
        self.fd = self.direct_fd = None
        flags = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
        try:
            self.fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise UserError(f"cannot open {path}: {e.strerror}") from None
        if hasattr(os, "O_DIRECT"):
            try:
                self.direct_fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_DIRECT | os.O_CLOEXEC)
            except OSError:
                pass
        self.device = os.fstat(self.fd).st_dev

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def allocate(self, nbytes: int) -> None:
        """Reserve the space now, so that a full disk shows before the run and not in it."""
        if nbytes:
            try:
                os.posix_fallocate(self.fd, 0, nbytes)
            except OSError as e:
                raise UserError(
                    f"no space for {nbytes} bytes in the offload folder {self.path.parent} ({e.strerror}): "
                    "free disk space or name another --offload-dir"
                ) from None

    def read_at(self, view: memoryview, offset: int, direct: bool = False) -> None:
        """Fill `view`."""

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
            raise UserError(
                f"cannot write to the offload folder {self.path.parent}: {e.strerror}; "
                "free disk space or name another --offload-dir"
            ) from None

    def _move(self, call, view: memoryview, offset: int, direct: bool) -> None:
        """`call(fd, part, at)` until all is moved. What is direct takes whole pages, and leaves the rest to the page
        cache."""
        whole = len(view) - len(view) % PAGE if direct and self.direct_fd is not None else 0
        done = 0
        while done < len(view):
            fd, end = (self.direct_fd, whole) if done < whole else (self.fd, len(view))
            try:
                count = call(fd, view[done:end], offset + done)
            except OSError as e:
                if fd == self.fd or e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                whole = 0  # this file system takes no direct requests of this shape
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


WRITE, READ, LATER = range(3)
#: a request of what is wanted later, if large ones harm nobody: each takes a little from compute. A page more than a
#: power of two, which a tensor at any phase takes, is not cut off
LARGE = (8 << 20) + PAGE


class _Requests:
    """Threads that take requests to one file system: of those that wait the most urgent first."""

    def __init__(self, threads: int):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="disk")
        self._waiting = deque(), deque(), deque()  # WRITE, READ, LATER
        self._threads, self._taking = threads, 0
        self._lock = threading.Lock()

    def submit(self, urgency: int, work: Callable, *args) -> Future:
        future = Future()
        self._waiting[urgency].append((future, partial(work, *args)))
        # not one each: an interrupt here would leave one that nobody takes, and where the disk never rests those of
        # requests that others have taken would pile up. Counted afterwards: an interrupt between costs no thread
        with self._lock:
            if self._taking < self._threads:
                self._pool.submit(self._take_all)
                self._taking += 1
        return future

    def _take(self) -> tuple[Future, Callable] | None:
        for waiting in self._waiting:
            try:
                return waiting.popleft()
            except IndexError:
                pass
        return None

    def _take_all(self) -> None:
        while True:
            with self._lock:  # who submits after this finds a thread less
                if (request := self._take()) is None:
                    self._taking -= 1
                    return
            future, work = request
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as e:
                future.set_exception(e)
                del request, future, work  # or the error would hold them, and they the error, with their buffer

    def close(self) -> None:
        """What runs ends, what waits is cancelled."""
        while (request := self._take()) is not None:
            request[0].cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)


class DiskIO:
    """A few threads for each file system that keep its disk busy with large requests. Counts the bytes moved.

    What holds memory until it is written goes first. What is wanted next (cache) does not queue behind what is wanted a
    layer from now (weights), which fills the pauses.

    Attributes:
        large_later: whether that comes in large requests. A decode step is faster for it, but slower where pieces of
            cache come from disk as well, since those have to wait for requests that run.
    """

    def __init__(self, threads: int = THREADS, request: int = REQUEST):
        self.threads, self.request = threads, request
        self.large_later = False
        self.read_bytes = 0
        self.written_bytes = 0
        self._lock = threading.Lock()
        self._requests: dict[int, _Requests] = {}  # by file system
        self._closed = False

    def read(
        self, file: File, array: np.ndarray, offset: int, direct: bool = False, later: bool = False
    ) -> list[Future]:
        """Start reading `array` (C-contiguous) from `offset`; wait for the futures. The result of each is which bytes
        of the array it has read: (begin, end). `later`: begin only when no other request waits."""

        def work(view: memoryview, at: int) -> tuple[int, int]:
            file.read_at(view, at, direct)
            return at - offset, at - offset + len(view)

        with self._lock:
            self.read_bytes += array.nbytes
            return self._each(work, file, array, offset, LATER if later else READ)

    def write(self, file: File, array: np.ndarray, offset: int, direct: bool = False) -> list[Future]:
        """Start writing `array` (C-contiguous) at `offset`; wait for the futures."""
        with self._lock:
            self.written_bytes += array.nbytes
            return self._each(partial(file.write_at, direct=direct), file, array, offset, WRITE)

    def _each(self, work: Callable, file: File, array: np.ndarray, offset: int, urgency: int) -> list[Future]:
        if self._closed:
            raise RuntimeError("no requests are taken any more")
        if file.device not in self._requests:
            self._requests[file.device] = _Requests(self.threads)
        submit = partial(self._requests[file.device].submit, urgency, work)
        view = memoryview(array).cast("B")
        most, threads = (LARGE, 1) if urgency == LATER and self.large_later else (self.request, self.threads)
        step = request_bytes(len(view), most, threads)
        return [submit(view[at : at + step], offset + at) for at in range(0, len(view), step)]

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for requests in self._requests.values():
            requests.close()


def wait(futures: list[Future]) -> None:
    """Wait for all, then raise the first error: no request may still write into a buffer afterwards."""
    errors = [e for f in futures if (e := f.exception()) is not None]
    if errors:
        raise errors[0]


class OffloadFolder:
    """A private folder (0700) for one job, under `root`. It goes at exit; the leftovers of jobs that were
    killed go when the next one starts. A lock that dies with its process tells which those are.

    Raises:
        UserError: the folder cannot be made or written.
    """

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
                # locked under another name first: whoever sweeps must never see a lock that nobody holds
                new = self.path / "lock.new"
                self._lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                new.rename(self.path / "lock")
            except BaseException:
                self.close()
                raise
        except OSError as e:
            raise UserError(
                f"cannot write to the offload folder {self.root} ({e.strerror}): name another --offload-dir"
            ) from None
        atexit.register(self.close)  # for who never closes an LLM

    @classmethod
    def sweep(cls, root: Path) -> None:
        """Remove what killed jobs left under `root`."""
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
        """Remove the folder with all its files, which nothing may use any more."""
        atexit.unregister(self.close)
        for file in self._files:
            file.close()  # an open file would keep its space on disk
        self._files.clear()
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def default_root() -> Path:
    return Path(os.environ.get("H2O_FLEXGEN_OFFLOAD") or cache_root() / "offload")


def cache_root() -> Path:
    """The folder for what is kept between jobs. Raises UserError if there is none."""
    if mine := os.environ.get("H2O_FLEXGEN_HOME"):
        return Path(mine)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "h2o_flexgen"
    except RuntimeError:
        raise UserError("this user has no home folder: name one for what is kept in H2O_FLEXGEN_HOME") from None
