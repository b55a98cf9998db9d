"""Output files: JSON lines, appended as rows finish, which survive a kill -9 and a full disk."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import stat
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs import openai
from h2o_flexgen.jobs.input import Row, id_hash, short_hash
from h2o_flexgen.utils.files import open_regular, sync

if TYPE_CHECKING:
    from h2o_flexgen.engine.outputs import CompletionOutput, RequestOutput

log = logging.getLogger(__name__)

#: bytes of a file that are written at once
PIECE = 1 << 18
#: a text in JSON as we write it
TEXT = rb'"[ !#-\[\]-~]*+(?:\\(?:["\\/bfnrt]|u[0-9a-f]{4})[ !#-\[\]-~]*+)*+"'
#: the line of a plain row that has one output, as we write it: its index, its id and its token ids; an id with escapes
#: is left to the parser of JSON
PLAIN = re.compile(
    rb'\{"index": (0|[1-9]\d*), (?:"custom_id": ("[ !#-\[\]-~]*+"), )?'
    rb'"text": ' + TEXT + rb', "token_ids": \[((?:\d+(?:, )?)*+)\], "finish_reason": "(?:length|stop)"\}\n'
)


class Held(NamedTuple):
    """The rows of an output file, which ends with them: their indices, the places where they begin, and all bytes."""

    indices: array
    offsets: array
    size: int


class OutputFile:
    """The output file of a running job: rows are appended as they finish.

    Args:
        kept: (index, line) of rows that are done already; anything else in the file is dropped.
        held: in place of that, the rows that the file holds; it is not written again.

    Attributes:
        waiting: (index, line) of finished rows that are not on disk yet. Of the others only indices and places in the
            file are kept in memory.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, kept: Iterable[tuple[int, bytes]] = (), held: Held | None = None):
        self.path = path
        self.indices = array("q", held.indices if held else ())
        self.offsets = array("q", held.offsets if held else ())
        self.size = held.size if held else 0  # bytes of the rows on disk
        self.waiting: list[tuple[int, bytes]] = []
        self.error: OSError | None = None  # of the last flush
        if held:
            self.file = _open_locked(path)
        else:
            self.file = replace_file(path, (self._noted(index, line) for index, line in kept))

    @property
    def written(self) -> int:
        """How many rows are on disk."""
        return len(self.indices)

    def add(self, index: int, row: DoneRow) -> None:
        self.waiting.append((index, encoded(row.data)))

    def flush(self) -> None:
        """Write the waiting rows, and sync them to disk; those that fail keep waiting (`error`)."""
        if not self.waiting:
            return
        written = 0
        try:
            if os.fstat(self.file.fileno()).st_size < self.size:
                raise OSError(errno.EIO, "somebody has cut it short")
            self.file.truncate(self.size)  # drops half a row, and rows that a failed fsync may have lost
            try:
                for _, line in self.waiting:
                    _write(self.file, line)
                    written += 1
            finally:
                os.fsync(self.file.fileno())
                for index, line in self.waiting[:written]:
                    self._noted(index, line)
                del self.waiting[:written]
            self.error = None
        except OSError as e:
            if self.error is None:
                log.warning("cannot write %s: %s; the job continues, its rows wait in memory", self.path, e.strerror)
            self.error = e

    def _noted(self, index: int, line: bytes) -> bytes:
        self.indices.append(index)
        self.offsets.append(self.size)
        self.size += len(line)
        return line

    def finish(self) -> None:
        """Put the rows in the order of the input. Raises UserError, which says where the rows are, if the disk is full
        or somebody has written the file."""
        self.flush()
        if self.error is not None:
            count = self.written + len(self.waiting)
            raise UserError(
                f"cannot write {self.path}: {self.error.strerror}; {self.written} of {count} finished rows are in it: "
                "make room, then the same command resumes the job"
            )
        if os.fstat(self.file.fileno()).st_size != self.size:
            raise UserError(f"`output_file` {self.path} was edited while the job ran: the same command resumes the job")
        put_in_order(self.path, self._ordered)

    def _ordered(self) -> Iterator[bytes]:
        with open(os.dup(self.file.fileno()), "rb") as file:  # its name may belong to a copy by now
            for n in np.argsort(self.indices):
                yield line_at(file, self.offsets[n])

    def close(self) -> None:
        self.file.close()


