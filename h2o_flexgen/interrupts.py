"""Signals that end a job early, and where a job may be interrupted.

A handler that raises within a lock's Python code leaves the lock taken, or released twice: the job hangs, or loses its
rows. So while a job loads and runs (`deferred`), a signal waits for the next `check`: one for every tensor that is
loaded, every layer, every micro-batch of prefill and every batch's attention.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from h2o_flexgen.errors import Interrupted

#: signals that end a job, which keeps its finished rows; SIGHUP: its terminal has gone
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: seconds after which a signal waits no longer for a `check`, for example while a disk hangs
WAITING = 5
#: seconds for clearing up, after which one more signal ends the process at once
PATIENCE = 10

_deferred = False
_waiting: int | None = None  # the signal that waits


def take_over() -> None:
    """Let the signals that end a job do so by `interrupt`."""
    for s in STOPPING:
        if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN:  # ignored: it is nohup's job
            signal.signal(s, interrupt)


def interrupt(signum, frame) -> None:
    """Handler of the signals that end a job: raises Interrupted, now or at the next `check`."""
    global _waiting
    if not _deferred:
        _strike(signum)
    if _waiting is None:
        _waiting = signum
        signal.signal(signal.SIGALRM, lambda signum, frame: check())
        signal.setitimer(signal.ITIMER_REAL, WAITING)


def check() -> None:
    """Raises Interrupted if a signal waits."""
    if _waiting is not None:
        _strike(_waiting)


@contextmanager
def deferred() -> Iterator[None]:
    """Inside, signals wait for a `check`; the end is one."""
    global _deferred, _waiting
    _deferred = True
    try:
        yield
    except Interrupted:
        _waiting = None
        raise
    finally:
        _deferred = False
        check()


def _strike(signum: int) -> None:
    global _waiting
    end = time.monotonic() + PATIENCE

    def again(signum, frame) -> None:  # must not disturb the clearing up, unless that does not end
        if time.monotonic() > end:
            os._exit(128 + signum)

    for s in STOPPING:
        if signal.getsignal(s) is interrupt:
            signal.signal(s, again)
    if _waiting is not None:
        signal.setitimer(signal.ITIMER_REAL, 0)  # an interpreter that ends has no handler for it any more
        if not _deferred:  # inside, what struck may have become another error, or been swallowed: checks raise it again
            _waiting = None
    raise Interrupted(signum)
