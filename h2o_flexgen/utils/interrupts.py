"""Signals that end a job early.

While a job loads and runs (`deferred`), the first signal waits for the next `check`, so that no exception is raised
within the engine's threads and locks. There is a check for every loaded tensor, every layer, every micro-batch of
prefill and every batch's attention. A second signal ends a command immediately, and loses nothing: finished rows are on
disk, and temporary files have no names.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from h2o_flexgen.errors import Interrupted

#: signals that end a job, which keeps its finished rows
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_running = False  # within `deferred`
_waiting: int | None = None  # a signal that waits for a check
_second = signal.SIG_DFL  # the handler of a second signal


def take_over() -> None:
    """Make the signals that end a job raise Interrupted, as commands need it."""
    for s in STOPPING:
        if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(s, interrupt)


def interrupt(signum, frame) -> None:
    """The handler of the first signal."""
    global _waiting
    for s in STOPPING:
        if signal.getsignal(s) is interrupt:
            signal.signal(s, _second)
    if not _running:
        raise Interrupted(signum)
    _waiting = signum


def check() -> None:
    """Raises Interrupted if a signal waits."""
    global _waiting
    if _waiting is not None and threading.current_thread() is threading.main_thread():
        signum = _waiting
        _waiting = None
        raise Interrupted(signum)


@contextmanager
def deferred() -> Iterator[None]:
    """Inside, a signal waits for a `check`, as on exit. Outside a command this only concerns Ctrl-C, and a second one
    goes to the previous handler. Does nothing outside the main thread, which receives all signals."""
    global _running, _second
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    is_library = callable(before) and before is not interrupt
    if is_library:
        _second = before
        signal.signal(signal.SIGINT, interrupt)
    _running = True
    try:
        yield
    finally:
        _running = False
        if is_library:
            signal.signal(signal.SIGINT, before)
            _second = signal.SIG_DFL
        check()