def put_in_order(path: Path, lines: Callable[[], Iterable[bytes]]) -> None:
    """Rewrite an output file with its lines in order, unless they already are. Raises UserError."""
    try:
        with open(open_regular(path), "rb") as file:
            is_ordered = all(old == new for old, new in zip_longest(file, lines()))
        if not is_ordered:
            replace_file(path, lines()).close()
    except OSError as e:
        raise UserError(
            f"all rows are in {path}, but not in the order of the input: {e.strerror}; the same command tries again"
        ) from None


def replace_file(path: Path, lines: Iterable[bytes], *, is_new: bool = False) -> BinaryIO:
    """Replace a file atomically: write and sync a new one before it gets the name; returns it, open and locked (flock).

    Raises:
        OSError: it cannot be written; `path` is unchanged, or complete.
        BlockingIOError: another process does the same.
        FileExistsError: with `is_new`, there is one.
    """
    new = path.with_name(f".{path.name}.new")
    file = _open_locked(new)
    try:
        if is_new and path.exists():
            raise FileExistsError(path)
        if path.exists():
            os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
        file.truncate(0)  # it may be left from a process that was killed
        _write_all(file, lines)
        os.fsync(file.fileno())
        os.replace(new, path)
        sync(path.parent)  # the new name
        return file
    except BaseException:
        new.unlink(missing_ok=True)
        file.close()
        raise


def _open_locked(path: Path) -> BinaryIO:
    """A file to append and to read, locked before it can get the name of another one."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
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
            raise OSError(errno.EMLINK, f"{path}: it is a hard link to another file")
    except OSError:
        file.close()
        raise
    return file


def _write(file: BinaryIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def _write_all(file: BinaryIO, lines: Iterable[bytes]) -> None:
    """Write lines in a few large pieces."""
    data = bytearray()
    for line in lines:
        data += line
        if len(data) >= PIECE:
            _write(file, data)
            data = bytearray()
    _write(file, data)


def encoded(data: dict) -> bytes:
    return json.dumps(data).encode() + b"\n"


# rows


@dataclass(frozen=True)
class DoneRow:
    """A line of the output file: a plain row, or a response in OpenAI's form.

    Attributes:
        id: as `Row.id`.
        data: the content of the line.
        error: why it failed; None if it did not.
        tokens: how many were generated, in all answers.
        answers: how many there are.
    """

    id: str | int
    data: dict
    error: str | None
    tokens: int
    answers: int = 1

    @classmethod
    def of(cls, data: dict) -> DoneRow:
        """The row of a line. Raises TypeError, KeyError or AttributeError for anything else."""
        id = data["index"] if data.get("custom_id") is None else data["custom_id"]
        if type(id) not in (int, str):
            raise TypeError
        if "response" not in data:
            error = data.get("error")
            is_text = error is None and not data.keys() & {"embedding", "scores"}
            outputs = data.get("outputs", [data]) if is_text else []
            return cls(id, data, error, sum(len([*each["token_ids"]]) for each in outputs), len(outputs))
        answer = data["response"]
        if answer["status_code"] != 200:
            return cls(id, data, answer["body"]["error"]["message"], 0, 0)
        body = answer["body"]
        return cls(id, data, None, body["usage"].get("completion_tokens", 0) + 0, len(body.get("choices", [])))


def done_row(row: Row, output: RequestOutput, model: str, tokenizer) -> DoneRow:
    """The line of a row that was run. `model`: the model's name."""
    if row.kind != "plain":
        return DoneRow.of(openai.response(row, output, model, tokenizer))
    if output.error is not None:
        return failed_row(row, UserError(output.error))
    each = [_plain(row, done) for done in output.outputs]
    found = each[0] if len(each) == 1 else {"outputs": each}
    if output.prompt_logprobs is not None:
        found["prompt_logprobs"] = output.prompt_logprobs
    return DoneRow.of(begin(row) | found)


