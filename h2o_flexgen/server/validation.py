"""Whether a file is the input of a batch: requests for its endpoint, a line each."""

from __future__ import annotations

from pathlib import Path

from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.content import GZIP
from h2o_flexgen.jobs.input import Row, read_rows
from h2o_flexgen.jobs.openai import URLS

#: errors that are listed
MOST_ERRORS = 100


def check_input(path: Path, endpoint: str) -> dict:
    """The `total` of a batch's requests, or the `errors` for which it fails, as the fields of a `Batch`. A request
    that only cannot be run is no error here: its own response says why."""
    if is_packed(path):  # it may be thousands of times as large
        return {"errors": [error_of("the file is compressed: upload it as plain JSON lines")]}
    try:
        rows = read_rows(str(path))
        errors = []
        for row in rows:
            if (message := _problem(row, endpoint)) is not None and len(errors) < MOST_ERRORS:
                errors.append(error_of(message, row.line))
    except UserError as e:
        return {"errors": [error_of(without_path(str(e), path))]}
    return {"errors": errors} if errors else {"total": len(rows)}


def is_packed(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(len(GZIP)) == GZIP


def _problem(row: Row, endpoint: str) -> str | None:
    if row.kind == "plain":
        if isinstance(row.prompt, UserError):
            return str(row.prompt)
        return 'not a request: it needs "custom_id", "method", "url" and "body"'
    if getattr(row.prompt, "param", None) in ("url", "method"):
        return str(row.prompt)
    if row.kind != URLS[endpoint]:
        return f"its url is not the endpoint of the batch, {endpoint}"
    return None


def error_of(message: str, line: int | None = None) -> dict:
    """OpenAI's batch error."""
    return {
        "code": "invalid_request" if line else "invalid_input_file",
        "line": line,
        "message": message,
        "param": None,
    }


def without_path(message: str, path: Path) -> str:
    """A message for clients, which know a file by its id."""
    return message.replace(f"`input_file` {path}", path.name).replace(str(path), path.name)
