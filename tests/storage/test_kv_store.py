"""KV blocks on disk are loaded side by side and written back, within the buffers that the plan counts."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from random import Random

import pytest
import torch

from h2o_flexgen.formats import KVFormat
from h2o_flexgen.formats.forms import cache_format
from h2o_flexgen.kv_cache import KVLayout
from h2o_flexgen.kv_cache.layout import KVTensors
from h2o_flexgen.machine.device import host_memory, open_device
from h2o_flexgen.machine.pages import PAGE
from h2o_flexgen.storage.kv_store import KVStore, Occupied
from h2o_flexgen.storage.queues import KV_BUFFERS
from h2o_flexgen.storage.transport import Transport

BLOCKS = 8
SLOTS = 16
HELD = 4
LAYOUT = KVLayout(batch=2, heads=2, segments=(SLOTS,), head_dim=8, form=KVFormat.dense(torch.float32))


@pytest.fixture
def gates(monkeypatch):
    """One for reads and one for writes, which wait while their gate is closed."""
    gates = [threading.Event(), threading.Event()]
    for gate, name in zip(gates, ("preadv", "pwrite")):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, gate=gate, real=real: (gate.wait(30), real(*args))[1])
        gate.set()
    yield gates
    for gate in gates:
        gate.set()


@pytest.fixture
def store(tmp_path, gates):
    """With all blocks on disk, each filled with its number."""
    transport = Transport(open_device("cpu"), tmp_path / "offload")
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


def numbers(cache) -> set[float]:
    return {*cache.k[0].unique().tolist(), *(-cache.v[0]).unique().tolist()}


def step(store, k: int) -> None:
    """Take a block through a decode step that writes its last slot but one."""
    cache = store.get(0, k, HELD)
    slots = torch.full((2, 2), SLOTS - 2)
    token = torch.full((2, 2, 8), 100.0 + k)
    cache.write(slots, token, -token)
    store.store_step(0, k, cache, slots, [0, 1], Occupied(HELD, [], 2))


def test_a_block_is_loaded_into_every_free_staging_buffer_at_once(store, gates):
    reads, _ = gates
    reads.clear()
    assert [store.prefetch(0, k, HELD) for k in range(BLOCKS)] == [True] * KV_BUFFERS + [False] * (BLOCKS - KV_BUFFERS)
    assert not any(block.loading.done() for block in store.blocks.values() if block.loading is not None)
    reads.set()
    for k in range(KV_BUFFERS):
        assert numbers(store.get(0, k, HELD)) == {k}
        store.store_all(0, k, HELD)


def test_a_block_that_is_staged_or_being_loaded_is_not_loaded_again(store):
    assert store.prefetch(0, 0, HELD) and not store.prefetch(0, 0, HELD)
    store.get(0, 0, HELD)
    assert not store.prefetch(0, 0, HELD)
    store.store_all(0, 0, HELD)
    assert store.prefetch(0, 0, HELD)


def test_no_more_tokens_wait_for_the_disk_than_the_plan_counts(store, gates):
    """Compute waits, so that a slow disk does not fill memory."""
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
        assert numbers(store.get(0, k, HELD)) == {k, 100 + k}
        store.store_all(0, k, HELD)


def test_a_dropped_staging_buffer_is_free_once_its_reads_have_ended(store, gates):
    """No request may still fill a buffer that another block takes."""
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
    assert store.prefetch(0, 5, HELD) and numbers(store.get(0, 5, HELD)) == {5}


@pytest.mark.parametrize("lag", [0, 2, 5])
def test_a_step_reads_the_tokens_that_a_growing_cache_holds_and_writes_a_segment_once(tmp_path, lag):
    """`lag`: tokens by which the second sequence is shorter; its first new ones go into the prompts' segment."""
    segments = (6, 4, 4, 3)
    layout = KVLayout(batch=2, heads=1, segments=segments, head_dim=256, form=KVFormat.dense(torch.float32))
    assert layout.row_bytes == PAGE
    transport = Transport(open_device("cpu"), tmp_path / "offload")
    io = transport.io
    store = KVStore(transport, {(0, 0): layout}, {(0, 0): "disk"})
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
        read = io.read_bytes
        written = io.written_bytes
        cache = store.get(0, 0, held)
        assert io.read_bytes - read == held * PAGE
        for tensors, first in ((cache.k, 0.0), (cache.v, 100.0)):
            whole = torch.cat(tensors, 2)
            for b, n in enumerate((held, held - lag)):
                assert torch.equal(whole[b, 0, :n, 7], first + torch.arange(float(n)))
        slots = torch.tensor([[held], [held - lag]])
        token = slots.float()[..., None].expand(2, 1, 256)
        cache.write(slots, token, 100 + token)
        store.store_step(0, 0, cache, slots, [0, 1], Occupied(held + 1, [], 2))
        store.drain()
        pages = (io.written_bytes - written) // PAGE
        if held + 1 not in (10, 14):
            assert pages == 1
        else:
            assert pages == 4 if not lag else 4 < pages <= held + 1
    transport.close()


