"""Output files: JSON lines, appended as rows finish, that survive a kill -9 and a full disk."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from h2o_flexgen.errors import UserError
from h2o_flexgen.files import open_regular, read_bytes, sync
from h2o_flexgen.jobs import openai
from h2o_flexgen.jobs.input import Row

log = logging.getLogger(__name__)


class OutputFile:
    """The output file of a job that runs: rows are appended as they finish.

    Args:
        rows: those that are done already; whatever else the file holds goes.

    Attributes:
        rows: all that are done; written: how many of them are on the disk. The others wait for space there.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, rows: list[DoneRow]):
        self.path = path
        self.rows = list(rows)
        self.written = len(rows)
        self.error: OSError | None = None  # of the last flush
        self.file = replace_file(path, encoded(rows))
        self.size = os.fstat(self.file.fileno()).st_size  # of the rows on the disk

    def add(self, row: DoneRow) -> None:
        self.rows.append(row)

    def flush(self) -> None:
        """Write the rows that wait, to the disk itself; if it does not take them they wait on (`error`)."""
        written = self.written
        size = self.size
        if written == len(self.rows):
            return
        try:
            self.file.truncate(size)  # half a row is none; nor is one that a failed fsync may have dropped
            try:
                for row in self.rows[written:]:
                    line = encoded([row])
                    _write(self.file, line)
                    written += 1
                    size += len(line)
            finally:
                os.fsync(self.file.fileno())
                self.written = written
                self.size = size
            self.error = None
        except OSError as e:
            if self.error is None:
                log.warning("cannot write %s: %s; the job goes on, its rows wait in memory", self.path, e.strerror)
            self.error = e

    def finish(self, order: list[str | int]) -> None:
        """Put the rows in the order of the input, and close the file.

        Args:
            order: the ids of all rows.

        Raises:
            UserError: the disk is full; the message says where the rows are.
        """
        self.flush()
        if self.error is not None:
            raise UserError(
                f"cannot write {self.path}: {self.error.strerror}; {self.written} of {len(self.rows)} finished rows "
                "are in it: make room, and the same command goes on"
            )
        put_in_order(self.path, self.rows, order)

    def close(self) -> None:
        self.file.close()


def put_in_order(path: Path, rows: list[DoneRow], order: list[str | int]) -> None:
    """Rewrite an output file, whose rows these are, unless they stand in order already. Raises UserError."""
    place = {id: n for n, id in enumerate(order)}
    ordered = encoded(sorted(rows, key=lambda row: place[row.id]))
    try:
        if read_bytes(path) != ordered:
            replace_file(path, ordered).close()
    except OSError as e:
        raise UserError(
            f"all rows are in {path}, but not in the order of the input: {e.strerror}; the same command tries again"
        ) from None


def replace_file(path: Path, data: bytes, *, is_new: bool = False) -> BinaryIO:
    """Write a file whole, on the disk itself, and only then under its name; returns it, open and locked (flock).

    Raises:
        OSError: it cannot be written; `path` is as it was, or whole. BlockingIOError: another process does the same.
        FileExistsError: with `is_new`, there is one.
    """
    new = path.with_name(f".{path.name}.new")
    file = _open_locked(new)
    try:
        if is_new and path.exists():
            raise FileExistsError(path)
        if path.exists():
            os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
        file.truncate(0)  # of a process that was killed
        _write(file, data)
        os.fsync(file.fileno())
        os.replace(new, path)
        sync(path.parent)  # the new name
        return file
    except BaseException:
        new.unlink(missing_ok=True)
        file.close()
        raise


def _open_locked(path: Path) -> BinaryIO:
    """To append. Whoever replaces a file with it has the lock already when it gets its name."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    try:
        file = open(open_regular(path, flags, 0o666), "ab", buffering=0)
    except OSError as e:
        raise OSError(e.errno, f"{path}: {e.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(file.fileno())
        if not os.path.lexists(path) or not os.path.samestat(found, path.lstat()):
            raise BlockingIOError(errno.EAGAIN, "another process has just put it in place")
        if found.st_nlink > 1:
            raise OSError(errno.EMLINK, f"{path}: it is another file too, by a hard link")
    except OSError:
        file.close()
        raise
    return file


def _write(file: BinaryIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def encoded(rows: Iterable[DoneRow]) -> bytes:
    return b"".join(json.dumps(row.data).encode() + b"\n" for row in rows)


# rows


@dataclass(frozen=True)
class DoneRow:
    """A line of the output file: a plain row, or a response of OpenAI's form.

    Attributes:
        id: as `Row.id`; data: what the line holds.
        error: why it has failed; None if it has not.
        tokens: how many were generated.
    """

    id: str | int
    data: dict
    error: str | None
    tokens: int

    @classmethod
    def of(cls, data: dict) -> DoneRow:
        """Raises TypeError, KeyError or AttributeError for what is no such line."""
        id = data["index"] if data.get("custom_id") is None else data["custom_id"]
        if type(id) not in (int, str):
            raise TypeError
        if "response" not in data:
            error = data.get("error")
            return cls(id, data, error, len([*data["token_ids"]]) if error is None else 0)
        answer = data["response"]
        if answer["status_code"] != 200:
            return cls(id, data, answer["body"]["error"]["message"], 0)
        return cls(id, data, None, answer["body"]["usage"]["completion_tokens"] + 0)

    def at(self, index: int) -> DoneRow:
        """The same, of a row that has moved in the input."""
        return replace(self, data=self.data | {"index": index}) if "index" in self.data else self


def done_row(row: Row, output, model: str, tokenizer) -> DoneRow:
    """Of a row that was run; `output`: its `RequestOutput`, `model`: the model's name."""
    if row.kind != "plain":
        return DoneRow.of(openai.response(row, output, model, tokenizer))
    if output.error is not None:
        return failed_row(row, UserError(output.error))
    done = output.outputs[0]
    found = {"text": done.text, "token_ids": done.token_ids, "finish_reason": done.finish_reason}
    return DoneRow.of(_begin(row) | found | ({"logprobs": done.logprobs} if row.logprobs else {}))


def failed_row(row: Row, error: UserError) -> DoneRow:
    """Of a row that cannot be run."""
    return DoneRow.of(openai.failure(row, error) if row.kind != "plain" else _begin(row) | {"error": str(error)})


def _begin(row: Row) -> dict:
    return {"index": row.index} | ({} if row.custom_id is None else {"custom_id": row.custom_id})


def read_done(path: Path) -> list[DoneRow]:
    """The rows of an output file; behind a power failure the last line may be half a row, which is none.

    Raises:
        UserError: the file cannot be read, or a line is no row.
    """
    try:
        lines = read_bytes(path).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    rows = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            rows.append(DoneRow.of(json.loads(line)))
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            raise no_row(path, number) from None
    return rows


def no_row(path: Path, number: int) -> UserError:
    advice = "take the line out, and its row is run again"
    return UserError(f"`output_file` {path}: line {number} is no row of this job, or has been edited: {advice}")
