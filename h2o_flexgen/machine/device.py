"""The compute device: its memory, pinned RAM, events, and the time that compute waits for data.

On CUDA, events order the streams of compute and of the transfer queues (`storage.queues`), so that no step waits for
the whole device. On the CPU a job is done when it returns, and events are None.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.formats import dtype_name
from h2o_flexgen.kernels.linear import rates
from h2o_flexgen.machine import memory
from h2o_flexgen.machine.pages import PAGE, aligned

#: torch's CUDA allocator hands out multiples of this many bytes
CUDA_ALIGN = 512
#: anonymous memory of at least this many bytes is mapped with huge pages
HUGE_PAGE = 1 << 21
#: by the names that a user may give
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
DTYPES |= {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def open_device(name: str = "auto") -> Device:
    """The device named "cpu", "cuda", "cuda:N", or "auto": CUDA if there is any, else the CPU. Raises UserError for
    another name, and for a device that torch does not see."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return CpuDevice(torch.device("cpu"))
    if (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        other = f"the last is cuda:{count - 1}" if count else "leave `device` out to compute on the CPU"
        raise UserError(f"`device` {name}: this torch sees {count} CUDA devices: {other}")
    # an index: each thread has its own current device, and some calls need one
    return CudaDevice(torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index))


def check_devices(devices: list[Device]) -> None:
    """Raises UserError for devices that cannot share a model: of both kinds, or a GPU twice. The CPU may be given
    several times, as so many pools of RAM."""
    given = f"`device` {device_names(devices)}"
    if len({device.is_cuda for device in devices}) > 1:
        raise UserError(f"{given}: give GPUs alone, or the CPU alone, whose RAM GPUs use anyway")
    gpus = [str(device) for device in devices if device.is_cuda]
    if twice := [name for name in gpus if gpus.count(name) > 1]:
        raise UserError(f"{given}: {twice[0]} is given twice")


def device_names(devices: list[Device]) -> str:
    """The names of devices, as a user gives them."""
    return ",".join(map(str, devices))


def pool_names(devices: list[Device]) -> list[str]:
    """What a plan calls the memory of each device: of a single one it is the gpu tier."""
    if len(devices) == 1:
        return ["gpu"]
    return [str(device) if device.is_cuda else f"cpu:{n}" for n, device in enumerate(devices)]


class Device:
    """Where the model computes."""

    is_cuda = False
    workspace_bytes = 0  # device memory that matrix libraries keep, known after `CudaDevice.start`

    def __init__(self, torch_device: torch.device):
        self.torch_device = torch_device
        self._stalls = defaultdict(float)

    def __str__(self) -> str:
        return str(self.torch_device)

    def dtype(self, name: str, stored: torch.dtype | None = None) -> torch.dtype:
        """The dtype of a name in DTYPES, or for "auto" the one to compute in; `stored`: that of most of the checkpoint,
        if known. Raises UserError for another name."""
        if name == "auto":
            return self._auto_dtype(stored)
        if name not in DTYPES:
            raise UserError(f"unknown dtype {name!r}: use auto, float16, bfloat16 or float32")
        return DTYPES[name]

    def _auto_dtype(self, stored: torch.dtype | None) -> torch.dtype:
        raise NotImplementedError

    def buffer(self, nbytes: int) -> Tensor:
        """`nbytes` on the compute device, uint8, page-aligned."""
        raise NotImplementedError

    def buffers(self, sizes: list[int]) -> list[Tensor]:
        """Buffers that are freed together."""
        return [self.buffer(nbytes) for nbytes in sizes]

    def host_buffer(self, nbytes: int) -> Tensor:
        """`nbytes` of RAM, uint8, page-aligned; pinned on CUDA, so that copies run beside compute. Raises UserError if
        the system grants no such memory, or CUDA cannot pin it."""
        return host_memory(nbytes)

    def pinned_count(self) -> int:
        return 0

    def unpin(self, since: int = 0) -> None:
        """Unpin all but the first `since` buffers of `host_buffer`; no copy may use them any more."""

    def start(self, most_bytes: int | None) -> None:
        """CUDA: load what computing takes now, and limit this process to `most_bytes` of device memory."""

    def free_bytes(self) -> int:
        """Bytes that can still be allocated on the device, torch's cached memory included."""
        raise NotImplementedError

    def release_cached(self) -> None:
        """CUDA: return memory that torch keeps for reuse to the driver."""

    def release_gaps(self) -> None:
        """CPU: trim the heap, in which temporaries leave free pages."""

    def record(self):
        """An event behind everything queued on the current stream; None on the CPU."""

    def wait(self, event) -> None:
        """Make what is queued next on the current stream run after `event`; does not block the thread."""

    def wait_for(self, job: Future | None) -> None:
        """In a job of a transfer queue: continue after a job of another queue. Raises that job's error."""
        if job is not None:
            self.wait(job.result())

    def synchronize(self) -> None:
        """Wait for all streams; only around a phase that is timed."""

    def reset_meters(self) -> None:
        """Reset peak memory and stall times."""
        self._stalls.clear()
        memory.reset_peak()

    def mark(self):
        """A point in time for `seconds_between`; on CUDA, of the current stream."""
        return time.perf_counter()

    def seconds_between(self, begin, end) -> float:
        """Seconds between two marks; waits for the second one."""
        return end - begin

    @contextmanager
    def stalling(self, kind: str) -> Iterator[None]:
        """Count the time inside the `with` as compute waiting for data of this kind."""
        start = time.perf_counter()
        yield
        self._stalls[kind] += time.perf_counter() - start

    def stall_on(self, future: Future | None, kind: str) -> None:
        """Make compute wait for a transfer, and count how long it waits. Raises the transfer's error."""
        if future is not None:
            with self.stalling(kind):
                future.result()

    def hold_back(self, jobs: deque[Future], most: int, kind: str) -> None:
        """Wait for the oldest jobs until fewer than `most` are left, since each keeps tensors alive."""
        while len(jobs) >= most:
            self.stall_on(jobs.popleft(), kind)

    @property
    def stall_seconds(self) -> dict[str, float]:
        """Per kind of data, the time that compute waited for it since `reset_meters`."""
        return dict(self._stalls)