# sequences that take the places of others

#: segments of a cache that grows, and of one of fixed size
GROWTHS = {"append": (5, 3, 3, 4), "fixed": (12,)}


class Life:
    """A block on a tier in which sequences come and go, and what each of them should read.

    Attributes:
        rows: by place, a sequence's own cache and its length.
    """

    def __init__(self, folder, tier: str, layout: KVLayout, seed: int):
        self.transport = Transport(open_device("cpu"), folder)
        blocks = {(0, 0): tier, (0, 1): tier}
        self.store = KVStore(self.transport, dict.fromkeys(blocks, layout), blocks)
        self.layout = layout
        self.one = replace(layout, batch=1)
        self.random = Random(seed)
        self.rows: list[tuple[KVTensors, int]] = []
        self.generator = torch.Generator().manual_seed(seed)

    def newcomer(self) -> tuple[KVTensors, int]:
        cache = self.one.view(host_memory(self.one.kv_bytes), host_memory(self.one.meta_bytes))
        length = self.random.randint(1, self.layout.segments[0] + 1)
        for at in range(min(length, self.layout.slots)):
            self.write(cache, torch.full((1, self.layout.heads), at))
        return cache, length

    def write(self, cache: KVTensors, slots: torch.Tensor) -> None:
        """A random token."""
        cache.write(slots, *torch.randn(2, 1, self.layout.heads, self.layout.head_dim, generator=self.generator))

    def slots(self, length: int) -> torch.Tensor:
        """Slots (1, H) of a sequence's next token."""
        heads = range(self.layout.heads)
        at = [self.random.randrange(self.layout.slots) for _ in heads] if self.is_fixed else [length for _ in heads]
        return torch.tensor([at])

    @property
    def is_fixed(self) -> bool:
        return self.layout.growth == "fixed"

    def held(self, lengths: list[int]) -> int:
        return self.layout.slots if self.is_fixed else max(lengths)

    def open(self) -> None:
        """Fill the empty block with the first sequences."""
        self.store.begin({(0, 0): self.layout})
        self.rows = [self.newcomer() for _ in range(self.layout.batch)]
        cache = self.store.blank(0, 0)
        for place, (row, _) in enumerate(self.rows):
            put(cache, place, row)
        self.store.store_all(0, 0, self.held([length for _, length in self.rows]))

    def spoil(self) -> None:
        """Let another block leave NaN in a staging buffer."""
        self.store.begin({(0, 1): self.layout})
        cache = self.store.blank(0, 1)
        for tensor in (*cache.k, *cache.v):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 255)
        self.store.store_all(0, 1, self.layout.slots)

    def step(self, ended: set[int], new: int) -> None:
        """Those `ended` leave, the last ones move into their places, `new` ones come, and the others get a token."""
        left = [place for place in range(len(self.rows)) if place not in ended]
        holes = [place for place in range(len(left)) if place in ended]
        moves = list(zip(reversed(left), holes))
        old = len(left)
        for source, target in moves:
            self.rows[target] = self.rows[source]
        self.rows = self.rows[:old] + [self.newcomer() for _ in range(min(new, self.layout.batch - old))]
        lengths = [length + (place < old) for place, (_, length) in enumerate(self.rows)]
        held = self.held(lengths)
        if self.random.random() < 0.5:
            self.store.prefetch(0, 0, held)
        cache = self.store.get(0, 0, held)
        for source, target in moves:
            cache.move(source, target, self.held([self.rows[target][1]]))
        for place in range(old):
            self.check(cache, place, held)
        slots = [self.slots(length) for _, length in self.rows[:old]]
        for place, at in enumerate(slots):
            self.write(self.rows[place][0], at)
            with cache.rows([place]) as row:
                row.write(at, *floats(self.rows[place][0], at))
        for place in range(old, len(self.rows)):
            put(cache, place, self.rows[place][0])
        self.rows = [(row, length) for (row, _), length in zip(self.rows, lengths)]
        after = Occupied(held, [*holes, *range(old, len(self.rows))], len(self.rows))
        self.store.store_step(0, 0, cache, torch.cat(slots), list(range(old)), after)

    def check(self, cache: KVTensors, place: int, held: int) -> None:
        """A sequence reads its own tokens, and no NaN in empty slots."""
        row, length = self.rows[place]
        begin = 0
        for n, segment in enumerate(self.layout.segments):
            if begin >= held:
                break
            used = segment if cache.reads_empty_slots else min(segment, max(0, length - begin))
            for found, wanted in ((cache.k[n], row.k[n]), (cache.v[n], row.v[n])):
                assert torch.equal(found[place, :, :used], wanted[0, :, :used]), f"place {place}, segment {n}"
            begin += segment


