"""An error in a transfer thread reaches the caller, and nothing is left behind."""

from __future__ import annotations

import os
import threading
from itertools import count

import pytest
import torch
from command_tools import PROMPTS

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams
from h2o_flexgen.engine.step import Walk
from h2o_flexgen.errors import UserError
from h2o_flexgen.machine.device import CudaDevice, open_device
from h2o_flexgen.storage.activations import WRITE_BACKS, ActivationStore
from h2o_flexgen.storage.disk import DiskIO, File, wait
from h2o_flexgen.storage.kv_store import KVStore
from h2o_flexgen.storage.queues import TransferQueue
from h2o_flexgen.storage.transport import Transport
from h2o_flexgen.storage.weights import WeightStore

pytest_plugins = ["command_tools"]


@pytest.fixture(params=[True, False], ids=["overlap", "no overlap"])
def overlap(request) -> bool:
    return request.param


@pytest.fixture
def queue(overlap):
    queue = TransferQueue(open_device("cpu"), "test", overlap)
    yield queue
    queue.close()


def test_after_an_error_a_queue_runs_its_next_jobs(queue):
    done = []
    before = queue.submit(lambda: done.append(1))
    failed = queue.submit(lambda: 1 / 0)
    after = queue.submit(lambda: done.append(2))
    after.result()
    before.result()
    assert done == [1, 2]
    with pytest.raises(ZeroDivisionError):
        failed.result()
    with pytest.raises(ZeroDivisionError):
        queue.device.stall_on(failed, "weights")


def test_jobs_run_in_order_one_at_a_time(queue):
    running = []
    order = []

    def job(n):
        running.append(n)
        assert running == [n]
        order.append(n)
        running.remove(n)

    for future in [queue.submit(lambda n=n: job(n)) for n in range(50)]:
        future.result()
    assert order == list(range(50))


def test_a_queue_may_change_tensors_that_compute_made(queue):
    """Compute runs in inference mode, whose tensors change in no other mode, and each thread sets its own mode."""
    with torch.inference_mode():
        buffer = torch.zeros(4)
        half = torch.ones(4, dtype=torch.float16)
        queue.submit(lambda: buffer.copy_(half)).result()
    assert buffer.tolist() == [1, 1, 1, 1]


def test_closing_waits_for_the_running_job_and_drops_the_rest():
    queue = TransferQueue(open_device("cpu"), "test", overlap=True)
    started = threading.Event()
    go = threading.Event()
    done = []

    def first():
        started.set()
        go.wait(30)
        done.append(1)

    queue.submit(first)
    waiting = queue.submit(lambda: done.append(2))
    started.wait(30)
    closer = threading.Thread(target=queue.close)
    closer.start()
    while not waiting.cancelled():
        pass
    go.set()
    closer.join(30)
    assert done == [1]


def test_hidden_states_that_wait_for_their_write_back_are_limited(tmp_path, monkeypatch):
    started = threading.Event()
    go = threading.Event()
    real = ActivationStore.store

    def slow(*args):
        started.set()
        go.wait(30)
        real(*args)

    monkeypatch.setattr(ActivationStore, "store", slow)
    transport = Transport(open_device("cpu"), tmp_path)
    store = ActivationStore(transport, ["cpu"], [64 * (WRITE_BACKS + 1)], 64)
    hiddens = [torch.full((1, 4, 4), float(n)) for n in range(WRITE_BACKS + 1)]

    def put(n):
        store.put(0, n, 64 * n, hiddens[n])

    for n in range(WRITE_BACKS):
        put(n)
    started.wait(30)
    last = threading.Thread(target=put, args=(WRITE_BACKS,))
    last.start()
    last.join(0.2)
    assert last.is_alive()
    go.set()
    last.join(30)
    assert transport.device.stall_seconds["activations"] > 0
    assert all(torch.equal(store.get(0, n), hidden) for n, hidden in enumerate(hiddens))
    transport.close()


#: where a job can fail, and the policy under which it gets there
PLACES = {
    "weights": (WeightStore, "fill", (0, 0, 100, 0, 100, 0)),
    "weights in RAM": (WeightStore, "fill", (0, 100, 100, 0, 100, 0)),
    "rows of the embedding": (WeightStore, "rows", (0, 0, 100, 0, 100, 0)),
    "cache load": (KVStore, "load_block", (100, 0, 0, 0, 100, 0)),
    "cache load from RAM": (KVStore, "load_block", (100, 0, 0, 100, 100, 0)),
    "cache store": (KVStore, "store_block", (100, 0, 0, 0, 100, 0)),
    "cache scores": (KVStore, "store_scores", (100, 0, 0, 0, 100, 0)),
    "cache step": (KVStore, "store_token", (100, 0, 0, 0, 100, 0)),
    "activation load": (ActivationStore, "load", (100, 0, 100, 0, 0, 0)),
    "activation store": (ActivationStore, "store", (100, 0, 100, 0, 0, 0)),
    "disk read": (File, "read_at", (0, 0, 0, 0, 0, 0)),
    "disk write": (File, "write_at", (0, 0, 0, 0, 0, 0)),
}


