"""Jobs of any size: rows are read when the engine has room, written when they end, and never stay in memory."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from command_tools import TINY, environment, read_rows, write_model, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import ROOT
from stub_engine import StubLLM

from h2o_flexgen import SamplingParams, UserError
from h2o_flexgen.jobs import content, input, manifest, output
from h2o_flexgen.jobs.admission import Admission
from h2o_flexgen.jobs.content import Content
from h2o_flexgen.jobs.job import Job
from h2o_flexgen.jobs.manifest import Manifest, manifest_path
from h2o_flexgen.planning.workload import Workload

pytest_plugins = ["command_tools"]

PARAMS = SamplingParams(max_tokens=5)


@pytest.fixture(scope="module")
def llm(model):
    with StubLLM(str(model), device="cpu", dtype="float32", progress=False) as llm:
        yield llm


def run(llm: StubLLM, folder: Path, rows: list, stop: int | None = None, out: str = "out.jsonl", **options) -> list:
    """The rows of the output file, after a job that stops after `stop` rows."""
    llm.stop = stop
    restart = options.pop("restart", False)
    with Job(str(folder / out), restart) as job, suppress(KeyboardInterrupt):
        job.run(llm, input.read_rows(str(write_rows(folder / "in.jsonl", rows))), PARAMS, **options)
    return read_rows(folder / out)


def many(count: int) -> list[dict]:
    """Rows, some with a name, and some that cannot be run."""
    rows = [{"prompt_token_ids": [3 + n % 90] * (1 + n % 4)} for n in range(count)]
    for n, row in enumerate(rows):
        row |= {"custom_id": f"row {n}"} if n % 3 else {}
        row |= {"max_tokens": 2} if n % 5 == 0 else {}
        row |= {"prompt_token_ids": []} if n % 7 == 6 else {}
    return rows


ROW = st.fixed_dictionaries(
    {"prompt_token_ids": st.lists(st.integers(3, 90), max_size=4)},
    optional={"max_tokens": st.integers(1, 4)},
)


@given(st.lists(ROW, min_size=1, max_size=12), st.integers(0, 12), st.data())
@settings(max_examples=40, deadline=None)
def test_a_job_stopped_anywhere_ends_as_if_never_stopped(llm, rows, names, data):
    """Even if the input changes: the first rows have names; all may move, some are removed, and new ones added."""
    llm.window = data.draw(st.integers(1, 5))
    before = [row | {"custom_id": f"row {n}"} for n, row in enumerate(rows[:names])] + rows[names:]
    stays = data.draw(st.integers(1, len(rows)))
    after = data.draw(st.permutations(before))[:stays] + data.draw(st.lists(ROW, max_size=3))
    with TemporaryDirectory() as name:
        folder = Path(name)
        try:
            whole = run(llm, folder, after, out="whole.jsonl")
            for stop in data.draw(st.lists(st.integers(0, 12), max_size=3)):
                kept = run(llm, folder, before, stop)
                assert len({row["index"] for row in kept}) == len(kept)
            run(llm, folder, after, data.draw(st.integers(0, 12)))
            assert run(llm, folder, after) == whole
        except UserError as e:
            assert "none of the" in str(e) or "no row in" in str(e), e


def test_rows_are_read_as_the_engine_asks_and_written_once_a_pass(llm, tmp_path, monkeypatch):
    llm.window = 4
    admitted = Admission.admitted
    flush = output.OutputFile.flush
    read = []
    on_disk = []

    def noted(self):
        for row in admitted(self):
            read.append(row)
            yield row

    def flushed(self) -> None:
        flush(self)
        on_disk.append((len(read), len(read_rows(tmp_path / "out.jsonl"))))

    monkeypatch.setattr(Admission, "admitted", noted)
    monkeypatch.setattr(output.OutputFile, "flush", flushed)
    run(llm, tmp_path, [{"prompt_token_ids": [5]}] * 10)
    assert on_disk == [(0, 0), (4, 4), (8, 8), (10, 10), (10, 10)]  # first at the beginning, last at the end


def test_rows_that_cannot_be_run_do_not_wait_in_memory(llm, tmp_path, monkeypatch):
    monkeypatch.setattr("h2o_flexgen.jobs.job.FLUSH_ROWS", 2)
    monkeypatch.setattr(content, "SPOOL_BYTES", 20)
    rows = many(50)
    found = run(llm, tmp_path, rows)
    assert [row["index"] for row in found] == list(range(50))
    assert [n for n, row in enumerate(found) if "error" in row] == list(range(6, 50, 7))
    assert found == run(llm, tmp_path, rows, retry_errors=True)


def test_the_plan_knows_the_lengths_of_all_rows_that_run(llm, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(StubLLM, "run", lambda self, job, writer: seen.append(job.workload))
    with pytest.raises(AttributeError):  # the stub begins no job
        run(llm, tmp_path, many(20))
    found = Workload(seen[0].prompt_lens.tolist(), seen[0].gen_len)
    assert found == Workload(sorted((1 + n % 4 for n in range(20) if n % 7 != 6), reverse=True), PARAMS.max_tokens)


@pytest.mark.parametrize("change", ["edited", "cut", "appended"])
def test_an_input_file_may_change_once_its_rows_are_admitted(llm, tmp_path, monkeypatch, change):
    """The job runs the rows that it has read, and the next run runs new ones."""
    rows = many(9)
    whole = run(llm, tmp_path, rows, out="whole.jsonl")
    new = {"edited": [*rows[:6], {"prompt_token_ids": [7]}, *rows[7:]], "cut": rows[:8], "appended": [*rows, rows[0]]}
    real = StubLLM.run

    def changed(self, job, writer):
        write_rows(tmp_path / "in.jsonl", new[change])
        real(self, job, writer)

    with monkeypatch.context() as patch:
        patch.setattr(StubLLM, "run", changed)
        assert run(llm, tmp_path, rows) == whole
    assert run(llm, tmp_path, new[change]) == run(llm, tmp_path, new[change], out="new.jsonl")


@pytest.mark.parametrize("change", ["edited", "cut", "appended"])
def test_an_input_file_that_changes_before_its_rows_are_admitted(llm, tmp_path, change):
    """Appended lines are not read; anything else is an error."""
    rows = many(9)
    whole = run(llm, tmp_path, rows, out="whole.jsonl")
    read = input.read_rows(str(write_rows(tmp_path / "in.jsonl", rows)))
    new = {"edited": [*rows[:6], {"prompt_token_ids": [7]}, *rows[7:]], "cut": rows[:8], "appended": [*rows, rows[0]]}
    write_rows(tmp_path / "in.jsonl", new[change])
    with Job(str(tmp_path / "out.jsonl")) as job:
        if change == "appended":
            job.run(llm, read, PARAMS)
            assert read_rows(tmp_path / "out.jsonl") == whole
        else:
            with pytest.raises(UserError, match="in.jsonl was changed while the job read it: start the job again"):
                job.run(llm, read, PARAMS)


def test_an_output_file_that_is_edited_while_the_job_begins(llm, tmp_path):
    run(llm, tmp_path, many(9), stop=4)
    llm.stop = None
    with Job(str(tmp_path / "out.jsonl")) as job:
        with open(tmp_path / "out.jsonl", "a") as file:
            file.write('{"index": 8, "error": "mine"}\n')
        with pytest.raises(UserError, match="was edited while the job began"):
            job.run(llm, input.read_rows(str(tmp_path / "in.jsonl")), PARAMS)
    assert len(read_rows(tmp_path / "out.jsonl")) == 6


def test_an_output_file_that_is_edited_while_the_job_runs(llm, tmp_path, monkeypatch):
    """An editor replaces it by a copy, or writes into it."""
    llm.window = 4
    out = tmp_path / "out.jsonl"
    whole = run(llm, tmp_path, many(9), out="whole.jsonl")
    flush = output.OutputFile.flush

    def copied(self) -> None:
        flush(self)
        (tmp_path / "copy").write_bytes(out.read_bytes()[:10])
        os.replace(tmp_path / "copy", out)

    monkeypatch.setattr(output.OutputFile, "flush", copied)
    assert run(llm, tmp_path, many(9)) == whole

    def cut(self) -> None:
        flush(self)
        os.truncate(out, max(0, out.stat().st_size - 5))

    monkeypatch.setattr(output.OutputFile, "flush", cut)
    with pytest.raises(UserError, match="somebody has cut it short; 1 of 9 finished rows are in it"):
        run(llm, tmp_path, many(9), restart=True)
    monkeypatch.undo()
    assert run(llm, tmp_path, many(9)) == whole


def test_a_manifest_of_an_earlier_version(llm, tmp_path):
    """It has the id and the digest of each row as text."""
    rows = many(20)
    whole = run(llm, tmp_path, rows)
    path = manifest_path(tmp_path / "out.jsonl")
    old = json.loads(path.read_text())
    old["rows"] = [[row.id, row.digest] for row in input.read_rows(str(tmp_path / "in.jsonl"))]
    path.write_text(json.dumps(old) + "\n")
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in whole[4:]))
    with Job(str(tmp_path / "out.jsonl")) as job:
        assert len(job.done) == 16
    assert run(llm, tmp_path, rows) == whole


def test_a_manifest_of_many_rows_is_json_of_many_lines(tmp_path):
    known = np.arange(10_000, dtype=np.uint64).reshape(-1, 2) << np.uint64(50)
    path = tmp_path / "manifest.json"
    Manifest({"a": 1}, None, 5, known, [{"start": 1.0, "done": 0}]).write(path, is_new=True).close()
    assert np.array_equal(Manifest.read(path).rows, known)
    packed = b"".join(map(base64.b64decode, json.loads(path.read_text())["rows"]))
    assert packed == known.astype(">u8").tobytes()
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 5 + 1
    for damaged in (lines[:-1], lines[:3], [lines[0], b'"AAAA",\n', *lines[1:]], [lines[0], b'"%%%%"\n', lines[-1]]):
        path.write_bytes(b"".join(damaged))
        with pytest.raises(UserError, match="is damaged"):
            Manifest.read(path)


@pytest.fixture
def weak_hashes(monkeypatch):
    """Hashes of six bits, so that some ids collide."""
    real = input.id_hash
    for module in (input, manifest, output):
        monkeypatch.setattr(module, "id_hash", lambda id: real(id) % 64)
    short = output.short_hash
    monkeypatch.setattr(output, "short_hash", lambda content: short(content) % 64)


def test_ids_with_the_same_hash_are_not_the_same_id(llm, tmp_path, weak_hashes):
    llm.window = 3
    rows = many(30)
    whole = run(llm, tmp_path, rows, out="whole.jsonl")
    assert len(whole) == 30
    for stop in (5, 5, 5):
        run(llm, tmp_path, rows, stop)
    assert run(llm, tmp_path, rows) == whole
    with pytest.raises(UserError, match="lines 3 and 31 have the same custom_id 'row 2'"):
        run(llm, tmp_path, [*rows, rows[2]])


def test_a_duplicate_row_is_found_among_those_with_its_hash(llm, tmp_path, weak_hashes):
    run(llm, tmp_path, many(30))
    out = tmp_path / "out.jsonl"
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join([*lines, lines[5]]))
    with pytest.raises(UserError, match="line 31 is not a row of this job"):
        Job(str(out))


@given(st.lists(st.sampled_from([b"a", b"bc", b" ", b"\r", b"\n", b"\r\n", b"\x0b", b"\x85"]), max_size=30), st.data())
@settings(max_examples=80, deadline=None)
def test_lines_do_not_depend_on_the_blocks_that_are_read(parts, data):
    text = b"-" + b"".join(parts)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder, "in")
        path.write_bytes(text)
        patch.setattr(content, "BLOCK", data.draw(st.integers(1, 8)))
        lines = Content(str(path))
        for _ in range(2):
            assert list(lines) == text.splitlines(keepends=True)


def test_a_pipe_is_copied_into_an_unnamed_file_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "SPOOL_BYTES", 10)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    read, write = os.pipe()
    os.write(write, b"".join(b'{"prompt": "%d"}\n' % n for n in range(99)))
    os.close(write)
    rows = input.read_rows(f"/dev/fd/{read}")
    os.close(read)
    for _ in range(2):
        assert [row.prompt for row in rows] == [str(n) for n in range(99)]
    assert os.listdir(tmp_path) == []


def test_four_times_the_rows_take_the_same_memory(tmp_path):
    """Except for a few bytes of each row: the limit of a million rows, 200 MB and 16 bytes a row, scaled down."""
    write_model(tmp_path / "model", config=TINY | {"max_position_embeddings": 128})
    argv = [sys.executable, ROOT / "tests" / "stub_engine.py", tmp_path, "5000", "20000"]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, check=True)
    few, many = map(int, done.stdout.split())
    assert many - few < (200e6 + 16 * 1_000_000) * 15_000 / 1_000_000
