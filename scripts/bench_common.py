"""What the benchmark scripts share: a description of the machine, result files, and a memory cap."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks"
sys.path.insert(0, str(ROOT))


def machine(ram_cap: int | None = None) -> dict:
    """The machine in words."""
    from h2o_flexgen.hardware import machine as found

    m = found()
    cap = None if ram_cap is None else round(ram_cap / 2**30, 2)
    return {
        **{name: m[name] for name in ("processor", "cores", "ram_gib")},
        "ram_cap_gib": cap,
        "gpu": m["gpu"],
    }


def versions(*others: str) -> dict:
    from h2o_flexgen.hardware import installed

    return installed("torch", "transformers", "numpy", *others)


def save(name: str, data: dict, ram_cap: int | None = None, others: tuple[str, ...] = ()) -> Path:
    """Write docs/benchmarks/NAME.json with the command, machine, versions (`others`: of more packages) and date."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    meta = {
        "command": f"python scripts/{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}",
        "date": date.today().isoformat(),
        "machine": machine(ram_cap),
        "versions": versions(*others),
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(meta | data, indent=1) + "\n")
    print(f"wrote {path.relative_to(ROOT)}")
    return path


def stored(name: str) -> dict:
    """What docs/benchmarks/NAME.json holds; nothing if there is no such file."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def kept(name: str, *others: str) -> dict:
    """What an earlier run wrote to docs/benchmarks/NAME.json, if on this machine and with these versions."""
    data = stored(name)
    same = data and data["versions"] == versions(*others) and data["machine"] | {"ram_cap_gib": None} == machine()
    return data if same else {}


def median(values: list[float]) -> float:
    return statistics.median(values)


def random_prompts(count: int, length: int) -> list[list[int]]:
    import torch

    return torch.randint(4, 50000, (count, length), generator=torch.Generator().manual_seed(0)).tolist()


def time_generate(model, prompts: list[list[int]], gen_len: int, device: str = "cpu") -> dict[str, float]:
    """Seconds of prefill and of the decode steps of transformers' `generate`."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Clock(StoppingCriteria):
        def __init__(self):
            self.times = []

        def __call__(self, input_ids, scores, **kwargs):
            if device != "cpu":
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    clock = Clock()
    ids = torch.tensor(prompts, device=device)
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=gen_len,
        min_new_tokens=gen_len,
        do_sample=False,
        pad_token_id=1,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    assert out.shape == (len(prompts), len(prompts[0]) + gen_len)
    return {
        "prefill": clock.times[0] - start,
        "decode": clock.times[-1] - clock.times[0],
    }


class MemoryCap:
    """A memory cgroup (v1 or v2) of `nbytes` (None: no limit), page cache included. Needs the right to make one (root).

    A process must enter before it allocates: what was charged before stays uncharged.
    """

    def __init__(self, nbytes: int | None):
        v1 = Path("/sys/fs/cgroup/memory")
        root = v1 if v1.is_dir() else Path("/sys/fs/cgroup")
        self.is_v1 = v1.is_dir()
        if not self.is_v1:
            control = root / "cgroup.subtree_control"
            if "memory" not in control.read_text().split():
                control.write_text("+memory")
        self.folder = Path(tempfile.mkdtemp(prefix="h2o_flexgen-", dir=root))
        limit = self.folder / ("memory.limit_in_bytes" if self.is_v1 else "memory.max")
        limit.write_text(str(nbytes) if nbytes is not None else "-1" if self.is_v1 else "max")
        if not self.is_v1 and (self.folder / "memory.swap.max").exists():
            (self.folder / "memory.swap.max").write_text("0")

    def run(self, argv: list[str], timeout: float | None = None, **kwargs) -> subprocess.CompletedProcess:
        """Run a command inside; a program over its cap may thrash instead of dying, hence the timeout."""
        procs = self.folder / "cgroup.procs"
        enter = f'echo $$ > {procs} && exec "$@"'
        return subprocess.run(["sh", "-c", enter, "sh", *argv], timeout=timeout, **kwargs)

    def peak(self) -> int:
        """The most bytes charged, page cache included."""
        name = "memory.max_usage_in_bytes" if self.is_v1 else "memory.peak"
        path = self.folder / name
        return int(path.read_text()) if path.exists() else 0

    def __enter__(self) -> MemoryCap:
        return self

    def __exit__(self, *exc) -> None:
        try:
            self.folder.rmdir()
        except OSError:
            pass


def scratch() -> Path:
    """A folder for checkpoints and offload, on a real disk (not a tmpfs); remove it when done."""
    base = os.environ.get("H2O_FLEXGEN_SCRATCH")
    return Path(tempfile.mkdtemp(prefix="h2o_flexgen-bench-", dir=base))


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
