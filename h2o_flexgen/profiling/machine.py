"""What machine this is, how busy other programs keep it, and the files that keep what was measured on it."""

from __future__ import annotations

import logging
import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from h2o_flexgen.errors import UserError
from h2o_flexgen.machine.device import Device
from h2o_flexgen.utils.files import cache_folder, make_private, read_json

#: version of the kept files: with another one everything is measured again
FORMAT = 24
#: fraction of the time that a process may wait for a core while it measures: 0.03 at rest, 0.4 beside a busy program
CROWDED = 0.2

log = logging.getLogger(__name__)


def machine(offload_root: Path | None = None, device: Device | None = None) -> dict:
    """What measured rates depend on: CPU, RAM, GPU and, with a folder, its disk."""
    gpu = device.torch_device if device is not None and device.is_cuda else None
    found = {
        "cpu": _cpu_info().get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name(gpu) if torch.cuda.is_available() else None,
    }
    return found if offload_root is None else found | {"disk": mount_point(offload_root)}


def _cpu_info() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)


def described() -> dict:
    """This machine, as results name it. The CPU's model number distinguishes CPUs that are sold under one name."""
    found = machine()
    cpu = _cpu_info()
    model = ", ".join(f"{name} {cpu[name]}" for name in ("cpu family", "model") if name in cpu)
    return {name: found[name] for name in ("cpu", "cores", "ram_gib", "gpu")} | {"cpu_model": model or None}


def stamp(offload_root: Path | None = None, device: Device | None = None) -> dict:
    """Machine and versions, written beside rates, which are valid only while it stays the same."""
    versions = {"profile": FORMAT, **installed("torch", "h2o_flexgen")}
    return {"machine": machine(offload_root, device), "versions": versions}


def installed(*names: str) -> dict[str, str]:
    """Versions of Python and of the named packages, without those that are not installed."""
    found = {"python": platform.python_version()}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def mount_point(folder: Path) -> str:
    """The mount point of the file system that holds a folder, which need not exist yet."""
    folder = Path(os.path.realpath(folder))
    while not os.path.ismount(folder):
        folder = folder.parent
    return str(folder)


def scheduled(threads: Path = Path("/proc/self/task")) -> tuple[float, float]:
    """Seconds that this process's threads ran, and that they waited for a core; zeros where the kernel does not count
    them."""
    ran = waited = 0
    for path in threads.glob("*/schedstat"):
        try:
            thread = path.read_text().split()
        except OSError:
            continue  # the thread has ended
        ran += int(thread[0])
        waited += int(thread[1])
    return ran / 1e9, waited / 1e9


def crowding(before: tuple[float, float], now: tuple[float, float]) -> float:
    """The fraction of the time between two calls of `scheduled` that this process waited for a core, in [0, 1]."""
    ran, waited = (max(0.0, b - a) for a, b in zip(before, now))  # less than 0 once a thread has ended
    return waited / (ran + waited) if waited else 0.0


# kept files


def kept_file(name: str) -> Path:
    return cache_folder("hardware") / f"{name}.json"


def read_kept(path: Path, expected: dict) -> dict | None:
    """The content of a kept file, if its `stamp` is the expected one."""
    try:
        data = read_json("what was measured", path)
        return data if {name: data[name] for name in expected} == expected else None
    except (UserError, KeyError, TypeError):
        return None


def keep(path: Path, text: str) -> None:
    """Write a file, or warn. If it is cut short, everything is measured again."""
    try:
        make_private(path.parent)
        path.write_text(text + "\n")
    except OSError as e:
        log.warning("cannot keep what was measured in %s: %s", path, e.strerror)
