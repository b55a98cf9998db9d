"""Records that outlive the server: each is a small JSON file, replaced as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.output import encoded, replace_file
from h2o_flexgen.server.errors import ApiError
from h2o_flexgen.utils.files import read_json

#: a dataclass with `id` and `created_at`
R = TypeVar("R")


class Records(Generic[R]):
    """The records of a folder, by their ids. The caller lets one thread at a time change them.

    Args:
        kind: their dataclass.

    Raises:
        UserError: a file cannot be read, or is damaged.
    """

    def __init__(self, folder: Path, kind: type[R]):
        self.folder = folder
        self.by_id: dict[str, R] = {}
        for path in folder.glob("*.json"):
            try:
                self.by_id[path.stem] = kind(**read_json("the record", path))
            except TypeError:
                raise UserError(f"the record {path} is damaged: remove it, or put it back") from None

    def put(self, record: R) -> R:
        """Add or replace a record. Raises OSError if it cannot be written; then nothing has changed."""
        replace_file(self.folder / f"{record.id}.json", [encoded(vars(record))]).close()
        self.by_id[record.id] = record
        return record

    def remove(self, id: str) -> None:
        (self.folder / f"{id}.json").unlink(missing_ok=True)
        del self.by_id[id]


@dataclass(frozen=True)
class Page:
    """Where a list begins, and how long it is: `limit` records after the one with the id `after`."""

    after: str | None
    limit: int
    newest_first: bool = True

    def of(self, records: Iterable[R]) -> tuple[list[R], bool]:
        """The records, and whether there are more. Raises ApiError if there is no record `after`."""
        ordered = sorted(records, key=lambda record: (record.created_at, record.id), reverse=self.newest_first)
        begin = 0
        if self.after is not None:
            ids = [record.id for record in ordered]
            if self.after not in ids:
                raise ApiError(400, f"after: no {self.after!r} in this list", param="after")
            begin = ids.index(self.after) + 1
        return ordered[begin : begin + self.limit], begin + self.limit < len(ordered)
