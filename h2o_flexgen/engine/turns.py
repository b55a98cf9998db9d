"""One call at a time: how the threads of a program share one model."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from h2o_flexgen.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

#: the id of the process that made the first LLM; a fork inherits it
_first_process: int | None = None


class Turns:
    """Lets one call at a time use a model: other threads wait, and a call from within another one is refused.

    Raises:
        UserError: in a fork of a process that has made an LLM: PyTorch's threads and ours do not survive the fork, so
            waiting for them would never end.
    """

    def __init__(self):
        global _first_process
        self.lock = threading.Lock()
        self.holder: int | None = None  # the thread that holds the lock
        if _first_process is None:
            _first_process = os.getpid()
        self.check()

    @property
    def is_forked(self) -> bool:
        return os.getpid() != _first_process

    def check(self) -> None:
        """Raises UserError for a call that would never return."""
        if self.is_forked:
            raise UserError(
                "this process was forked from one that had made an LLM, whose threads it lacks: start processes by "
                'multiprocessing\'s "spawn", or make the first LLM after the fork'
            )
        if self.holder == threading.get_ident():
            raise UserError(
                "this LLM is in the middle of a call: call it again when that has returned, not from `on_output`, "
                "`on_text` or an observer"
            )


def in_turn(method: Callable[P, R]) -> Callable[P, R]:
    """Makes a method wait for its turn, by its object's `turns`."""

    @wraps(method)
    def call(self, *args, **kwargs):
        turns = self.turns
        turns.check()
        with turns.lock:
            try:
                turns.holder = threading.get_ident()
                return method(self, *args, **kwargs)
            finally:
                turns.holder = None

    return call
