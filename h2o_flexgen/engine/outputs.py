"""The outputs of a job, one for each prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.observer import Observer
from h2o_flexgen.engine.stop import decode


@dataclass
class CompletionOutput:
    """One generated text.

    Attributes:
        text: if a stop string ended it, what is before that.
        token_ids: all tokens that were generated, those of a stop string too; logprobs: one for each.
        finish_reason: "length", "stop" (an end-of-sequence token or a stop string), or "abort" (the job was
            interrupted).
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


@dataclass
class RequestOutput:
    """The outcome of one prompt: one output, or `error`, which says why it could not be run or broke off.

    Attributes:
        prompt: the text or the conversation as it was given; None for token ids.
        prompt_token_ids: what the model got; of a conversation, with all that the chat template writes around it.
    """

    index: int
    prompt: str | list[dict] | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    error: str | None = None


@dataclass
class ScoreOutput:
    """The score of one text.

    Attributes:
        index: place among the texts.
        token_ids: of the whole text.
        token_logprobs: natural logarithm of the probability of each scored token, the last ones of the text.
        is_greedy: whether each of them was the most likely token.
        error: why the text could not be scored, and then there is nothing else; or None.
    """

    index: int
    token_ids: list[int]
    token_logprobs: list[float] = field(default_factory=list)
    is_greedy: list[bool] = field(default_factory=list)
    error: str | None = None


class OutputCollector(Observer):
    """Gathers the outputs of a job, and hands each on as soon as its batch is done.

    Args:
        tokenizer: turns tokens into text; None for no text.
        on_output: gets every output. One that an interrupt hits gets the same output again.

    Attributes:
        outputs: by index, of every prompt of the job, and with an error of every one that cannot be run.
    """

    def __init__(self, tokenizer, on_output: Callable[[RequestOutput], None] | None = None):
        self.tokenizer, self.on_output = tokenizer, on_output
        self.outputs: dict[int, RequestOutput] = {}
        self._emitted: set[int] = set()

    def on_begin(self) -> None:
        """Hand on the outputs of prompts that cannot be run."""
        for output in self.outputs.values():
            if output.error is not None and self.on_output is not None:
                self.on_output(output)

    def on_finished(self, sequences: list[Sequence]) -> None:
        self._emit([s for s in sequences if s.finish_reason != "error"])

    def on_block_end(self, sequences: list[Sequence]) -> None:
        self._emit(sequences)

    def on_interrupt(self, sequences: list[Sequence]) -> None:
        for s in sequences:
            s.finish_reason = s.finish_reason or "abort"
        self._emit([s for s in sequences if s.tokens or s.finish_reason == "error"])

    def _emit(self, sequences: list[Sequence]) -> None:
        for s in sequences:
            if s.index in self._emitted:
                continue
            output = self.outputs[s.index]
            if s.finish_reason == "error":
                output.error = "the model's hidden states overflowed for this prompt"
            else:
                output.outputs = [CompletionOutput(0, self._text(s), s.tokens, s.logprobs, s.finish_reason)]
            if self.on_output is not None:
                self.on_output(output)
            self._emitted.add(s.index)  # an interrupt before this line must not lose it

    def _text(self, s: Sequence) -> str:
        if s.text is not None:
            return s.text
        return "" if self.tokenizer is None else decode(self.tokenizer, s.tokens)


class ScoreCollector(Observer):
    """Completes the outputs of texts that are scored, and hands each on as soon as its batch is done.

    Args:
        outputs: by index, of every text of the job.
        is_greedy: by index, whether each scored token was the most likely one.
        on_output: gets every output.
    """

    def __init__(
        self,
        outputs: list[ScoreOutput],
        is_greedy: dict[int, list[bool]],
        on_output: Callable[[ScoreOutput], None] | None = None,
    ):
        self.outputs, self.is_greedy, self.on_output = outputs, is_greedy, on_output

    def on_finished(self, sequences: list[Sequence]) -> None:
        for s in sequences:
            output = self.outputs[s.index]
            if s.finish_reason == "error":
                output.error = "the model's hidden states overflowed for this text"
            else:
                output.token_logprobs, output.is_greedy = s.logprobs, self.is_greedy[s.index]
            if self.on_output is not None:
                self.on_output(output)
