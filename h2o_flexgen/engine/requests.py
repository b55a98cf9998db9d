"""The prompts and texts of a job, as sequences for the engine and outputs that it completes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import chain, count, islice, repeat

from h2o_flexgen.engine.answers import AnswerParser
from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.messages import Conversation, is_conversation
from h2o_flexgen.engine.model import LoadedModel, Prompt
from h2o_flexgen.engine.outputs import RequestOutput, ScoreOutput
from h2o_flexgen.engine.params import (
    SamplingParams,
    check_params,
    keys_of_each,
    list_of,
    numbers_of_each,
    params_of_each,
    whole_number,
)
from h2o_flexgen.engine.prefixes import shared_tokens
from h2o_flexgen.engine.step import LogitsSink
from h2o_flexgen.engine.tasks import TaskSink
from h2o_flexgen.errors import UserError
from h2o_flexgen.planning.execution_plan import ExecutionPlan
from h2o_flexgen.planning.workload import WINDOW, Workload
from h2o_flexgen.policy import KVBudget


@dataclass(frozen=True)
class JobSpec:
    """Rows that have been admitted, and how to run them.

    Attributes:
        rows: read as places become free.
        workload: of all rows.
        kv_budget, compress_cache: as for `LLM`.
        sink: receives the logits; None samples tokens.
        plan: for these rows, if it is chosen already.
        window: the most rows that are read ahead; None: as many as the workload says.
        is_sound: the model has given tokens for another row: rows that give NaN fail alone.
    """

    rows: Iterable[Sequence]
    workload: Workload
    kv_budget: KVBudget | str | None = None
    compress_cache: str | None = None
    sink: LogitsSink | None = None
    plan: ExecutionPlan | None = None
    window: int | None = None
    is_sound: bool = False


def admit(model: LoadedModel, prompt: Prompt, gen_len: int, rolling: bool) -> list[int]:
    """Token ids of a prompt, if there is room for an output of `gen_len` tokens, which may outgrow the model's
    positions if these are `rolling`. Raises UserError if it is too long, or as `LoadedModel.encode`."""
    ids = model.encode(prompt)
    model.spec.check_length(len(ids), gen_len, rolling)
    return ids


class Requests:
    """The prompts of a job, admitted as they are read.

    Args:
        each: (prompt, parameters, key) of each.
        rolling: positions roll.
        skip_errors: a prompt that cannot be run becomes an output with an error; otherwise its error is raised.

    Attributes:
        outputs: by index, of the prompts that have been read; whoever passes one on may remove it.
        refused: called with the output of a prompt that cannot be run; None leaves it in `outputs`.
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
            output = RequestOutput(index, _shown(prompt), [])
            self.outputs[index] = output
            try:
                yield from self._admitted(output, prompt, params, key)
            except UserError as e:
                if not self.skip_errors:
                    raise UserError(f"prompt {index}: {e}") from None
                output.error = str(e)
                if self.refused is not None:
                    self.refused(output)

    def read_ahead(
        self, longest: int | None, kv_budget: KVBudget | str | None, compress_cache: str | None
    ) -> tuple[Iterator[Sequence], Workload | None]:
        """Rows that are read as they are asked for, and the workload of a job that runs a window of them at a time; no
        workload if none can be run. If there are more than a window, the first ones stand for all.

        Args:
            longest: tokens of the longest prompt, if that is known.
            kv_budget, compress_cache: as for `LLM`.

        Raises:
            UserError: the longest prompt is not known, but the slots of the KV cache depend on it.
        """
        rows = iter(self)
        first = list(islice(rows, WINDOW))
        workload = workload_of(first)
        if workload is None:
            return rows, None
        if len(first) == WINDOW:
            has_ratio = isinstance(kv_budget, KVBudget) and (kv_budget.hh_ratio, kv_budget.recent_ratio) != (None, None)
            if longest is None and (has_ratio or "auto" in (kv_budget, compress_cache)):
                raise UserError(
                    "a KV budget that is a ratio, or auto, depends on the longest prompt, which an iterator does not "
                    "tell: give `longest_prompt`, or the budget in slots"
                )
            longest = workload.longest if longest is None else whole_number("`longest_prompt`", longest, 1)
            workload = replace(workload, prompt_lens=(longest, *workload.prompt_lens[1:]))
        self.limits = (workload.longest, workload.gen_len)
        return chain(first, rows), replace(workload, window=WINDOW)

    def _admitted(self, output: RequestOutput, prompt: Prompt, params: SamplingParams, key: int) -> list[Sequence]:
        ids = admit(self.model, prompt, params.max_tokens, self.rolling)
        output.prompt_token_ids = ids
        check_params(params, self.model.tokenizer, self.model.spec.vocab)
        if self.limits is not None:
            tokens = {"longest_prompt": len(ids), "max_tokens": params.max_tokens}
            for (name, count), most in zip(tokens.items(), self.limits):
                if count > most:
                    raise UserError(f"{count} tokens are more than the {most} of `{name}` that the job is planned for")
        return answers_to(output.index, ids, params, key, self.model.answer_parser(prompt))


