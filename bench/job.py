"""One system on one job, in a process of its own: load, warm up, generate to the last token, tell what it took.

python -m bench.job JOB.json RESULT.json
"""

from __future__ import annotations

import ctypes
import importlib
import json
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Job:
    """What one process does.

    Attributes:
        system: a module of bench.systems.
        model: folder of the checkpoint; scratch: folder for what is offloaded.
        batch: sequences generated together (for ours: prompts of the job).
        gpu_bytes, ram_bytes: what a system may plan with; None: whatever there is.
        options: of the system alone; kv_budget: heavy and recent slots (ours only).
        hardware: the machine's profile (ours only).
    """

    system: str
    model: str
    scratch: str
    dtype: str
    device: str
    prompt_len: int
    gen_len: int
    batch: int
    gpu_bytes: int | None = None
    ram_bytes: int | None = None
    options: dict = field(default_factory=dict)
    kv_budget: list[int] | None = None
    hardware: str | None = None

    @property
    def room(self) -> int:
        """Bytes of RAM that a system may plan with."""
        from h2o_flexgen.offload.memory import ram_in_all

        return self.ram_bytes or int(0.8 * ram_in_all())

    @property
    def checkpoint_bytes(self) -> int:
        return sum(path.stat().st_size for path in Path(self.model).iterdir())

    @property
    def fits_in_ram(self) -> bool:
        return self.checkpoint_bytes < self.room


def die_with_parent() -> None:
    """Else the next benchmark would measure beside this process."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    die_with_parent()
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    if job.device != "cpu" and job.gpu_bytes is not None:
        import torch

        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.gpu_bytes / total))
    result = importlib.import_module(f"bench.systems.{job.system}").run(job)
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
