"""OpenAI's batch format: a request a line, and a response a line.

https://platform.openai.com/docs/api-reference/batch: request input and request output objects.
"""

from __future__ import annotations

import hashlib
import time
from itertools import accumulate
from typing import TYPE_CHECKING

from h2o_flexgen.engine.messages import Conversation, checked_kwargs, checked_message
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.keys import HONOURED, REFUSED, SAMPLING, RowError, is_empty, sampling, short

if TYPE_CHECKING:
    from h2o_flexgen.engine.outputs import RequestOutput
    from h2o_flexgen.jobs.input import Row

#: the kind of a row by its url
URLS = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
#: those of `jobs.tasks`
URLS |= {"/v1/embeddings": "embedding", "/v1/score": "score"}
#: other keys of a body, which are read elsewhere or do not affect the response
OTHERS = set(
    "model messages prompt logprobs max_completion_tokens chat_template_kwargs user metadata store service_tier "
    "safety_identifier prompt_cache_key prompt_cache_retention parallel_tool_calls stream_options prediction "
    "request_id priority".split()
)


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
        if not (is_empty(value) or name in SAMPLING or name in REFUSED or name in OTHERS):
            raise RowError(f"{name} is not supported: leave it out", name)
    row.logprobs = wants_logprobs(body, row.kind)
    if row.kind == "chat":
        row.prompt = conversation(body)
    else:
        refuse_template_kwargs(body)
        row.prompt = completion_prompt(body.get("prompt"))


def conversation(data: dict) -> Conversation:
    """The conversation of a plain row or the body of a request. Raises RowError if there are no messages, one has a
    wrong shape, or `chat_template_kwargs` is not an object."""
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
        return Conversation(messages, checked_kwargs(data.get(param)))
    except UserError as e:
        raise RowError(str(e), param) from None


def refuse_template_kwargs(data: dict) -> None:
    """Raises RowError for variables of a chat template without messages."""
    if not is_empty(data.get("chat_template_kwargs")):
        raise RowError("chat_template_kwargs is for messages: leave it out", "chat_template_kwargs")


def completion_prompt(prompt) -> str | list[int]:
    """The prompt of a completion. Raises RowError unless it is one text or one list of token ids."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str) or (isinstance(prompt, list) and not any(isinstance(x, (str, list)) for x in prompt)):
        return prompt
    raise RowError("prompt must be one text or one list of token ids", "prompt")


def wants_logprobs(data: dict, kind: str) -> bool:
    """Whether a row asks for the log-probabilities of the chosen tokens: by true, or in a completion by 0, the number
    of alternatives. Raises RowError for anything else."""
    logprobs = data.get("logprobs")
    if logprobs is None or logprobs is False:
        return False
    if logprobs == 0 if kind == "completion" else logprobs is True:
        return True
    only = "0: other tokens than the chosen one are not supported" if kind == "completion" else "true or false"
    raise RowError(f"logprobs must be {only}", "logprobs")


# responses


def response(row: Row, output: RequestOutput, model: str, tokenizer) -> dict:
    """The output line of a request that was run. `model`: the name to give if the request names none."""
    if output.error is not None:
        return failure(row, UserError(output.error), 500)
    done = output.outputs[0]
    used = len(output.prompt_token_ids)
    made = len(done.token_ids)
    choice = {"index": 0, "finish_reason": done.finish_reason, "logprobs": None}
    if row.kind == "chat":
        choice["message"] = {"role": "assistant", "content": done.text, "refusal": None}
    else:
        choice["text"] = done.text
    if row.logprobs:
        logprobs = _chat_logprobs if row.kind == "chat" else _completion_logprobs
        choice["logprobs"] = logprobs(_token_texts(tokenizer, done.token_ids), done.logprobs)
    body = {
        "id": f"{'chatcmpl' if row.kind == 'chat' else 'cmpl'}-{_number(row)}",
        "object": "chat.completion" if row.kind == "chat" else "text_completion",
        "created": int(time.time()),
        "model": row.model or model,
        "choices": [choice],
        "usage": {"prompt_tokens": used, "completion_tokens": made, "total_tokens": used + made},
    }
    return _line(row, 200, body)


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


def _token_texts(tokenizer, tokens: list[int]) -> list[str]:
    """The text of each token; without a tokenizer its id, written as in vLLM."""
    if tokenizer is None:
        return [f"token_id:{token}" for token in tokens]
    return [tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in tokens]


def _chat_logprobs(texts: list[str], logprobs: list[float]) -> dict:
    content = []
    for text, logprob in zip(texts, logprobs):
        is_part = "\ufffd" in text  # an incomplete character
        values = None if is_part else list(text.encode("utf-8", "replace"))
        content.append({"token": text, "logprob": logprob, "bytes": values, "top_logprobs": []})
    return {"content": content, "refusal": None}


def _completion_logprobs(texts: list[str], logprobs: list[float]) -> dict:
    offsets = [0, *accumulate(map(len, texts))]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets[:-1]}
