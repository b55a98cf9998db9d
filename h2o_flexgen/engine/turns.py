"""One call at a time: what the threads of a program may do with one model."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from h2o_flexgen.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")


_processes: list[int] = []  # the first that made an LLM; a fork inherits the entry


class Turns:
    """A lock that knows who holds it: other threads wait, the holder itself is refused.

    Raises:
        UserError: also when it is made, in a fork of a process that has made an LLM. PyTorch's threads and ours are
            gone there, and whoever waits for them waits for ever.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._holder: int | None = None  # a thread
        if not _processes:
            _processes.append(os.getpid())
        self._check_process()

    @property
    def is_forked(self) -> bool:
        return os.getpid() not in _processes

    def _check_process(self) -> None:
        if self.is_forked:
            raise UserError(
                "this process was forked from one that had made an LLM, whose threads it lacks: start processes by "
                'multiprocessing\'s "spawn", or make the first LLM after the fork'
            )

    def __enter__(self) -> None:
        self._check_process()
        if self._holder == threading.get_ident():
            raise UserError(
                "this LLM is in the middle of a call: call it again when that has returned, not from `on_output`, "
                "`on_text` or an observer"
            )
        self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *exc) -> None:
        self._holder = None
        self._lock.release()


def in_turn(method: Callable[P, R]) -> Callable[P, R]:
    """A method that runs within the `turns` of its object."""

    @wraps(method)
    def call(self, *args, **kwargs):
        with self.turns:
            return method(self, *args, **kwargs)

    return call
