"""Chat templates: conversations as the text that a model expects, with nothing left out.

A template is a program that silently drops what it does not expect. So the form in which it reads messages of a shape
is found with probes, once for each shape, and the format in which it writes tool calls, once for all.
"""

from __future__ import annotations

import inspect
import logging
import re
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from os.path import commonprefix

from h2o_flexgen.engine.answers import PROBE, AnswerParser, call_format_of, opening_of, reasoning_of
from h2o_flexgen.engine.message_forms import ARGUMENTS, Form, find_form, shape_of, with_marks
from h2o_flexgen.engine.messages import Conversation, checked_message
from h2o_flexgen.engine.tools import ToolsError, names_of
from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.models.tokenizer import ANSWER

log = logging.getLogger(__name__)

#: shapes of conversations that are remembered
MOST_SHAPES = 1000
#: a conversation with a call of the function `PROBE`, for templates that want a result after a call or none; its id is
#: one that Mistral's accept
CALLED = [
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "tool_calls": [{"id": "h2ocall00", "type": "function", "function": {"name": PROBE, "arguments": ARGUMENTS}}],
    },
    {"role": "tool", "content": "!", "name": PROBE, "tool_call_id": "h2ocall00"},
]
PROBE_PARAMETERS = {"type": "object", "properties": {"h2oname": {"type": "string", "description": "h2o"}}}
PROBE_TOOLS = [
    {"type": "function", "function": {"name": "h2otool", "description": "h2o", "parameters": PROBE_PARAMETERS}}
]


