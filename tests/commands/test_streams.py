"""How a process ends when stdout, stderr or the report cannot be written."""

from __future__ import annotations

import json
import os
import signal
import subprocess

from command_tools import FP32, command, environment, start

from h2o_flexgen.utils.files import check_writable

pytest_plugins = ["command_tools"]


def test_a_closed_stdout_ends_the_command_quietly(model, tmp_path):
    report = tmp_path / "report.json"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command("--model", model, *FP32, "--prompt-len", 5, "--gen-len", 2, "--report", report),
        env=environment(),
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert done.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert json.loads(report.read_text())["total"]["generated_tokens"] > 0


def test_a_full_disk_behind_stdout_is_an_error(model, tmp_path):
    with open("/dev/full", "w") as full:
        argv = command("--model", model, *FP32, "--prompt-len", 5, "--gen-len", 2, "--report", tmp_path / "report.json")
        done = subprocess.run(argv, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert done.stderr.splitlines()[-1] == "error: cannot write to stdout: No space left on device"
    assert json.loads((tmp_path / "report.json").read_text())["total"]["generated_tokens"] > 0


def test_an_unwritable_report_loses_nothing_else(model):
    argv = command("--model", model, *FP32, "--prompt-len", 5, "--gen-len", 2, "--report", "/dev/full")
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: cannot write --report /dev/full: No space left on device"
    assert "--- prompt 0" in done.stdout and "tokens/s" in done.stdout


def test_a_report_can_go_to_a_device_whose_folder_is_read_only(monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, how: str(path) == "/dev/null")
    check_writable("--report", "/dev/null")


def test_a_closed_stderr_ends_the_job_like_a_signal(model):
    process = start("--model", model, *FP32, "--prompt-len", 30, "--gen-len", 30, "--num-prompts", 40)
    process.stderr.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
