"""Signals that end a job early.

While a job loads and runs (`deferred`), the first signal only waits for the next `check`, so that no exception strikes
within the engine's threads and locks. There is a check for every tensor that is loaded, every layer, every micro-batch
of prefill and every batch's attention. A Ctrl-C behind the first signal ends the process at once; other signals do
nothing more, since who stops a job (a closing terminal, `timeout`) often sends one twice.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from h2o_flexgen.errors import Interrupted

#: signals that end a job, which keeps its finished rows; SIGHUP: its terminal has gone
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_waiting: int | None = None  # the signal that waits


def take_over() -> None:
    """Let the signals that end a job raise Interrupted, as the commands want it."""
    for s in STOPPING:
        if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN:  # ignored: it is nohup's job
            signal.signal(s, interrupt)


def interrupt(signum, frame) -> None:
    """The commands' handler: raises Interrupted."""
    _give_up(s for s in STOPPING if signal.getsignal(s) is interrupt)
    raise Interrupted(signum)


def _give_up(taken) -> None:
    """Behind the first signal only Ctrl-C counts, and ends the process."""
    for s in taken:
        signal.signal(s, signal.SIG_DFL if s == signal.SIGINT else signal.SIG_IGN)


def check() -> None:
    """Raises Interrupted if a signal waits."""
    global _waiting
    if _waiting is not None and threading.current_thread() is threading.main_thread():
        signum, _waiting = _waiting, None
        raise Interrupted(signum)


@contextmanager
def deferred() -> Iterator[None]:
    """Inside, the first signal waits for a `check`; the end is one. Outside a command this goes for SIGINT alone, and a
    second one meets the handler that was there before. In other threads than the main one nothing happens: they get
    no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {s: signal.getsignal(s) for s in STOPPING}
    taken = [s for s, handler in handlers.items() if handler is interrupt or (s == signal.SIGINT and callable(handler))]

    def note(signum, frame) -> None:
        global _waiting
        _waiting = signum
        _give_up(s for s in taken if handlers[s] is interrupt)
        if handlers[signal.SIGINT] is not interrupt:
            signal.signal(signal.SIGINT, handlers[signal.SIGINT])

    for s in taken:
        signal.signal(s, note)
    try:
        yield
    finally:
        for s in taken:
            if signal.getsignal(s) is note:
                signal.signal(s, handlers[s])
        check()
