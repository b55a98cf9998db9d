"""OpenAI's batch format: a request a line, and a response a line.

https://platform.openai.com/docs/api-reference/batch: request input and request output objects.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING

from h2o_flexgen.engine.messages import Conversation, checked_kwargs, checked_message
from h2o_flexgen.engine.tools import checked_tools
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.keys import HONOURED, REFUSED, SAMPLING, STRUCTURED, RowError, is_empty, sampling, short

if TYPE_CHECKING:
    from h2o_flexgen.engine.outputs import CompletionOutput, RequestOutput
    from h2o_flexgen.jobs.input import Row

#: the kind of a row by its url
URLS = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
#: those of `jobs.tasks`
URLS |= {"/v1/embeddings": "embedding", "/v1/score": "score"}
#: other keys of a body, which are read elsewhere or do not affect the response
OTHERS = set(
    "model messages prompt logprobs max_completion_tokens chat_template_kwargs user metadata store service_tier "
    "safety_identifier prompt_cache_key prompt_cache_retention parallel_tool_calls stream_options prediction "
    "request_id priority tools tool_choice continue_final_message add_generation_prompt".split()
)
#: keys of a row with messages, and values that ask for nothing in one without
CHAT_KEYS = {
    "chat_template_kwargs": (),
    "tools": (),
    "tool_choice": ("none", "auto"),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}


def is_request(data: dict) -> bool:
    """Whether a line is a request, not a plain row, which may have labels of any name."""
    given = {name for name, value in data.items() if value is not None}
    return bool(given & {"url", "body"}) and not given & {"prompt", "prompt_token_ids", "messages"}


def parse(data: dict, row: Row) -> None:
    """Fill `row` from a request. Raises UserError if it cannot be run; without a custom_id its output can only be a
    plain row. Of a request that generates nothing the body is left to `jobs.tasks`."""
    if row.custom_id is None:
        raise UserError("a request needs a custom_id")
    row.kind = URLS.get(str(data.get("url")), "chat")  # errors look the same in both
    if str(data.get("url")) not in URLS:
        raise RowError(f"url must be one of {', '.join(URLS)}, not {short(data.get('url'))}", "url")
    if data.get("method") != "POST":
        raise RowError(f"method must be POST, not {short(data.get('method'))}", "method")
    body = data.get("body")
    if not isinstance(body, dict):
        raise RowError("body must be an object", "body")
    row.model = body["model"] if isinstance(body.get("model"), str) else None
    sampling(data)  # refuses unsupported keys outside the body too
    if misplaced := [name for name in data if name in HONOURED and not is_empty(data[name])]:
        raise RowError(f"{misplaced[0]} belongs in the body", misplaced[0])
    if row.kind not in ("chat", "completion"):
        return
    row.params = sampling(body, is_body=True)
    for name, value in body.items():
        if not (is_empty(value) or name in {*SAMPLING, *STRUCTURED, *REFUSED, *OTHERS}):
            raise RowError(f"{name} is not supported: leave it out", name)
    row.set_logprobs(wanted_logprobs(body, row.kind))
    if row.kind == "chat":
        row.prompt = conversation(body)
    else:
        refuse_chat_keys(body)
        row.prompt = completion_prompt(body.get("prompt"))


def conversation(data: dict) -> Conversation:
    """The conversation of a plain row or the body of a request. Raises RowError if there are no messages, or one or
    another of its keys has a wrong shape."""
    messages = data.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise RowError("messages must be a list of objects with role and content", "messages")
    if not messages:
        raise RowError("messages is an empty list: a conversation has one or more", "messages")
    param = "messages"
    try:
        for n, message in enumerate(messages):
            checked_message(n, message)
        param = "chat_template_kwargs"
        template_kwargs = checked_kwargs(data.get(param))
        param = "continue_final_message"
        return Conversation(messages, template_kwargs, _tools(data), **_flags(data))
    except UserError as e:
        raise RowError(str(e), getattr(e, "param", param)) from None


def _tools(data: dict) -> list[dict]:
    """The functions that the model may call. Raises RowError for a call that it would have to make, and ToolsError as
    `checked_tools`."""
    tools = checked_tools(None if is_empty(data.get("tools")) else data["tools"])
    choice = data.get("tool_choice")
    if not is_empty(choice) and choice not in ("none", "auto"):
        only = '"none" or "auto": the model cannot be made to call a function'
        raise RowError(f"tool_choice must be {only}, not {short(choice)}", "tool_choice")
    return [] if choice == "none" else tools


def _flags(data: dict) -> dict[str, bool]:
    """What a row says about its conversation by true or false. Raises RowError for anything else."""
    names = ("parallel_tool_calls", "continue_final_message", "add_generation_prompt")
    found = {name: data[name] for name in names if not is_empty(data.get(name))}
    for name, value in found.items():
        if not isinstance(value, bool):
            raise RowError(f"{name} must be true or false, not {short(value)}", name)
    return found


def refuse_chat_keys(data: dict) -> None:
    """Raises RowError for a key of a row with messages in one without."""
    for name, harmless in CHAT_KEYS.items():
        if name in data and not is_empty(data[name]) and data[name] not in harmless:
            raise RowError(f"{name} is for messages: leave it out", name)


def completion_prompt(prompt) -> str | list[int]:
    """The prompt of a completion. Raises RowError unless it is one text or one list of token ids."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str) or (isinstance(prompt, list) and not any(isinstance(x, (str, list)) for x in prompt)):
        return prompt
    raise RowError("prompt must be one text or one list of token ids", "prompt")


