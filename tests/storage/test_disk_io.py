"""Reads and writes at offsets by several threads are exact, direct or buffered."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen.errors import UserError
from h2o_flexgen.machine.device import open_device
from h2o_flexgen.machine.pages import PAGE
from h2o_flexgen.storage.disk import PREFETCH, READ, WRITE, DiskIO, File, OffloadFolder, RequestQueue, wait

SIZE = 10 * PAGE + 123
CONTENT = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("disk") / "content"
    path.write_bytes(CONTENT.tobytes())
    return path


def buffer(nbytes: int, phase: int) -> np.ndarray:
    """A view that starts `phase` bytes into a page."""
    return open_device("cpu").host_buffer(nbytes + PAGE).numpy()[phase : phase + nbytes]


@given(
    offset=st.one_of(
        st.integers(0, SIZE), st.sampled_from(range(0, SIZE, PAGE)), st.sampled_from([1, 4095, 4097, SIZE])
    ),
    length=st.one_of(
        st.integers(0, SIZE), st.sampled_from(range(0, SIZE, PAGE)), st.sampled_from([1, 511, 4095, 4097])
    ),
    phase=st.sampled_from([0, 0, 0, 1, 512, 4095]),
    direct=st.booleans(),
    prefetch=st.booleans(),
    request_size=st.sampled_from([1, 1000, PAGE, 3 * PAGE, 1 << 22]),
)
def test_any_read_is_exact(content, offset, length, phase, direct, prefetch, request_size):
    """Offset, length, address and request size need not be multiples of anything."""
    length = min(length, SIZE - offset)
    if request_size < 1000:
        length = min(length, 200)  # one request a byte
    file = File(content)
    io = DiskIO(threads=3, request=request_size)
    io.large_prefetches = prefetch
    out = buffer(length, phase)
    wait(io.read(file, out, offset, direct, prefetch))
    assert np.array_equal(out, CONTENT[offset : offset + length])
    assert io.read_bytes == length
    io.close()
    file.close()


@given(
    st.lists(
        st.tuples(
            st.one_of(st.integers(0, 20_000), st.sampled_from([0, PAGE, 2 * PAGE])),
            st.one_of(st.integers(1, 9_000), st.sampled_from([PAGE, 2 * PAGE])),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([0, 0, 1, 512]),
    st.booleans(),
    st.sampled_from([700, PAGE, 1 << 22]),
)
def test_any_write_is_exact_and_touches_nothing_else(tmp_path_factory, writes, phase, direct, request_size):
    path = tmp_path_factory.mktemp("write") / "file"
    expected = np.zeros(30_000, dtype=np.uint8)
    file = File(path, writable=True)
    io = DiskIO(threads=3, request=request_size)
    file.allocate(len(expected))
    for n, (offset, length) in enumerate(writes):
        data = buffer(length, phase)
        data[:] = n + 1
        wait(io.write(file, data, offset, direct))
        expected[offset : offset + length] = data
    assert np.array_equal(np.frombuffer(path.read_bytes(), np.uint8), expected)
    assert io.written_bytes == sum(length for _, length in writes)
    assert file.size == len(expected)
    io.close()
    file.close()


@pytest.mark.parametrize("mib, more, parts", [(0, 0, 0), (1, 100, 1), (5, PAGE, 1), (8, 0, 1), (32, 100, 4)])
def test_prefetches_may_be_large_requests(tmp_path, mib, parts, more):
    nbytes = mib and (mib << 20) + more
    content = np.random.default_rng(mib).integers(0, 256, nbytes, dtype=np.uint8)
    content.tofile(tmp_path / "f")
    out = buffer(nbytes, 0)
    io = DiskIO()
    io.large_prefetches = True
    reads = io.read(File(tmp_path / "f"), out, 0, direct=True, prefetch=True)
    wait(reads)
    assert len(reads) == parts and np.array_equal(out, content)
    assert sum(read.result() for read in reads) == nbytes
    io.close()


def test_every_request_is_served_whether_threads_are_busy_or_idle():
    requests = RequestQueue(3)
    served: list[tuple[int, int]] = []

    def submit(caller: int) -> None:
        for n in range(300):
            future = requests.submit((WRITE, READ, PREFETCH)[n % 3], served.append, (caller, n))
            if n % 7 == caller:
                assert future.exception(60) is None  # now threads are idle

    callers = [threading.Thread(target=submit, args=(caller,)) for caller in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    requests.submit(PREFETCH, int).result(60)
    requests.close()
    assert sorted(served) == [(caller, n) for caller in range(4) for n in range(300)]


def test_arrays_of_any_type_and_shape(tmp_path):
    file = File(tmp_path / "f", writable=True)
    io = DiskIO(request=PAGE)
    data = np.random.default_rng(1).standard_normal((3, 5, 2000)).astype(np.float32)
    wait(io.write(file, data, 7))
    out = np.empty_like(data)
    wait(io.read(file, out, 7, direct=True))
    assert np.array_equal(out, data)
    wait(io.write(file, data[0, 0, :0], 7))
    io.close()


def test_a_file_system_that_refuses_direct_requests(content, tmp_path, monkeypatch):
    """At open (older tmpfs), or only at the request: ordinary requests take over."""
    real_open = os.open

    def no_open(path, flags, *mode, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *mode, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_open)
        file = File(content)
    assert file.direct_fd is None
    out = np.empty(SIZE, np.uint8)
    file.read_at(memoryview(out), 0, direct=True)
    assert np.array_equal(out, CONTENT)

    file = File(content)
    fail_directly(monkeypatch, "preadv", file, errno.EINVAL)
    out[:] = 0
    file.read_at(memoryview(out), 0, direct=True)
    assert np.array_equal(out, CONTENT)

    copy = File(tmp_path / "copy", writable=True)
    fail_directly(monkeypatch, "pwrite", copy, errno.EINVAL)
    copy.write_at(memoryview(CONTENT), 0, direct=True)
    assert (tmp_path / "copy").read_bytes() == CONTENT.tobytes()


def fail_directly(monkeypatch, call: str, file: File, error: int) -> None:
    """Let direct requests to a file fail."""
    real = getattr(os, call)

    def failing(fd, part, offset):
        if fd == file.direct_fd:
            raise OSError(error, os.strerror(error))
        return real(fd, part, offset)

    monkeypatch.setattr(os, call, failing)


def test_a_direct_write_that_fails_is_not_tried_again_through_the_page_cache(tmp_path, monkeypatch):
    """It might seem to succeed there."""
    file = File(tmp_path / "f", writable=True)
    if file.direct_fd is None:
        pytest.skip("this file system takes no direct requests")
    fail_directly(monkeypatch, "pwrite", file, errno.EIO)
    with pytest.raises(UserError, match="cannot write to the offload folder.*Input/output error"):
        file.write_at(memoryview(buffer(2 * PAGE, 0)), 0, direct=True)


def test_short_reads_and_writes_continue_where_they_stopped(content, tmp_path, monkeypatch):
    """A signal or a network file system may cut a request short."""
    real_read = os.preadv
    real_write = os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real_read(fd, [views[0][:1111]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: real_write(fd, view[:777], at))
    for direct in (False, True):
        out = buffer(SIZE, 0)
        File(content).read_at(memoryview(out), 0, direct)
        assert np.array_equal(out, CONTENT)
    for n, (begin, direct) in enumerate([(3, False), (0, False), (0, True)]):
        file = File(tmp_path / f"copy{n}", writable=True)
        out[:] = CONTENT
        file.write_at(memoryview(out), begin, direct)
        assert (tmp_path / f"copy{n}").read_bytes() == bytes(begin) + CONTENT.tobytes()


def test_all_requests_end_before_the_first_error_is_raised(tmp_path, monkeypatch):
    """No thread may still fill a buffer whose owner has seen the read fail."""
    path = tmp_path / "f"
    path.write_bytes(b"x" * 8 * PAGE)
    file = File(path)
    io = DiskIO(threads=2, request=PAGE)
    ended = []
    real = os.preadv

    def read(fd, views, offset):
        try:
            if offset == PAGE:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, views, offset)
        finally:
            ended.append(offset)

    monkeypatch.setattr(os, "preadv", read)
    with pytest.raises(UserError, match="cannot read .*Input/output error"):
        wait(io.read(file, np.empty(8 * PAGE, np.uint8), 0))
    assert sorted(ended) == [n * PAGE for n in range(8)]
    io.close()


def test_a_missing_file(tmp_path):
    with pytest.raises(UserError, match="cannot open .*No such file"):
        File(tmp_path / "none")


def test_files_give_their_descriptors_back(tmp_path):
    """On close, and when nothing refers to them: a deleted file that is still open keeps its space on disk."""

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    file = File(tmp_path / "f", writable=True)
    assert open_files() == before + 2
    file.close()
    file.close()
    assert open_files() == before
    file = File(tmp_path / "g", writable=True)
    del file
    assert open_files() == before
    folder = OffloadFolder(tmp_path / "root")
    file = folder.file("kv", 5 * PAGE)
    assert open_files() > before
    folder.close()
    assert file.fd is None and open_files() == before


def test_a_file_of_the_offload_folder_has_its_space_reserved(tmp_path):
    folder = OffloadFolder(tmp_path / "root")
    file = folder.file("kv", 1 << 20)
    stat = os.fstat(file.fd)
    assert stat.st_size == 1 << 20 and stat.st_blocks * 512 >= 1 << 20
    assert stat.st_mode & 0o777 == 0o600
    assert folder.file("empty", 0).size == 0
    folder.close()


@pytest.fixture
def gated(monkeypatch):
    """Reads at offset 0 wait for `gate`; `order` lists the pages in the order they are read in."""
    gate = threading.Event()
    order = []
    real = os.preadv

    def read(fd, views, offset):
        if offset == 0:
            assert gate.wait(30)
        order.append(offset // PAGE)
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", read)
    yield gate, order
    gate.set()


def test_a_prefetch_waits_until_no_other_request_does(content, gated):
    """The next layer's weights do not hold up the cache, in another file, that compute needs next."""
    gate, order = gated
    weights = File(content)
    cache = File(content)
    io = DiskIO(threads=1, request=PAGE)
    outs = [np.empty(PAGE, np.uint8) for _ in range(6)]
    requests = []
    for n, prefetch in enumerate([False, True, True, False, True, False]):  # the first one holds the only thread
        requests += io.read(weights if prefetch else cache, outs[n], n * PAGE, prefetch=prefetch)
    gate.set()
    wait(requests)
    assert order == [0, 3, 5, 1, 2, 4]
    assert all(np.array_equal(out, CONTENT[n * PAGE :][:PAGE]) for n, out in enumerate(outs))
    io.close()


