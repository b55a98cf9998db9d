"""Input files may be compressed, in other encodings, or pipes; an error names other kinds of files."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
from command_tools import write_rows

from h2o_flexgen.commands.stream import read_turns
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.input import read_rows

LINES = "\n".join(
    json.dumps({"prompt": text}, ensure_ascii=False) for text in ("grüße", "你好 😀", "a\u2028b")
).encode()
#: with a fixed time, since it is part of the names of parametrised tests
packed = partial(gzip.compress, mtime=0)


def prompts(path) -> list[str]:
    return [row.prompt for row in read_rows(str(path))]


FORMS = {
    "plain": LINES,
    "CR LF": LINES.replace(b"\n", b"\r\n"),
    "CR": LINES.replace(b"\n", b"\r"),
    "empty lines": b"\n\n" + LINES.replace(b"\n", b"\n \n\r\n") + b"\n\n\n",
    "UTF-8 with a mark": b"\xef\xbb\xbf" + LINES,
    "UTF-16 LE": b"\xff\xfe" + LINES.decode().encode("utf-16-le"),
    "UTF-16 BE": b"\xfe\xff" + LINES.decode().encode("utf-16-be"),
    "UTF-32 LE": b"\xff\xfe\x00\x00" + LINES.decode().encode("utf-32-le"),
    "UTF-32 BE": b"\x00\x00\xfe\xff" + LINES.decode().encode("utf-32-be"),
    "UTF-16 without a mark": LINES.decode().encode("utf-16-le"),
    "gzip": gzip.compress(LINES),
    "gzip of two parts": gzip.compress(LINES[:60]) + gzip.compress(LINES[60:]),
    "gzip of UTF-16": gzip.compress(b"\xff\xfe" + LINES.decode().encode("utf-16-le")),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_rows_in_every_form(tmp_path, form):
    (tmp_path / "plain").write_bytes(LINES)
    (tmp_path / "rows").write_bytes(FORMS[form])
    found = read_rows(str(tmp_path / "rows"))
    assert [row.prompt for row in found] == ["grüße", "你好 😀", "a\u2028b"]
    assert [row.digest for row in found] == [row.digest for row in read_rows(str(tmp_path / "plain"))]


def test_stdin_and_a_pipe_with_a_writer(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(gzip.compress(LINES))))
    assert len(prompts("-")) == 3
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_bytes, args=(LINES,))
    writer.start()
    assert len(prompts(fifo)) == 3
    writer.join()


def test_a_closed_stdin(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="stdin is closed"):
        read_rows("-")


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null"])
def test_a_device_is_not_an_input_file(path):
    with pytest.raises(UserError, match="neither a file nor a pipe"):
        read_rows(path)


@pytest.mark.parametrize(
    "content, say",
    [
        (packed(LINES * 99)[:100], "compressed with gzip, but damaged or cut short"),
        (packed(LINES)[:-4], "compressed with gzip, but damaged or cut short"),
        (packed(LINES) + b"garbage", "compressed with gzip, but damaged or cut short"),
        (bytes([*packed(LINES)[:20], *b"x" * 40]), "compressed with gzip, but damaged or cut short"),
        (bz2.compress(LINES), "compressed with bzip2: give JSON lines, plain or compressed with gzip"),
        (b"PK\x03\x04" + b"x" * 99, "a zip archive or a spreadsheet"),
        (b"PAR1" + b"x" * 99, "a Parquet file"),
        (b"\xff\xfe" + LINES[:11], "begins like UTF-16, but is not: save it as UTF-8"),
        (b"\xff\xfe\x00\x00" + LINES[:11], "begins like UTF-32, but is not: save it as UTF-8"),
        (b"[" + LINES.replace(b"\n", b",") + b"]", "is a JSON array: give an object a line, as by jq -c '.[]' "),
        (b"\n[\n" + LINES.replace(b"\n", b",\n") + b"\n]\n", "is a JSON array"),
        (b"[]", "is a JSON array"),
        (b"prompt,label\nhello,1\n", "is a table (CSV): give JSON lines"),
        (b'"prompt";"label"\n"hello";"1"\n', "is a table (CSV): give JSON lines"),
        (b"prompt\tlabel\nhello\t1\n", "is a table (CSV): give JSON lines"),
    ],
)
def test_other_kinds_of_files_are_named(tmp_path, content, say):
    (tmp_path / "rows").write_bytes(content)
    with pytest.raises(UserError) as error:
        read_rows(str(tmp_path / "rows"))
    assert say in str(error.value) and "\n" not in str(error.value)


def test_a_table_of_one_column_is_recognised_by_its_name(tmp_path):
    (tmp_path / "rows.CSV").write_text("prompt\nhello\n")
    with pytest.raises(UserError, match=r"is a table \(CSV\)"):
        read_rows(str(tmp_path / "rows.CSV"))


def test_a_first_line_that_looks_like_another_file_is_just_a_bad_row(tmp_path):
    for first in ("prompt,label", '[{"prompt": "a"}]', "[", "PAR"):
        found = list(read_rows(str(write_rows(tmp_path / "rows.csv", [first, {"prompt": "b"}]))))
        assert isinstance(found[0].prompt, UserError) and found[1].prompt == "b"


def test_turns_of_a_stream_come_from_the_same_files(tmp_path):
    (tmp_path / "turns.jsonl.gz").write_bytes(gzip.compress(LINES))
    assert read_turns(str(tmp_path / "turns.jsonl.gz")) == ["grüße", "你好 😀", "a\u2028b"]
