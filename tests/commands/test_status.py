"""h2o-flexgen status: how far a job is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_tools import FP32, environment, write_rows

from h2o_flexgen.commands.main import main
from h2o_flexgen.jobs.job import Job
from h2o_flexgen.jobs.manifest import Manifest, manifest_path

pytest_plugins = ["command_tools"]

ROWS = [{"prompt_token_ids": [n, 5, 6]} for n in range(7, 11)] + [{"prompt_token_ids": []}]


@pytest.fixture
def status(capfd):
    def run(path) -> tuple[int, str, str]:
        capfd.readouterr()
        return main(["status", str(path)]), *capfd.readouterr()

    return run


@pytest.fixture
def out(cli, model, tmp_path):
    """The output file of a job that is done."""
    out = tmp_path / "out.jsonl"
    job = ("--model", model, *FP32, "--gen-len", 4, "--ignore-eos", "--output-file", out)
    assert cli(*job, "--input-file", write_rows(tmp_path / "in.jsonl", ROWS))[0] == 0
    return out


def keep(path: Path, *places: int) -> None:
    """Keep only these lines of a file, in this order."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[n] for n in places))


def test_a_finished_job(status, out):
    assert status(out) == (0, "finished: 4 of 5 rows are done, 1 failed, 0 are left\n", "")


def test_a_stopped_job(status, out):
    keep(out, 0, 1)
    code, said, _ = status(out)
    assert code == 0 and said.startswith("stopped: 2 of 5 rows are done, 0 failed, 3 are left; ")


def test_a_running_job(status, out):
    """Two rows of four tokens each took ten seconds, two are left, one was refused; an earlier run finished none."""
    keep(out, 4, 0, 1)
    start = Manifest.read(manifest_path(out)).runs[-1]["start"]
    with Job(str(out)):
        os.utime(out, (start + 10, start + 10))
        said = status(out)[1]
        assert said.startswith("runs: 2 of 5 rows are done, 1 failed, 2 are left") and said.endswith(
            "; 0.8 tokens/s, about 0:00:10 (h:mm:ss) left at this rate\n"
        )
        out.write_bytes(b"")
        assert "no row of this run has finished yet" in status(out)[1]


@pytest.mark.parametrize("start", [0, -1e300, 1e18], ids=str)
def test_a_job_whose_clock_was_wrong(status, out, start):
    """It stood at 1970 when the job began, or was far ahead."""
    path = manifest_path(out)
    manifest = json.loads(path.read_text())
    manifest["runs"][-1]["start"] = start
    path.write_text(json.dumps(manifest))
    keep(out, 0, 1)
    with Job(str(out)):
        rows = "runs: 2 of 5 rows are done, 0 failed, 3 are left"
        assert status(out)[1] == f"{rows}; this machine's clock was changed meanwhile: the speed is unknown\n"


def test_a_job_on_a_machine_that_stays_in_1970(status, out):
    path = manifest_path(out)
    manifest = json.loads(path.read_text())
    manifest["runs"][-1]["start"] = 0
    path.write_text(json.dumps(manifest))
    keep(out, 0, 1)
    with Job(str(out)):
        os.utime(out, (10, 10))
        assert status(out)[1].endswith("0.8 tokens/s, about 0:00:15 (h:mm:ss) left at this rate\n")


@pytest.mark.parametrize(
    "run",
    [
        {"start": float("nan"), "done": 0},
        {"start": 10**400, "done": 0},
        {"start": 0, "done": -1},
        {"start": 0, "done": 0.5},
        {},
    ],
)
def test_a_manifest_with_impossible_runs(status, out, run):
    path = manifest_path(out)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"runs": [run]}))
    assert status(out)[0] == 2 and "is damaged" in status(out)[2]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.manifest.json"])
def test_files_that_are_pipes(status, out, name):
    path = out.with_name(name)
    path.unlink()
    os.mkfifo(path)
    code, said, err = status(out)
    assert (code, said) == (2, "") and err == f"error: cannot read {path}: it is not a regular file\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="the test must become another user")
def test_a_folder_without_permission(out):
    # before setuid, while they can be read
    modules = "from h2o_flexgen.commands.main import main; import h2o_flexgen.commands.status, locale"
    code = f"import os, sys; {modules}; os.setuid(54321); sys.exit(main(sys.argv[1:]))"
    out.parent.chmod(0o700)
    argv = [sys.executable, "-c", code, "status", out]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"error: cannot read {manifest_path(out)}: Permission denied\n"


def test_files_that_are_not_output_files(status, out, tmp_path):
    for path in ("none.jsonl", "in.jsonl", "."):
        code, said, err = status(tmp_path / path)
        assert code == 2 and said == "" and "is not the output file of a job" in err
    manifest_path(out).write_text("garbage")
    assert "is damaged" in status(out)[2]


def test_it_does_not_import_torch(out):
    code = (
        "import sys; from h2o_flexgen.commands.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, "status", out], env=environment())
    assert done.returncode == 0
