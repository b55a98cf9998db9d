"""Each read and write of a small job fails once: it ends in a clear error or continues, and the next run completes it.

By hand, which writes the outcomes to docs/benchmarks:

    python tests/jobs/test_faults.py
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import shutil
import sys
import tempfile
import threading
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
from command_tools import FP32, ON_DISK, TINY, last_line, percent, read_rows, write_model, write_rows  # noqa: E402

from bench import common  # noqa: E402
from h2o_flexgen.commands.main import run_command  # noqa: E402
from h2o_flexgen.jobs.resume import Done  # noqa: E402

pytest_plugins = ["command_tools"]

ROWS = [{"prompt_token_ids": [5 + n] * (3 + n)} for n in range(4)]
#: calls with which a job reads, writes, replaces and locks its files, besides `open`
CALLS = {os: ("preadv", "pwrite", "fsync", "replace", "posix_fallocate"), fcntl: ("flock",)}
FILE_CALLS = ("readinto", "write", "truncate")


class Faults:
    """Makes one call fail, `fails`: its name, and its number among calls of that name. Counts all calls; of opens only
    those in `root`."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path, fails: tuple[str, int] | None, error: int):
        self.root = str(root)
        self.fails = fails
        self.error = error
        self.calls = Counter()
        self.lock = threading.Lock()
        for module, names in CALLS.items():
            for name in names:
                patch.setattr(module, name, self.counted(name, getattr(module, name)))
        self.File = type("File", (io.FileIO,), {n: self.counted(n, getattr(io.FileIO, n)) for n in FILE_CALLS})
        for module, call in ((builtins, self.open), (io, self.open), (os, self.counted("open", os.open))):
            patch.setattr(module, "open", self.within_root(call, module.open))

    def counted(self, name: str, call):
        def counted_call(*args, **options):
            with self.lock:
                self.calls[name] += 1
                if (name, self.calls[name] - 1) == self.fails:
                    raise OSError(self.error, os.strerror(self.error))
            return call(*args, **options)

        return counted_call

    def within_root(self, call, real):
        def opened(path, *args, **more):
            name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path)
            return (call if name.startswith(self.root) else real)(path, *args, **more)

        return opened

    def open(self, path, mode="r", buffering=-1, *text, **options):
        """Like the built-in one, for a file whose reads and writes are counted."""
        make = (
            self.File if isinstance(path, int) else self.counted("open", self.File)
        )  # a descriptor comes from os.open
        file = make(path, mode.replace("b", ""))
        if buffering == 0:
            return file
        file = (io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter)(file)
        return file if "b" in mode else io.TextIOWrapper(file, *text, **options)


class Job:
    """A small job in `folder`, all on disk; `options` are added to its own."""

    def __init__(self, folder: Path, rows: list = ROWS, *options):
        self.folder = folder
        model = write_model(folder / "model", config=TINY | {"num_hidden_layers": 2})
        rows = write_rows(folder / "in.jsonl", rows)
        how = ("--gen-len", 2, "--gpu-batch-size", 2, "--hh-size", 1, "--ignore-eos", *percent(ON_DISK))
        self.argv = ("--model", model, *FP32, *how, "--input-file", rows, "--offload-dir", folder / "offload", *options)

    def run(self, out: Path, fails=None, error: int = 0) -> tuple[int, str, Counter]:
        """Exit code, stderr, and how often each call was made."""
        said = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stderr(said), redirect_stdout(io.StringIO()):
            faults = Faults(patch, self.folder, fails, error)
            code = run_command("generate", [*map(str, self.argv), "--output-file", str(out)], "")
        assert not (self.folder / "offload").exists() or os.listdir(self.folder / "offload") == []
        return code, said.getvalue(), faults.calls


def check(folder: Path, goes_on: bool, error: int, most: int) -> Counter:
    """Make calls of a new or a resumed job fail once each; returns how many of each call and
    outcome there were.

    Args:
        most: of each call, that many at even distances.
    """
    job = Job(folder)
    out = folder / "out.jsonl"
    whole = folder / "whole.jsonl"
    outcomes = Counter()
    assert job.run(whole)[0] == 0

    def begin() -> None:
        for path in folder.glob("*out.jsonl*"):
            path.unlink()
        if goes_on:
            out.write_text("".join(whole.read_text().splitlines(keepends=True)[:2]))
            shutil.copy(f"{whole}.manifest.json", f"{out}.manifest.json")

    begin()
    code, err, calls = job.run(out)
    assert code == 0, err
    for name, count in calls.items():
        for nth in range(0, count, -(-count // most)):
            begin()
            code, err, _ = job.run(out, (name, nth), error)
            assert code in (0, 2) and "Traceback" not in err, err
            assert code == 0 or (last_line(err).startswith("error: ") and os.strerror(error) in err), err
            outcomes[name, "went on" if code == 0 else "clear error"] += 1
            if code != 0:
                assert not goes_on or len(Done(out)) >= 2, "a finished row was lost"
                code, err, _ = job.run(out)
                assert code == 0, err
            assert read_rows(out) == read_rows(whole), (name, nth)
    return outcomes


@pytest.mark.parametrize("goes_on, error", [(False, errno.ENOSPC), (True, errno.EIO)])
def test_calls_of_each_kind_fail_once(tmp_path, goes_on, error):
    """Three of each; all of them when run by hand."""
    outcomes = check(tmp_path, goes_on, error, 3)
    assert {name for name, _ in outcomes} == {
        *(name for names in CALLS.values() for name in names),
        *FILE_CALLS,
        "open",
    }


@pytest.mark.parametrize(
    "pages, say",
    [
        (0, "cannot be written: No space left"),  # no room for the manifest
        (1, "No space left on device; 0 of 32 finished rows are in it"),
        (2, "finished rows are in it"),
        (3, "but not in the order of the input: No space left"),  # no room for a second copy
        (5, " tokens/s"),
    ],
)
def test_a_disk_that_is_full(mount, tmp_path, pages, say):
    """With room for this many pages."""
    disk = mount("-t", "tmpfs", "-o", "size=1m", "tmpfs")
    rows = [{"prompt_token_ids": [5 + n] * (1 + n)} for n in range(32)]  # the last one is run first
    job = Job(tmp_path, rows, "--gen-len", 32, "--gpu-batch-size", 16)
    out = disk / "out.jsonl"
    (disk / "filler").write_bytes(bytes((1 << 20) - 4096 * pages))
    code, err, _ = job.run(out)
    assert code == (0 if pages == 5 else 2) and say in last_line(err), err
    (disk / "filler").unlink()
    assert job.run(out)[0] == job.run(tmp_path / "whole.jsonl")[0] == 0
    assert read_rows(out) == read_rows(tmp_path / "whole.jsonl")
    assert sorted(path.name for path in disk.iterdir()) == ["out.jsonl", "out.jsonl.manifest.json"]


def main() -> None:
    outcomes = Counter()
    with tempfile.TemporaryDirectory() as name:
        os.environ["H2O_FLEXGEN_HOME"] = f"{name}/home"
        for goes_on in (False, True):
            for error in (errno.EIO, errno.ENOSPC):
                outcomes += check(Path(name), goes_on, error, sys.maxsize)
    rows = []
    for name in sorted({name for name, _ in outcomes}):
        went_on = outcomes[name, "went on"]
        rows.append({"call": name, "went_on": went_on, "clear_error": outcomes[name, "clear error"]})
    common.save("jobs_faults", {"rows": rows})


if __name__ == "__main__":
    main()