@pytest.mark.parametrize("place, overlap, after", [(p, n % 2 == 0, 7 * (n % 2 == 0)) for n, p in enumerate(PLACES)])
def test_an_error_anywhere_reaches_the_caller(model, tmp_path, monkeypatch, place, overlap, after):
    """At its first call or a later one: the error itself is raised, threads end, and the offload folder is gone."""
    owner, name, six = PLACES[place]
    real = getattr(owner, name)
    calls = count()

    def failing(*args, **more):
        if next(calls) >= after:
            raise RuntimeError("the disk fell off")
        return real(*args, **more)

    threads = threading.active_count()
    options = {"device": "cpu", "dtype": "float32", "progress": False, "offload_dir": tmp_path / "off"}
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(str(model), Policy(1, 3, six, overlap), **options) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            with pytest.raises(RuntimeError, match="the disk fell off"):
                llm.generate(PROMPTS, params)
        assert next(calls) > after
        assert threading.active_count() == threads
        assert not (tmp_path / "off").exists() or os.listdir(tmp_path / "off") == []
        assert len(llm.generate(PROMPTS, params)) == len(PROMPTS)
    assert not (tmp_path / "off").exists() or os.listdir(tmp_path / "off") == []


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("six", [(100, 0, 0, 0, 100, 0), (100, 0, 0, 100, 100, 0)], ids=["disk", "cpu"])
def test_an_error_while_a_newcomer_is_written_reaches_the_caller(model, monkeypatch, six, overlap):
    """When it takes a place beside rows that decode."""
    prompts = [[5, 6, 7], [8, 9], [5], [6, 7], [9, 9]]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 9, 9, 3, 6)]
    options = {"device": "cpu", "dtype": "float32", "progress": False}
    with LLM(str(model), Policy(4, 1, six, overlap), **options) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(KVStore, "store_rows", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.generate(prompts, params)
        assert [len(o.outputs[0].token_ids) for o in llm.generate(prompts, params)] == [9, 9, 9, 3, 6]


def full_gpu(*args, **more):
    raise torch.OutOfMemoryError("tried to allocate 2 GiB")


def test_a_gpu_that_runs_out_of_memory_is_an_error_of_one_line(model, tmp_path, monkeypatch):
    """And the job may be tried again."""
    with LLM(str(model), Policy(1, 3, (0,) * 6), device="cpu", progress=False, offload_dir=tmp_path) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(ActivationStore, "put", full_gpu)
            with pytest.raises(UserError, match="out of memory.*smaller `gpu_mem`.*tried to allocate 2 GiB"):
                llm.generate(PROMPTS, SamplingParams(max_tokens=3))
        assert os.listdir(tmp_path) == []
        assert len(llm.generate(PROMPTS, SamplingParams(max_tokens=3))) == len(PROMPTS)


def test_a_gpu_that_runs_out_of_memory_ends_a_session_with_one_line(model, monkeypatch):
    with LLM(str(model), kv_budget=KVBudget.from_size(4), device="cpu", progress=False) as llm:
        session = llm.session(position_rolling=False)
        monkeypatch.setattr(Walk, "_read", full_gpu)
        with pytest.raises(UserError, match="out of memory.*tried to allocate 2 GiB"):
            session.feed([5, 6, 7])


def test_a_gpu_that_is_full_before_the_job_is_an_error_of_one_line(monkeypatch):
    def full():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB\nand more")

    monkeypatch.setattr(torch.cuda, "empty_cache", full)
    with pytest.raises(UserError, match="cannot start on cuda:0: CUDA out of memory.*MiB; if its memory is full, end"):
        CudaDevice(torch.device("cuda:0")).start(None)


def test_no_request_is_taken_after_close(tmp_path):
    io = DiskIO()
    file = File(tmp_path / "f", writable=True)
    wait(io.write(file, torch.zeros(4).numpy(), 0))
    io.close()
    with pytest.raises(RuntimeError):
        io.write(file, torch.zeros(4).numpy(), 0)


def test_the_first_error_is_reported_not_its_consequences(model, tmp_path, monkeypatch):
    """When a write fails, later loads of the same block fail too; the user sees the write's error."""

    def full(fd, data, offset):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "pwrite", full)
    with LLM(str(model), Policy(1, 3, (0,) * 6), progress=False, offload_dir=tmp_path) as llm:
        with pytest.raises(UserError, match="cannot write to the offload folder"):
            llm.generate(PROMPTS, SamplingParams(max_tokens=3))
    assert os.listdir(tmp_path) == []


def test_only_layers_are_prefetched(model, tmp_path, monkeypatch):
    """Everything else is needed at once, including rows of the embedding."""
    real = DiskIO.read
    read = {False: set(), True: set()}

    def recording(self, file, array, offset, direct=False, prefetch=False):
        read[prefetch].add(file.path.name.split("-")[0])
        return real(self, file, array, offset, direct, prefetch)

    monkeypatch.setattr(DiskIO, "read", recording)
    options = {"device": "cpu", "dtype": "float32", "progress": False, "offload_dir": tmp_path / "off"}
    with LLM(str(model), Policy(1, 3, (0, 0, 0, 0, 0, 0)), **options) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True))
    (weights,) = read[True]
    assert weights.endswith(".safetensors")
    assert read[False] == {"kv_cache", "activations", weights}  # rows of the embedding
