"""What the benchmark scripts share: a description of the machine, result files, and a memory cap."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CGROUPS, SWAPS, VMSTAT = Path("/sys/fs/cgroup"), Path("/proc/swaps"), Path("/proc/vmstat")
RESULTS = ROOT / "docs" / "benchmarks"
#: a folder, locked by the one benchmark that runs on this machine
LOCK = Path(tempfile.gettempdir())
sys.path.insert(0, str(ROOT))


def machine(ram_cap: int | None = None) -> dict:
    """The machine in words."""
    from h2o_flexgen.hardware import machine as found
    from h2o_flexgen.kernels.linear import has_bf16

    m = found()
    cap = None if ram_cap is None else round(ram_cap / 2**30, 2)
    return {
        **{name: m[name] for name in ("processor", "cores", "ram_gib")},
        "processor_model": processor_model(),
        "bf16_instructions": has_bf16(),
        "ram_cap_gib": cap,
        "gpu": m["gpu"],
    }


def processor_model() -> str | None:
    """Its generation: processors of quite different speed may have the same name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = dict([part.strip() for part in line.split(":", 1)] for line in lines if ":" in line)
    return ", ".join(f"{name} {found[name]}" for name in ("cpu family", "model") if name in found) or None


def machine_name() -> str:
    """The processor, or the card if there is one, for the name of a file."""
    m = machine()
    name = (m["gpu"] or m["processor"]).lower().replace("(r)", "").replace("processor", "")
    return "_".join(re.findall(r"[a-z0-9.]+", name))


def versions(*others: str) -> dict:
    from h2o_flexgen.hardware import installed

    return installed("torch", "transformers", "numpy", *others)


def command() -> str:
    """What was typed, without the paths of this machine."""
    return f"python scripts/{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}"


@cache
def commit() -> str | None:
    """Of this working copy when it was first asked for, as benchmarks do before what they measure is imported or
    started: "-dirty" if the code was changed; None if it is none."""

    def git(*argv: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *argv], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        dirty = git("status", "--porcelain", "h2o_flexgen", "scripts")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def save(name: str, data: dict, ram_cap: int | None = None, others: tuple[str, ...] = ()) -> Path:
    """Write docs/benchmarks/NAME.json with command, commit, machine, versions (`others`: of more packages) and date,
    unless `data` has its own."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    meta = {
        "command": command(),
        "commit": commit(),
        "date": date.today().isoformat(),
        "machine": machine(ram_cap),
        "versions": versions(*others),
    }
    path = RESULTS / f"{name}.json"
    try:
        write_json(path, meta | data)
    except OSError as e:
        sys.exit(f"error: cannot write docs/benchmarks/{path.name} ({e.strerror}); what it held before is still there")
    print(f"wrote docs/benchmarks/{path.name}")
    return path


def write_json(path: Path, data: dict) -> None:
    """The whole file or, whatever happens, the one that was there."""
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(json.dumps(data, indent=1) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def stored(name: str) -> dict:
    """What docs/benchmarks/NAME.json holds; nothing if there is no such file. Raises SystemExit if it is damaged."""
    path = RESULTS / f"{name}.json"
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as e:
        sys.exit(f"error: docs/benchmarks/{path.name} is damaged ({e}): restore it, or move it away")


def made_elsewhere(data: dict) -> str | None:
    """In what the machine of a result file differs from this one; None if in nothing. Early files do not name the
    generation of the processor."""
    return _differ(data["machine"], machine())


def made_otherwise(data: dict, *others: str) -> str | None:
    """The same for versions (`others`: of more packages; not every package is needed for every run)."""
    return _differ(data["versions"], versions(*others))


def _differ(there: dict, here: dict) -> str | None:
    both = [k for k in there if k in here and k != "ram_cap_gib"]
    return "; ".join(f"{k} {there[k]}, here {here[k]}" for k in both if there[k] != here[k]) or None


def kept(name: str) -> dict:
    """What an earlier run wrote to docs/benchmarks/NAME.json, if on this machine and with these versions."""
    data = stored(name)
    return {} if not data or made_elsewhere(data) or made_otherwise(data) else data


def random_prompts(count: int, length: int) -> list[list[int]]:
    import torch

    return torch.randint(4, 50000, (count, length), generator=torch.Generator().manual_seed(0)).tolist()


def before_token_steps(call: Callable[[int], None]) -> Callable[[], None]:
    """`call` gets the number of every token step of our engines before it begins; what is returned ends that."""
    from h2o_flexgen.engine.schedule import ZigZag

    original = ZigZag.layers

    def layers(schedule):
        for i, j, active in original(schedule):
            if j == 0:
                call(i)
            yield i, j, active

    ZigZag.layers = layers
    return lambda: setattr(ZigZag, "layers", original)


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
    """A memory cgroup (v1 or v2) of `nbytes` (None: none is made), page cache included. Needs the right to make one.

    A process must enter before it allocates: what was charged before stays uncharged.

    Raises:
        SystemExit: no cgroup can be made, or swap would get around it.
    """

    PREFIX = "h2o_flexgen-"

    def __init__(self, nbytes: int | None):
        self.folder: Path | None = None
        if nbytes is None:
            self.kills_before = oom_kills(VMSTAT)
            return
        root = self.root()
        self.is_v1 = root != CGROUPS
        try:
            control = root / "cgroup.subtree_control"
            if not self.is_v1 and "memory" not in control.read_text().split():
                control.write_text("+memory")
            self.folder = Path(tempfile.mkdtemp(prefix=f"{self.PREFIX}{os.getpid()}-", dir=root))
            self._file("memory.limit_in_bytes", "memory.max").write_text(str(nbytes))
            # without swap
            swap, limit = self._file("memory.memsw.limit_in_bytes", "memory.swap.max"), nbytes if self.is_v1 else 0
            if swap.exists():
                swap.write_text(str(limit))
            elif SWAPS.exists() and len(SWAPS.read_text().splitlines()) > 1:
                self.__exit__()
                sys.exit(
                    "error: this kernel counts no swap, and there is some: a program over its cap would go on there"
                )
        except OSError as e:
            self.__exit__()
            sys.exit(
                f"error: cannot make a memory cgroup under {root} ({e.strerror}): that takes root, not in a container"
            )

    @staticmethod
    def root() -> Path:
        """Of the memory cgroups of version 1, or of all cgroups of version 2."""
        v1 = CGROUPS / "memory"
        return v1 if v1.is_dir() else CGROUPS

    @classmethod
    def sweep(cls) -> None:
        """Remove what killed benchmarks left: of processes that live no more, with no process inside."""
        for folder in cls.root().glob(f"{cls.PREFIX}*"):
            if not Path("/proc", folder.name.removeprefix(cls.PREFIX).split("-")[0]).exists():
                with suppress(OSError):
                    folder.rmdir()

    def _file(self, v1: str, v2: str) -> Path:
        return self.folder / (v1 if self.is_v1 else v2)

    def run(self, argv: list[str], timeout: float | None = None, **kwargs) -> subprocess.CompletedProcess:
        """Run a command inside; a program over its cap may thrash instead of dying, hence the timeout."""
        if self.folder is not None:
            argv = ["sh", "-c", f'echo $$ > {self.folder / "cgroup.procs"} && exec "$@"', "sh", *argv]
        return subprocess.run(argv, timeout=timeout, **kwargs)

    def peak(self) -> int | None:
        """The most bytes charged, page cache included; None if the kernel does not tell."""
        if self.folder is None:
            return None
        path = self._file("memory.max_usage_in_bytes", "memory.peak")
        return int(path.read_text()) if path.exists() else None

    def killed(self) -> bool:
        """Whether the kernel killed a process at the cap, or without one for want of the machine's memory."""
        if self.folder is None:
            return oom_kills(VMSTAT) != self.kills_before
        return oom_kills(self._file("memory.oom_control", "memory.events")) != 0

    def __enter__(self) -> MemoryCap:
        return self

    def __exit__(self, *exc) -> None:
        if self.folder is not None:
            with suppress(OSError):
                self.folder.rmdir()


