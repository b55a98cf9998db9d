"""Output files: rows in the order of the input, which survive whatever happens to the job or the disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from command_tools import FP32, ON_DISK, PROMPTS, SHORT, TINY, last_line, percent, read_rows, write_prompts

from h2o_flexgen.jobs.output import DoneRow, OutputFile, encoded, open_done, read_done

pytest_plugins = ["command_tools"]


def test_rows_come_in_the_order_of_the_input_with_exactly_four_fields(cli, model, tmp_path):
    """Rows are run by length, in another order."""
    prompts = [[3 + n % 7] * (1 + (5 * n) % 17) for n in range(23)]
    rows = write_prompts(tmp_path / "in.jsonl", prompts)
    out = tmp_path / "out.jsonl"
    job = ("--model", model, *FP32, "--gen-len", 4, "--gpu-batch-size", 3, "--num-gpu-batches", 2)
    code, _, err = cli(*job, "--input-file", rows, "--output-file", out)
    assert code == 0, err
    found = read_rows(out)
    assert [row["index"] for row in found] == list(range(23))
    for row in found:
        assert list(row) == ["index", "text", "token_ids", "finish_reason"]
        assert row["finish_reason"] in ("length", "stop")
        assert row["text"] == ""  # there is no tokenizer
        assert 1 <= len(row["token_ids"]) <= 4 and all(type(t) is int for t in row["token_ids"])
        assert row["finish_reason"] == "stop" or len(row["token_ids"]) == 4
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == [
        "in.jsonl",
        "out.jsonl",
        "out.jsonl.manifest.json",
    ]


def test_a_row_stops_at_the_end_of_sequence_token(generate, model, tmp_path):
    whole = generate("--model", model, "--ignore-eos", gen_len=12)
    eos = whole[0]["token_ids"][2]
    shutil.copytree(model, tmp_path / "eos")
    (tmp_path / "eos" / "config.json").write_text(json.dumps(TINY | {"eos_token_id": [eos, 1]}))
    for row, full in zip(generate("--model", tmp_path / "eos", gen_len=12), whole):
        ids = full["token_ids"]
        if eos in ids:
            ids = ids[: ids.index(eos) + 1]
        stopped = ids[-1] in (eos, 1)
        assert row["token_ids"] == ids and row["finish_reason"] == ("stop" if stopped else "length")


def test_a_link_to_an_output_file_stays_one(cli, model, tmp_path):
    real = tmp_path / "real.jsonl"
    link = tmp_path / "link.jsonl"
    link.symlink_to(real)
    rows = write_prompts(tmp_path / "in.jsonl")
    code, _, _ = cli("--model", model, "--gen-len", 2, "--input-file", rows, "--output-file", link)
    assert code == 0
    assert link.is_symlink() and len(read_rows(real)) == len(PROMPTS)


@pytest.mark.parametrize(
    "option, where",
    [("--output-file", "no/such/folder/out"), ("--report", "."), ("--output-file", "file/out"), ("--report", "link")],
)
def test_an_output_that_cannot_be_written(refused, model, tmp_path, monkeypatch, option, where):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("a file")
    (tmp_path / "link").symlink_to(tmp_path / "unmounted" / "out")
    assert f"{option} {where}" in refused("--model", model, *SHORT, option, where, files=False)


def test_an_output_on_a_read_only_file_system(refused, model, read_only):
    message = refused("--model", model, *SHORT, "--output-file", read_only / "out", files=False)
    assert "cannot be written" in message
    message = refused("--model", model, *SHORT, "--report", read_only / "out", files=False)
    assert "cannot be written" in message


def test_an_output_that_is_not_a_file(refused, model, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert "--output-file" in refused("--model", model, *SHORT, "--output-file", fifo, files=False)
    assert fifo.is_fifo()


@pytest.fixture
def precious(tmp_path) -> Path:
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "elsewhere" / "precious"
    path.write_text("precious")
    return path


@pytest.mark.parametrize(
    "name, make", [(".out.jsonl.new", os.symlink), (".out.jsonl.manifest.json.new", os.link)], ids=["link", "hard link"]
)
def test_a_link_in_the_place_of_a_file_of_the_job_is_not_followed(cli, model, tmp_path, precious, name, make):
    make(precious, tmp_path / name)
    code, _, err = cli("--model", model, *SHORT, "--output-file", tmp_path / "out.jsonl")
    assert code == 2 and f"cannot be written: {tmp_path / name}: it is " in last_line(err)
    assert precious.read_text() == "precious" and (tmp_path / name).exists()


@pytest.mark.parametrize("name", [".out.jsonl.new", "out.jsonl.manifest.json"])
def test_a_pipe_in_the_place_of_a_file_of_the_job_is_not_waited_for(cli, model, tmp_path, name):
    os.mkfifo(tmp_path / name)
    code, _, err = cli("--model", model, *SHORT, "--output-file", tmp_path / "out.jsonl")
    assert code == 2 and name in last_line(err)
    assert (tmp_path / name).is_fifo()


def test_an_old_file_is_not_kept_behind_a_link(cli, model, tmp_path, precious):
    """A dangling link counts as an existing backup."""
    out = tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl~").symlink_to(precious.with_name("new"))
    (tmp_path / "out.jsonl~~").symlink_to(precious)
    for ids in ([5, 6], [7, 8]):
        rows = write_prompts(tmp_path / "in.jsonl", [[9, 9], ids])
        code, _, err = cli("--model", model, *FP32, "--gen-len", 2, "--input-file", rows, "--output-file", out)
        assert code == 0, err
    assert len(read_rows(tmp_path / "out.jsonl~~~")) == 2
    assert os.listdir(precious.parent) == ["precious"] and precious.read_text() == "precious"


def plain(index: int) -> DoneRow:
    return DoneRow.of({"index": index, "text": "", "token_ids": [5], "finish_reason": "length"})


def done(path: Path) -> list:
    """The ids of the rows of an output file."""
    with open_done(path) as file:
        return [row.id for _, row in read_done(path, file)]


def test_rows_wait_while_their_disk_is_full(tmp_path, caplog):
    """They are written completely as soon as there is space."""
    file = OutputFile(tmp_path / "out.jsonl")
    real = file.file
    room = []

    class Full:
        def __getattr__(self, name):
            return getattr(real, name)

        def write(self, line):
            space = room.pop(0) if room else len(line)
            if not space:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real.write(line[:space])

    def add(index: int) -> list[int]:
        file.add(index, plain(index))
        file.flush()
        return done(tmp_path / "out.jsonl")

    file.file = Full()
    assert add(0) == [0]
    room[:] = [0, 7, 0]  # half of a row is written
    assert add(3) == add(2) == [0]
    assert caplog.text.count("No space left on device; the job continues") == 1
    assert add(1) == [0, 3, 2, 1]
    file.finish()
    file.close()
    assert [row["index"] for row in read_rows(tmp_path / "out.jsonl")] == [0, 1, 2, 3]
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_rows_that_a_failed_fsync_may_have_lost_are_written_again(tmp_path, monkeypatch):
    """The kernel may report an error once, and drop the pages that it could not write."""
    out = tmp_path / "out.jsonl"
    file = OutputFile(out, [(0, encoded(plain(0).data))])
    synced = out.stat().st_size

    def fsync(fd):
        os.truncate(out, synced)  # what is on disk
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for index in (1, 2):
        file.add(index, plain(index))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            file.flush()
        assert file.error.errno == errno.EIO and file.written == 1
    file.flush()
    assert file.error is None and done(out) == [0, 1, 2]
    file.close()


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def job(cli, model, tmp_path):
    """Run a job of three blocks: (exit code, last line on stderr, ids in the output file)."""
    files = ("--input-file", write_prompts(tmp_path / "in.jsonl"), "--output-file", tmp_path / "out.jsonl")

    def run(*options) -> tuple[int, str, list[int]]:
        offload = ("--gpu-batch-size", 2, *percent(ON_DISK), "--offload-dir", tmp_path / "offload")
        code, _, err = cli("--model", model, *FP32, "--gen-len", 4, *files, *offload, *options)
        assert list((tmp_path / "offload").iterdir()) == []
        assert not list(tmp_path.glob("*.new"))
        return code, last_line(err), done(tmp_path / "out.jsonl")

    return run


@pytest.mark.parametrize("nth", range(4))
def test_an_output_file_that_cannot_be_put_in_place(job, tmp_path, monkeypatch, nth):
    """Two files are replaced at the beginning, and one at the end; whichever fails, the next run completes the job."""
    real = os.replace
    calls = iter(range(99))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *names: (full if next(calls) == nth else real)(*names))
        code, line, rows = job()
    assert len(rows) == (len(PROMPTS) if nth >= 2 else 0)
    assert code == (0 if nth == 3 else 2)
    assert nth == 3 or (line.startswith("error: ") and "No space left" in line)
    code, _, rows = job()
    assert code == 0 and rows == list(range(len(PROMPTS)))


def test_an_error_in_the_run_keeps_the_finished_rows(job, tmp_path, monkeypatch):
    """The disk fills up in the second block."""
    real = os.pwrite
    out = tmp_path / "out.jsonl"

    def pwrite(fd, data, offset):
        return (full if out.exists() and out.stat().st_size else real)(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        code, line, rows = job()
    assert code == 2 and "No space left" in line and line.endswith("2 of 5 rows are done")
    assert len(rows) == 2
    code, _, rows = job()
    assert code == 0 and len(rows) == len(PROMPTS)
