"""Events alone order transfers: with a fake CUDA whose copies run as late as events allow, tokens stay the same.

Every copy of a transfer queue is delayed until something waits for an event behind it. So a staging buffer that is
filled again too early, or a copy to RAM that is read before it has ended, changes the tokens.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import sized

from h2o_flexgen import LLM, Policy, SamplingParams
from h2o_flexgen import llm as llm_module
from h2o_flexgen.machine import memory
from h2o_flexgen.machine.device import CudaDevice, host_memory
from h2o_flexgen.storage import stored, transport
from h2o_flexgen.storage.queues import TransferQueue

_lock = threading.RLock()
_thread = threading.local()


class Stream:
    def __init__(self):
        self.queue = []
        self.done = 0

    def add(self, work):
        with _lock:
            self.queue.append(work)

    def run_to(self, end):
        with _lock:
            while self.done < end:
                work = self.queue[self.done]
                self.queue[self.done] = None
                self.done += 1
                work()


class Event:
    def __init__(self, stream):
        self.stream = stream
        self.end = len(stream.queue) if stream else 0

    def synchronize(self):
        if self.stream:
            self.stream.run_to(self.end)


class Flush(TorchDispatchMode):
    """What else a job computes comes after its copies."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            _thread.stream.run_to(len(_thread.stream.queue))
        return func(*args, **(kwargs or {}))


class LazyDevice(CudaDevice):
    def __init__(self, name="auto"):
        super().__init__(torch.device("cpu"))
        self.name = name

    def __str__(self):
        return self.name

    def buffer(self, nbytes):
        return torch.zeros(nbytes, dtype=torch.uint8)

    def host_buffer(self, nbytes):
        return host_memory(nbytes)

    def start(self, most_bytes):
        pass

    def free_bytes(self):
        return memory.ram_available()

    def reset_meters(self):
        memory.reset_peak()

    def peak_bytes(self):
        return 0

    def release_cached(self):
        pass

    def synchronize(self):
        for stream in streams:
            stream.run_to(len(stream.queue))

    def record(self):
        return Event(getattr(_thread, "stream", None))

    def mark(self):
        return time.perf_counter()

    def seconds_between(self, begin, end):
        return end - begin

    def wait(self, event):
        if event is None:
            return
        if getattr(_thread, "stream", None) is None:
            event.synchronize()  # compute runs at once
        else:
            _thread.stream.add(event.synchronize)

    def stall_on(self, future, kind):
        if future is not None:
            self.wait(future.result())


streams: list[Stream] = []


class LazyQueue(TransferQueue):
    def __init__(self, device, name, overlap=True, workers=1):
        device.is_cuda = False
        super().__init__(device, name, overlap, workers)
        device.is_cuda = True
        self.stream = Stream()
        streams.append(self.stream)

    def run(self, job, after=None):
        _thread.stream = self.stream
        try:
            self.device.wait(after)
            with Flush():
                job()
            return self.device.record()
        finally:
            _thread.stream = None


def lazy_copy(dst, src):
    stream = getattr(_thread, "stream", None)
    if stream is None:
        dst.copy_(src)
    else:
        stream.add(lambda: _plain_copy(dst, src))


def _plain_copy(dst, src):
    outer = getattr(_thread, "stream", None)
    _thread.stream = None
    try:
        with torch.utils._python_dispatch._disable_current_modes():
            dst.copy_(src)
    finally:
        _thread.stream = outer


@pytest.fixture
def lazy(monkeypatch):
    streams.clear()
    monkeypatch.setattr(llm_module, "open_device", LazyDevice)
    monkeypatch.setattr(transport, "TransferQueue", LazyQueue)
    for module in (stored, transport):
        monkeypatch.setattr(module, "copy", lazy_copy)
    yield


#: placement, whether the CPU computes attention, and whether transfers run beside compute
POLICIES = [
    ((100, 0, 100, 0, 100, 0), False, True),
    ((0, 100, 0, 100, 0, 100), True, True),
    ((0, 100, 0, 100, 0, 100), False, False),
    ((0, 0, 0, 0, 0, 0), False, True),
    ((34, 33, 34, 33, 34, 33), False, True),
    ((34, 33, 34, 33, 34, 33), True, False),
    ((0, 50, 0, 50, 0, 50), True, True),
    ((50, 0, 50, 0, 0, 0), False, True),
]


@pytest.mark.parametrize(
    "n, device", [*((n, "auto") for n in range(len(POLICIES))), *((n, "cuda:0,cuda:1") for n in (1, 4, 6))], ids=str
)
def test_copies_that_run_as_late_as_events_allow_give_the_same_tokens(lazy, tiny, n, device):
    """Policies alternate between a full cache and a budget; each meets every tier. Rows end one by one, and others take
    their places."""
    model = tiny("opt")
    percent, cpu_compute, overlap = POLICIES[n]
    budget = [None, (4, 4)][n % 2]
    budgets = (None, None) if budget is None else budget
    lengths = [5, 17, 9, 30, 12, 22, 7]
    prompts = model.clear_cut_prompts(lengths, 12, [budgets])
    outputs = [12, 5, 9, 12, 3, 7, 10]
    wanted = [t.tokens[:most] for t, most in zip(model.references(prompts, 12, *budgets), outputs)]
    params = [SamplingParams(max_tokens=most, ignore_eos=True) for most in outputs]
    policy = Policy(
        *[(3, 1), (2, 2)][n // 2 % 2], percent, overlap=overlap, cpu_cache_compute=cpu_compute, prefill_tokens=30
    )
    kv_budget = None if budget is None else sized(*budget)
    with LLM(str(model.folder), policy, kv_budget, device, dtype="float32", progress=False) as engine:
        for _ in range(2):
            assert [o.outputs[0].token_ids for o in engine.generate(prompts, params)] == wanted
    assert percent[0] == 100 or any(stream.done for stream in streams)
