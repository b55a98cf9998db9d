"""Conversations as users and OpenAI's clients write them, checked before they reach a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from h2o_flexgen.engine.params import list_of
from h2o_flexgen.errors import UserError


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template.

    Attributes:
        messages: each has a text "role" and a "content": a text, a list of parts {"type": "text", "text": ...}, or,
            with "tool_calls", None. All other keys are passed to the template too.
        template_kwargs: variables of the template, such as {"enable_thinking": False}.
        tools: functions that the model may call, as from `checked_tools`.
        parallel_tool_calls: an answer may hold several calls; otherwise only the first is kept.
        continue_final_message: the last message is left open, and the model continues it.
        add_generation_prompt: the text ends with the beginning of an answer; default: unless a message is continued.

    Raises:
        UserError: an answer cannot both begin and continue a message.
    """

    messages: Seq[dict]
    template_kwargs: dict = field(default_factory=dict)
    tools: Seq[dict] = ()
    parallel_tool_calls: bool = True
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None

    def __post_init__(self):
        if self.continue_final_message and self.add_generation_prompt:
            raise UserError("continue_final_message and add_generation_prompt cannot both be true: leave one out")

    @property
    def begins_answer(self) -> bool:
        """`add_generation_prompt` without its default."""
        is_given = self.add_generation_prompt is not None
        return self.add_generation_prompt if is_given else not self.continue_final_message


def is_conversation(prompt) -> bool:
    """Whether it is a `Conversation`, or a list of messages. An empty list counts as neither messages nor token ids."""
    is_list = isinstance(prompt, (list, tuple)) and len(prompt) > 0 and isinstance(prompt[0], dict)
    return is_list or isinstance(prompt, Conversation)


def as_conversation(prompt: Seq[dict] | Conversation) -> Conversation:
    return prompt if isinstance(prompt, Conversation) else Conversation(prompt)


def conversations_of(given: Seq[dict] | Seq[Seq[dict]], options: Conversation) -> list[Conversation | UserError]:
    """One conversation, or each of several, with what else `options` has; an error for those that are not lists of
    messages."""
    what = "a conversation is a list of messages, one or more, with role and content"
    several = [given] if is_conversation(given) else list_of(what, given)
    return [replace(options, messages=each) if is_conversation(each) else UserError(what) for each in several]


def content_text(content: str | list[dict] | None) -> str:
    """The content as one text, with a line for each part."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or [])


def checked_kwargs(given) -> dict:
    """A user's `chat_template_kwargs`, which may be None. Raises UserError for anything but an object."""
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise UserError(f"chat_template_kwargs must be an object with the template's variables, not {given!r:.60}")
    return given


def checked_message(n: int, message: dict) -> dict:
    """Message `n` of a conversation, without keys that are None; its content is "" if it has only tool calls. Raises
    UserError if it has a wrong shape, or holds something other than texts and tool calls."""
    if not isinstance(message, dict):
        raise UserError(f"message {n} is not an object with role and content")
    if not isinstance(message.get("role"), str):
        raise UserError(f'message {n}: "role" must be a text')
    found = {name: value for name, value in message.items() if value is not None}
    for name in ("function_call", "audio"):
        if name in found:
            raise UserError(f'message {n}: "{name}" is not supported')
    calls = found.pop("tool_calls", [])
    if not isinstance(calls, (list, tuple)):
        raise UserError(f'message {n}: "tool_calls" must be a list of objects')
    content = found.get("content", "" if calls else None)
    if not isinstance(content, (str, list, tuple)):
        raise UserError(f'message {n}: "content" must be a text or a list of parts')
    found["content"] = content if isinstance(content, str) else [_checked_part(n, part) for part in content] or ""
    return found | ({"tool_calls": [_checked_call(n, call) for call in calls]} if calls else {})


def _checked_part(n: int, part) -> dict:
    if not isinstance(part, dict) or part.get("type", "text") != "text":
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise UserError(f"message {n}: a content part must be of type text, not {kind!r:.60}")
    if not isinstance(part.get("text"), str):
        raise UserError(f"message {n}: a content part lacks its text")
    return {"type": "text"} | part


def _checked_call(n: int, call) -> dict:
    """A tool call, whose arguments may be omitted."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"message {n}: a tool call must have a function with a name")
    arguments = function.get("arguments") or {}
    try:
        if isinstance(arguments_object(arguments), dict):
            return call | {"function": function | {"arguments": arguments}}
    except (ValueError, RecursionError):
        pass
    raise UserError(f"message {n}: the arguments of a tool call must be a JSON object")


def arguments_object(arguments: dict | str) -> dict:
    """The arguments of a tool call, which OpenAI writes as JSON."""
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def arguments_json(arguments: dict | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
