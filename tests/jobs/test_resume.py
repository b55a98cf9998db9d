"""Going on with a job takes shortcuts, and finds what the long way finds."""

from __future__ import annotations

import json

import numpy as np
from command_tools import read_rows, write_rows
from hypothesis import example, given, settings
from hypothesis import strategies as st

from h2o_flexgen.jobs.input import Rows, id_hash, parse_row
from h2o_flexgen.jobs.input import read_rows as input_rows
from h2o_flexgen.jobs.job import Job
from h2o_flexgen.jobs.output import PLAIN, Brief, DoneRow, OutputFile, brief, encoded

pytest_plugins = ["command_tools"]

IDS = st.one_of(st.none(), st.text(max_size=5), st.sampled_from(["row 1", '"', "\\", "é", "a/b"]))
PLAIN_ROWS = st.fixed_dictionaries(
    {
        "index": st.integers(0, 20),
        "custom_id": IDS,
        "text": st.text(max_size=8),
        "token_ids": st.lists(st.integers(0, 99999), max_size=4),
        "finish_reason": st.sampled_from(["length", "stop"]),
    }
)
#: changes to a line that a user may make
EDITS = st.lists(st.tuples(st.integers(0, 80), st.sampled_from(list('"\\,{}[]x1 é\n'))), max_size=2)


def slow_brief(line: bytes) -> Brief | None:
    """As `brief`, by the parser of JSON alone; None for what is not a row."""
    try:
        row = DoneRow.of(json.loads(line))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return None
    return Brief(id_hash(row.id), row.error, row.tokens, row.answers)


@given(PLAIN_ROWS, EDITS)
@example({"index": 3, "custom_id": None, "text": "", "token_ids": [5], "finish_reason": "stop"}, [])
@settings(max_examples=120, deadline=None)
def test_a_line_is_read_as_json_reads_it(row, edits):
    data = {name: value for name, value in row.items() if (name, value) != ("custom_id", None)}
    line = encoded(data)
    assert brief(line) == slow_brief(line)
    for place, char in edits:
        line = line[:place] + char.encode() + line[place + 1 :]
    try:
        found = brief(line)
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        found = None
    assert found == slow_brief(line)


def test_most_lines_take_the_short_way():
    row = {"index": 7, "custom_id": "row 7", "text": 'a "quote",\nü', "token_ids": [5, 6], "finish_reason": "length"}
    assert PLAIN.fullmatch(encoded(row))
    assert not PLAIN.fullmatch(encoded(row | {"logprobs": [0.5]}))


LINES = st.lists(st.sampled_from([b'{"prompt": "a"}\n', b'{"custom_id": "x"}\n', b"[]\n", b"5\n", b"\n", b"{}"]))


@given(LINES, LINES)
@settings(max_examples=40, deadline=None)
def test_lines_that_are_as_before_are_not_parsed_again(old, new):
    def rows(lines, before=None, parse=parse_row):
        named = [line.replace(b'"x"', b'"x%d"' % n) for n, line in enumerate(lines)]
        return Rows("rows", named, parse, before)

    def noted(*args):
        parsed.append(args)
        return parse_row(*args)

    parsed = []
    before = rows(old).known
    found = rows(new, before, noted).known
    assert np.array_equal(found, rows(new).known)
    same = sum(np.array_equal(a, b) for a, b in zip(before, found))
    assert len(parsed) == len(found) - same


def test_an_output_file_is_not_written_again_unless_it_must(cli, model, tmp_path, monkeypatch):
    rows = [{"prompt_token_ids": [5 + n], "custom_id": str(n)} for n in range(6)]
    files = ("--input-file", write_rows(tmp_path / "in.jsonl", rows), "--output-file", tmp_path / "out.jsonl")
    job = ("--model", model, *files, "--device", "cpu", "--dtype", "float32", "--gen-len", 2)
    assert cli(*job)[0] == 0
    whole = read_rows(tmp_path / "out.jsonl")
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(b"".join([lines[4], lines[1], lines[2], lines[5][:9]]))
    kept = []

    class Noted(OutputFile):
        def __init__(self, path, lines=(), held=None):
            kept.append(held and list(held.indices))
            super().__init__(path, lines, held)

    monkeypatch.setattr("h2o_flexgen.jobs.job.OutputFile", Noted)
    assert cli(*job)[0] == 0
    assert read_rows(tmp_path / "out.jsonl") == whole
    write_rows(tmp_path / "in.jsonl", rows[1:])  # all places change
    assert cli(*job)[0] == 0
    assert kept == [[4, 1, 2], None]


def test_a_job_knows_its_rows_before_the_input_is_read(model, tmp_path):
    with Job(str(tmp_path / "out.jsonl")) as job:
        assert job.known is None
        rows = input_rows(str(write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])), before=job.known)
        assert len(rows) == 1
