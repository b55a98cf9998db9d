"""Shared by benchmarks and measuring scripts: result files and their origin, prompts, the scratch folder."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from operator import itemgetter
from pathlib import Path

from h2o_flexgen.profiling import machine as profiled
from h2o_flexgen.utils.files import cache_root, rounded, to_json

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks"
GIB = 1 << 30
#: prefix of scratch folders' names
SCRATCH = "scratch-"
#: packages whose versions a result records
PACKAGES = ("torch", "transformers", "accelerate")


def command() -> str:
    """The command line of this process, without paths of this machine."""
    path = Path(sys.argv[0]).resolve()
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(path.name)
    program = f"-m {'.'.join(name.with_suffix('').parts)}" if name.parts[0] == "bench" else str(name)
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return f"python {program} {shlex.join(words)}".strip()


def commit(root: Path = ROOT) -> str | None:
    """The commit of a checkout, with the suffix "-dirty" if its code has changes; None outside a checkout."""

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
    """Write `data` and its origin, which `data` may override, to docs/benchmarks/NAME.json atomically."""
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


def load_result(name: str) -> dict:
    """The content of docs/benchmarks/NAME.json, or an empty dict if there is no such file."""
    path = RESULTS / f"{name}.json"
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as e:
        sys.exit(f"error: {path} is damaged ({e}): restore it or move it away")


def check_origin(name: str, old: dict, new: dict, remedy: str) -> None:
    """Raises SystemExit if the stored result `old` has a machine, versions or contents other than `new`'s."""
    differing = [key for key in new if key not in ("command", "commit", "date") and old.get(key) != new[key]]
    if old and differing:
        sys.exit(f"error: {name}.json differs in {' and '.join(differing)}: {remedy}")


def add_entry(name: str, key: str, entry: dict, identity: tuple[str, ...], order: Callable, extra: dict) -> None:
    """Add an entry to the list `key` of docs/benchmarks/NAME.json, replacing the one with the same `identity`.

    Args:
        identity: fields that identify an entry.
        order: sort key of the list.
        extra: further contents of the file, beside its origin and the list.

    Raises:
        SystemExit: the file has another machine, other versions or another `extra`.
    """
    old = load_result(name)
    header = origin() | extra
    check_origin(name, old, header, "move it away and run everything again")
    key_of = itemgetter(*identity)
    others = [other for other in old.get(key, []) if key_of(other) != key_of(entry)]
    save(name, header | {key: sorted([*others, entry], key=order)})


def random_prompts(count: int, length: int) -> list[list[int]]:
    """Always the same prompts; every vocabulary in the benchmarks has their ids."""
    import torch

    return torch.randint(4, 49000, (count, length), generator=torch.Generator().manual_seed(0)).tolist()


def data_folder() -> Path:
    """Folder of what is made once: checkpoints, the peers' environment, llama.cpp."""
    return cache_root() / "bench"


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder in `data_folder` for what a benchmark offloads. After a kill the next benchmark deletes it.

    Raises:
        SystemExit: it cannot be written or would be in RAM, or another benchmark is running.
    """
    lock = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        sys.exit("error: another benchmark is running on this machine and would disturb the timings")
    root = data_folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(f"{SCRATCH}*"):
            shutil.rmtree(leftover, ignore_errors=True)
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
    """Yields a dict that gets "cores_of_others": how many cores other processes used on average in the meantime."""
    found = {}
    begin = time.perf_counter()
    before = busy_seconds()
    try:
        yield found
    finally:
        total, ours = (after - earlier for after, earlier in zip(busy_seconds(), before))
        found["cores_of_others"] = max(0.0, total - ours) / (time.perf_counter() - begin)


def busy_seconds() -> tuple[float, float]:
    """Core seconds used by all of this machine (and stolen by its host), and by this process and its children."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    ticks = user + nice + system + irq + softirq + steal
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return ticks / os.sysconf("SC_CLK_TCK"), sum(use.ru_utime + use.ru_stime for use in used)


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
