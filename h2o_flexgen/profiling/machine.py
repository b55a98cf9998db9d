"""Which machine this is: what a profile is valid for, and what a result must name."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from h2o_flexgen.offload.device import Device

#: of a profile: one that was kept by an older version is measured again
FORMAT = 9


def machine(offload_root: Path | None = None, device: Device | None = None) -> dict:
    """What a profile is valid for."""
    card = device.torch_device if device is not None and device.is_cuda else None
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = {
        "processor": next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name(card) if torch.cuda.is_available() else None,
    }
    if offload_root is not None:
        found["disk"] = mount_point(offload_root)
    return found


def versions() -> dict:
    """What a profile is valid for, too."""
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
    """Seconds that this process's threads ran on a processor, and that they waited for one; nothing where the system
    does not count them."""
    ran = waited = 0
    for path in threads.glob("*/schedstat"):
        try:
            thread = path.read_text().split()
        except OSError:
            continue  # it has ended
        ran += int(thread[0])
        waited += int(thread[1])
    return ran / 1e9, waited / 1e9
