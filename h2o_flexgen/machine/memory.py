"""RAM that this process uses and may use, within its cgroup (v1 or v2); its heap; free disk."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: bytes that libraries and the allocator hold besides tensors once they compute: 20 to 70 MiB
LIBRARIES = 48 << 20
#: oneDNN caches what it compiles for each shape of a matmul, 1,024 shapes by default. Every row that ends makes another
#: shape, in all hundreds of MiB that no plan counts; a pass needs about twenty. Read before the first matmul.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "48")
#: the kernel clears fresh memory for each large temporary, a tenth of the CPU time of a large prefill, and half of that
#: in pages of 2 MiB. Read before the first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
#: two parameters of mallopt, and the bytes they are set to
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
TRIM_BYTES = 64 << 20
MMAP_BYTES = 8 << 20
#: by version of cgroups: their root, the files of a group's limit and usage, the prefix of its counters
CGROUPS = {
    1: ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("/sys/fs/cgroup", "memory.max", "memory.current", ""),
}


def hold_heap() -> None:
    """Keep large temporaries out of the heap: once a large block has been freed, glibc allocates others of up to 32 MiB
    in the heap and fragments it, in a long job by hundreds of MiB that no plan counts. Small blocks stay in the heap,
    since fresh pages for each would cost time."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)


def trim_heap() -> None:
    """Return free pages of the heap to the system, including those between blocks in use."""
    ctypes.CDLL(None).malloc_trim(0)


def _lines(path: str) -> list[str]:
    """The lines of a file of the kernel; none if it is missing."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _cgroups_left() -> Iterator[float]:
    """Bytes left under the limits of this process's memory cgroup and of its ancestors."""
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            root, *files = CGROUPS[1 if controllers else 2]
            group = Path(root + path)  # in a container this may be the host's path, with our own group at the root
            yield from (_cgroup_left(folder, *files) for folder in (group, *group.parents))


def _cgroup_left(folder: Path, limit_file: str, usage_file: str, prefix: str) -> float:
    """Bytes left under one limit. Page cache that the kernel can drop counts as left, as in /proc/meminfo."""
    try:
        limit, usage = (int((folder / file).read_text()) for file in (limit_file, usage_file))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such cgroup, or its limit is "max"
        return float("inf")
    cache = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    return limit - max(0, usage - cache)


def ram_available() -> int:
    """Bytes of RAM that this process can still take: free on the machine and allowed by its cgroups."""
    return max(0, min([_proc("meminfo", "MemAvailable"), *_cgroups_left()]))


def ram_in_all() -> int:
    """Bytes of RAM that this process can hold: available ones, which include mapped files, and its own."""
    return ram_available() + _proc("self/status", "RssAnon") + _proc("self/status", "RssShmem")


def held() -> int:
    """Bytes of RAM that this process holds once its heap is trimmed."""
    trim_heap()
    return resident()


def baseline() -> int:
    """Bytes of RAM that this process will hold besides further tensors once it computes."""
    return held() + LIBRARIES


def disk_free(folder: Path) -> int:
    """Bytes that this user may still write to the file system of `folder`, or of the nearest parent that exists."""
    folder = folder.absolute()
    while not os.path.exists(folder):
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _proc(file: str, key: str) -> int:
    """Bytes of an entry like "MemAvailable:  123 kB" in a file under /proc; 0 if there is none."""
    return next((int(line.split()[1]) * 1024 for line in _lines(f"/proc/{file}") if line.startswith(key + ":")), 0)


def resident() -> int:
    """Bytes of RAM that this process holds now."""
    return _proc("self/status", "VmRSS")


def peak_resident() -> int:
    """The most bytes of RAM that this process has held since `reset_peak`."""
    return _proc("self/status", "VmHWM")


def reset_peak() -> None:
    """Reset `peak_resident`; if the kernel refuses, it keeps counting from the start of the process."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
