"""Observers: callbacks while a job runs."""

from __future__ import annotations

import time

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.planning.execution_plan import ExecutionPlan
from h2o_flexgen.utils.progress import bar


class Observer:
    """Watches a job: override the methods of interest. An exception in a method ends the job."""

    def on_plan(self, choice: ExecutionPlan) -> None:
        """The policy is chosen; nothing is allocated yet."""

    def on_begin(self) -> None:
        """The weights are loaded, and the first pass is next."""

    def on_pass(self, rows: list[Sequence]) -> None:
        """A pass begins, one walk through the model that gives each of these rows a token."""

    def on_layer(self, j: int) -> None:
        """Stage j of the pass has been computed: 0 is the embedding, the last one the head."""

    def on_finished(self, rows: list[Sequence]) -> None:
        """These rows have ended with a pass."""


class Observers:
    """Several observers as one, which are called in turn."""

    def __init__(self, *observers: Observer):
        self.observers = observers

    def __getattr__(self, event: str):
        def call(*args) -> None:
            for observer in self.observers:
                getattr(observer, event)(*args)

        return call


class TokenCounter:
    """Counts the tokens that a pass chooses or scores."""

    def begin(self, rows: list[Sequence]) -> None:
        self.rows = rows
        self.before = sum(len(s.logprobs) for s in rows)

    def new(self) -> int:
        """Tokens since the last call."""
        count = sum(len(s.logprobs) for s in self.rows)
        found = count - self.before
        self.before = count
        return found


class ProgressBar(Observer):
    """Shows generated tokens on stderr, and how many rows are done.

    Args:
        total: the most tokens that can be generated; None if unknown.
        rows: of the job.
        layers: stages of a pass, embedding and head included.
        show: False shows nothing.
    """

    def __init__(self, total: int | None, rows: int, layers: int, show: bool):
        self.total = total
        self.rows = rows
        self.done = 0
        self.layers = layers
        self.show = show
        self.bar = None
        self.counter = TokenCounter()
        self.passes = 0

    def on_begin(self) -> None:  # not earlier, since loading the weights shows its own bar
        self.begun = time.monotonic()
        self.bar = bar(desc="generating", total=self.total, unit="tokens", show=self.show, leave=True)

    def on_pass(self, rows: list[Sequence]) -> None:
        self.counter.begin(rows)
        self.passes += 1
        self.has_new = any(not s.tokens for s in rows)

    def on_layer(self, j: int) -> None:
        layer = f", layer {j + 1}/{self.layers}" if self.has_new else ""
        done = f"{self.done} of {self.rows} rows done"
        if self.done:
            done += f" ({self.done / max(1e-9, time.monotonic() - self.begun):.3g}/s)"
        shown = f"{done}, pass {self.passes} of {len(self.counter.rows)} rows{layer}"
        self.bar.set_postfix_str(shown, refresh=self.has_new)
        self.bar.update(self.counter.new())

    def on_finished(self, rows: list[Sequence]) -> None:
        self.done += len(rows)
        if self.total is not None:  # some may have stopped early
            self.bar.total -= sum(max(0, s.params.max_tokens - len(s.logprobs)) for s in rows if s.task is None)
            self.bar.refresh()
        if whole := sum(s.task is not None for s in rows):  # they generate nothing, and count as a token each
            self.bar.update(whole)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
