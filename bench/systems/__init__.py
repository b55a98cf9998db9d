"""The systems of the comparison, one per file. `command(job)` gives the command line to run under the cap, and
`result(job, printed)` reads what it left: seconds of `prefill` and `decode`, the `lowest_tier` (GPU, RAM, disk) that
held data, the `version`, and more for the tables.

Peers in Python define `PACKAGE` and `run(job) -> dict` instead; bench.job runs them in the peers' environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from bench.job import Job


def ensure_built(name: str, proof: str = "ready") -> Path:
    """The folder that bench/NAME.sh fills. The script runs unless the file `proof` exists there."""
    from bench.common import ROOT, data_folder

    folder = data_folder() / name
    if not (folder / proof).exists():
        print(f"running bench/{name}.sh (minutes, once)", flush=True)
        env = os.environ | {"PYTHON": sys.executable}
        if subprocess.run(["bash", ROOT / "bench" / f"{name}.sh", folder], env=env).returncode:
            sys.exit(f"error: bench/{name}.sh failed: see its output above, and its requirements in the script")
    return folder


def command(job: Job) -> list[str]:
    if hasattr(system(job), "command"):
        return system(job).command(job)
    return [str(ensure_built("peers") / "bin" / "python"), "-m", "bench.job", str(Path(job.scratch) / "job.json")]


def result(job: Job, printed: str) -> dict:
    if hasattr(system(job), "result"):
        return system(job).result(job, printed)
    return json.loads((Path(job.scratch) / "result.json").read_text())


def system(job: Job) -> ModuleType:
    return import_module(f"bench.systems.{job.system}")
