"""Input and output in other forms than one file of JSON lines: folders of parts, gzip, Parquet.

Rows are appended to a file of JSON lines whatever the form (`journal_of`): only that survives a kill -9 at any moment.
When a job has ended, its rows are copied to the form that was asked for.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.jobs.content import Content, check_no_array
from h2o_flexgen.utils.files import open_regular, sync

#: ends of the names of parts
LINES = (".jsonl", ".ndjson", ".json")
GZIPPED = tuple(f"{end}.gz" for end in LINES)
PARQUET = ".parquet"
#: rows of a part of an output folder
PART_ROWS = 100_000
#: names in an output folder: parts, and one that was being written when its command was killed
PART = re.compile(r"part-\d+\.jsonl|\.part-\d+\.jsonl\.new")
#: rows of a Parquet file that are in memory at once
BATCH_ROWS = 4096
#: columns of an output in Parquet; `rest` has everything else as JSON
COLUMNS = ("index", "custom_id", "text", "token_ids", "finish_reason", "error")


# input


def open_content(path: str) -> Content | Parts | ParquetContent:
    """The lines of an input file, or of all files of a folder. Raises UserError if it cannot be read."""
    if os.path.isdir(path):
        return Parts(path)
    content = ParquetContent(path) if path.endswith(PARQUET) and os.path.isfile(path) else Content(path)
    check_no_array(content)
    return content


class Parts:
    """The lines of the files in a folder, in the order of their names; as `Content`. Names that begin with a dot or an
    underscore are ignored.

    Raises:
        UserError: the folder cannot be read, holds no part, or something else.
    """

    def __init__(self, path: str):
        self.path = path
        try:
            names = sorted(name for name in os.listdir(path) if not name.startswith((".", "_")))
        except OSError as e:
            raise UserError(f"cannot read `input_file` {path}: {e.strerror}") from None
        for name in names:
            if not name.endswith((*LINES, *GZIPPED, PARQUET)):
                ends = ", ".join((*LINES, *GZIPPED, PARQUET))
                raise UserError(f"`input_file` {path} holds {name}, which is no part: these end with {ends}")
        if not names:
            raise UserError(f"`input_file` {path} is an empty folder")
        self.parts = [open_content(os.path.join(path, name)) for name in names]

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self.parts)


class ParquetContent:
    """The rows of a Parquet file as JSON lines, without nulls; as `Content`.

    Raises:
        UserError: it cannot be read, or pyarrow is not installed.
    """

    def __init__(self, path: str):
        self.path = path
        with self._readable() as parquet:
            parquet.ParquetFile(path).close()

    def __iter__(self) -> Iterator[bytes]:
        with self._readable() as parquet, parquet.ParquetFile(self.path) as file:
            for batch in file.iter_batches(BATCH_ROWS):
                for row in batch.to_pylist():
                    yield json.dumps(_without_nulls(row), default=str).encode() + b"\n"

    @contextmanager
    def _readable(self) -> Iterator:
        pyarrow = _import_pyarrow()
        try:
            yield pyarrow.parquet
        except (OSError, pyarrow.ArrowException) as e:
            raise UserError(f"cannot read `input_file` {self.path}: {reason(e)}") from None


def _import_pyarrow():
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            "Parquet files need pyarrow, which is not installed: pip install 'h2o_flexgen[parquet]'"
        ) from None
    return pyarrow


def _without_nulls(value):
    """Arrow gives every struct all fields that any of them has."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


# output


def is_folder(path: str) -> bool:
    return path.endswith("/") or os.path.isdir(path)


def journal_of(path: str) -> str:
    """The file of JSON lines to which the rows of an output are appended."""
    if is_folder(path) or path.endswith((*GZIPPED, PARQUET)):
        return f"{path.rstrip('/')}.rows.jsonl"
    return path


def check_form(path: str) -> None:
    """Raises UserError for an output that cannot be written at the end of a job, or that no job has written."""
    if path.endswith(PARQUET):
        _import_pyarrow()
    journal = journal_of(path)
    if journal == path:
        return
    found = os.path.lexists(path.rstrip("/"))
    if found and is_folder(path):
        found = bool(_parts_of(path))
    if found and not os.path.exists(journal):
        raise UserError(
            f"`output_file` {path} is not one that a job wrote (there is no {os.path.basename(journal)}): "
            "name another, or rename this one"
        )


def _parts_of(folder: str) -> list[str]:
    """Raises UserError if it cannot be read, or holds something else."""
    try:
        names = os.listdir(folder)
    except OSError as e:
        raise UserError(f"cannot write `output_file` {folder}: {e.strerror}") from None
    others = [name for name in names if not PART.fullmatch(name)]
    if others:
        raise UserError(f"`output_file` {folder} is a folder with other files, such as {others[0]}: name a new one")
    return names


def export(path: str) -> None:
    """Copy the rows of a job that has ended from its journal to the output, if that has another form. Raises
    UserError if it cannot be written."""
    journal = journal_of(path)
    if journal == path:
        return
    try:
        with open(open_regular(journal), "rb") as lines:
            if is_folder(path):
                _write_parts(Path(path), lines)
            elif path.endswith(PARQUET):
                _write(Path(path), lines, _write_parquet)
            else:
                _write(Path(path), lines, _write_gzip)
    except OSError as e:
        reasons = f"cannot write `output_file` {path}: {e.strerror or e}"
        raise UserError(f"{reasons}; all rows are in {journal}, and the same command tries again") from None


def _write(path: Path, lines: Iterable[bytes], write: Callable[[BinaryIO, Iterable[bytes]], None]) -> None:
    """Write a file, which gets its name when it is whole."""
    new = path.with_name(f".{path.name}.new")
    with open(open_regular(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666), "wb") as file:
        write(file, lines)
        file.flush()
        os.fsync(file.fileno())
        if path.exists():
            os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
    os.replace(new, path)
    sync(path.parent)


def _write_parts(folder: Path, lines: Iterator[bytes]) -> None:
    folder.mkdir(exist_ok=True)
    names = set()
    for first in lines:
        path = folder / f"part-{len(names):05d}.jsonl"
        part = chain([first], islice(lines, PART_ROWS - 1))
        _write(path, part, lambda file, lines: file.writelines(lines))
        names.add(path.name)
    for old in folder.iterdir():
        if old.name not in names and PART.fullmatch(old.name):
            old.unlink()


def _write_gzip(file: BinaryIO, lines: Iterable[bytes]) -> None:
    with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as packed:
        packed.writelines(lines)


def _write_parquet(file: BinaryIO, lines: Iterator[bytes]) -> None:
    pyarrow = _import_pyarrow()
    text = pyarrow.string()
    types = (pyarrow.int64(), text, text, pyarrow.list_(pyarrow.int32()), text, text)
    schema = pyarrow.schema([*zip(COLUMNS, types), ("rest", text)])
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        while rows := [_columns(json.loads(line)) for line in islice(lines, BATCH_ROWS)]:
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))


def _columns(row: dict) -> dict:
    found = {name: row.pop(name, None) for name in COLUMNS}
    if found["custom_id"] is not None:  # half a surrogate pair is a text in JSON, but none in UTF-8
        found["custom_id"] = found["custom_id"].encode("utf-8", "replace").decode()
    return found | {"rest": json.dumps(row) if row else None}
