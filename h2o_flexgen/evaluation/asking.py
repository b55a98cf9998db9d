"""How a model is asked about a passage: through its chat template, or in plain text if it has none."""

from __future__ import annotations

from h2o_flexgen.engine.messages import Conversation
from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.errors import UserError
from h2o_flexgen.evaluation.passages import Passage

#: parts of a plain text
BREAK = "\n\n"


def asks(passage: str, question: str, in_front: bool) -> str:
    """A question and the passage, one behind the other."""
    return BREAK.join((question, passage) if in_front else (passage, question))


def prompt(model: LoadedModel, text: str, begun: str) -> Conversation | str:
    """A prompt that asks `text`, with the beginning of the answer, which may be empty."""
    if not has_chat(model):
        return f"{text}{BREAK}{begun}"
    question = {"role": "user", "content": text}
    if not begun:
        return Conversation([question])
    return Conversation([question, {"role": "assistant", "content": begun}], continue_final_message=True)


def following(model: LoadedModel, question: str, begun: str) -> list[int]:
    """Token ids of a further question behind an answer, and the beginning of its answer."""
    text = model.chat.render_next(question) if has_chat(model) else f"{BREAK}{question}{BREAK}"
    return model.encode(text + begun, begins=False)


def has_chat(model: LoadedModel) -> bool:
    return model.tokenizer.chat_template is not None


def fitted(model: LoadedModel, passage: Passage, others: Conversation | str) -> str:
    """The text of a passage, cut so that with `others`, a prompt without it, about `prompt_len` tokens result. Raises
    UserError if there is no room for any."""
    needed = len(model.encode(others))
    if needed >= passage.prompt_len:
        raise UserError(
            f"`prompt_len` {passage.prompt_len} leaves no room for a text: the question has {needed} tokens"
        )
    return model.tokenizer.decode(passage.token_ids[: passage.prompt_len - needed], skip_special_tokens=True)
