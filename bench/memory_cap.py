"""A memory cgroup around a benchmark. It counts page cache: whatever exceeds the cap comes from disk for everyone."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
SWAPS = Path("/proc/swaps")
VMSTAT = Path("/proc/vmstat")


class MemoryCap:
    """A memory cgroup (v1 or v2) of `nbytes`, or none if that is None.

    Raises:
        SystemExit: the cgroup cannot be created, which takes root, or processes could swap past it.
    """

    PREFIX = "h2o_flexgen-"

    def __init__(self, nbytes: int | None):
        self.folder: Path | None = None
        if nbytes is None:
            self.kills_before = oom_kills(VMSTAT)
            return
        self.is_v1 = (CGROUPS / "memory").is_dir()
        root = CGROUPS / "memory" if self.is_v1 else CGROUPS
        try:
            for left in root.glob(f"{self.PREFIX}*"):  # of killed benchmarks; one in use cannot be removed
                with suppress(OSError):
                    left.rmdir()
            control = root / "cgroup.subtree_control"
            if not self.is_v1 and "memory" not in control.read_text().split():
                control.write_text("+memory")
            self.folder = Path(tempfile.mkdtemp(prefix=self.PREFIX, dir=root))
            self._file("memory.limit_in_bytes", "memory.max").write_text(str(nbytes))
            swap = self._file("memory.memsw.limit_in_bytes", "memory.swap.max")
            if swap.exists():
                swap.write_text(str(nbytes) if self.is_v1 else "0")
            elif SWAPS.exists() and len(SWAPS.read_text().splitlines()) > 1:
                self.__exit__()
                sys.exit("error: this kernel counts no swap: a program over its cap would continue in swap")
        except OSError as e:
            self.__exit__()
            sys.exit(f"error: cannot create a memory cgroup under {root} ({e.strerror}): run as root")

    def _file(self, v1: str, v2: str) -> Path:
        return self.folder / (v1 if self.is_v1 else v2)

    def run(self, argv: list[str], timeout: float | None = None, **kwargs) -> subprocess.CompletedProcess:
        """Run a command inside. It enters before it allocates, since earlier memory would not count. A program over its
        cap may thrash instead of dying, hence the timeout."""
        if self.folder is not None:
            argv = ["sh", "-c", f'echo $$ > {self.folder / "cgroup.procs"} && exec "$@"', "sh", *argv]
        return subprocess.run(argv, timeout=timeout, preexec_fn=die_with_parent, **kwargs)

    def killed(self) -> bool:
        """Whether the kernel killed a process for lack of memory: inside the cgroup, or without one anywhere."""
        if self.folder is None:
            return oom_kills(VMSTAT) != self.kills_before
        return oom_kills(self._file("memory.oom_control", "memory.events")) != 0

    def __enter__(self) -> MemoryCap:
        return self

    def __exit__(self, *exc) -> None:
        if self.folder is not None:
            with suppress(OSError):
                os.rmdir(self.folder)


def oom_kills(path: Path) -> int | None:
    """The number of out-of-memory kills in a counter file; None on older kernels, which do not count them."""
    counts = dict(line.split() for line in path.read_text().splitlines())
    return int(counts["oom_kill"]) if "oom_kill" in counts else None


def die_with_parent() -> None:
    """Called in a child, so that nothing this benchmark started runs beside the next one."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
