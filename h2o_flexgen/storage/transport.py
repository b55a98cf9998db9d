"""The links between the tiers: disk requests, transfer queues, and the files of the offload folder."""

from __future__ import annotations

import threading
from copy import copy as shallow_copy
from pathlib import Path

from torch import Tensor

from h2o_flexgen.machine.device import Device, copy
from h2o_flexgen.storage.disk import DiskIO, File, OffloadFolder
from h2o_flexgen.storage.queues import KV_BUFFERS, TransferQueue

#: threads of each transfer queue
WORKERS = {"weights": 1, "cache": KV_BUFFERS, "activations": 1, "store": 1}


class Transport:
    """What the stores of one device share, and with those of other devices (`beside`) files, requests and counts.

    Args:
        offload_root: the offload folder.
        overlap: transfers run beside compute.

    Attributes:
        io: reads and writes files.
        queues: "weights", "cache" and "activations" move data to the device, "store" moves it back.
    """

    def __init__(self, device: Device, offload_root: Path, overlap: bool = True):
        self.device = device
        self.offload_root = offload_root
        self.overlap = overlap
        self.io = DiskIO()
        self._folder = OffloadFolder(offload_root)
        self._opened: list[TransferQueue] = []  # of all devices
        self.queues = self._open(device)
        self._copied = {"cpu_to_gpu": 0, "gpu_to_cpu": 0}
        self._lock = threading.Lock()

    def _open(self, device: Device) -> dict[str, TransferQueue]:
        found = {name: TransferQueue(device, name, self.overlap, count) for name, count in WORKERS.items()}
        self._opened += found.values()
        return found

    def beside(self, device: Device) -> Transport:
        """The same for another device, with queues of its own; this one closes it."""
        other = shallow_copy(self)
        other.device = device
        other.queues = self._open(device)
        return other

    def to_device(self, dst: Tensor, src: Tensor) -> None:
        """Copy from RAM to the device, on the current stream."""
        copy(dst, src)
        self.count("cpu_to_gpu", dst.nbytes)

    def to_host(self, dst: Tensor, src: Tensor) -> None:
        """Copy from the device to RAM, on the current stream."""
        copy(dst, src)
        self.count("gpu_to_cpu", dst.nbytes)

    def count(self, link: str, nbytes: int) -> None:
        """Count bytes that were copied from "cpu_to_gpu" or from "gpu_to_cpu"."""
        with self._lock:
            self._copied[link] += nbytes

    def moved_bytes(self) -> dict[str, int]:
        """Bytes moved between the tiers so far, by link."""
        return {"disk_to_cpu": self.io.read_bytes, **self._copied, "cpu_to_disk": self.io.written_bytes}

    def file(self, name: str, nbytes: int) -> File | None:
        """A new file of `nbytes` in the offload folder, None for 0. Raises UserError if there is no space for it."""
        if nbytes == 0:
            return None
        return self._folder.file(name, nbytes)

    def disk_bytes(self) -> int:
        """Bytes of the files in the offload folder."""
        return self._folder.size()

    def close(self) -> None:
        """Wait for running transfers, drop waiting ones, and remove the files."""
        for queue in self._opened:
            queue.close()
        self.io.close()
        self._folder.close()
