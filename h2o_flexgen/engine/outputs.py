"""The outputs of a job, one for each prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from h2o_flexgen.engine.answers.calls import Answer, ToolCall
from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.observer import Observer
from h2o_flexgen.engine.stop import decode, decode_before, decode_with


@dataclass
class CompletionOutput:
    """One generated text.

    Attributes:
        text: up to the stop string or the token that ended it.
        token_ids: all generated tokens, including those that ended it.
        logprobs: natural logarithm of the probability of each token.
        finish_reason: "length" or "stop" (an end-of-sequence token, one of `stop_token_ids`, a stop string, or the end
            of structured output).
        top_logprobs: for each token {token id: log-probability} of the most likely ones, if `SamplingParams` asks.
        reasoning_content, tool_calls, content: the parts of an answer to a conversation, where the chat template
            defines reasoning or tool calls: calls as OpenAI has them, and the text beside both. None for a part that
            the answer lacks; all are None if `text` is not split. `text` is always whole.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    top_logprobs: list[dict[int, float]] | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict] | None = None
    content: str | None = None

    @property
    def is_split(self) -> bool:
        """Whether the text has parts."""
        return (self.reasoning_content, self.tool_calls, self.content) != (None, None, None)


@dataclass
class RequestOutput:
    """The outcome of one prompt: its `outputs`, or `error`, which says why it could not be run or was aborted.

    Attributes:
        outputs: of each answer, `SamplingParams.n` in all.
        prompt_logprobs: for each token of the prompt {token id: log-probability} of itself and the most likely ones,
            None for the first, if `SamplingParams` asks.
        prompt: the text or the conversation as given; None for token ids.
        prompt_token_ids: the input of the model, with everything that a chat template adds.
    """

    index: int
    prompt: str | list[dict] | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    error: str | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None


@dataclass
class ScoreOutput:
    """The score of one text.

    Attributes:
        index: place among the texts.
        token_ids: of the whole text.
        token_logprobs: natural logarithm of the probability of each scored token, the last ones of the text.
        greedy_token_ids: the most likely token in the place of each of them.
        error: why the text could not be scored, in which case the lists are empty; or None.
    """

    index: int
    token_ids: list[int]
    token_logprobs: list[float] = field(default_factory=list)
    greedy_token_ids: list[int] = field(default_factory=list)
    error: str | None = None

    @property
    def is_greedy(self) -> list[bool]:
        """Whether each scored token was the most likely one."""
        scored = self.token_ids[len(self.token_ids) - len(self.greedy_token_ids) :]
        return [token == greedy for token, greedy in zip(scored, self.greedy_token_ids)]


Output = RequestOutput | ScoreOutput


def text_of(s: Sequence, tokenizer) -> str:
    """The output of a sequence as text; empty without a tokenizer."""
    if s.text is not None:
        return s.text
    return "" if tokenizer is None else decode(tokenizer, _shown(s))


def completion(s: Sequence, tokenizer, index: int = 0) -> CompletionOutput:
    found = CompletionOutput(index, text_of(s, tokenizer), s.tokens, s.logprobs, s.finish_reason)
    if s.params.top_logprobs:
        found.top_logprobs = s.top_logprobs
    return found if s.answer_parser is None or tokenizer is None else _split(found, s, tokenizer)


def _shown(s: Sequence) -> list[int]:
    """The tokens of a sequence whose text shows, if no stop string has ended it."""
    return s.tokens[:-1] if s.finish_reason == "stop" else s.tokens


def _split(output: CompletionOutput, s: Sequence, tokenizer) -> CompletionOutput:
    """The output with the parts of its answer."""
    markers = s.answer_parser.markers
    if s.text is None:
        text = decode_with(tokenizer, _shown(s), markers)
    else:
        text = decode_before(tokenizer, s.tokens, s.text, markers)
    answer = s.answer_parser.parse(text)
    if answer == Answer(output.text):
        return output
    calls = [_tool_call(s, n, call) for n, call in enumerate(answer.tool_calls)]
    parts = dict(reasoning_content=answer.reasoning_content, tool_calls=calls or None, content=answer.content)
    return replace(output, **parts)


def _tool_call(s: Sequence, n: int, call: ToolCall) -> dict:
    """Call `n` of an answer in OpenAI's form. Its id is not random: a job that was resumed gives the rows of one that
    never stopped."""
    digest = hashlib.sha256(repr((s.key, s.answer, list(s.prompt), s.tokens, n)).encode()).hexdigest()
    # Mistral's templates refuse longer ids
    id = digest[:9] if s.answer_parser.calls == "mistral" else f"call_{digest[:24]}"
    return {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class Answers:
    """Collects the answers to prompts that have several."""

    def __init__(self):
        self._ended: dict[int, list[Sequence]] = {}  # by index of the prompt, of those that have not all ended

    def add(self, s: Sequence) -> list[Sequence] | None:
        """All answers to the prompt of a sequence that has ended, in order; None if some have not ended yet."""
        if s.params.answers == 1:
            return [s]
        ended = self._ended.setdefault(s.index, [])
        ended.append(s)
        if len(ended) < s.params.answers:
            return None
        return sorted(self._ended.pop(s.index), key=lambda s: s.answer)


def complete(output: RequestOutput, answers: list[Sequence], tokenizer) -> RequestOutput:
    """Fill in the output of a prompt whose answers have all ended."""
    first = answers[0]
    failed = [s.error for s in answers if s.finish_reason == "error"]
    if failed:
        output.error = failed[0]
        return output
    kept = answers
    if first.params.best_of is not None:
        kept = sorted(answers, key=mean_logprob, reverse=True)[: first.params.n]
    output.outputs = [completion(s, tokenizer, n) for n, s in enumerate(kept)]
    if first.params.prompt_logprobs is not None:
        output.prompt_logprobs = [None, *first.prompt_logprobs]
    return output


def mean_logprob(s: Sequence) -> float:
    return sum(s.logprobs) / max(1, len(s.logprobs))


def complete_score(output: ScoreOutput, answers: list[Sequence], greedy_token_ids: dict[int, list[int]]) -> ScoreOutput:
    """Fill in the output of a text that has been scored; `greedy_token_ids` by index of the text."""
    (s,) = answers
    if s.finish_reason == "error":
        output.error = "the model's hidden states overflowed for this text"
    else:
        output.token_logprobs = s.logprobs
        output.greedy_token_ids = greedy_token_ids[s.index]
    return output


class OutputCollector(Observer):
    """Completes the outputs of a job, and hands each on as soon as its row has ended.

    Args:
        outputs: by index, of the prompts that have been read; those that cannot be run have an error.
        finish: fills in the output of a row, whose answers have all ended.
        on_output: receives every output.
        keeps: outputs stay in `outputs`.
    """

    def __init__(self, outputs: dict[int, Output], finish: Callable, on_output: Callable | None, keeps: bool = True):
        self.outputs = outputs
        self.finish = finish
        self.on_output = on_output
        self.keeps = keeps
        self.answers = Answers()

    def on_begin(self) -> None:
        """Hand on the outputs of prompts that cannot be run."""
        for output in [output for output in self.outputs.values() if output.error is not None]:
            self.hand_on(output)

    def on_finished(self, rows: list[Sequence]) -> None:
        for s in rows:
            if (answers := self.answers.add(s)) is not None:
                self.hand_on(self.finish(self.outputs[s.index], answers))

    def hand_on(self, output: Output) -> None:
        if not self.keeps:
            del self.outputs[output.index]
        if self.on_output is not None:
            self.on_output(output)
