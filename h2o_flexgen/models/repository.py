"""Names of repositories on the Hugging Face hub, as users write them."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

from h2o_flexgen.errors import UserError
from h2o_flexgen.models.registry import hub_name

_SITE = re.compile(r"(?:hf://|(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/)", re.I)
_REVISION = r"\w(?:[\w+-]|[./](?![./]|$))*"
#: owner/name, name, owner/name:KIND or owner/name/FILE.gguf, each optionally followed by @REVISION
_NAME = re.compile(
    rf"((?:[\w-][\w.-]*/)?[\w-][\w.-]*)(?:(?<!\.gguf):([\w.-]+)|/([^@]+\.gguf))?(?:@({_REVISION}))?", re.ASCII | re.I
)
#: a page on the hub: repository, revision and, optionally, a GGUF file
_PAGE = re.compile(r"([^/]+/[^/]+)/(?:tree|blob|resolve)/(refs/\w+/[^/]+|[^/]+)(/.+\.gguf)?", re.ASCII | re.I)


class Repository(NamedTuple):
    """A repository of models, or one GGUF file in it."""

    name: str  # the hub's, such as facebook/opt-125m
    revision: str | None = None  # a branch, tag or commit; None for the default branch
    gguf: str | None = None  # a file's path, or the type in its name, such as Q4_K_M; None for a whole repository


def repository(model: str) -> Repository | None:
    """The repository that a name, or the address of a page on the hub, means; None for any other text. Raises UserError
    for an address on the hub that is not a model's."""
    text = model.strip()
    address = _SITE.match(text)
    if address:
        page = unquote(re.split("[?#]", text[address.end() :])[0]).rstrip("/")
        if page.startswith(("datasets/", "spaces/")):
            raise UserError(f"`model` {text} is the address of {page.partition('/')[0]}, not of a model")
        inner = _PAGE.fullmatch(page)
        text = f"{inner[1]}{inner[3] or ''}@{inner[2]}" if inner else page
    found = _NAME.fullmatch(text.rstrip("/"))
    if found is None or (found[1].lower().endswith(".gguf") and not found[3]):
        if address:
            raise UserError(f"`model` {model.strip()} is not the address of a model: give OWNER/NAME")
        return None
    return Repository(hub_name(found[1]), found[4], found[2] or found[3])


def with_revision(model: str | None, revision: str | None) -> str | None:
    """The name of a model at a revision: NAME@REVISION. Raises UserError for no `model`, a model with another revision,
    or an impossible name of a revision."""
    if revision is None:
        return model
    if model is None:
        raise UserError("`revision` is for a repository of the Hugging Face hub: name it as `model`")
    if not isinstance(revision, str) or re.fullmatch(_REVISION, revision, re.ASCII) is None:
        raise UserError(f"`revision` must be a branch, a tag or a commit, not {revision!r}")
    named = repository(model)
    if named is not None and named.revision is not None:
        if named.revision != revision:
            raise UserError(f"`model` {model} contradicts `revision` {revision}: give one of the two")
        return model
    return f"{model.strip().rstrip('/')}@{revision}"
