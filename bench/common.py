"""What benchmarks and measuring scripts share: this machine in words, result files, prompts, and a scratch folder."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

from h2o_flexgen.profiling import machine as profiled
from h2o_flexgen.utils.files import cache_root, rounded, to_json

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks"
GIB = 1 << 30
#: begins the names of scratch folders
SCRATCH = "scratch-"
#: packages whose versions stand in a result
PACKAGES = ("torch", "transformers", "accelerate")


def command() -> str:
    """What was typed, without the paths of this machine."""
    path = Path(sys.argv[0]).resolve()
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(path.name)
    program = f"-m {'.'.join(name.with_suffix('').parts)}" if name.parts[0] == "bench" else str(name)
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return f"python {program} {shlex.join(words)}".strip()


def commit(root: Path = ROOT) -> str | None:
    """Of a working copy, with "-dirty" behind it if code was changed; None outside one."""

    def git(*argv: str) -> str:
        return subprocess.run(["git", "-C", root, *argv], capture_output=True, text=True, check=True).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "h2o_flexgen", "scripts", "bench")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def origin() -> dict:
    """How, when and where a result was made."""
    return {
        "command": command(),
        "commit": commit(),
        "date": date.today().isoformat(),
        "machine": profiled.described(),
        "versions": {k: v for k, v in profiled.installed(*PACKAGES).items() if k != "python"},
    }


def save(name: str, data: dict) -> Path:
    """Write docs/benchmarks/NAME.json: `data`, and its origin unless `data` has its own. The whole file, or none."""
    path = RESULTS / f"{name}.json"
    RESULTS.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(to_json(rounded(origin() | data)) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    print(f"wrote {path}")
    return path


def stored(name: str) -> dict:
    """What docs/benchmarks/NAME.json holds; nothing if there is no such file."""
    path = RESULTS / f"{name}.json"
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as e:
        sys.exit(f"error: {path} is damaged ({e}): restore it, or move it away")


def add(name: str, key: str, entry: dict, same: tuple[str, ...], order: Callable, more: dict | None = None) -> None:
    """Add an entry to the list `key` of docs/benchmarks/NAME.json, instead of one with the same values of `same`.

    Args:
        order: of the list, a key as `sorted` takes it.
        more: what the file says beside its origin and the list.

    Raises:
        SystemExit: the file is of another machine or other versions, or says something else of `more`.
    """
    old = stored(name)
    here = origin() | (more or {})
    if differ := [each for each in ("machine", "versions", *(more or ())) if old and old.get(each) != here[each]]:
        sys.exit(f"error: {name}.json is of another {' and '.join(differ)}: move it away, and run everything")
    kept = [each for each in old.get(key, []) if any(each[field] != entry[field] for field in same)]
    save(name, here | {key: sorted([*kept, entry], key=order)})


def random_prompts(count: int, length: int) -> list[list[int]]:
    """The same ones every time; every vocabulary of the benchmarks has these ids."""
    import torch

    return torch.randint(4, 49000, (count, length), generator=torch.Generator().manual_seed(0)).tolist()


def data_folder() -> Path:
    """What the benchmark makes once: checkpoints, the peers' environment, llama.cpp."""
    return cache_root() / "bench"


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in `data_folder` for what one benchmark offloads. It goes at the end, and after a kill when the next one
    starts. One benchmark at a time: two would disturb each other's timings.

    Raises:
        SystemExit: it cannot be written, or would be in RAM, or another benchmark runs.
    """
    lock = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        sys.exit("error: another benchmark runs on this machine, and would disturb this one's timings")
    root = data_folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob(f"{SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)
        folder = tempfile.TemporaryDirectory(prefix=SCRATCH, dir=root)
    except OSError as e:
        os.close(lock)
        sys.exit(f"error: cannot write to {root} ({e.strerror}): name another folder in H2O_FLEXGEN_HOME")
    try:
        mounts = dict(line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines())
        if mounts.get(profiled.mount_point(Path(folder.name))) in ("tmpfs", "ramfs"):
            sys.exit(f"error: {root} is in RAM: name a folder on a disk in H2O_FLEXGEN_HOME")
        yield Path(folder.name)
    finally:
        folder.cleanup()
        os.close(lock)


@contextmanager
def machine_use() -> Iterator[dict]:
    """Fills in how many cores others had meanwhile, on average: on a shared machine a run says how quiet it was."""
    found = {}
    begin = time.perf_counter()
    before = busy_seconds()
    try:
        yield found
    finally:
        every, ours = (after - earlier for after, earlier in zip(busy_seconds(), before))
        found["cores_of_others"] = max(0.0, every - ours) / (time.perf_counter() - begin)


def busy_seconds() -> tuple[float, float]:
    """Core seconds of all processes of this machine, what its host took included, and of this one and its children."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    ticks = user + nice + system + irq + softirq + steal
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return ticks / os.sysconf("SC_CLK_TCK"), sum(use.ru_utime + use.ru_stime for use in used)


def run_flex_opt(options: list[str], folder: Path, cap: int | None = None, timeout: float | None = None) -> dict:
    """The report of a run of the command line, in a memory cgroup of `cap` bytes if there is one. A run that fails has
    "failed" in the place of the report."""
    from bench.memory_cap import MemoryCap

    report = folder / "report.json"
    argv = [sys.executable, "-m", "h2o_flexgen.flex_opt", *options, "--report", str(report)]
    report.unlink(missing_ok=True)
    with MemoryCap(cap) as memory_cap:
        done = memory_cap.run([*argv, "--offload-dir", str(folder)], timeout, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return {"failed": f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"}
    return json.loads(report.read_text())