def _plain(row: Row, done: CompletionOutput) -> dict:
    found = {"text": done.text, "token_ids": done.token_ids, "finish_reason": done.finish_reason}
    if row.logprobs:
        found["logprobs"] = done.logprobs
    if row.logprobs and done.top_logprobs is not None:
        found["top_logprobs"] = done.top_logprobs
    return found | openai.parts_of(done)


def failed_row(row: Row, error: UserError) -> DoneRow:
    """The line of a row that cannot be run."""
    return DoneRow.of(openai.failure(row, error) if row.kind != "plain" else begin(row) | {"error": str(error)})


def begin(row: Row) -> dict:
    """What the line of every plain row has."""
    return {"index": row.index} | ({} if row.custom_id is None else {"custom_id": row.custom_id})


def open_done(path: Path) -> BinaryIO:
    """Open an output file; an empty one if it does not exist. Raises UserError if it cannot be read."""
    try:
        return open(open_regular(path), "rb")
    except FileNotFoundError:
        return open(os.devnull, "rb")
    except OSError as e:
        raise cannot_read(path, e) from None


def read_done(path: Path, file: BinaryIO) -> Iterator[tuple[int, DoneRow]]:
    """The offset of each row in an output file, and the row. After a power failure the last line may be half a row,
    which is ignored. Raises UserError if the file cannot be read, or a line is not a row."""
    return _read(path, file, lambda line: DoneRow.of(json.loads(line)))


def _read(path: Path, file: BinaryIO, parse: Callable[[bytes], object]) -> Iterator[tuple]:
    offset = 0
    try:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                row = parse(line)
            except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
                raise no_row(path, number) from None
            yield offset, row
            offset += len(line)
    except OSError as e:
        raise cannot_read(path, e) from None


class Brief(NamedTuple):
    """What resuming needs of a row: `id_hash` of its id, and as of a `DoneRow`."""

    id_hash: int
    error: str | None
    tokens: int
    answers: int


def brief(line: bytes) -> Brief:
    """Of the line of a row. Raises as `json.loads` and `DoneRow.of`."""
    found = PLAIN.fullmatch(line)
    if found is None:
        row = DoneRow.of(json.loads(line))
        return Brief(id_hash(row.id), row.error, row.tokens, row.answers)
    index, id, tokens = found.groups()
    return Brief(short_hash(id or index), None, tokens.count(b",") + 1 if tokens else 0, 1)


def read_briefs(path: Path, file: BinaryIO) -> Iterator[tuple[int, Brief]]:
    """As `read_done`, several times as fast."""
    return _read(path, file, brief)


def line_at(file: BinaryIO, offset: int) -> bytes:
    file.seek(offset)
    return file.readline()


def moved(line: bytes, index: int) -> bytes:
    """A line of an output file with the index that its row has now."""
    if line.startswith(b'{"index": %d, ' % index):
        return line
    data = json.loads(line)
    return line if data.get("index", index) == index else encoded(data | {"index": index})


def cannot_read(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot read {path}: {error.strerror}")


def no_row(path: Path, number: int) -> UserError:
    advice = "remove the line to run its row again"
    return UserError(f"`output_file` {path}: line {number} is not a row of this job, or was edited: {advice}")


@dataclass
class Failures:
    """How many rows failed, and the message of the first of them."""

    count: int = 0
    first: str = ""

    def note(self, id: str | int, error: str | None) -> None:
        """Count a row; `error`: None if it has not failed."""
        if error is not None:
            self.count += 1
            self.first = self.first or f"row {id}: {error}"
