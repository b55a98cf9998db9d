"""Prompts and texts of a job, as sequences for the engine and outputs that it will complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import count, repeat

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.messages import is_conversation, messages_of
from h2o_flexgen.engine.model import LoadedModel, Prompt
from h2o_flexgen.engine.outputs import RequestOutput, ScoreOutput
from h2o_flexgen.engine.params import SamplingParams, check_stop, numbers_of_each
from h2o_flexgen.errors import UserError


def admit(model: LoadedModel, prompt: Prompt, gen_len: int, rolling: bool) -> list[int]:
    """Token ids of a prompt, if an output of `gen_len` tokens fits behind it.

    Args:
        rolling: positions roll, so that the output may go on past the model's.

    Raises:
        UserError: it is too long, or as `LoadedModel.encode`.
    """
    ids = model.encode(prompt)
    model.spec.check_length(len(ids), gen_len, rolling)
    return ids


class Requests:
    """The prompts of a job, admitted as they are read.

    Args:
        each: (prompt, its parameters, its key) of each.
        rolling: positions roll.
        skip_errors: a prompt that cannot be run has an output with an error; else its error is raised.

    Attributes:
        outputs: by index, of the prompts that have been read; whoever hands one on may take it out.
        refused: what to do with the output of a prompt that cannot be run; None: it waits.
        limits: tokens of the longest prompt and the longest output that the job is planned for; None before.
    """

    def __init__(
        self,
        model: LoadedModel,
        each: Iterable[tuple[Prompt, SamplingParams, int]],
        rolling: bool,
        skip_errors: bool,
    ):
        self.model = model
        self.each = each
        self.rolling = rolling
        self.skip_errors = skip_errors
        self.outputs: dict[int, RequestOutput] = {}
        self.refused: Callable[[RequestOutput], None] | None = None
        self.limits: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[Sequence]:
        for index, (prompt, params, key) in enumerate(self.each):
            output = self.outputs[index] = RequestOutput(index, _shown(prompt), [])
            try:
                yield self._admitted(output, prompt, params, key)
            except UserError as e:
                if not self.skip_errors:
                    raise UserError(f"prompt {index}: {e}") from None
                output.error = str(e)
                if self.refused is not None:
                    self.refused(output)

    def _admitted(self, output: RequestOutput, prompt: Prompt, params: SamplingParams, key: int) -> Sequence:
        ids = output.prompt_token_ids = admit(self.model, prompt, params.max_tokens, self.rolling)
        check_stop(params, self.model.tokenizer, self.model.spec.vocab)
        for name, tokens, most in zip(
            ("longest_prompt", "max_tokens"), (len(ids), params.max_tokens), self.limits or ()
        ):
            if tokens > most:
                raise UserError(f"it has {tokens} tokens, more than the {most} of `{name}` that the job is planned for")
        return Sequence(output.index, ids, params, key)


def each_of(prompts: Iterable[Prompt], params, keys) -> Iterator[tuple[Prompt, SamplingParams, int]]:
    """Prompts with their parameters and keys, which may be iterators too.

    Raises:
        UserError: there are fewer of them than of the prompts.
    """
    many_params = repeat(params or SamplingParams()) if params is None or isinstance(params, SamplingParams) else params
    rest = (iter(many_params), count() if keys is None else iter(keys))
    for n, prompt in enumerate(prompts):
        try:
            yield prompt, *map(next, rest)
        except StopIteration:
            raise UserError(f"`sampling_params` or `keys` ended before prompt {n}: give one for each") from None


def _shown(prompt: Prompt) -> str | Seq[dict] | None:
    if is_conversation(prompt):
        return messages_of(prompt)
    return prompt if isinstance(prompt, str) else None


def to_score(
    model: LoadedModel,
    texts: Seq[str | Seq[int]],
    prompt_len: int | Seq[int] | None,
    first_scored: int | Seq[int] | None,
    rolling: bool,
) -> tuple[list[Sequence], list[ScoreOutput], dict[int, list[int]]]:
    """Sequences of the texts, the outputs of all texts, and by index the tokens to be scored. Arguments and errors are
    those of `LLM.score`; a text that cannot be scored has an `error` in its output, and no sequence."""
    sequences = []
    outputs = []
    targets = {}
    prompt_lens = numbers_of_each("prompt_len", prompt_len, len(texts))
    firsts = numbers_of_each("first_scored", first_scored, len(texts))
    for index, (text, its_prompt_len, first) in enumerate(zip(texts, prompt_lens, firsts)):
        output = ScoreOutput(index, [])
        outputs.append(output)
        try:
            if is_conversation(text):
                raise UserError("a text or a list of token ids can be scored, not a conversation")
            ids = output.token_ids = model.encode(text)
            begin = its_prompt_len or len(ids) - 1  # what is behind it is decoded
            first = first or its_prompt_len or 1
            is_stream = rolling and its_prompt_len is not None
            model.spec.check_length(*((begin, len(ids) - begin, True) if is_stream else (len(ids),)))
            if len(ids) <= first or len(ids) <= begin:
                raise UserError(f"the text has {len(ids)} tokens, none behind the first {first} to be scored")
            if its_prompt_len is not None and first > its_prompt_len:
                raise UserError(f"`first_scored` is {first}: at most `prompt_len` {its_prompt_len}")
            targets[index] = ids[first:]
            params = SamplingParams(max_tokens=len(ids) - begin)
            sequences.append(Sequence(index, ids[:begin], params, wanted=first - 1))
        except UserError as e:
            output.error = str(e)
    return sequences, outputs, targets
