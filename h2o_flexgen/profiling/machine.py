"""Which machine this is, what rates measured on it are valid for, and how busy other programs keep it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from h2o_flexgen.offload.device import Device

#: of what is kept: a file of another format is measured again
FORMAT = 11


def machine(offload_root: Path | None = None, device: Device | None = None) -> dict:
    """What rates are valid for: CPU, RAM, GPU and, with a folder, its disk."""
    gpu = device.torch_device if device is not None and device.is_cuda else None
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = {
        "processor": next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name(gpu) if torch.cuda.is_available() else None,
    }
    if offload_root is not None:
        found["disk"] = mount_point(offload_root)
    return found


def versions() -> dict:
    """Of the packages that rates are valid for."""
    return {"profile": FORMAT, **installed("torch", "h2o_flexgen")}


def installed(*names: str) -> dict[str, str]:
    """Versions of Python and of packages, if they are there."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    return found


def mount_point(folder: Path) -> str:
    """Where the file system is mounted that a folder is on, or will be."""
    folder = Path(os.path.realpath(folder))
    while not os.path.ismount(folder):
        folder = folder.parent
    return str(folder)


def scheduled(threads: Path = Path("/proc/self/task")) -> tuple[float, float]:
    """Seconds that this process's threads ran, and that they waited for a core; zeros where the system does not count
    them."""
    ran = waited = 0
    for path in threads.glob("*/schedstat"):
        try:
            thread = path.read_text().split()
        except OSError:
            continue  # it has ended
        ran += int(thread[0])
        waited += int(thread[1])
    return ran / 1e9, waited / 1e9


class Crowding:
    """How much of the time since it was made this process waited for a core.

    Args:
        clock: as `scheduled`.
    """

    def __init__(self, clock: Callable[[], tuple[float, float]] = scheduled):
        self.clock, self.begun = clock, clock()

    def share(self) -> float:
        """In [0, 1]; 0 where the system does not count it."""
        ran, waited = (max(0.0, now - then) for now, then in zip(self.clock(), self.begun))
        return waited / (ran + waited) if waited else 0.0
