"""h2o-flexgen status: how far a job is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from cli_tools import FP32, environment, write_rows

from h2o_flexgen.jobs.job import Job
from h2o_flexgen.jobs.manifest import Manifest, manifest_path
from h2o_flexgen.jobs.output import encoded, read_done
from h2o_flexgen.main import main

pytest_plugins = ["cli_tools"]

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


def test_of_a_job_that_is_finished(status, out):
    assert status(out) == (0, "finished: 4 of 5 rows are done, 1 failed, 0 are left\n", "")


def test_of_a_job_that_was_stopped(status, out):
    out.write_bytes(encoded(read_done(out)[:2]))
    code, said, _ = status(out)
    assert code == 0 and said.startswith("stopped: 2 of 5 rows are done, 0 failed, 3 are left; ")


def test_of_a_job_that_runs(status, out):
    """Two rows of four tokens each in ten seconds, two are left; one was refused, and an earlier run made none."""
    rows = read_done(out)
    out.write_bytes(encoded([rows[4], *rows[:2]]))
    start = Manifest.read(manifest_path(out)).runs[-1]["start"]
    with Job(str(out)):
        os.utime(out, (start + 10, start + 10))
        said = status(out)[1]
        assert said.startswith("runs: 2 of 5 rows are done, 1 failed, 2 are left") and said.endswith(
            "; 0.8 tokens/s, about 0:00:10 (h:mm:ss) left at this rate\n"
        )
        out.write_bytes(b"")
        assert "no row of this run has finished yet" in status(out)[1]


def test_of_what_is_no_output_file(status, out, tmp_path):
    for path in ("none.jsonl", "in.jsonl", "."):
        code, said, err = status(tmp_path / path)
        assert code == 2 and said == "" and "is no output file of a job" in err
    manifest_path(out).write_text("garbage")
    assert "is damaged" in status(out)[2]


def test_it_does_not_import_torch(out):
    code = "import sys; from h2o_flexgen.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, "status", out], env=environment())
    assert done.returncode == 0
