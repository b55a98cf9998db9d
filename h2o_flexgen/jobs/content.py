"""The content of an input file, whatever form people have it in: compressed, in another encoding, or from a pipe."""

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
#: the first line of a CSV
HEADER = re.compile(rb'"?[\w .-]+"?([,;\t]"?[\w .-]+"?)+')


def read_content(path: str) -> bytes:
    """An input file, - for stdin, in UTF-8 and without a byte order mark.

    Raises:
        UserError: the file cannot be read; is not a regular file, pipe or terminal; or is known to hold something else.
    """
    try:
        content = _read(path)
    except OSError as e:
        raise UserError(f"cannot read `input_file` {path}: {e.strerror}") from None
    if content.startswith(GZIP):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as e:
            raise UserError(f"`input_file` {path} is compressed with gzip, but damaged or cut short: {e}") from None
    for begin, what in OTHERS.items():
        if content.startswith(begin):
            raise UserError(f"`input_file` {path} is {what}: give JSON lines, plain or compressed with gzip")
    return _in_utf8(path, content)


def _read(path: str) -> bytes:
    if path == "-":
        if sys.stdin is None:
            raise UserError("cannot read `input_file` -: stdin is closed")
        return sys.stdin.buffer.read()
    with open(path, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or file.isatty()):
            raise UserError(f"`input_file` {path} is neither a file nor a pipe")
        return file.read()


def _in_utf8(path: str, content: bytes) -> bytes:
    encoding = json.detect_encoding(content)
    if encoding.startswith("utf-8"):  # a line that is not UTF-8 is a bad row alone
        return content.removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode(encoding).encode()
    except UnicodeError:
        name = encoding[:6].upper()
        raise UserError(f"`input_file` {path} begins like {name}, but is not: save it in UTF-8") from None


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
