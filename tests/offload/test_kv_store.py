"""KV blocks on disk are loaded beside each other, and written back, within the buffers that the plan counts."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from h2o_flexgen.formats import KVFormat
from h2o_flexgen.kv_cache import KVLayout
from h2o_flexgen.offload.device import Device
from h2o_flexgen.offload.kv_store import KVStore, Occupied
from h2o_flexgen.offload.transport import Transport
from h2o_flexgen.sizes import KV_BUFFERS, PAGE

BLOCKS, SLOTS, HELD = 8, 16, 4
LAYOUT = KVLayout(batch=2, heads=2, segments=(SLOTS,), head_dim=8, form=KVFormat.dense(torch.float32))


@pytest.fixture
def gates(monkeypatch):
    """Of reads and of writes: they wait while theirs is closed."""
    gates = threading.Event(), threading.Event()
    for gate, name in zip(gates, ("preadv", "pwrite")):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, gate=gate, real=real: (gate.wait(30), real(*args))[1])
        gate.set()
    yield gates
    for gate in gates:
        gate.set()


@pytest.fixture
def store(tmp_path, gates):
    """All blocks are on disk, each filled with its number."""
    transport = Transport(Device("cpu"), tmp_path / "offload")
    tiers = {(0, k): "disk" for k in range(BLOCKS)}
    layouts = dict.fromkeys(tiers, LAYOUT)
    store = KVStore(transport, layouts, tiers)
    store.begin(layouts)
    for k in range(BLOCKS):
        cache = store.blank(0, k)
        cache.k[0].fill_(k)
        cache.v[0].fill_(-k)
        store.store_all(0, k, HELD)
    store.drain()
    yield store
    for gate in gates:
        gate.set()
    transport.close()


def number(cache) -> set[float]:
    return {*cache.k[0].unique().tolist(), *(-cache.v[0]).unique().tolist()}


def step(store, k: int) -> None:
    """Use a block, and put a token into its last slot but one."""
    cache = store.get(0, k, HELD)
    slots, token = torch.full((2, 2), SLOTS - 2), torch.full((2, 2, 8), 100.0 + k)
    cache.write(slots, token, -token)
    store.store_step(0, k, cache, slots, [0, 1], Occupied(HELD, [], 2))


def test_as_many_blocks_are_loaded_at_once_as_there_are_staging_buffers(store, gates):
    reads, _ = gates
    reads.clear()
    assert [store.prefetch(0, k, HELD) for k in range(BLOCKS)] == [True] * KV_BUFFERS + [False] * (BLOCKS - KV_BUFFERS)
    assert not any(block.loading.done() for block in store.blocks.values() if block.loading is not None)
    reads.set()
    for k in range(KV_BUFFERS):
        assert number(store.get(0, k, HELD)) == {k}
        store.store_all(0, k, HELD)


def test_a_block_that_is_staged_or_being_loaded_is_not_loaded_again(store):
    assert store.prefetch(0, 0, HELD) and not store.prefetch(0, 0, HELD)
    store.get(0, 0, HELD)
    assert not store.prefetch(0, 0, HELD)
    store.store_all(0, 0, HELD)
    assert store.prefetch(0, 0, HELD)


def test_no_more_tokens_wait_for_the_disk_than_the_plan_counts(store, gates):
    """Compute waits, instead of memory filling with what a slow disk has not taken yet."""
    _, writes = gates
    writes.clear()
    used = []
    compute = threading.Thread(target=lambda: [(step(store, k), used.append(k)) for k in range(BLOCKS)])
    compute.start()
    while len(used) < KV_BUFFERS:
        time.sleep(0.001)
    compute.join(0.2)
    assert compute.is_alive() and used == list(range(KV_BUFFERS)) and len(store.storing) < KV_BUFFERS
    writes.set()
    compute.join()
    assert used == list(range(BLOCKS)) and len(store.storing) <= KV_BUFFERS
    for k in range(BLOCKS):
        assert number(store.get(0, k, HELD)) == {k, 100 + k}
        store.store_all(0, k, HELD)


def test_a_staging_buffer_is_free_again_once_its_reads_have_ended(store, gates):
    """No request may still read into a buffer that another block takes."""
    reads, _ = gates
    reads.clear()
    for k in range(KV_BUFFERS):
        store.prefetch(0, k, HELD)
    dropping = threading.Thread(target=lambda: [store.drop(0, k) for k in range(KV_BUFFERS)])
    dropping.start()
    dropping.join(0.2)
    assert dropping.is_alive() and not store.prefetch(0, 5, HELD)
    reads.set()
    dropping.join()
    assert store.prefetch(0, 5, HELD) and number(store.get(0, 5, HELD)) == {5}


@pytest.mark.parametrize("lag", [0, 2, 5])
def test_a_step_reads_the_tokens_that_a_growing_cache_holds_and_writes_a_segment_once(tmp_path, lag):
    """`lag`: by so many tokens the second sequence is shorter; its first ones go into the prompts' segment."""
    segments = (6, 4, 4, 3)
    layout = KVLayout(batch=2, heads=1, segments=segments, head_dim=256, form=KVFormat.dense(torch.float32))
    assert layout.row_bytes == PAGE
    transport = Transport(Device("cpu"), tmp_path / "offload")
    store, io = KVStore(transport, {(0, 0): layout}, {(0, 0): "disk"}), transport.io
    store.begin({(0, 0): layout})
    cache = store.blank(0, 0)
    for part in (*cache.k, *cache.v):
        part.fill_(-1)
    for b, length in enumerate((6, 6 - lag)):
        cache.k[0][b, :, :length] = torch.arange(float(length))[:, None]
        cache.v[0][b, :, :length] = 100 + torch.arange(float(length))[:, None]
    store.store_all(0, 0, 6)
    store.drain()
    for held in range(6, 17):
        before = io.read_bytes, io.written_bytes
        cache = store.get(0, 0, held)
        assert io.read_bytes - before[0] == held * PAGE
        for tensors, first in ((cache.k, 0.0), (cache.v, 100.0)):
            whole = torch.cat(tensors, 2)
            for b, n in enumerate((held, held - lag)):
                assert torch.equal(whole[b, 0, :n, 7], first + torch.arange(float(n)))
        slots = torch.tensor([[held], [held - lag]])
        token = slots.float()[..., None].expand(2, 1, 256)
        cache.write(slots, token, 100 + token)
        store.store_step(0, 0, cache, slots, [0, 1], Occupied(held + 1, [], 2))
        store.drain()
        written = (io.written_bytes - before[1]) // PAGE
        if held + 1 not in (10, 14):
            assert written == 1
        else:
            assert written == 4 if not lag else 4 < written <= held + 1
    transport.close()
