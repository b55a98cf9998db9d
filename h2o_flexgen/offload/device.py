"""The compute device, and lanes that move bytes beside it.

The only place that asks "is it CUDA?". On CUDA a lane is a thread with a stream of its own; order between
streams is kept by events, so that no step waits for the whole device. On the CPU a lane is a thread.
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.errors import UserError
from h2o_flexgen.kernels.linear import dtype_name, rates
from h2o_flexgen.offload import memory
from h2o_flexgen.sizes import PAGE, aligned

#: bytes to whose multiples torch's CUDA allocator cuts its memory
CUDA_ALIGN = 512


class Device:
    """Where the maths runs ("cpu", "cuda", "cuda:1"; "auto" takes CUDA where there is one).

    `stall_seconds` holds, per kind of data, the time that compute waited for it; `workspace_bytes` is what matrix
    products hold of the device's memory for good, known after `start`.
    """

    _allowed: dict[int, float] = {}  # by device: the part of its memory to which this process is or was held
    _workspaces: dict[int, int] = {}

    def __init__(self, name: str = "auto"):
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.torch_device = torch.device(name)
        except RuntimeError:
            raise UserError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N") from None
        self.is_cuda = self.torch_device.type == "cuda"
        if self.is_cuda:
            if not torch.cuda.is_available():
                raise UserError("device cuda: this torch sees no CUDA device")
            if (self.torch_device.index or 0) >= torch.cuda.device_count():
                raise UserError(f"device {name}: there are {torch.cuda.device_count()} CUDA devices")
            if self.torch_device.index is None:  # threads each have a current device, and some calls want an index
                self.torch_device = torch.device("cuda", torch.cuda.current_device())
        elif self.torch_device.type != "cpu":
            raise UserError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N")
        self.workspace_bytes = 0
        self._pinned: list[Tensor] = []
        self._stalls = defaultdict(float)
        self._stall_events = defaultdict(list)
        if self.is_cuda:  # dropped unclosed: CUDA must not go on knowing addresses that the system gives to others
            weakref.finalize(self, _unpin, self.torch_device, self._pinned).atexit = False

    def __str__(self) -> str:
        return str(self.torch_device)

    def dtype(self, name: str, stored: torch.dtype | None = None) -> torch.dtype:
        """The type of that name.

        Args:
            name: "float16", "bfloat16", "float32", "fp16", "bf16", "fp32", or "auto": on CUDA fp16, or bf16 for a
                checkpoint in bf16 where the GPU has it; on the CPU the fastest by measuring (`KernelRates.dtype`).
            stored: what most of the checkpoint is stored in, if that is known.

        Raises:
            UserError: there is no such type.
        """
        if name == "auto" and self.is_cuda:
            return torch.bfloat16 if stored == torch.bfloat16 and self.has_bf16 else torch.float16
        if name == "auto":
            return getattr(torch, rates().dtype(stored and dtype_name(stored)))
        dtypes = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
        dtypes |= {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
        if name not in dtypes:
            raise UserError(f"unknown dtype {name!r}: use auto, float16, bfloat16 or float32")
        return dtypes[name]

    @property
    def has_bf16(self) -> bool:
        """Whether this GPU has bf16 matmuls."""
        return self.is_cuda and torch.cuda.get_device_capability(self.torch_device) >= (8, 0)

    # memory

    def buffer(self, nbytes: int) -> Tensor:
        """Bytes on the compute device, aligned to pages."""
        if self.is_cuda:
            # zeros: a masked slot must not hold NaN, since 0 * NaN would spread
            return torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)
        return _host_buffer(nbytes)

    def buffers(self, sizes: list[int]) -> list[Tensor]:
        """Buffers that live as long as each other. With CUDA in one allocation: torch rounds those of a few MiB up
        by as much as a fifth."""
        if not self.is_cuda:
            return [self.buffer(nbytes) for nbytes in sizes]
        starts = list(accumulate((-(-nbytes // CUDA_ALIGN) * CUDA_ALIGN for nbytes in sizes), initial=0))
        slab = self.buffer(starts[-1])
        return [slab[at : at + nbytes] for at, nbytes in zip(starts, sizes)]

    def host_buffer(self, nbytes: int) -> Tensor:
        """Bytes in RAM, aligned to pages; pinned where there is CUDA, so that copies run beside compute."""
        buffer = _host_buffer(nbytes)
        if self.is_cuda and nbytes:
            # torch's own pinned allocator rounds up to a power of two, which doubles a large cache
            with torch.cuda.device(self.torch_device):  # else a context of another card would be made
                error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), aligned(nbytes), 0)
            if int(error) != 0:
                try:  # the error stays with the next call of this process that looks for one
                    torch.zeros(1, device=self.torch_device)
                except RuntimeError:
                    pass
                raise UserError(
                    f"cannot pin {nbytes} bytes of RAM (CUDA error {int(error)}): lower the cpu percentages"
                )
            self._pinned.append(buffer)
        return buffer

    def pinned_count(self) -> int:
        return len(self._pinned)

    def unpin(self, since: int = 0) -> None:
        """Give back what `host_buffer` pinned after the first `since`; nothing may use it any more."""
        _unpin(self.torch_device, self._pinned, since)

    def start(self, most_bytes: int | None) -> None:
        """CUDA only: create the context and load the matrix libraries, which costs RAM and time, and hold this
        process to `most_bytes`. Raises UserError if other programs have left the card too little."""
        try:
            self._start(most_bytes)
        except RuntimeError as e:  # torch's own, CUDA's, or that of its matrix library
            if not any(text in str(e) for text in ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")):
                raise
            raise UserError(f"{self} has no memory left to begin with: end what else uses it") from None

    def _start(self, most_bytes: int | None) -> None:
        torch.cuda.empty_cache()
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape of a micro-batch
        if self.torch_device.index not in Device._workspaces:
            before = torch.cuda.memory_allocated(self.torch_device)
            for dtype in (torch.float32, torch.float16):
                x = torch.ones(16, 16, dtype=dtype, device=self.torch_device)
                torch.bmm(torch.nn.functional.linear(x, x, x[0])[None], x[None])
            del x
            self.synchronize()
            Device._workspaces[self.torch_device.index] = torch.cuda.memory_allocated(self.torch_device) - before
        self.workspace_bytes = Device._workspaces[self.torch_device.index]
        if most_bytes is not None or self.torch_device.index in Device._allowed:
            fraction = 1.0 if most_bytes is None else min(1.0, most_bytes / self._total_bytes())
            torch.cuda.set_per_process_memory_fraction(fraction, self.torch_device)
            Device._allowed[self.torch_device.index] = fraction

    def _total_bytes(self) -> int:
        return torch.cuda.get_device_properties(self.torch_device).total_memory

    def free_bytes(self) -> int:
        """Memory of the compute device that is still to be had, what torch has cached included."""
        if not self.is_cuda:
            return memory.ram_available()
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        cached = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        fraction = Device._allowed.get(self.torch_device.index, 1.0)
        allowed = int(fraction * self._total_bytes()) - torch.cuda.memory_allocated(self.torch_device)
        return max(0, min(free + cached, allowed))

    def reset_peaks(self) -> None:
        memory.reset_peak()
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int:
        """The most device memory held since `reset_peaks` (CUDA only; on the CPU ask `memory`)."""
        return torch.cuda.max_memory_allocated(self.torch_device) if self.is_cuda else 0

    def release_cached(self) -> None:
        if self.is_cuda:
            torch.cuda.empty_cache()

    def release_gaps(self) -> None:
        """On the CPU: give back what temporaries have left in the heap."""
        if not self.is_cuda:
            memory.trim_heap()

    # order

    def record(self):
        """A mark in the current stream: what was queued before it. None on the CPU, where all is done."""
        if not self.is_cuda:
            return None
        event = torch.cuda.Event(blocking=True)  # others keep a core busy while a thread waits for them
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def wait(self, event) -> None:
        """Queue nothing more on the current stream before `event` has happened; does not block."""
        if event is not None:
            torch.cuda.current_stream(self.torch_device).wait_event(event)

    def wait_for(self, job: Future | None) -> None:
        """In a lane: queue nothing more before another lane's job is done."""
        if job is not None:
            self.wait(job.result())

    @contextmanager
    def stalling(self, kind: str) -> Iterator[None]:
        """Count what runs inside as time that compute waits."""
        start = time.perf_counter()
        yield
        self._stalls[kind] += time.perf_counter() - start

    def stall_on(self, future: Future | None, kind: str) -> None:
        """Make compute wait for a lane's job, and count how long it had to."""
        if future is None:
            return
        if not self.is_cuda:
            with self.stalling(kind):
                future.result()
            return
        # the host may wait long before the card does: what counts is between the two marks, whoever is late
        stream = torch.cuda.current_stream(self.torch_device)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        self.wait(future.result())
        after.record(stream)
        self._stall_events[kind].append((before, after))
        if len(self._stall_events[kind]) >= 1024:
            self._count_stalls(kind)

    def hold_back(self, jobs: deque[Future], most: int, kind: str) -> None:
        """Wait for the oldest of a lane's jobs until fewer than `most` are left, since each holds memory."""
        while len(jobs) >= most:
            self.stall_on(jobs.popleft(), kind)

    def synchronize(self) -> None:
        """Only at the ends of a phase that is timed."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    @property
    def stall_seconds(self) -> dict[str, float]:
        self.synchronize()
        for kind in self._stall_events:
            self._count_stalls(kind)
        return dict(self._stalls)

    def _count_stalls(self, kind: str) -> None:
        """Add up the pairs of events that have happened, so that a long job does not hoard them."""
        pairs = self._stall_events[kind]
        done = next((n for n, (_, after) in enumerate(pairs) if not after.query()), len(pairs))
        self._stalls[kind] += sum(before.elapsed_time(after) for before, after in pairs[:done]) / 1e3
        del pairs[:done]

    def reset_stalls(self) -> None:
        self._stalls.clear()
        self._stall_events.clear()


class TransferQueue:
    """One direction of traffic: jobs start in order, and run beside compute, at most `workers` at a time.

    With `overlap=False` a job runs to its end before `submit` returns.
    """

    def __init__(self, device: Device, name: str, overlap: bool = True, workers: int = 1):
        self.device = device
        self.overlap = overlap
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix=name) if overlap else None
        self._stream = torch.cuda.Stream(device.torch_device) if device.is_cuda else None

    def submit(self, job: Callable[[], None], after=None) -> Future:
        """Run `job` once `after` (an event of `Device.record`) has happened; the result is the event
        that says that everything it queued is done."""
        if self._pool is not None:
            return self._pool.submit(self._run, job, after)
        future = Future()
        try:
            event = self._run(job, after)
            if event is not None:
                event.synchronize()
            future.set_result(None)
        except Exception as e:  # an interrupt goes through at once
            future.set_exception(e)
        return future

    @torch.inference_mode()  # compute's tensors are, and the mode is a thread's own
    def _run(self, job: Callable[[], None], after):
        if self._stream is None:
            job()
            return None
        # of a card that is not the thread's own, leaving the stream alone would make a context on card 0
        with torch.cuda.device(self.device.torch_device), torch.cuda.stream(self._stream):
            self.device.wait(after)
            job()
            return self.device.record()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def finish(event) -> None:
    """Block this thread until `event` has happened."""
    if event is not None:
        event.synchronize()


def copy(dst: Tensor, src: Tensor) -> None:
    """Copy on the current stream; in RAM with one thread, so as not to take cores from compute."""
    if dst.device.type == "cpu" and src.device.type == "cpu":
        assert dst.dtype == src.dtype
        np.copyto(as_numpy(dst), as_numpy(src))
    else:
        dst.copy_(src, non_blocking=True)


#: fp16 becomes bf16 through floats of so many numbers
_PART = 1 << 18


def convert(dst: Tensor, src: Tensor) -> None:
    """Copy numbers, of another type or to another device, on the compute device with all its threads."""
    if dst.dtype == src.dtype or torch.float32 in (dst.dtype, src.dtype):
        dst.copy_(src)
        return
    for into, part in zip(dst.view(-1).split(_PART), src.view(-1).split(_PART)):
        into.copy_(part.float())  # straight takes twice as long


def _unpin(device: torch.device, buffers: list[Tensor], since: int = 0) -> None:
    if len(buffers) <= since:
        return
    torch.cuda.synchronize(device)
    with torch.cuda.device(device):
        for buffer in buffers[since:]:
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
    del buffers[since:]


def as_numpy(tensor: Tensor) -> np.ndarray:
    """A view of a CPU tensor's memory; 16-bit floats come as int16, which numpy can at least move."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.view(torch.int16)
    return tensor.numpy()


def _host_buffer(nbytes: int) -> Tensor:
    # an anonymous mapping is page aligned, untouched until used, and goes back to the system at once
    # (private: a shared one would be a shmem file to the kernel, for which huge pages are off by default)
    try:
        mapping = mmap.mmap(-1, max(aligned(nbytes), PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:  # under a limit of addresses, or where the system grants no more than it has
        raise UserError(f"cannot get {nbytes} bytes of RAM: {e.strerror}") from None
    if nbytes >= 1 << 21 and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)[:nbytes]


class StagingBuffers:
    """Device buffers that pieces visit. `busy`: the job that may still use a buffer that has been given back."""

    def __init__(self, device: Device, nbytes: int, count: int):
        self.buffers = [device.buffer(nbytes) for _ in range(count)] if nbytes else []
        self.busy: list[Future | None] = [None] * count
        self._free = deque(range(len(self.buffers)))

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    def take(self) -> tuple[int, Future | None]:
        """The one that has been free the longest, and the job to wait for before it is filled."""
        index = self._free.popleft()
        return index, self.busy[index]

    def give_back(self, index: int, busy: Future | None = None) -> None:
        self.busy[index] = busy
        self._free.append(index)
