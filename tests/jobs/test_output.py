"""Output files: rows in the order of the input, kept whatever happens to the job or the disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from cli_tools import FP32, ON_DISK, PROMPTS, SHORT, TINY, last_line, percent, read_rows, write_prompts

from h2o_flexgen.jobs.output import OutputFile, open_output

pytest_plugins = ["cli_tools"]


def test_rows_come_in_the_order_of_the_input_with_exactly_four_fields(cli, model, tmp_path):
    """Blocks are made by length, so that the order of work is another."""
    prompts = [[3 + n % 7] * (1 + (5 * n) % 17) for n in range(23)]
    rows, out = write_prompts(tmp_path / "in.jsonl", prompts), tmp_path / "out.jsonl"
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
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["in.jsonl", "out.jsonl"]


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


def test_an_output_file_that_was_there_is_replaced_whole(generate, model, tmp_path):
    (tmp_path / "generate.out.jsonl").write_text("old\n" * 1000)
    assert len(generate("--model", model)) == len(PROMPTS)


def test_a_link_to_an_output_file_stays_one(cli, model, tmp_path):
    real, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(real)
    rows = write_prompts(tmp_path / "in.jsonl")
    code, _, _ = cli("--model", model, "--gen-len", 2, "--input-file", rows, "--output-file", link)
    assert code == 0
    assert link.is_symlink() and len(read_rows(real)) == len(PROMPTS)


def test_rows_of_every_killed_job_are_kept(tmp_path, caplog):
    for n in range(3):
        killed = OutputFile(str(tmp_path / "out.jsonl"))
        killed.add({"index": n})
        killed.file.close()  # and with it its lock
    kept = [tmp_path / f"out.jsonl.partial{end}" for end in ("~", "~~", "")]
    assert [json.loads(path.read_text())["index"] for path in kept] == [0, 1, 2]
    assert str(kept[1]) in caplog.text


@pytest.mark.parametrize("option", ["--output-file", "--report"])
@pytest.mark.parametrize("where", ["no/such/folder/out", ".", "file/out", "link"])
def test_an_output_that_cannot_be_written(refused, model, tmp_path, monkeypatch, option, where):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("a file")
    (tmp_path / "link").symlink_to(tmp_path / "unmounted" / "out")
    assert f"{option} {where}" in refused("--model", model, *SHORT, option, where, files=False)


def test_an_output_that_another_job_writes(refused, model, tmp_path):
    with open_output(str(tmp_path / "out.jsonl")) as first:
        for _ in range(2):
            message = refused("--model", model, *SHORT, "--output-file", tmp_path / "out.jsonl", files=False)
            assert message.endswith("another job is writing it")
            first.add({"index": 0})
    assert len(read_rows(tmp_path / "out.jsonl")) == 2


def test_an_output_on_a_read_only_file_system(refused, model, read_only):
    message = refused("--model", model, *SHORT, "--output-file", read_only / "out", files=False)
    assert "cannot be written" in message
    message = refused("--model", model, *SHORT, "--report", read_only / "out", files=False)
    assert "cannot be written" in message


def test_an_output_that_is_no_file(refused, model, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert "--output-file" in refused("--model", model, *SHORT, "--output-file", fifo, files=False)
    assert fifo.is_fifo()


def test_an_output_file_system_that_fills_up(cli, model, tmp_path, small_disk):
    """The rows that were finished stay in the partial file; the output file is not made; the job ends cleanly."""
    source = write_prompts(tmp_path / "in.jsonl", [[n] for n in range(3, 9)])
    (small_disk / "filler").write_bytes(b"x" * (2 * 1024 * 1024 - 4096))
    target = small_disk / "out.jsonl"
    options = ("--gpu-batch-size", 1, *percent(ON_DISK), "--offload-dir", tmp_path / "offload", "--ignore-eos")
    code, _, err = cli(
        "--model", model, *FP32, "--gen-len", 63, "--input-file", source, "--output-file", target, *options
    )
    if code == 0:
        pytest.skip("this file system found space all the same")
    assert code == 2
    assert last_line(err).startswith("error: ") and "No space left" in last_line(err)
    assert not target.exists()
    assert list((tmp_path / "offload").iterdir()) == []


def test_rows_wait_while_their_disk_is_full(tmp_path, caplog):
    """And go to the partial file, whole, as soon as there is space."""
    file = OutputFile(str(tmp_path / "out.jsonl"))
    file.add({"index": 0, "text": "first"})
    real, room = file.file, [0, 7, 0]

    class Full:
        def __getattr__(self, name):
            return getattr(real, name)

        def write(self, line):
            space = room.pop(0) if room else len(line)
            if not space:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real.write(line[:space])

    file.file = Full()
    for index in (3, 2):
        file.add({"index": index, "text": "waits"})
    with open(tmp_path / "out.jsonl.partial") as f:
        assert [json.loads(line)["index"] for line in f] == [0]
    assert caplog.text.count("No space left on device; the job goes on") == 1
    assert "3 of 3 finished rows are in" in file.where()
    file.add({"index": 1, "text": "last"})
    with open(tmp_path / "out.jsonl.partial") as f:
        assert [json.loads(line)["index"] for line in f] == [0, 3, 2, 1]
    file.finish(whole=True)
    assert [row["index"] for row in read_rows(tmp_path / "out.jsonl")] == [0, 1, 2, 3]
    assert not (tmp_path / "out.jsonl.partial").exists()


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def fails(cli, model, tmp_path):
    """Run a job of three blocks that runs out of disk; returns its rows in the partial file."""

    files = ("--input-file", write_prompts(tmp_path / "in.jsonl"), "--output-file", tmp_path / "out.jsonl")

    def run() -> list[dict]:
        offload = ("--gpu-batch-size", 2, *percent(ON_DISK), "--offload-dir", tmp_path / "offload")
        code, _, err = cli("--model", model, *FP32, "--gen-len", 4, *files, *offload)
        assert code == 2
        line = last_line(err)
        assert line.startswith("error: ") and "No space left" in line and "out.jsonl.partial" in line
        assert list((tmp_path / "offload").iterdir()) == []
        assert not (tmp_path / "out.jsonl.sorted").exists()
        return read_rows(tmp_path / "out.jsonl.partial")

    return run


@pytest.mark.parametrize("owner, call", [(Path, "write_text"), (os, "replace")], ids=["write", "replace"])
def test_an_output_file_that_cannot_be_finished(fails, tmp_path, monkeypatch, owner, call):
    """Whatever fails, the output file of before stays as it was and the finished rows can be had."""
    (tmp_path / "out.jsonl").write_text("before\n")
    with monkeypatch.context() as patch:
        patch.setattr(owner, call, full)
        assert len(fails()) == len(PROMPTS)
    assert (tmp_path / "out.jsonl").read_text() == "before\n"


def test_an_error_in_the_run_keeps_the_finished_rows(fails, tmp_path, monkeypatch):
    """The disk fills up in the second block."""
    real = os.pwrite

    def pwrite(fd, data, offset):
        return (full if os.path.getsize(tmp_path / "out.jsonl.partial") else real)(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert len(fails()) == 2
    assert not (tmp_path / "out.jsonl").exists()
