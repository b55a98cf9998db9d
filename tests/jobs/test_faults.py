"""Each read and write of a small job fails once: it ends in a clear error or goes on, and the next run completes it."""

from __future__ import annotations

import errno
import io
import json
import os
import threading
from collections import Counter

import pytest
from cli_tools import FP32, ON_DISK, percent, read_rows, write_rows

from h2o_flexgen.jobs import output

pytest_plugins = ["cli_tools"]

#: what a job calls to read, write and place its files
CALLS = ("pread", "preadv", "pwrite", "fsync", "replace", "posix_fallocate")


class Faults:
    """Lets the call number `fails` fail; counts all by name."""

    def __init__(self, monkeypatch, fails: int | None, error: int):
        self.fails, self.error = fails, error
        self.count, self.calls, self.failed = 0, Counter(), None
        self.lock = threading.Lock()
        for name in CALLS:
            monkeypatch.setattr(os, name, self.wrapped(name, getattr(os, name)))
        faults = self

        class Raw(io.FileIO):
            def write(self, data):
                return faults.wrapped("write", super().write)(data)

        monkeypatch.setattr(output, "open", lambda path, mode, buffering: Raw(path, "a"), raising=False)

    def wrapped(self, name: str, call):
        def counted(*args, **options):
            with self.lock:
                self.calls[name] += 1
                number, self.count = self.count, self.count + 1
            if number == self.fails:
                self.failed = name
                raise OSError(self.error, os.strerror(self.error))
            return call(*args, **options)

        return counted


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_each_read_and_write_fails_once(cli, model, tmp_path, error):
    rows = [{"prompt_token_ids": [5 + n] * (3 + n), "max_tokens": 2 + n % 2} for n in range(4)]
    source = write_rows(tmp_path / "in.jsonl", rows)

    def job(out, fails=None) -> tuple[int, str, Faults]:
        options = ("--gpu-batch-size", 2, "--num-gpu-batches", 1, "--hh-size", 1, *percent(ON_DISK))
        files = ("--input-file", source, "--output-file", tmp_path / out, "--offload-dir", tmp_path / "offload")
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, fails, error)
            code, _, err = cli("--model", model, *FP32, *files, "--ignore-eos", *options)
        assert list((tmp_path / "offload").iterdir()) == []
        return code, err, faults

    code, err, counted = job("whole.jsonl")
    assert code == 0, err
    whole, outcomes = read_rows(tmp_path / "whole.jsonl"), Counter()
    for number in range(counted.count):
        out = f"{number}.jsonl"
        code, err, faults = job(out, number)
        if faults.failed is None:  # the order of transfers varies a little
            continue
        assert code in (0, 2) and "Traceback" not in err, err
        assert code == 0 or "error: " in err
        outcomes[faults.failed, "went on" if code == 0 else "clear error"] += 1
        if code != 0:
            code, err, _ = job(out)
            assert code == 0, err
        assert read_rows(tmp_path / out) == whole
    print(json.dumps({f"{call}, {outcome}": n for (call, outcome), n in sorted(outcomes.items())}))
    assert sum(outcomes.values()) >= 0.9 * counted.count
