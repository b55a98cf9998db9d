"""How a process ends when stdout, stderr or the report cannot be written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from command_tools import FP32, environment, last_line

from h2o_flexgen.utils.files import check_writable

pytest_plugins = ["command_tools"]

#: runs jobs one after the other, each in a child that finds torch imported, and prints their exit codes;
#: "closed" is a pipe that nobody reads
CHILDREN = """
import json, os, sys
import h2o_flexgen.jobs.job, h2o_flexgen.models.tokenizer, numba, transformers
from h2o_flexgen.commands.main import run_command
for argv, *outputs in json.loads(sys.argv[1]):
    if os.fork() == 0:
        for n, name in enumerate(outputs, 1):
            read, write = os.pipe()
            os.close(read)
            os.dup2(write if name == "closed" else os.open(name, os.O_WRONLY | os.O_CREAT), n)
        sys.exit(run_command("generate", argv, "h2o-flexgen generate"))
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_an_output_that_cannot_be_written_loses_nothing_else(model, tmp_path):
    """A closed pipe ends the command quietly, like a signal; a full disk is an error."""
    report = [tmp_path / f"report{n}.json" for n in range(2)]
    cases = [
        ("closed", tmp_path / "err0", report[0]),
        ("/dev/full", tmp_path / "err1", report[1]),
        (tmp_path / "out2", tmp_path / "err2", "/dev/full"),
        (tmp_path / "out3", "closed", "/dev/null"),
    ]
    job = ("--model", model, *FP32, "--prompt-len", 5, "--gen-len", 2, "--report")
    jobs = [[[*map(str, (*job, report))], str(out), str(err)] for out, err, report in cases]
    argv = [sys.executable, "-c", CHILDREN, json.dumps(jobs)]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, check=True)
    assert [int(code) for code in done.stdout.split()] == [128 + signal.SIGPIPE, 2, 2, 128 + signal.SIGPIPE]
    said = [(tmp_path / f"err{n}").read_text() for n in range(3)]
    assert not any(word in text for text in (done.stderr, *said) for word in ("Traceback", "Exception"))
    assert last_line(said[1]) == "error: cannot write to stdout: No space left on device"
    assert last_line(said[2]) == "error: cannot write --report /dev/full: No space left on device"
    for path in report:
        assert json.loads(path.read_text())["total"]["generated_tokens"] > 0
    shown = (tmp_path / "out2").read_text()
    assert "--- prompt 0" in shown and "tokens/s" in shown


def test_a_report_can_go_to_a_device_whose_folder_is_read_only(monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, how: str(path) == "/dev/null")
    check_writable("--report", "/dev/null")
