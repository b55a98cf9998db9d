"""RAM that this process uses and may use, within its cgroup (v1 or v2); free disk; gaps in its heap."""

from __future__ import annotations

import ctypes
import os
import shutil
from contextlib import suppress
from pathlib import Path

#: bytes that libraries and the allocator hold beside tensors once they compute: 20 to 70 MiB
LIBRARIES = 48 << 20
#: mallopt's names for two of its parameters, and the bytes they are set to
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
TRIM_BYTES, MMAP_BYTES = 64 << 20, 8 << 20
#: cgroup v1 writes "no limit" as a number near 2**63
_UNLIMITED = 1 << 60
#: of a cgroup by version: the files of its limit and of its usage, and what its counters begin with in memory.stat
CGROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


def hold_heap() -> None:
    """Keep large temporaries out of the heap: after a large block is freed, glibc takes others of up to 32 MiB from the
    heap, where they leave gaps that no plan counts, hundreds of MiB in a long job. Small blocks stay in the heap, since
    new pages for each would cost time."""
    _glibc("mallopt", M_MMAP_THRESHOLD, MMAP_BYTES)
    _glibc("mallopt", M_TRIM_THRESHOLD, TRIM_BYTES)


def trim_heap() -> None:
    """Give free pages of the heap back to the system, also those between blocks in use."""
    _glibc("malloc_trim", 0)


def _glibc(function: str, *args: int) -> None:
    with suppress(OSError, AttributeError):  # another C library
        getattr(ctypes.CDLL(None), function)(*args)


def _cgroup_bytes(path: Path) -> int | None:
    """What a file of a cgroup holds; None if there is no such file, or no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None


def _cgroup_folders() -> list[tuple[Path, int]]:
    """The memory cgroup of this process and its ancestors as (folder, cgroup version)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = (line.split(":", 2) + ["none", ""])[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        version, root = (1, Path("/sys/fs/cgroup/memory")) if controllers else (2, Path("/sys/fs/cgroup"))
        folder = root / path.lstrip("/")
        # in a container the path is the host's, but the mount shows the container's group at its root
        chain = [folder, *folder.parents] if folder.exists() else [root]
        folders += [(f, version) for f in chain if f == root or root in f.parents]
    return folders


def cgroup_available() -> int | None:
    """Bytes left under the tightest memory cgroup limit, or None without a limit; page cache that the kernel can drop
    counts as left, as in /proc/meminfo."""
    left = []
    for folder, version in _cgroup_folders():
        limit_file, usage_file, prefix = CGROUP_FILES[version]
        limit, usage = _cgroup_bytes(folder / limit_file), _cgroup_bytes(folder / usage_file)
        if limit is None or usage is None:
            continue
        try:
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            stat = {}
        cache = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        left.append(limit - max(0, usage - cache))
    return min(left) if left else None


def ram_available() -> int:
    """Bytes of RAM this process can still take: free in the machine and allowed by the cgroup."""
    machine = _proc("meminfo", "MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    cgroup = cgroup_available()
    return machine if cgroup is None else max(0, min(machine, cgroup))


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
    try:
        lines = Path(f"/proc/{file}").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":")), 0)
    except OSError:
        return 0


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
