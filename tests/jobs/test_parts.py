"""Input and output as folders of parts, gzipped, and in Parquet."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from command_tools import FP32, read_rows, write_rows

from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs import parts
from h2o_flexgen.jobs.input import read_rows as input_rows
from h2o_flexgen.jobs.parts import open_content

pytest_plugins = ["command_tools"]

ROWS = [{"prompt_token_ids": [5 + n, 7], "custom_id": f"row {n}"} for n in range(9)]


@pytest.fixture
def job(cli, model, tmp_path):
    """Run a job: (exit code, stderr)."""

    def run(source: Path, target: str, *argv) -> tuple[int, str]:
        files = ("--input-file", source, "--output-file", target)
        code, _, err = cli("--model", model, *FP32, "--gen-len", 3, *files, *argv)
        return code, err

    return run


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three parts, one gzipped, with files that are ignored."""
    found = tmp_path / "in"
    found.mkdir()
    write_rows(found / "b.jsonl", ROWS[2:5])
    (found / "a.jsonl.gz").write_bytes(
        gzip.compress(json.dumps(ROWS[0]).encode() + b"\n" + json.dumps(ROWS[1]).encode())
    )
    write_rows(found / "c.ndjson", ROWS[5:])
    (found / "_SUCCESS").touch()
    (found / ".b.crc").touch()
    return found


@pytest.fixture
def expected(job, tmp_path) -> list[dict]:
    """What one file of JSON lines gives."""
    assert job(write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "expected.jsonl")[0] == 0
    return read_rows(tmp_path / "expected.jsonl")


def test_the_parts_of_a_folder_are_read_in_order(folder):
    rows = list(input_rows(str(folder)))
    assert [row.custom_id for row in rows] == [row["custom_id"] for row in ROWS]
    assert [row.index for row in rows] == list(range(9))


@pytest.mark.parametrize("name, what", [("x.csv", "x.csv, which is no part"), (None, "an empty folder")])
def test_a_folder_of_something_else(tmp_path, name, what):
    (tmp_path / "in").mkdir()
    if name:
        (tmp_path / "in" / name).touch()
    with pytest.raises(UserError, match=what):
        open_content(str(tmp_path / "in"))


def test_an_array_in_a_part_is_named(folder):
    write_rows(folder / "d.json", [[1, 2]])
    with pytest.raises(UserError, match="d.json is a JSON array"):
        open_content(str(folder))


def test_the_output_is_a_folder_of_parts(job, folder, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_ROWS", 4)
    out = tmp_path / "out"
    for argv in ((), ("--restart",)):
        assert job(folder, f"{out}/", *argv)[0] == 0
        found = sorted(out.iterdir())
        assert [path.name for path in found] == [f"part-0000{n}.jsonl" for n in range(3)]
        assert [row for path in found for row in read_rows(path)] == expected


def test_fewer_rows_leave_no_old_part(job, folder, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_ROWS", 4)
    assert job(folder, f"{tmp_path}/out/")[0] == 0
    (folder / "c.ndjson").unlink()
    assert job(folder, f"{tmp_path}/out/")[0] == 0
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_the_output_is_gzipped_and_the_job_goes_on(job, folder, expected, tmp_path, cli):
    out = tmp_path / "out.jsonl.gz"
    assert job(folder, out)[0] == 0
    once = out.read_bytes()
    assert [json.loads(line) for line in gzip.decompress(once).splitlines()] == expected
    journal = Path(f"{out}.rows.jsonl")
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:5]))
    out.unlink()
    code, err = job(folder, out)
    assert code == 0 and "resuming: 5 of 9 rows are done" in err
    assert out.read_bytes() == once
    assert parts.journal_of(str(out)) == str(journal)


