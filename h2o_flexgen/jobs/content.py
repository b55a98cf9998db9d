"""The lines of an input file, whatever form people have it in: compressed, in another encoding, or from a pipe."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import BinaryIO

from h2o_flexgen.errors import UserError

GZIP = b"\x1f\x8b\x08"
#: the first bytes of other files
OTHERS = {
    b"PK\x03\x04": "a zip archive or a spreadsheet",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"\xfd7zXZ\x00": "compressed with xz",
    b"BZh": "compressed with bzip2",
}
#: enough of a file to know its form and its encoding by
HEAD_BYTES = 8
#: the first line of a CSV
HEADER = re.compile(rb'"?[\w .-]+"?([,;\t]"?[\w .-]+"?)+')
#: a string in JSON, or the rest of a line where its end is missing
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?')
#: bytes that are read at once
BLOCK = 1 << 18
#: bytes of a temporary file that stay in memory
SPOOL_BYTES = 4 << 20


class Content:
    """The lines of an input file, - for stdin, in UTF-8 and without a byte order mark. They are read anew by each loop
    over them, of which one may run at a time; what can be read only once is copied into a temporary file.

    Raises:
        UserError: also while lines are read: the file cannot be read; is not a regular file, pipe or terminal; or is
            known to hold something else.
    """

    def __init__(self, path: str):
        self.path = path
        self.encoding = "utf-8"
        with self._readable():
            self.file = _open(path)
            self.is_packed = self.file.read(len(GZIP)) == GZIP
            head = self._unpacked().read(HEAD_BYTES)
        for begin, what in OTHERS.items():
            if head.startswith(begin):
                raise UserError(f"`input_file` {path} is {what}: give JSON lines, plain or compressed with gzip")
        self.encoding = json.detect_encoding(head)
        self.mark = len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0

    def __iter__(self) -> Iterator[bytes]:
        """Lines with their ends, as `bytes.splitlines` cuts them: a text may hold the other separators of Unicode."""
        rest = bytearray()
        for block in self._blocks():
            tail = rest[-1:] + block  # behind a "\r" there may be a "\n" of the same line end
            rest += block
            if b"\n" in tail or b"\r" in tail:
                *lines, last = bytes(rest).splitlines(keepends=True)
                yield from lines
                rest = bytearray(last)
        if rest:
            yield bytes(rest)

    def _blocks(self) -> Iterator[bytes]:
        with self._readable():
            file = self._unpacked()
            file.seek(self.mark)
            blocks = iter(partial(file.read, BLOCK), b"")
            if self.encoding.startswith("utf-8"):  # a line that is not UTF-8 is a bad row alone
                yield from blocks
                return
            decoder = codecs.getincrementaldecoder(self.encoding)()
            for block in blocks:
                yield decoder.decode(block).encode()
            yield decoder.decode(b"", final=True).encode()

    def _unpacked(self) -> BinaryIO:
        self.file.seek(0)
        return gzip.GzipFile(fileobj=self.file, mode="rb") if self.is_packed else self.file

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Inside, errors of reading are the user's."""
        name = f"`input_file` {self.path}"
        try:
            yield
        except (gzip.BadGzipFile, EOFError, zlib.error) as e:
            raise UserError(f"{name} is compressed with gzip, but damaged or cut short: {e}") from None
        except UnicodeError:
            encoding = self.encoding[:6].upper()
            raise UserError(f"{name} begins like {encoding}, but is not: save it in UTF-8") from None
        except OSError as e:
            raise UserError(f"cannot read {name}: {e.strerror}") from None


def _open(path: str) -> BinaryIO:
    """A file that can be read again and again."""
    if path == "-":
        if sys.stdin is None:
            raise UserError("cannot read `input_file` -: stdin is closed")
        return _copied(sys.stdin.buffer)
    file = open(path, "rb")
    mode = os.fstat(file.fileno()).st_mode
    if stat.S_ISREG(mode):
        return file
    with file:
        if not (stat.S_ISFIFO(mode) or file.isatty()):
            raise UserError(f"`input_file` {path} is neither a file nor a pipe")
        return _copied(file)


def _copied(file: BinaryIO) -> BinaryIO:
    copy = temporary_file()
    shutil.copyfileobj(file, copy, BLOCK)
    copy.seek(0)
    return copy


def temporary_file() -> BinaryIO:
    """A small one is in memory. A large one has no name, and lies in /var/tmp unless TMPDIR says otherwise: /tmp is in
    RAM on many systems."""
    folder = os.environ.get("TMPDIR", "/var/tmp")
    return tempfile.SpooledTemporaryFile(SPOOL_BYTES, dir=folder if os.access(folder, os.W_OK) else None)


def check_no_array(content: Content) -> None:
    """Raises UserError for a file that is one JSON array, whose last line may look like a row: its first bracket is
    closed at its end."""
    depth = 0
    is_array = False
    for line in filter(bytes.strip, content):
        if is_array or not (depth or line.lstrip().startswith(b"[")):
            return
        bare = STRING.sub(b"", line)
        depth += bare.count(b"[") + bare.count(b"{") - bare.count(b"]") - bare.count(b"}")
        is_array = depth == 0
    if is_array:
        path = content.path
        advice = f"jq -c '.[]' {path} > rows.jsonl"
        raise UserError(f"`input_file` {path} is a JSON array: give an object a line, as by {advice}")


def check_no_table(content: Content) -> None:
    """For a file in which no line is an object: raises UserError if it looks like a CSV."""
    path = content.path
    first = next(filter(None, map(bytes.strip, content)))
    if path.lower().endswith((".csv", ".tsv")) or HEADER.fullmatch(first):
        example = '{"prompt": "text"}'
        raise UserError(f"`input_file` {path} is a table (CSV): give JSON lines, an object a line, such as {example}")
