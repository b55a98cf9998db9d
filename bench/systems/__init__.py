"""Every system of the comparison, one a file: its `command(job)`, which runs in `job.scratch` under the cap, and what
`result(job, printed)` reads of it: seconds of `prefill` and `decode`, the `lowest_tier` (GPU, RAM, disk) that it read
from, its `version`, and more that the tables show.

A peer in Python has `PACKAGE` and `run(job) -> dict` instead, for a process in the peers' environment (bench.job).
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


def built(name: str, proof: str = "ready") -> Path:
    """The folder that bench/NAME.sh fills once. `proof`: a file without which it is not filled yet."""
    from bench.common import ROOT, data_folder

    folder = data_folder() / name
    if not (folder / proof).exists():
        print(f"bench/{name}.sh runs (minutes, once)", flush=True)
        env = os.environ | {"PYTHON": sys.executable}
        if subprocess.run(["bash", ROOT / "bench" / f"{name}.sh", folder], env=env).returncode:
            sys.exit(f"error: bench/{name}.sh failed: see what it printed, and what it needs")
    return folder


def command(job: Job) -> list[str]:
    if hasattr(system(job), "command"):
        return system(job).command(job)
    return [str(built("peers") / "bin" / "python"), "-m", "bench.job", str(Path(job.scratch) / "job.json")]


def result(job: Job, printed: str) -> dict:
    if hasattr(system(job), "result"):
        return system(job).result(job, printed)
    return json.loads((Path(job.scratch) / "result.json").read_text())


def system(job: Job) -> ModuleType:
    return import_module(f"bench.systems.{job.system}")