def wanted_logprobs(data: dict, kind: str) -> dict:
    """What a row wants of the log-probabilities of its tokens: {} for nothing, or how many `top_logprobs` it wants
    beside its own tokens'. In a chat or a plain row `logprobs` is true or false, in a completion that number. Raises
    RowError for anything else."""
    logprobs = data.get("logprobs")
    top = data.get("top_logprobs")
    if logprobs is None or logprobs is False:
        if top:
            raise RowError("top_logprobs needs logprobs: set it to true", "top_logprobs")
        return {}
    if kind == "completion":
        if type(logprobs) is not int or logprobs < 0:
            raise RowError(f"logprobs must be a number, 0 or more, not {short(logprobs)}", "logprobs")
        return {"top_logprobs": logprobs}
    if logprobs is not True:
        raise RowError("logprobs must be true or false", "logprobs")
    return {"top_logprobs": 0 if top is None else top}


# responses


def response(row: Row, output: RequestOutput, model: str, tokenizer) -> dict:
    """The output line of a request that was run. `model`: the name to give if the request names none."""
    if output.error is not None:
        return failure(row, UserError(output.error), 500)
    used = len(output.prompt_token_ids)
    made = sum(len(done.token_ids) for done in output.outputs)
    body = {
        "id": f"{'chatcmpl' if row.kind == 'chat' else 'cmpl'}-{_number(row)}",
        "object": "chat.completion" if row.kind == "chat" else "text_completion",
        "created": int(time.time()),
        "model": row.model or model,
        "choices": [_choice(row, done, tokenizer) for done in output.outputs],
        "usage": {"prompt_tokens": used, "completion_tokens": made, "total_tokens": used + made},
    }
    if output.prompt_logprobs is not None:
        body["prompt_logprobs"] = output.prompt_logprobs
    return _line(row, 200, body)


def _choice(row: Row, done: CompletionOutput, tokenizer) -> dict:
    choice = {"index": done.index, "finish_reason": done.finish_reason, "logprobs": None}
    if row.kind == "chat":
        choice["message"] = _message(done)
        if done.tool_calls and done.finish_reason == "stop":
            choice["finish_reason"] = "tool_calls"
    else:
        choice["text"] = done.text
    if row.logprobs:
        logprobs = _chat_logprobs if row.kind == "chat" else _completion_logprobs
        choice["logprobs"] = logprobs(done, tokenizer)
    return choice


def _message(done: CompletionOutput) -> dict:
    content = done.content if done.is_split else done.text
    return {"role": "assistant", "content": content, "refusal": None} | parts_of(done)


def parts_of(done: CompletionOutput) -> dict:
    """The parts of an answer, those that it has."""
    parts = {name: getattr(done, name) for name in ("reasoning_content", "tool_calls", "content")}
    return {name: value for name, value in parts.items() if value is not None}


def success(row: Row, body: dict) -> dict:
    """The output line of a request that generates nothing."""
    return _line(row, 200, body)


def failure(row: Row, error: UserError, status: int = 400) -> dict:
    """The output line of a request that cannot be run (400), or that was aborted (500)."""
    kind = "invalid_request_error" if status == 400 else "server_error"
    param = getattr(error, "param", None)
    return _line(row, status, {"error": {"message": str(error), "type": kind, "param": param, "code": None}})


def _line(row: Row, status: int, body: dict) -> dict:
    answer = {"status_code": status, "request_id": f"req_{_number(row)}", "body": body}
    return {"id": f"batch_req_{_number(row)}", "custom_id": row.custom_id, "response": answer, "error": None}


def _number(row: Row) -> str:
    """Not random: a job that was resumed gives the lines of one that never stopped."""
    return hashlib.sha256(f"{row.custom_id!r} {row.digest}".encode()).hexdigest()[:24]


def _token_texts(tokenizer, tokens: Iterable[int]) -> list[str]:
    """The text of each token; without a tokenizer its id, written as in vLLM."""
    if tokenizer is None:
        return [f"token_id:{token}" for token in tokens]
    return [tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in tokens]


def _chat_logprobs(done: CompletionOutput, tokenizer) -> dict:
    content = []
    for n, (token, logprob) in enumerate(zip(done.token_ids, done.logprobs)):
        top = done.top_logprobs[n] if done.top_logprobs else {}
        others = [_chat_logprob(*each, tokenizer) for each in top.items()]
        content.append(_chat_logprob(token, logprob, tokenizer) | {"top_logprobs": others})
    return {"content": content, "refusal": None}


def _chat_logprob(token: int, logprob: float, tokenizer) -> dict:
    (text,) = _token_texts(tokenizer, [token])
    is_part = "\ufffd" in text  # an incomplete character
    values = None if is_part else list(text.encode("utf-8", "replace"))
    return {"token": text, "logprob": logprob, "bytes": values}


def _completion_logprobs(done: CompletionOutput, tokenizer) -> dict:
    texts = _token_texts(tokenizer, done.token_ids)
    offsets = [0, *accumulate(map(len, texts))]
    top = None
    if done.top_logprobs:
        each = zip(done.token_ids, done.logprobs, done.top_logprobs)
        with_own = [{token: logprob} | likely for token, logprob, likely in each]
        top = [dict(zip(_token_texts(tokenizer, likely), likely.values())) for likely in with_own]
    return {"tokens": texts, "token_logprobs": done.logprobs, "top_logprobs": top, "text_offset": offsets[:-1]}