def test_writes_go_first(content, tmp_path, gated, monkeypatch):
    """They hold memory until they are done."""
    gate, order = gated
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: (order.append("write"), real(fd, data, offset))[1])
    file = File(content)
    target = File(tmp_path / "target", writable=True)
    io = DiskIO(threads=1, request=PAGE)
    out = np.empty((3, PAGE), np.uint8)
    requests = [io.read(file, row, n * PAGE) for n, row in enumerate(out)]
    while not requests[0][0].running():
        time.sleep(0.001)
    requests.append(io.write(target, np.zeros(PAGE, np.uint8), 0))
    gate.set()
    wait([future for futures in requests for future in futures])
    assert order == [0, "write", 1, 2]
    io.close()


def test_file_systems_do_not_wait_for_each_other(content, gated):
    gate, order = gated
    one = File(content)
    other = File(content)
    io = DiskIO(threads=1, request=PAGE)
    other.device = one.device + 1
    out = np.empty(PAGE, np.uint8)
    held = io.read(one, out, 0)
    wait(io.read(other, out, PAGE))
    assert order == [1]
    gate.set()
    wait(held)
    io.close()


def test_closing_ends_running_requests_and_cancels_waiting_ones(content, gated):
    """Nobody waits forever for a request that no thread will take."""
    gate, _ = gated
    file = File(content)
    io = DiskIO(threads=1, request=PAGE)
    requests = io.read(file, np.empty(4 * PAGE, np.uint8), 0)
    while not requests[0].running():
        time.sleep(0.001)
    closing = threading.Thread(target=io.close)
    closing.start()
    while not requests[-1].cancelled():
        time.sleep(0.001)
    gate.set()
    closing.join()
    assert requests[0].result() == PAGE
    assert [request.cancelled() for request in requests] == [False, True, True, True]


def test_failed_requests_release_their_buffer(tmp_path, monkeypatch):
    """Without garbage collection, since a buffer may take most of the memory."""

    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    path = tmp_path / "f"
    path.write_bytes(bytes(4 * PAGE))
    file = File(path)
    io = DiskIO(threads=2, request=PAGE)
    out = np.empty(4 * PAGE, np.uint8)
    gone = weakref.ref(out)
    gc.disable()
    try:
        requests = io.read(file, out, 0)
        errors = [request.exception() for request in requests]
        assert all(isinstance(e, UserError) for e in errors)
        io.close()  # its threads keep nothing of their last request
        del requests, out, errors
        assert gone() is None
    finally:
        gc.enable()
