"""Classification without generation: the log-probability of each of several given answers to a prompt.

Answers whose tokens begin alike share a sequence, and sequences share the prefix that is their prompt:

    prompt | pos itive          sequence 1: prompt, pos     scores both tokens of "positive"
           | neg ative          sequence 2: prompt, neg     scores "negative" and "neg"
           | neg

The last token of an answer is never an input, so that any number of answers of one token need the prompt alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.messages import Conversation, is_conversation
from h2o_flexgen.engine.model import LoadedModel, Prompt
from h2o_flexgen.engine.params import Answer, check_answers, list_of
from h2o_flexgen.engine.pooling import ONE_PASS
from h2o_flexgen.errors import UserError


@dataclass(eq=False)
class Scored:
    """The task of a sequence behind whose prompt answers are scored.

    Attributes:
        targets: for each token of its prompt whose logits are wanted, the tokens to score after it.
        logprobs: of each of them, by token, as far as the prompt has been computed.
    """

    targets: list[list[int]]
    logprobs: list[dict[int, float]] = field(default_factory=list)


@dataclass
class AnswerScore:
    """The score of one answer.

    Attributes:
        answer: as given.
        token_ids: its tokens behind the prompt.
        logprob: natural logarithm of the probability of these tokens: the sum over them.
        probability: the same as a share of all answers of the prompt, which add up to 1.
    """

    answer: Answer
    token_ids: list[int]
    logprob: float
    probability: float


@dataclass
class AnswersOutput:
    """The scores of the answers to one prompt.

    Attributes:
        index: place among the prompts.
        scores: of the answers, in their order.
        error: why they could not be scored, in which case there are no scores; or None.
    """

    index: int
    prompt_token_ids: list[int]
    scores: list[AnswerScore] = field(default_factory=list)
    error: str | None = None

    @property
    def answer(self) -> Answer | None:
        """The most likely one, the first among equals; None without scores."""
        best = max(self.scores, key=lambda score: score.logprob, default=None)
        return best and best.answer


@dataclass
class Question:
    """A prompt with answers.

    Attributes:
        prompt: token ids.
        answers: as given.
        token_ids: of each answer behind the prompt.
    """

    prompt: list[int]
    answers: list[Answer]
    token_ids: list[list[int]] = field(default_factory=list)

    def sequences(self, index: int) -> list[Sequence]:
        """The sequences that score the answers, in the order of their token ids. `index`: place of the prompt."""
        contexts = _longest([ids[:-1] for ids in self.token_ids])
        return [self._sequence(index, context) for context in contexts]

    def _sequence(self, index: int, context: list[int]) -> Sequence:
        """Scores all answers of which `context` begins with all tokens but the last."""
        targets: list[list[int]] = [[] for _ in range(len(context) + 1)]
        for ids in self.token_ids:
            if ids[:-1] == context[: len(ids) - 1]:
                for place, token in enumerate(ids):
                    targets[place].append(token)
        wanted = len(self.prompt) - 1
        return Sequence(index, self.prompt + context, ONE_PASS, wanted=wanted, task=Scored(targets))

    def scores(self, sequences: list[Sequence]) -> list[AnswerScore]:
        """The scores of the answers, from its sequences, which have ended."""
        contexts = [s.prompt[s.wanted + 1 :] for s in sequences]
        logprobs = []
        for ids in self.token_ids:
            task = sequences[bisect_left(contexts, ids[:-1])].task
            logprobs.append(math.fsum(by_token[token] for by_token, token in zip(task.logprobs, ids)))
        most = max(logprobs)
        shares = [math.exp(logprob - most) for logprob in logprobs]
        probabilities = [share / math.fsum(shares) for share in shares]
        return list(map(AnswerScore, self.answers, self.token_ids, logprobs, probabilities))


def answers_of_each(given, count: int) -> list:
    """The answers to each of `count` prompts. `given`: one list for all prompts, or a list with one for each. Raises
    UserError for another number of them."""
    given = list_of("`answers` must be a list of texts or lists of token ids, or one such list for each prompt", given)
    if all(map(_is_answer, given)):
        return [given] * count
    if len(given) != count:
        raise UserError(f"`answers` has {len(given)} lists for {count} prompts: give one for each, or one for all")
    return given


def _is_answer(given) -> bool:
    """Whether it may be one answer, not a list of them."""
    is_list = isinstance(given, (list, tuple))
    return isinstance(given, str) or (is_list and not any(isinstance(part, (str, list, tuple)) for part in given))


def question_of(model: LoadedModel, prompt: Prompt, answers: Seq[Answer]) -> Question:
    """A prompt and answers to it, which `check_answers` has checked.

    The tokens of a text are those that it has behind the prompt's text. Where the tokenizer would join the two in one
    token, it is encoded by itself.

    Raises:
        UserError: an answer without tokens, a prompt that is too long with one, or as `LoadedModel.encode`.
    """
    encode = _encoder(model, prompt)
    found = Question(encode(""), list(answers))
    for n, answer in enumerate(answers):
        try:
            found.token_ids.append(_tokens(model, encode, found.prompt, answer))
        except UserError as e:
            raise UserError(f"answer {n}: {e}") from None
    model.spec.check_length(len(found.prompt) + max(map(len, found.token_ids)))
    return found


def _encoder(model: LoadedModel, prompt: Prompt) -> Callable[[str], list[int]]:
    """Encodes the prompt with a text behind it, which may be empty."""
    if is_conversation(prompt):
        text = model.chat.render(prompt if isinstance(prompt, Conversation) else Conversation(prompt))
        return lambda answer: model.encode(text + answer, begins=False)
    if isinstance(prompt, str):
        return lambda answer: model.encode(prompt + answer)
    ids = model.encode(prompt)
    return lambda answer: ids + (model.encode(answer, begins=False) if answer else [])


def _tokens(model: LoadedModel, encode: Callable[[str], list[int]], ids: list[int], answer: Answer) -> list[int]:
    """Token ids of an answer behind a prompt, whose own are `ids`."""
    if not answer:
        raise UserError("it has no tokens")
    if not isinstance(answer, str):
        return model.encode(answer)
    whole = encode(answer)
    found = whole[len(ids) :] if whole[: len(ids)] == ids else model.encode(answer, begins=False)
    if not found:
        raise UserError("it adds no token to the prompt")
    return found


def _longest(contexts: list[list[int]]) -> list[list[int]]:
    """Those that are not the beginning of another one, sorted, each once."""
    ordered = sorted(map(list, set(map(tuple, contexts))))
    following = [*ordered[1:], []]
    return [context for context, after in zip(ordered, following) if after[: len(context)] != context or not after]


def has_failed(sequences: list[Sequence]) -> bool:
    """Whether the logits of one of them were not finite."""
    return any(s.finish_reason == "error" for s in sequences)


class Questions:
    """Prompts with answers, as the sequences and outputs of a job.

    Args:
        answers: as for `answers_of_each`.

    Attributes:
        outputs: of all prompts; those whose answers cannot be scored have an error.
        sequences: of the others.
    """

    def __init__(self, model: LoadedModel, prompts: Seq[Prompt], answers):
        self.outputs = [AnswersOutput(index, []) for index in range(len(prompts))]
        self.sequences: list[Sequence] = []
        self._asked: dict[int, Question] = {}
        for output, prompt, given in zip(self.outputs, prompts, answers_of_each(answers, len(prompts))):
            try:
                question = question_of(model, prompt, check_answers(given))
            except UserError as e:
                output.error = str(e)
                continue
            output.prompt_token_ids = question.prompt
            self._asked[output.index] = question
            self.sequences += question.sequences(output.index)

    def complete(self) -> list[AnswersOutput]:
        """All outputs, once the sequences have ended."""
        for index, group in groupby(self.sequences, attrgetter("index")):
            own = list(group)
            if has_failed(own):
                self.outputs[index].error = "the model's hidden states overflowed for this prompt"
            else:
                self.outputs[index].scores = self._asked[index].scores(own)
        return self.outputs
