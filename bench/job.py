"""Run one peer on one job in its own process: load, warm up, generate every token, write the times.

python -m bench.job JOB.json
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path


@dataclass
class Job:
    """What one process runs.

    Attributes:
        system: a module of bench.systems.
        model: the checkpoint, a folder or a GGUF file.
        scratch: folder for offloaded data.
        gen_len: tokens to generate, which may be fewer than the row's.
        batch: sequences generated together (for ours: prompts of the job).
        gpu_bytes, ram_bytes: memory that a system may use; None for all there is.
        options: settings of a peer.
        flags: our command line's flags.
        avx2: ours runs as on a CPU without newer instructions.
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
    flags: str = ""
    avx2: bool = False

    @property
    def python(self) -> list[str]:
        """The command that runs a module of ours."""
        return [sys.executable, "-m", *["bench.avx2"] * self.avx2]

    @property
    def room(self) -> int:
        """Bytes of RAM that a system may use."""
        from h2o_flexgen.machine.memory import ram_in_all

        return self.ram_bytes or int(0.8 * ram_in_all())

    @property
    def checkpoint_bytes(self) -> int:
        from bench.checkpoint import files_of

        return sum(path.stat().st_size for path in files_of(Path(self.model)))

    @property
    def fits_in_ram(self) -> bool:
        return self.checkpoint_bytes < self.room


def main() -> None:
    path = Path(sys.argv[1])
    job = Job(**json.loads(path.read_text()))
    if job.device != "cpu" and job.gpu_bytes is not None:
        import torch

        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.gpu_bytes / total))
    module = importlib.import_module(f"bench.systems.{job.system}")
    result = module.run(job) | {"version": f"{module.PACKAGE} {version(module.PACKAGE)}"}
    (path.parent / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
