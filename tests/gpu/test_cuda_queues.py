"""Transfer queues and events on CUDA: bytes arrive whole and in order, whatever compute does meanwhile."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from h2o_flexgen.machine.device import copy, finish, open_device
from h2o_flexgen.storage.queues import StagingBuffers, TransferQueue

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

ROUNDS = 400
MOST = 1 << 22


@pytest.fixture
def device():
    device = open_device("cuda")
    device.start(None)
    yield device
    device.unpin()


@pytest.fixture(params=[True, False], ids=["overlap", "serial"])
def overlap(request):
    return request.param


class Delay:
    """Keeps the compute stream behind the host by a random time, so that a missing wait shows."""

    def __init__(self):
        self.rng = random.Random(1)
        self.x = torch.randn(1024, 1024, device="cuda")

    def __call__(self):
        for _ in range(self.rng.randrange(6)):
            self.x = torch.tanh(self.x @ self.x)


def noise(rng, nbytes):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=rng)


def test_loaded_data_is_complete_and_not_overwritten_while_in_use(device, overlap):
    """The way weights are streamed: through host buffers in RAM, and staging buffers on the device, used in turn."""
    queue = TransferQueue(device, "load", overlap)
    rng = torch.Generator().manual_seed(0)
    delay = Delay()
    count = 2 if overlap else 1
    buffers = [device.buffer(MOST) for _ in range(count)]
    hosts = [device.host_buffer(MOST) for _ in range(count)]
    device.synchronize()
    buffer_free = [None] * count
    host_free = [None] * count
    results = []
    sent: list[torch.Tensor] = []
    loading = []

    def fill(index, data):
        finish(host_free[index])
        hosts[index][: len(data)] = data
        copy(buffers[index][: len(data)], hosts[index][: len(data)])
        host_free[index] = device.record()

    def start(n):
        data = noise(rng, random.Random(n).randrange(1, MOST))
        index = n % count
        sent.append(data)
        loading.append((queue.submit(lambda: fill(index, data), after=buffer_free[index]), index, len(data)))

    start(0)
    for n in range(ROUNDS):
        future, index, size = loading.pop()
        device.stall_on(future, "weights")
        if overlap:
            start(n + 1)
        delay()
        results.append(buffers[index][:size].clone())
        buffer_free[index] = device.record()
        if not overlap:
            start(n + 1)
        if len(results) == 50:
            torch.cuda.synchronize()
            assert all(torch.equal(r.cpu(), s) for r, s in zip(results, sent))
            results.clear()
            del sent[:50]
    queue.close()
    assert device.stall_seconds.get("weights", 0) >= 0


def test_stored_data_is_complete_when_its_future_is(device, overlap):
    """The way K and V of a decode step are written back: device tensors are dropped at once, their memory is reused."""
    queue = TransferQueue(device, "store", overlap)
    delay = Delay()
    rng = random.Random(2)
    ram = device.host_buffer(MOST)
    pending = []

    def send(data, at, size):
        copy(ram[at : at + size], data)
        finish(device.record())

    for n in range(ROUNDS):
        size = rng.randrange(1, MOST // 4)
        at = rng.randrange(MOST - size)
        delay()
        data = (torch.arange(size, device="cuda") * (n + 3) + n).to(torch.uint8)
        pending.append((queue.submit(lambda data=data, at=at, size=size: send(data, at, size), device.record()), at, n))
        del data
        torch.full((size,), 255, dtype=torch.uint8, device="cuda")  # takes the block if it was freed too early
        future, at, n = pending.pop()
        future.result()
        wanted = (torch.arange(size) * (n + 3) + n).to(torch.uint8)
        assert torch.equal(ram[at : at + size], wanted)
    queue.close()


def test_a_block_is_stored_and_loaded_again_by_two_queues(device):
    """The way the KV cache moves: a load waits for the store of its staging buffer and for the store of its block."""
    load = TransferQueue(device, "load", workers=2)
    store = TransferQueue(device, "store")
    delay = Delay()
    blocks = 5
    size = 1 << 20
    ram = [device.host_buffer(size) for _ in range(blocks)]
    wanted = [torch.full((size,), p, dtype=torch.uint8) for p in range(blocks)]
    for h, w in zip(ram, wanted):
        h.copy_(w)
    stored = [None] * blocks
    staging = StagingBuffers(device, size, 2)
    device.synchronize()

    def fetch(p):
        index, last_use = staging.take()
        last_store = stored[p]

        def job():
            device.wait_for(last_use)
            device.wait_for(last_store)
            copy(staging.buffers[index], ram[p])

        return index, load.submit(job)

    def send(p, index):
        copy(ram[p], staging.buffers[index])
        finish(device.record())

    loading = fetch(0)
    for n in range(ROUNDS):
        p = n % blocks
        index, future = loading
        device.stall_on(future, "cache")
        if n % 3:
            loading = fetch((p + 1) % blocks)
        delay()
        staging.buffers[index].add_(p + 1)
        wanted[p] += p + 1
        job = store.submit(lambda p=p, index=index: send(p, index), after=device.record())
        stored[p] = job
        staging.give_back(index, job)
        if not n % 3:
            loading = fetch((p + 1) % blocks)
    for job in stored:
        finish(job.result())
    assert all(torch.equal(h, w) for h, w in zip(ram, wanted))
    load.close()
    store.close()


def test_a_copy_that_changes_the_dtype_is_exact_and_in_order(device):
    queue = TransferQueue(device, "weights")
    delay = Delay()
    host = device.host_buffer(2 * 100_003).view(torch.float16)
    target = device.buffer(4 * 100_003).view(torch.float32)
    device.synchronize()
    for n in range(50):
        values = torch.randn(100_003, generator=torch.Generator().manual_seed(n)).half()
        host.copy_(values)
        delay()
        device.stall_on(queue.submit(lambda: copy(target, host), after=device.record()), "weights")
        assert torch.equal(target.cpu(), values.float())
    queue.close()


def test_the_result_of_a_failed_job_raises_its_error(device, overlap):
    queue = TransferQueue(device, "load", overlap)

    def fail():
        raise ValueError("no such block")

    with pytest.raises(ValueError, match="no such block"):
        queue.submit(fail).result()
    device.stall_on(queue.submit(lambda: None), "cache")
    queue.close()


def test_no_job_runs_before_the_event_it_must_follow(device):
    queue = TransferQueue(device, "load")
    x = torch.randn(4096, 4096, device="cuda")
    flag = torch.zeros(1, device="cuda")
    seen = torch.zeros(1, device="cuda")
    device.synchronize()
    for n in range(1, 30):
        for _ in range(4):
            x = torch.tanh(x @ x)
        flag.fill_(n)
        device.stall_on(queue.submit(lambda: seen.copy_(flag), after=device.record()), "cache")
        assert seen.item() == n
    queue.close()


def test_a_dropped_device_unpins_its_memory():
    device = open_device("cuda")
    device.start(None)
    buffer = device.host_buffer(1 << 20)
    assert buffer.is_pinned()
    del device
    gc.collect()
    assert not buffer.is_pinned()


def test_a_long_job_does_not_collect_events(device):
    queue = TransferQueue(device, "load")
    for _ in range(3000):
        device.stall_on(queue.submit(lambda: None), "cache")
    assert sum(map(len, device.stall_events.values())) <= 1100
    assert device.stall_seconds["cache"] > 0
    queue.close()