def answers_to(
    index: int, ids: list[int], params: SamplingParams, key: int, parser: AnswerParser | None = None
) -> list[Sequence]:
    """A sequence for each answer to a prompt. They share what they can of it as all rows do, and the logits of the
    prompt are those of the first. Structured output holds nothing beside it that could be split off."""
    parser = None if params.structured is not None else parser
    found = [Sequence(index, ids, params, key, answer=n, answer_parser=parser) for n in range(params.answers)]
    if params.prompt_logprobs is not None:
        found[0].wanted = 0
    return found


def list_each(prompts, params, keys) -> Iterator[tuple[Prompt, SamplingParams, int]]:
    """Prompts with their parameters and keys; arguments and errors are those of `LLM.generate`."""
    prompts = prompts_of(prompts)
    return zip(prompts, params_of_each(params, len(prompts)), keys_of_each(keys, len(prompts)))


def prompts_of(given: str | Seq[Prompt]) -> list[Prompt]:
    """One text, or each of several prompts. Raises UserError for anything but a text or a list."""
    what = "`prompts` must be a text, or a list of texts, lists of token ids and conversations"
    return [given] if isinstance(given, str) else list_of(what, given)


def read_each(prompts: Iterable[Prompt], params, keys) -> Iterator[tuple[Prompt, SamplingParams, int]]:
    """As `list_each`, from iterators. Raises UserError if there are fewer parameters or keys than prompts."""
    many_params = repeat(params or SamplingParams()) if params is None or isinstance(params, SamplingParams) else params
    rest = (iter(many_params), count() if keys is None else iter(keys))
    for n, prompt in enumerate(prompts):
        try:
            yield prompt, *map(next, rest)
        except StopIteration:
            raise UserError(f"`sampling_params` or `keys` ended before prompt {n}: give one for each") from None


def _shown(prompt: Prompt) -> str | Seq[dict] | None:
    if isinstance(prompt, Conversation):
        return prompt.messages
    return prompt if isinstance(prompt, str) or is_conversation(prompt) else None


def to_score(
    model: LoadedModel,
    texts: Seq[str | Seq[int]],
    prompt_len: int | Seq[int] | None,
    first_scored: int | Seq[int] | None,
    rolling: bool,
) -> tuple[list[Sequence], list[ScoreOutput], dict[int, list[int]]]:
    """Sequences of the texts, the outputs of all texts, and by index the tokens to score. Arguments and errors are as
    for `LLM.score`; a text that cannot be scored has an `error` in its output, and no sequence."""
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
            ids = model.encode(text)
            output.token_ids = ids
            begin = its_prompt_len or len(ids) - 1  # tokens after it are decoded
            first = first or its_prompt_len or 1
            is_stream = rolling and its_prompt_len is not None
            if is_stream:
                model.spec.check_length(begin, len(ids) - begin, True)
            else:
                model.spec.check_length(len(ids))
            if len(ids) <= first or len(ids) <= begin:
                raise UserError(f"the text has {len(ids)} tokens, none to score after the first {first}")
            if its_prompt_len is not None and first > its_prompt_len:
                raise UserError(f"`first_scored` is {first}: at most `prompt_len` {its_prompt_len}")
            targets[index] = ids[first:]
            params = SamplingParams(max_tokens=len(ids) - begin)
            sequences.append(Sequence(index, ids[:begin], params, wanted=first - 1))
        except UserError as e:
            output.error = str(e)
    return sequences, outputs, targets


def workload_of(rows: list[Sequence]) -> Workload | None:
    """The workload of rows that are all known; None if there are none."""
    if not rows:
        return None
    path, shared = shared_tokens(rows)
    prompt_lens = sorted((len(s.prompt) for s in rows), reverse=True)
    gen_lens = [s.params.max_tokens for s in rows]
    logits = max(len(s.prompt) - s.wanted for s in rows)
    output_tokens = sum(gen_lens)
    is_structured = any(s.params.structured is not None for s in rows)
    return Workload(
        tuple(prompt_lens),
        max(gen_lens),
        path=path,
        shared=shared,
        output_tokens=output_tokens,
        logits=logits,
        is_structured=is_structured,
    )


def one_pass(sequences: list[Sequence]) -> JobSpec:
    """A job of sequences that all have a task. What a KV cache would keep of them is not needed."""
    return JobSpec(sequences, workload_of(sequences), sink=TaskSink())
