"""The lines of an input file, which may be compressed, in another encoding, or come from a pipe."""

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
#: enough of a file to recognise its form and its encoding
HEAD_BYTES = 8
#: the first line of a CSV
HEADER = re.compile(rb'"?[\w .-]+"?([,;\t]"?[\w .-]+"?)+')
#: a string in JSON, or the rest of the line if its end is missing
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?')
#: bytes that are read at once; the allocator maps larger pieces anew each time, which takes longer than reading them
BLOCK = 1 << 16
#: bytes of the longest line
LONGEST = 256 << 20
#: bytes of a temporary file that stay in memory
SPOOL_BYTES = 4 << 20


class Content:
    """The lines of an input file (- for stdin), in UTF-8 and without a byte order mark. Each loop over them, one at a
    time, reads the file again; a pipe is copied into a temporary file.

    Raises:
        UserError: the file cannot be read, is not a regular file, pipe or terminal, or is known to hold something else.
            Also while lines are read.
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
        """Lines with their ends, as cut by `bytes.splitlines`: the other separators of Unicode may occur in texts."""
        rest = bytearray()
        for block in self._blocks():
            tail = rest[-1:] + block  # a "\r" and a "\n" may be parts of one line end
            rest += block
            if b"\n" in tail or b"\r" in tail:
                *lines, last = bytes(rest).splitlines(keepends=True)
                yield from lines
                rest = bytearray(last)
            if len(rest) > LONGEST:
                raise UserError(f"`input_file` {self.path} has a line of more than {LONGEST} bytes")
        if rest:
            yield bytes(rest)

    def _blocks(self) -> Iterator[bytes]:
        with self._readable():
            file = self._unpacked()
            file.seek(self.mark)
            blocks = iter(partial(file.read, BLOCK), b"")
            if self.encoding.startswith("utf-8"):  # not decoded: a line that is not UTF-8 is just one bad row
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
        """Turn errors of reading into UserErrors."""
        name = f"`input_file` {self.path}"
        try:
            yield
        except (gzip.BadGzipFile, EOFError, zlib.error) as e:
            raise UserError(f"{name} is compressed with gzip, but damaged or cut short: {e}") from None
        except UnicodeError:
            encoding = self.encoding[:6].upper()
            raise UserError(f"{name} begins like {encoding}, but is not: save it as UTF-8") from None
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
    """A temporary file. A small one is in memory; a large one is an unnamed file in TMPDIR, or else in /var/tmp, since
    /tmp is in RAM on many systems."""
    folder = os.environ.get("TMPDIR", "/var/tmp")
    return tempfile.SpooledTemporaryFile(SPOOL_BYTES, dir=folder if os.access(folder, os.W_OK) else None)


def check_no_array(content: Content) -> None:
    """Raises UserError for a file that is one JSON array, whose lines may look like rows: its first bracket closes at
    its end."""
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
    """Raises UserError if a file in which no line is an object looks like a CSV."""
    path = content.path
    first = next(filter(None, map(bytes.strip, content)))
    if path.lower().endswith((".csv", ".tsv")) or HEADER.fullmatch(first):
        example = '{"prompt": "text"}'
        raise UserError(f"`input_file` {path} is a table (CSV): give JSON lines, an object a line, such as {example}")
