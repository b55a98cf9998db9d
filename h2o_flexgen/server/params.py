"""What clients send: parameters of a new batch, and of a list."""

from __future__ import annotations

import json
from collections.abc import Mapping

from h2o_flexgen.jobs.openai import URLS
from h2o_flexgen.server.errors import ApiError
from h2o_flexgen.server.records import Page

#: the only one there is; nothing expires here
WINDOW = "24h"
#: parameters of a batch that decide how it runs
REQUIRED = ("input_file_id", "endpoint", "completion_window")
#: limits of a batch's metadata, as OpenAI has them
METADATA_KEYS = 16
KEY_LENGTH = 64
VALUE_LENGTH = 512


def batch_params(body: bytes) -> dict:
    """The parameters of a new batch, as fields of a `Batch`. Raises ApiError."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ApiError(400, "the body must be a JSON object")
    found = {name: value for name, value in found.items() if value is not None}
    for name in REQUIRED:
        if not isinstance(found.get(name), str):
            raise ApiError(400, f"{name} must be a text", param=name)
    for name in found:
        if name not in (*REQUIRED, "metadata"):
            raise ApiError(400, f"{name} is not supported: leave it out", param=name)
    if found["endpoint"] not in URLS:
        raise ApiError(400, f"endpoint must be one of {', '.join(URLS)}", param="endpoint")
    if found["completion_window"] != WINDOW:
        raise ApiError(400, f"completion_window must be {WINDOW}", param="completion_window")
    _check_metadata(found.get("metadata", {}))
    return found


def _check_metadata(metadata) -> None:
    is_fine = isinstance(metadata, dict) and len(metadata) <= METADATA_KEYS
    for key, value in metadata.items() if is_fine else ():
        is_fine &= isinstance(value, str) and len(key) <= KEY_LENGTH and len(value) <= VALUE_LENGTH
    if not is_fine:
        limits = f"{METADATA_KEYS} texts of {VALUE_LENGTH} characters, with names of {KEY_LENGTH}"
        raise ApiError(400, f"metadata must be an object of at most {limits}", param="metadata")


def page_params(query: Mapping[str, str], most: int, default: int) -> Page:
    """The part of a list that a client asks for: `limit` (at most `most`), `after` and `order`. Raises ApiError."""
    limit = query.get("limit", str(default))
    if not (limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= most):
        raise ApiError(400, f"limit must be a number from 1 to {most}", param="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, "order must be asc or desc", param="order")
    return Page(query.get("after"), int(limit), newest_first=order == "desc")
