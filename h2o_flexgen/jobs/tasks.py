"""Rows that are not continued: texts to embed, and prompts with answers to score.

Their requests are those of /v1/embeddings, in OpenAI's form, and of /v1/score, whose form is our own:

    {"prompt": "..." or "messages": [...], "answers": ["yes", "no"]}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from h2o_flexgen.engine.params import Answer, PoolingParams, check_answers
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs import openai
from h2o_flexgen.jobs.keys import HONOURED, RowError, is_empty, sampling, short

if TYPE_CHECKING:
    from h2o_flexgen.jobs.input import Row

#: texts of one request, as in OpenAI's API
MOST_INPUTS = 2048
ENCODINGS = ("float", "base64")
#: keys of a row or a body that set how it is embedded
POOLING = ("pooling", "normalize")
#: keys of both kinds of bodies, which are read elsewhere or do not affect the response
COMMON = set("model messages chat_template_kwargs user metadata store service_tier priority request_id".split())
#: keys of the body of each kind of request
KEYS = {
    "embedding": COMMON | {"input", "encoding_format", "dimensions", *POOLING},
    "score": COMMON | {"prompt", "answers"},
}


@dataclass
class Embed:
    """Embed the text of a row; in a request, each of its `Inputs`.

    Attributes:
        own: of the `PoolingParams`, what it sets itself.
        encoding_format: "float", or "base64" of little-endian fp32.
        dimensions: elements of an embedding, if it says so.
    """

    own: dict = field(default_factory=dict)
    encoding_format: str = "float"
    dimensions: int | None = None


@dataclass
class Score:
    """Score answers to the prompt of a row.

    Attributes:
        answers: as given.
        token_ids: of each, once the row has been admitted.
    """

    answers: list[Answer]
    token_ids: list[list[int]] = field(default_factory=list)


class Inputs(list):
    """The texts of a request to embed."""


# plain rows


def parse_embed(data: dict, row: Row) -> None:
    """Let a plain row, whose prompt has been read, be embedded. Raises RowError for keys that are for generation, or a
    wrong value."""
    _refuse_sampling(row, "to embed")
    row.task = Embed(_pooling(data))


def parse_answers(data: dict, row: Row) -> None:
    """Let a plain row, whose prompt has been read, be scored if it has a list of answers; anything else of that name is
    a label, as data sets have it. Raises RowError for keys that are for generation, and for answers that cannot be
    scored."""
    if isinstance(data.get("answers"), list):
        _refuse_sampling(row, "with answers")
        row.task = Score(_answers(data["answers"]))


def _refuse_sampling(row: Row, what: str) -> None:
    given = [*row.params, *(["logprobs"] if row.logprobs else [])]
    if given:
        raise RowError(f"{given[0]} is not for a row {what}, which generates nothing: leave it out", given[0])


def _answers(given) -> list[Answer]:
    try:
        return check_answers(given)
    except UserError as e:
        raise RowError(str(e), "answers") from None


def _pooling(data: dict) -> dict:
    """Of the `PoolingParams`, what a row or a body sets. Raises RowError for a wrong value."""
    own = {name: data[name] for name in POOLING if data.get(name) is not None}
    for name, value in own.items():
        try:
            PoolingParams(**{name: value})
        except UserError as e:
            raise RowError(str(e), name) from None
    return own


# requests


def parse_request(body: dict, row: Row) -> None:
    """Fill `row`, whose kind is known, from the body of a request. Raises UserError if it cannot be run."""
    sampling(body, is_body=True)  # refuses what other systems have, whatever its spelling
    for name, value in body.items():
        if name not in KEYS[row.kind] and not is_empty(value):
            what = "for requests that generate text" if name in HONOURED else "not supported"
            raise RowError(f"{name} is {what}: leave it out", name)
    if row.kind == "embedding":
        row.task = Embed(_pooling(body), _encoding(body.get("encoding_format")), _dimensions(body.get("dimensions")))
        row.prompt = Inputs([openai.conversation(body)]) if _has_messages(body, "input") else _inputs(body)
    else:
        if not isinstance(body.get("answers"), list):
            raise RowError("answers must be a list of texts, or of lists of token ids", "answers")
        row.task = Score(_answers(body["answers"]))
        has_messages = _has_messages(body, "prompt")
        row.prompt = openai.conversation(body) if has_messages else openai.completion_prompt(body.get("prompt"))


def _has_messages(body: dict, other: str) -> bool:
    """Whether a body has messages in place of the key `other`. Raises RowError if it has both, or variables of a chat
    template without messages."""
    if body.get("messages") is None:
        openai.refuse_chat_keys(body)
        return False
    if body.get(other) is not None:
        raise RowError(f"a request has messages or {other}, not both", other)
    return True


def _inputs(body: dict) -> Inputs:
    """The texts of a request: one or several, or the token ids of one or of several."""
    given = body.get("input")
    if isinstance(given, str):
        return Inputs([given])
    if not isinstance(given, list) or not given:
        raise RowError("input must be a text, or a list of texts, of token ids, or of lists of token ids", "input")
    if len(set(map(type, given))) > 1:
        raise RowError("input must be a list of one kind: of texts, of token ids, or of lists of token ids", "input")
    found = Inputs(given if isinstance(given[0], (str, list)) else [given])
    if len(found) > MOST_INPUTS:
        raise RowError(f"input must hold at most {MOST_INPUTS} texts, not {len(found)}", "input")
    return found


def _encoding(given) -> str:
    if given is not None and given not in ENCODINGS:
        raise RowError(f"encoding_format must be one of {', '.join(ENCODINGS)}, not {short(given)}", "encoding_format")
    return given or ENCODINGS[0]


def _dimensions(given) -> int | None:
    if given is not None and (type(given) is not int or given < 1):
        raise RowError(f"dimensions must be a whole number, 1 or more, not {short(given)}", "dimensions")
    return given
