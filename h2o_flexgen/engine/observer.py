"""What can be watched while a job runs."""

from __future__ import annotations

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.progress import bar


class Observer:
    """Watches a job: override the methods of interest. What a method raises ends the job.

    (i, j, k) are token step, layer and batch of the schedule; i == 0 is prefill, j == 0 the embedding.
    """

    def on_plan(self, choice) -> None:
        """The policy is chosen, nothing is allocated yet. `choice`: a `planning.planner.Choice`."""

    def on_begin(self) -> None:
        """Weights are loaded, the first block is next."""

    def on_block(self, block: int, blocks: int, sequences: list[Sequence]) -> None:
        """A block begins, the first with number 0."""

    def on_progress(self, i: int, j: int, batches: list[int]) -> None:
        """Layer j has been computed for these batches, all that have not finished."""

    def on_finished(self, sequences: list[Sequence]) -> None:
        """All sequences of a batch have finished, while others of the block may go on."""

    def on_block_end(self, sequences: list[Sequence]) -> None:
        """All sequences of a block have finished."""


class Observers:
    """Several observers as one: what it is told, it tells each of them in turn."""

    def __init__(self, *observers: Observer):
        self.observers = observers

    def __getattr__(self, event: str):
        def tell(*args) -> None:
            for observer in self.observers:
                getattr(observer, event)(*args)

        return tell


class ProgressBar(Observer):
    """Counts generated tokens on stderr.

    Args:
        sequences: of the job; their `max_tokens` together are the whole of the bar.
        layers: steps of the schedule through the model, embedding and head included.
        show: False for none.
    """

    def __init__(self, sequences: list[Sequence], layers: int, show: bool):
        self.total, self.layers, self.show = sum(s.params.max_tokens for s in sequences), layers, show
        self.bar = None
        self.block, self.sequences, self.before = "", [], 0  # `before`: tokens of earlier blocks

    def on_begin(self) -> None:  # not earlier: loading the weights shows a bar of its own
        self.bar = bar(desc="generating", total=self.total, unit="tokens", show=self.show, leave=True)

    def on_block(self, block: int, blocks: int, sequences: list[Sequence]) -> None:
        self.block, self.sequences, self.before = f"block {block + 1}/{blocks}", sequences, self.bar.n

    def on_progress(self, i: int, j: int, batches: list[int]) -> None:
        step = f"prefill {j + 1}/{self.layers}" if i == 0 else f"token {i + 1}"
        self.bar.set_postfix_str(f"{self.block} {step}", refresh=i == 0)
        self.bar.update(self.before + sum(len(s.tokens) for s in self.sequences) - self.bar.n)

    def on_block_end(self, sequences: list[Sequence]) -> None:
        self.bar.total -= sum(s.params.max_tokens - len(s.tokens) for s in sequences)  # those that stopped early
        self.bar.refresh()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