class ChatTemplate:
    """The chat template of a tokenizer, which is None for a model without one.

    Attributes:
        template_kwargs: variables of the template for all conversations; those of a conversation override them.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.template_kwargs: dict = {}
        self._forms: dict[tuple, Form] = {}  # by the shape of a conversation
        self._openings: dict[tuple, str] = {}  # of new answers, likewise
        self._known: set[str] = set()  # names of variables

    def set_kwargs(self, template_kwargs: dict) -> None:
        """Set variables for all conversations. Raises UserError for names that cannot be variables."""
        if self.tokenizer is not None and self.tokenizer.chat_template is not None:
            self._check_kwargs(template_kwargs)
        self.template_kwargs = template_kwargs

    def render(self, conversation: Conversation) -> str:
        """The text of a conversation, special tokens included, and the beginning of an answer. A last message of the
        assistant's is followed by a new answer, unless it is to be continued.

        Raises:
            UserError: messages of a wrong shape, no tokenizer, no template, or one that refuses the messages or leaves
                out some of their content. It may leave out earlier messages of the assistant's: many templates drop
                earlier reasoning.
            ToolsError: the template leaves out the tools.
        """
        ready = self._ready(conversation)
        return self._apply(ready.messages, ready.options)

    def answer_parser(self, conversation: Conversation) -> AnswerParser | None:
        """How the answer to a conversation is split; None if the template defines nothing to split. Raises UserError as
        `render`."""
        tools = names_of(conversation.tools)
        calls = self._call_format if tools else None
        if self._reasoning is None and calls is None:
            return None
        opening = "" if self._reasoning is None else self._opening(conversation)
        return AnswerParser(self._reasoning, opening, calls, tools, conversation.parallel_tool_calls)

    def render_next(self, question: str) -> str:
        """The text that the template writes after an answer: its end, the user's next question, and the beginning of
        the next answer. Raises UserError as `render`, or if the template does not print an answer unchanged."""
        turns = (("user", "?"), ("assistant", ANSWER), ("user", question))
        try:
            text = self.render(Conversation([{"role": role, "content": content} for role, content in turns]))
        except UserError as e:
            raise UserError(f"{e}; use `feed` and `generate`") from None
        if ANSWER not in text:
            raise UserError("the model's chat template changes earlier answers: use `feed` and `generate`")
        return text.partition(ANSWER)[2]

    def _check_kwargs(self, template_kwargs: dict) -> None:
        """Warn about variables that the template does not read. Raises UserError for names that cannot be variables."""
        for name in template_kwargs.keys() - self._known:
            if name in self._reserved:
                raise UserError(f"chat_template_kwargs: {name} is not a variable of a chat template: leave it out")
            if not re.search(rf"\b{re.escape(name)}\b", str(self.tokenizer.chat_template)):
                log.warning("chat_template_kwargs: the model's chat template does not read %s", name)
            self._known.add(name)

    @cached_property
    def _reserved(self) -> set[str]:
        """Arguments that the tokenizer does not pass on to the template."""
        parameters = inspect.signature(self.tokenizer.apply_chat_template).parameters
        return {"messages", "self", *parameters} - {"tools", "documents"}

    def _ready(self, conversation: Conversation) -> Ready:
        """What renders a conversation. Raises UserError as `render`."""
        messages = [checked_message(n, message) for n, message in enumerate(conversation.messages)]
        if self.tokenizer is None:
            raise UserError("this model has no tokenizer: give prompt_token_ids instead of messages")
        if self.tokenizer.chat_template is None:
            raise UserError("the model has no chat template: give a prompt instead of messages")
        options = self._options(conversation)
        if conversation.continue_final_message and "tool_calls" in messages[-1]:
            raise UserError("continue_final_message: a message with tool calls cannot be continued")
        try:
            shape = (*map(shape_of, messages), len(conversation.tools), repr(sorted(options.items())))
        except RecursionError:
            raise UserError("the tools or chat_template_kwargs are nested too deeply") from None
        if shape not in self._forms:
            # a probe is rendered whole, since what lies behind the text of a message may betray a wrong form
            form = find_form(messages, partial(self._apply, options=options | {"continue_final_message": False}))
            if conversation.tools:
                self._check_tools([form.of(message) for message in messages], options)
            if len(self._forms) == MOST_SHAPES:  # each row may have tools of its own
                self._forms.clear()
                self._openings.clear()
            self._forms[shape] = form
        return Ready([self._forms[shape].of(message) for message in messages], options, shape)

    def _options(self, conversation: Conversation) -> dict:
        """The arguments of apply_chat_template. Raises UserError for variables that the template cannot have."""
        options = self.template_kwargs | conversation.template_kwargs
        self._check_kwargs(options)
        if conversation.tools:
            if options.get("tools"):
                raise ToolsError("tools are in chat_template_kwargs too: leave them out there")
            options["tools"] = list(conversation.tools)
        if conversation.continue_final_message:
            options["continue_final_message"] = True
        return options | {"add_generation_prompt": conversation.begins_answer}

    @cached_property
    def _reasoning(self) -> str | None:
        """How the template writes reasoning: `AnswerParser.reasoning`."""
        return reasoning_of(str(getattr(self.tokenizer, "chat_template", None)))

    @cached_property
    def _call_format(self) -> str | None:
        """How the template writes tool calls: `AnswerParser.calls`."""
        options = {"add_generation_prompt": False, "tools": PROBE_TOOLS}
        for count, json_arguments in product((len(CALLED), 2), (False, True)):
            form = Form("given", frozenset(), json_arguments)
            messages = [form.of(checked_message(n, message)) for n, message in enumerate(CALLED[:count])]
            try:
                found = call_format_of(self._apply(messages, options))
            except UserError:
                continue
            if found is not None:
                return found
        log.warning("the chat template writes tool calls in a format that is not known: calls stay in the text")
        return None

    def _opening(self, conversation: Conversation) -> str:
        """`AnswerParser.opening` of the answer to a conversation."""
        ready = self._ready(conversation)
        if conversation.continue_final_message:
            return opening_of(self._reasoning, self._turn(ready, ready.messages[:-1]))
        if ready.shape not in self._openings:
            self._openings[ready.shape] = opening_of(self._reasoning, self._turn(ready, ready.messages))
        return self._openings[ready.shape]

    def _turn(self, ready: Ready, earlier: list[dict]) -> str:
        """What a prompt holds behind the text of earlier messages."""
        text = self._apply(ready.messages, ready.options)
        options = ready.options | {"add_generation_prompt": False, "continue_final_message": False}
        try:
            before = self._apply(earlier, options)
        except UserError:  # such as no messages at all
            before = ""
        return text[len(commonprefix([text, before])) :]

    def _apply(self, messages: list[dict], options: dict) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as e:  # a template is a program, and may raise anything
            raise UserError(f"the model's chat template refuses these messages: {reason(e)}") from None

    def _check_tools(self, messages: list[dict], options: dict) -> None:
        """Raises ToolsError if the template leaves out the tools of a conversation, or some of them."""
        marked = [with_marks(tool, {"name": f"h2otool{n}mark"}) for n, tool in enumerate(options["tools"])]
        text = self._apply(messages, options | {"tools": marked})
        if not all(name in text for name in names_of(marked)):
            raise ToolsError("the model's chat template leaves out tools: give none")


@dataclass(frozen=True)
class Ready:
    """A conversation as the template reads it.

    Attributes:
        options: of apply_chat_template.
        shape: all that the form of the messages depends on.
    """

    messages: list[dict]
    options: dict
    shape: tuple