def oom_kills(path: Path) -> int | None:
    """Processes killed for want of memory that the kernel counts in a file; None if it does not, as older ones."""
    counts = dict(line.split() for line in path.read_text().splitlines())
    return int(counts["oom_kill"]) if "oom_kill" in counts else None


@contextmanager
def alone() -> Iterator[None]:
    """One benchmark of a machine at a time: two would disturb each other's timings, and of two that write the same
    file each would undo what the other has added.

    Raises:
        SystemExit: another one runs.
    """
    lock = os.open(LOCK, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit("error: another benchmark runs on this machine, and would disturb this one's timings")
        yield
    finally:
        os.close(lock)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in $H2O_FLEXGEN_SCRATCH or the temporary folder for the checkpoints and offload of one benchmark at a
    time; it goes at the end, and if this process is killed, when the next one starts.

    Raises:
        SystemExit: it cannot be written, or would be in RAM, or another benchmark runs.
    """
    from h2o_flexgen.errors import UserError
    from h2o_flexgen.offload.disk import OffloadFolder

    with alone():
        MemoryCap.sweep()
        root = Path(os.environ.get("H2O_FLEXGEN_SCRATCH") or tempfile.gettempdir())
        try:
            folder = OffloadFolder(root)
        except UserError as e:
            sys.exit(f"error: {str(e).replace('offload_dir', 'folder in H2O_FLEXGEN_SCRATCH')}")
        try:
            if file_system(folder.path) in ("tmpfs", "ramfs"):
                sys.exit(f"error: {folder.root} is in RAM: name a folder on a disk in H2O_FLEXGEN_SCRATCH")
            yield folder.path
        finally:
            folder.close()


def file_system(folder: Path) -> str:
    """The type of the file system that a folder is on."""
    from h2o_flexgen.hardware import mount_point

    mounts = (line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines())
    return dict(mounts).get(mount_point(folder), "unknown")
