"""What an input file holds, in whichever form people have it: JSON lines in UTF-8, whole or packed by gzip."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import stat
import sys
import zlib

from h2o_flexgen.errors import UserError

#: how files begin that say their encoding; UTF-32 before UTF-16, which begins alike
ENCODINGS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
GZIP = b"\x1f\x8b\x08"
#: how files begin that are no text
OTHERS = {
    b"PK\x03\x04": "a zip archive or a spreadsheet",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x28\xb5\x2f\xfd": "packed by zstd",
    b"\xfd7zXZ\x00": "packed by xz",
    b"BZh": "packed by bzip2",
}
#: names of columns, as a CSV file begins
HEADER = re.compile(rb'"?[\w .-]+"?([,;\t]"?[\w .-]+"?)+')


def read_content(path: str) -> bytes:
    """An input file, - for stdin, in UTF-8 and without a byte order mark.

    Raises:
        UserError: the file cannot be read, is not a regular file, pipe or terminal, or of another form.
    """
    try:
        content = _read(path)
    except OSError as e:
        raise UserError(f"cannot read `input_file` {path}: {e.strerror}") from None
    if content.startswith(GZIP):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as e:
            raise UserError(f"`input_file` {path} is packed by gzip, and damaged or cut short: {e}") from None
    for begin, what in OTHERS.items():
        if content.startswith(begin):
            raise UserError(f"`input_file` {path} is {what}: give JSON lines, plain or packed by gzip")
    for mark, encoding in ENCODINGS.items():
        if content.startswith(mark):
            return _in_utf8(path, content[len(mark) :], encoding)
    return content


def _read(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    with open(path, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or file.isatty()):
            raise UserError(f"`input_file` {path} is neither a file nor a pipe")
        return file.read()


def _in_utf8(path: str, content: bytes, encoding: str) -> bytes:
    if encoding == "utf-8":
        return content
    try:
        return content.decode(encoding).encode()
    except UnicodeDecodeError:
        name = encoding[:6].upper()
        raise UserError(f"`input_file` {path} begins as {name} does, and is not: save it in UTF-8") from None


def check_no_array(path: str, content: bytes) -> None:
    """Raises UserError for a file that is one JSON array, whose last line may look like a row."""
    if content.lstrip().startswith(b"[") and _is_json(content):
        advice = f"jq -c '.[]' {path} > rows.jsonl"
        raise UserError(f"`input_file` {path} is a JSON array: give an object a line, as by {advice}")


def check_no_table(path: str, content: bytes) -> None:
    """For a file in which no line is an object: raises UserError if it looks like a CSV."""
    first = content.strip().partition(b"\n")[0].strip()
    if path.lower().endswith((".csv", ".tsv")) or HEADER.fullmatch(first):
        example = '{"prompt": "text"}'
        raise UserError(f"`input_file` {path} is a table (CSV): give JSON lines, an object a line, such as {example}")


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
