"""RAM that this process uses and may use, within its cgroup (v1 or v2); free disk; gaps in its heap."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: bytes that libraries and the allocator hold beside tensors once they compute: 20 to 70 MiB
LIBRARIES = 48 << 20
#: oneDNN keeps what it compiled for each shape of a matmul, 1,024 of them by default. With every row that ends there is
#: another, hundreds of MiB in all that no plan counts; a pass needs about twenty. Read before the first matmul.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "48")
#: mallopt's names for two of its parameters, and the bytes they are set to
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
TRIM_BYTES = 64 << 20
MMAP_BYTES = 8 << 20
#: by the version of cgroups: where they are, the files of a group's limit and usage, what its counters begin with
CGROUPS = {
    1: ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("/sys/fs/cgroup", "memory.max", "memory.current", ""),
}


def hold_heap() -> None:
    """Keep large temporaries out of the heap: after a large block is freed, glibc takes others of up to 32 MiB from the
    heap, where they leave gaps that no plan counts, hundreds of MiB in a long job. Small blocks stay in the heap, since
    new pages for each would cost time."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)


def trim_heap() -> None:
    """Give free pages of the heap back to the system, also those between blocks in use."""
    ctypes.CDLL(None).malloc_trim(0)


def _lines(path: str) -> list[str]:
    """What a file of the kernel holds; nothing where there is none."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _cgroups_left() -> Iterator[float]:
    """Bytes left under the limits of this process's memory cgroup and of those that hold it."""
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            root, *files = CGROUPS[1 if controllers else 2]
            group = Path(root + path)  # in a container that of the host may be told: there our own is at the root
            yield from (_cgroup_left(folder, *files) for folder in (group, *group.parents))


def _cgroup_left(folder: Path, limit_file: str, usage_file: str, prefix: str) -> float:
    """Page cache that the kernel can drop counts as left, as in /proc/meminfo."""
    try:
        limit, usage = (int((folder / file).read_text()) for file in (limit_file, usage_file))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such cgroup, or its limit is "max"
        return float("inf")
    cache = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    return limit - max(0, usage - cache)


def ram_available() -> int:
    """Bytes of RAM this process can still take: free in the machine and allowed by its cgroups."""
    return max(0, min([_proc("meminfo", "MemAvailable"), *_cgroups_left()]))


def ram_in_all() -> int:
    """Bytes of RAM this process can hold: free ones and its own, but for mapped files, which count as free."""
    return ram_available() + _proc("self/status", "RssAnon") + _proc("self/status", "RssShmem")


def held() -> int:
    """Bytes of RAM that this process holds, after its free pages have gone back to the system."""
    trim_heap()
    return resident()


def baseline() -> int:
    """Bytes of RAM that this process holds now, and will beside tensors once it computes."""
    return held() + LIBRARIES


def disk_free(folder: Path) -> int:
    """Bytes that this user may still write to the file system of `folder`, or of the nearest parent that exists."""
    folder = folder.absolute()
    while not os.path.exists(folder):
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _proc(file: str, key: str) -> int:
    """Bytes that a file under /proc gives, as in "MemAvailable:  123 kB"; 0 if it does not."""
    return next((int(line.split()[1]) * 1024 for line in _lines(f"/proc/{file}") if line.startswith(key + ":")), 0)


def resident() -> int:
    """Bytes of RAM that this process holds now."""
    return _proc("self/status", "VmRSS")


def peak_resident() -> int:
    """The most bytes of RAM that this process has held since `reset_peak`."""
    return _proc("self/status", "VmHWM")


def reset_peak() -> None:
    """Start `peak_resident` anew; if the kernel refuses, it counts from the start of the process."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