def put(cache: KVTensors, place: int, row: KVTensors) -> None:
    for target, source in zip((*cache.k, *cache.v), (*row.k, *row.v)):
        target[place] = source[0]


def floats(row: KVTensors, at: torch.Tensor) -> list[torch.Tensor]:
    """K and V (1, H, D) of a sequence's token."""
    return [form.floats(x, torch.float32) for form, x in zip(row.form, row.token(at))]


@pytest.mark.parametrize(
    "tier, growth, kind",
    [
        ("gpu", "append", "int4"),
        ("gpu", "fixed", None),
        ("cpu", "append", None),
        ("cpu", "fixed", "int8"),
        ("disk", "append", "int8"),
        ("disk", "append", None),
        ("disk", "fixed", "int4"),
    ],
)
def test_a_sequence_reads_its_own_tokens_while_others_come_and_go(tmp_path, tier, growth, kind):
    """Another block passes through the same buffers, and leaves NaN in them."""
    form = cache_format(kind, torch.float32, 8)
    layout = KVLayout(4, 2, GROWTHS[growth], 8, form, growth=growth)
    for seed in range(3):
        life = Life(tmp_path / f"offload{seed}", tier, layout, seed)
        for _ in range(2):
            life.open()
            while True:
                full = {place for place, (_, length) in enumerate(life.rows) if length >= layout.slots}
                ended = full | {place for place in range(len(life.rows)) if life.random.random() < 0.15}
                new = life.random.choice([0, 0, 1, 3])
                if life.random.random() < 0.3:
                    life.spoil()
                if len(ended) == len(life.rows):  # then the block is laid out again
                    break
                life.step(ended, new)
        life.store.drain()
        life.transport.close()


@pytest.mark.parametrize("is_prefetched", [False, True])
def test_a_block_is_laid_out_again_only_after_its_last_transfers(store, gates, is_prefetched):
    """They follow the old layout."""
    _, writes = gates
    writes.clear()
    step(store, 0)
    if is_prefetched:
        store.prefetch(0, 0, HELD)
    other = replace(LAYOUT, segments=(SLOTS // 2,))
    beginning = threading.Thread(target=lambda: store.begin({(0, 0): other}))
    beginning.start()
    beginning.join(0.2)
    assert beginning.is_alive() and store.blocks[0, 0].layout is LAYOUT
    writes.set()
    beginning.join()
    cache = store.blank(0, 0)
    cache.k[0].fill_(7)
    cache.v[0].fill_(-7)
    store.store_all(0, 0, HELD)
    assert numbers(store.get(0, 0, HELD)) == {7}


def test_in_a_block_that_is_not_full_a_step_writes_its_token_and_a_full_segment(tmp_path):
    """One of two places is in use."""
    segments = (64, 4, 4, 4)
    layout = KVLayout(batch=2, heads=1, segments=segments, head_dim=256, form=KVFormat.dense(torch.float32))
    transport = Transport(open_device("cpu"), tmp_path / "offload")
    io = transport.io
    store = KVStore(transport, {(0, 0): layout}, {(0, 0): "disk"})
    store.begin({(0, 0): layout})
    store.blank(0, 0)
    store.store_all(0, 0, 64)
    store.drain()
    for held in range(65, 73):
        before = io.written_bytes
        cache = store.get(0, 0, held)
        store.store_step(0, 0, cache, torch.tensor([[held - 1]]), [0], Occupied(held, [], 1))
        store.drain()
        assert (io.written_bytes - before) // PAGE == (4 if held in (68, 72) else 1)
    transport.close()
