"""Prompts and texts of a job, as sequences for the engine and outputs that it will complete."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.messages import is_conversation, messages_of
from h2o_flexgen.engine.model import LoadedModel, Prompt
from h2o_flexgen.engine.outputs import RequestOutput, ScoreOutput
from h2o_flexgen.engine.params import SamplingParams, check_stop, keys_of_each, numbers_of_each, params_of_each
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


def to_generate(
    model: LoadedModel,
    prompts: Seq[Prompt],
    sampling_params: SamplingParams | Seq[SamplingParams] | None,
    keys: Seq[int] | None,
    rolling: bool,
    skip_errors: bool,
) -> tuple[list[Sequence], dict[int, RequestOutput]]:
    """Sequences of the prompts, and by index the outputs of all prompts. Arguments and errors are those of
    `LLM.generate`: with `skip_errors` the output of a prompt that cannot be run gets an `error`, and there is no
    sequence of it."""
    params = params_of_each(sampling_params, len(prompts))
    keys = keys_of_each(keys, len(prompts))
    sequences = []
    outputs = {}
    for index, (prompt, its_params, key) in enumerate(zip(prompts, params, keys)):
        output = outputs[index] = RequestOutput(index, _shown(prompt), [])
        try:
            output.prompt_token_ids = admit(model, prompt, its_params.max_tokens, rolling)
            check_stop(its_params, model.tokenizer, model.spec.vocab)
            sequences.append(Sequence(index, output.prompt_token_ids, its_params, key))
        except UserError as e:
            if not skip_errors:
                raise UserError(f"prompt {index}: {e}") from None
            output.error = str(e)
    return sequences, outputs


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