def test_a_folder_with_other_files_is_not_written(job, folder, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").touch()
    code, err = job(folder, tmp_path / "out")
    assert code == 2 and "is a folder with other files, such as precious.txt" in err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious.txt"]


def test_an_output_that_cannot_be_copied_is_tried_again(job, folder, expected, tmp_path):
    out = tmp_path / "out.jsonl.gz"
    (tmp_path / ".out.jsonl.gz.new").mkdir()
    code, err = job(folder, out)
    assert code == 2 and "all rows are in" in err and "the same command tries again" in err
    (tmp_path / ".out.jsonl.gz.new").rmdir()
    assert job(folder, out)[0] == 0
    assert [json.loads(line) for line in gzip.decompress(out.read_bytes()).splitlines()] == expected


def test_status_finds_the_rows_of_each_form(job, folder, tmp_path, capfd):
    from h2o_flexgen.commands.main import main

    assert job(folder, tmp_path / "out.jsonl.gz")[0] == 0
    assert main(["status", str(tmp_path / "out.jsonl.gz")]) == 0
    assert capfd.readouterr().out.startswith("finished: 9 of 9 rows are done")


def test_parquet_needs_pyarrow(job, folder, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    code, err = job(folder, tmp_path / "out.parquet")
    assert code == 2
    assert err == "error: Parquet files need pyarrow, which is not installed: pip install 'h2o_flexgen[parquet]'\n"


def test_parquet_in_and_out(job, expected, tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(parts, "BATCH_ROWS", 4)
    rows = [row | {"note": {"a": None, "b": n} if n % 2 else None} for n, row in enumerate(ROWS)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    out = tmp_path / "out.parquet"
    assert job(tmp_path / "in.parquet", out)[0] == 0
    found = parquet.read_table(out).to_pylist()
    assert [row.pop("rest") for row in found] == [None] * 9
    assert [{name: value for name, value in row.items() if value is not None} for row in found] == expected


def test_a_parquet_file_that_is_none(job, tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "in.parquet").write_text("no")
    code, err = job(tmp_path / "in.parquet", tmp_path / "out.jsonl")
    assert code == 2 and "cannot read --input-file" in err and err.count("\n") == 1


def test_a_command_that_was_killed_while_it_wrote_parts_goes_on(job, folder, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_ROWS", 4)
    out = tmp_path / "out"
    write = parts._write

    def killed(path, lines, how):
        if path.name == "part-00001.jsonl":
            path.with_name(f".{path.name}.new").write_text('{"index"')
            raise KeyboardInterrupt
        write(path, lines, how)

    with monkeypatch.context() as patch:
        patch.setattr(parts, "_write", killed)
        assert job(folder, f"{out}/")[0] == 130
    assert sorted(path.name for path in out.iterdir()) == [".part-00001.jsonl.new", "part-00000.jsonl"]
    assert job(folder, f"{out}/")[0] == 0
    assert sorted(path.name for path in out.iterdir()) == [f"part-0000{n}.jsonl" for n in range(3)]
    assert [row for path in sorted(out.iterdir()) for row in read_rows(path)] == expected


@pytest.mark.parametrize("name", ["out.jsonl.gz", "out/part-00000.jsonl", "out/part-00000-1f2e.jsonl"])
@pytest.mark.parametrize("argv", [(), ("--restart",)])
def test_what_no_job_wrote_is_kept(job, folder, tmp_path, name, argv):
    other = tmp_path / name
    other.parent.mkdir(exist_ok=True)
    other.write_text("precious")
    out = f"{other.parent}/" if "/" in name else other
    before = sorted(tmp_path.iterdir())
    code, err = job(folder, out, *argv)
    assert code == 2 and ("is not one that a job wrote" in err or "with other files" in err)
    assert other.read_text() == "precious"
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_is_no_folder(job, folder, tmp_path):
    (tmp_path / "out").touch()
    code, err = job(folder, f"{tmp_path}/out/")
    assert code == 2 and "out/: Not a directory" in err


def test_input_is_never_written(job, folder, tmp_path):
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(ROWS[0]).encode()))
    before = packed.read_bytes()
    code, err = job(packed, packed)
    assert code == 2 and "--input-file and --output-file name the same file" in err
    assert packed.read_bytes() == before
    for out in (f"{folder}/", folder / "out.jsonl", folder / "out.jsonl.gz"):
        assert job(folder, out)[0] == 2
    code, err = job(folder, tmp_path / "out.jsonl", "--report", folder / "report.json")
    assert code == 2 and "--report is in the folder of --input-file" in err


def test_empty_parts_hold_no_rows(job, folder, expected, tmp_path):
    (folder / "aa.jsonl").touch()
    (folder / "bb.jsonl.gz").write_bytes(gzip.compress(b""))
    assert job(folder, tmp_path / "out.jsonl")[0] == 0
    assert read_rows(tmp_path / "out.jsonl") == expected


def test_any_name_of_a_row_fits_into_parquet(job, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt_token_ids": [5], "custom_id": "\ud800 a"}])
    assert job(rows, tmp_path / "out.parquet")[0] == 0
    assert parquet.read_table(tmp_path / "out.parquet").to_pylist()[0]["custom_id"] == "? a"