class CpuDevice(Device):
    """The CPU, whose memory is RAM."""

    def _auto_dtype(self, stored: torch.dtype | None) -> torch.dtype:
        """The fastest as measured (`KernelRates.dtype`)."""
        return getattr(torch, rates().dtype(stored and dtype_name(stored)))

    def buffer(self, nbytes: int) -> Tensor:
        return host_memory(nbytes)

    def free_bytes(self) -> int:
        return memory.ram_available()

    def release_gaps(self) -> None:
        memory.trim_heap()


class CudaDevice(Device):
    """A GPU."""

    is_cuda = True

    def __init__(self, torch_device: torch.device):
        super().__init__(torch_device)
        self._pinned: list[Tensor] = []
        self._most_bytes = float("inf")  # of the device's memory
        self.stall_events = defaultdict(deque)  # by kind of data, pairs around waits not yet seen to have ended

    def _auto_dtype(self, stored: torch.dtype | None) -> torch.dtype:
        """fp16, or bf16 for a checkpoint in bf16 where the GPU has it."""
        has_bf16 = torch.cuda.get_device_capability(self.torch_device) >= (8, 0)
        return torch.bfloat16 if stored == torch.bfloat16 and has_bf16 else torch.float16

    def start(self, most_bytes: int | None) -> None:
        """Load context and matrix libraries now, and limit this process to `most_bytes` of device memory. Raises
        UserError if other programs have left too little of it."""
        try:
            torch.cuda.empty_cache()
            torch.backends.cuda.enable_cudnn_sdp(False)  # it plans again for every shape of a micro-batch
            self.workspace_bytes = _workspace_bytes(self.torch_device)
        except RuntimeError as e:  # from torch, CUDA or cuBLAS
            cause = f"cannot start on {self}: {reason(e)}"
            raise UserError(f"{cause}; if its memory is full, end other programs that use it") from None
        if most_bytes is not None:
            self._most_bytes = most_bytes
        total = torch.cuda.get_device_properties(self.torch_device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, self._most_bytes / total), self.torch_device)

    def buffer(self, nbytes: int) -> Tensor:
        # zeros: an empty slot is masked, but a NaN left in it would spread through 0 * NaN
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)

    def buffers(self, sizes: list[int]) -> list[Tensor]:
        """One allocation, since torch rounds single ones of a few MiB up by as much as a fifth."""
        starts = list(accumulate((-(-nbytes // CUDA_ALIGN) * CUDA_ALIGN for nbytes in sizes), initial=0))
        slab = self.buffer(starts[-1])
        return [slab[at : at + nbytes] for at, nbytes in zip(starts, sizes)]

    def host_buffer(self, nbytes: int) -> Tensor:
        buffer = host_memory(nbytes)
        if nbytes:
            # torch's pinned allocator rounds up to a power of two, which can double a large cache
            with torch.cuda.device(self.torch_device):  # else CUDA would make a context on another GPU
                error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), aligned(nbytes), 0)
            if int(error) != 0:
                with suppress(RuntimeError):  # CUDA reports the error once more to the next call that asks
                    torch.zeros(1, device=self.torch_device)
                cause = f"cannot pin {nbytes} bytes of RAM (CUDA error {int(error)})"
                raise UserError(f"{cause}: lower the policy's cpu percent")
            self._pinned.append(buffer)
        return buffer

    def pinned_count(self) -> int:
        return len(self._pinned)

    def unpin(self, since: int = 0) -> None:
        if len(self._pinned) <= since:
            return
        self.synchronize()
        with torch.cuda.device(self.torch_device):
            for buffer in self._pinned[since:]:
                torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
        del self._pinned[since:]

    def __del__(self, is_finalizing=sys.is_finalizing):  # at exit `sys` may be gone
        # addresses that stay pinned could not be pinned again once the system reuses them
        if not is_finalizing():
            self.unpin()

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        allocated = torch.cuda.memory_allocated(self.torch_device)
        cached = torch.cuda.memory_reserved(self.torch_device) - allocated
        return max(0, min(free + cached, self._most_bytes - allocated))

    def peak_bytes(self) -> int:
        """The most bytes allocated since `reset_meters`."""
        return torch.cuda.max_memory_allocated(self.torch_device)

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def record(self) -> torch.cuda.Event:
        return self._recorded(torch.cuda.Event(blocking=True))  # waiting for a non-blocking one spins on a core

    def _recorded(self, event: torch.cuda.Event) -> torch.cuda.Event:
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self.torch_device).wait_event(event)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def reset_meters(self) -> None:
        super().reset_meters()
        self.stall_events.clear()
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def mark(self) -> torch.cuda.Event:
        return self._recorded(torch.cuda.Event(enable_timing=True, blocking=True))

    def seconds_between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def stall_on(self, future: Future | None, kind: str) -> None:
        if future is None:
            return
        # the GPU's own wait counts, which may begin after this thread's
        before = self._recorded(torch.cuda.Event(enable_timing=True))
        self.wait(future.result())
        after = self._recorded(torch.cuda.Event(enable_timing=True))
        self.stall_events[kind].append((before, after))
        self._count_stalls(kind)

    @property
    def stall_seconds(self) -> dict[str, float]:
        self.synchronize()
        for kind in self.stall_events:
            self._count_stalls(kind)
        return super().stall_seconds

    def _count_stalls(self, kind: str) -> None:
        """Add up the pairs of events that have happened, so that a long job does not collect them."""
        pairs = self.stall_events[kind]
        while pairs and pairs[0][1].query():
            before, after = pairs.popleft()
            self._stalls[kind] += before.elapsed_time(after) / 1e3


@cache
def _workspace_bytes(device: torch.device) -> int:
    """Create the CUDA context, and load the matrix libraries; returns the bytes of device memory that they keep."""
    before = torch.cuda.memory_allocated(device)
    for dtype in (torch.float32, torch.float16):
        x = torch.ones(16, 16, dtype=dtype, device=device)
        torch.bmm(torch.nn.functional.linear(x, x, x[0])[None], x[None])
    del x
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device) - before


def finish(event) -> None:
    """Block this thread until `event` has happened."""
    if event is not None:
        event.synchronize()


def copy(dst: Tensor, src: Tensor) -> None:
    """Copy on the current stream; within RAM on this thread alone, to leave the other cores to compute."""
    if dst.device.type == "cpu" and src.device.type == "cpu":
        assert dst.dtype == src.dtype
        np.copyto(as_numpy(dst), as_numpy(src))
    else:
        dst.copy_(src, non_blocking=True)


def as_numpy(tensor: Tensor) -> np.ndarray:
    """A view of a CPU tensor's memory; fp16 and bf16 as int16, since numpy knows no bf16."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.view(torch.int16)
    return tensor.numpy()


def host_memory(nbytes: int) -> Tensor:
    """`nbytes` of RAM, uint8: page-aligned, not resident until used, returned to the system as soon as dropped."""
    try:  # private, since by default the kernel does not back shared mappings with huge pages
        mapping = mmap.mmap(-1, max(aligned(nbytes), PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:  # a limit on address space, or no overcommit
        raise UserError(f"cannot get {nbytes} bytes of RAM: {e.strerror}") from None
    if nbytes >= HUGE_PAGE:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)[:nbytes]
