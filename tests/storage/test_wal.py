"""A KV block on disk reads back what was written, whatever is in its log and whenever it is compacted."""

from __future__ import annotations

from bisect import bisect_left
from itertools import product
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen.formats.forms import cache_format
from h2o_flexgen.kv_cache import HeavyHitterCache, KVLayout
from h2o_flexgen.kv_cache.layout import KVTensors
from h2o_flexgen.machine.device import host_memory
from h2o_flexgen.machine.pages import PAGE
from h2o_flexgen.storage.disk import DiskIO, File
from h2o_flexgen.storage.wal import LoggedBlock, file_bytes

HEADS = 2
HEAD_DIM = 4
OFFSET = 3 * PAGE
FORMS = st.sampled_from([cache_format(kind, torch.float32, HEAD_DIM) for kind in (None, "int8", "int4")])

#: metadata and growth of a cache of fixed size
FIXED = HeavyHitterCache.metadata, HeavyHitterCache.growth


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return File(tmp_path_factory.mktemp("wal") / "kv_cache", writable=True)


class Mirrored:
    """A block on disk, taken through steps as the store does, and the same cache in RAM.

    Attributes:
        compacted: number of steps that rewrote the block.
        in_part: number of steps that wrote only the parts of newcomers.
    """

    def __init__(self, file: File, layout: KVLayout, held: int):
        self.io = DiskIO(threads=1)
        self.layout = layout
        self.block = LoggedBlock(self.io, file, OFFSET)
        self.buffer = host_memory(file_bytes(layout))
        self.wanted = host_memory(layout.kv_bytes)
        self.compacted = self.in_part = self.token = 0
        self.block.begin(layout)
        self.wanted[: layout.used_bytes(held)] = 1  # as prefill leaves it
        self.buffer[: layout.kv_bytes] = self.wanted
        self.block.compact(self.buffer.numpy(), self.block.dirty(held))

    def caches(self) -> list[KVTensors]:
        return [self.layout.view(x, host_memory(self.layout.meta_bytes)) for x in (self.buffer, self.wanted)]

    def read(self, held: int, rows: int) -> None:
        """The first `rows` sequences must read what the cache in RAM holds."""
        self.buffer[:] = 255
        self.block.read(self.buffer.numpy(), self.layout.used_bytes(held))
        found, wanted = self.caches()
        for n in range(self.segments(held)):
            assert torch.equal(found.k[n][:rows], wanted.k[n][:rows]), f"segment {n}"
            assert torch.equal(found.v[n][:rows], wanted.v[n][:rows]), f"segment {n}"

    def segments(self, held: int) -> int:
        """Number of segments that hold the first `held` slots."""
        return 1 + bisect_left(self.layout.ends, held)

    def step(self, held: int, slots: torch.Tensor, new: dict[int, int] | None = None, count: int | None = None) -> None:
        """Sequences `new` come, by place and length, and the others write a token to `slots` (B, H); after that `held`
        slots of the first `count` sequences are in use."""
        layout = self.layout
        block = self.block
        new = new or {}
        places = list(new)
        count = layout.batch if count is None else count
        self.token += 1
        for cache in self.caches():
            for end, *segments in zip(layout.ends, cache.k, cache.v):
                for tensor, (place, length) in product(segments, new.items()):
                    tensor[place] = 0
                    tensor[place, :, : max(0, length - end + tensor.shape[2])] = (10 * self.token + place) % 199
            old = [place for place in range(count) if place not in places]
            k = torch.full((len(old), HEADS, HEAD_DIM), 1.0 + self.token) + torch.arange(HEAD_DIM)
            if old:
                with cache.rows(old) as rows:
                    rows.write(slots[old], k, -k)
        if block.is_due(held) or 2 * len(places) > count:
            block.compact(self.buffer.numpy(), block.dirty(held, None if places else slots))
            self.compacted += 1
            return
        if places:
            block.write(self.buffer.numpy(), block.changed(places, count, layout.used_bytes(held)))
            self.in_part += 1
        token = self.caches()[0].token(slots)
        row = torch.cat([x.contiguous().view(torch.uint8).view(-1) for x in token])
        block.append(torch.nn.functional.pad(row, (0, -len(row) % PAGE)).numpy(), slots.numpy())


def replay(file: File, layout: KVLayout, steps: list[tuple[int, torch.Tensor]]) -> int:
    """`steps`: (slots held before, slots). Returns how often the block was compacted."""
    mirrored = Mirrored(file, layout, steps[0][0])
    for held, slots in steps:
        after = min(held + 1, layout.slots)
        mirrored.read(after, layout.batch)
        mirrored.step(after, slots)
    mirrored.io.close()
    return mirrored.compacted


@settings(max_examples=15)
@given(form=FORMS, batch=st.integers(1, 3), slots=st.integers(1, 40), seed=st.integers(0, 100))
def test_a_cache_of_fixed_size(file, form, batch, slots, seed):
    layout = KVLayout(batch, HEADS, (slots,), HEAD_DIM, form, *FIXED)
    generator = torch.Generator().manual_seed(seed)
    victims = [torch.randint(0, slots, (batch, HEADS), generator=generator) for _ in range(30)]
    assert replay(file, layout, [(slots, victim) for victim in victims]) > 0  # a slot may be logged twice


@settings(max_examples=15)
@given(
    form=FORMS,
    segments=st.tuples(st.integers(3, 9), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
    lags=st.lists(st.integers(0, 6), min_size=1, max_size=3),
)
def test_a_cache_that_grows_by_segments(file, form, segments, lags):
    """`lags`: tokens by which each sequence is shorter than the longest; those may go into an earlier segment."""
    layout = KVLayout(len(lags), HEADS, segments, HEAD_DIM, form)
    steps = []
    for held in range(segments[0], sum(segments)):
        slots = torch.tensor([max(0, held - lag + min(lags)) for lag in lags])
        steps.append((held, slots[:, None].expand(len(lags), HEADS)))
    assert replay(file, layout, steps) == 2  # when the second and the third segment are full


# sequences that take the places of others


@settings(max_examples=10)
@given(form=FORMS, batch=st.integers(2, 5), slots=st.integers(1, 40), seed=st.integers(0, 1000))
def test_sequences_come_and_go_in_a_cache_of_fixed_size(file, form, batch, slots, seed):
    layout = KVLayout(batch, HEADS, (slots,), HEAD_DIM, form, *FIXED)
    random = Random(seed)
    mirrored = Mirrored(file, layout, slots)
    count = batch
    for _ in range(25):
        mirrored.read(slots, count)
        places, count = come_and_go(random, batch, count)
        victims = torch.tensor([random.randrange(slots) for _ in range(batch * HEADS)])
        mirrored.step(slots, victims.view(batch, HEADS), dict.fromkeys(places, slots), count)
    mirrored.read(slots, count)
    mirrored.io.close()


@settings(max_examples=10)
@given(
    form=FORMS,
    segments=st.tuples(st.integers(3, 9), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
    batch=st.integers(2, 5),
    seed=st.integers(0, 1000),
)
def test_sequences_come_and_go_in_a_cache_that_grows(file, form, segments, batch, seed):
    """Each ends at the latest when its slots are full, so the block grows and shrinks again."""
    layout = KVLayout(batch, HEADS, segments, HEAD_DIM, form)
    random = Random(seed)
    mirrored = Mirrored(file, layout, segments[0])
    count = batch
    lengths = [segments[0]] * batch
    for _ in range(25):
        running = count
        full = tuple(place for place in range(count) if lengths[place] == layout.slots)
        places, count = come_and_go(random, batch, count, full)
        new = {place: random.randint(1, segments[0] + 1) for place in places}
        old = [place for place in range(count) if place not in new]
        held = max(*new.values(), *(lengths[place] + 1 for place in old), 0, 0)
        mirrored.read(held, 0 if full else running)
        slots = torch.tensor([lengths[place] if place in old else 0 for place in range(batch)])
        mirrored.step(held, slots[:, None].expand(batch, HEADS), new, count)
        lengths = [new.get(place, length + (place in old)) for place, length in enumerate(lengths)]
    mirrored.io.close()


def come_and_go(random: Random, batch: int, count: int, ended: tuple[int, ...] = ()) -> tuple[tuple[int, ...], int]:
    """(places that a sequence takes, places in use then), of `count` in use."""
    if random.random() < 0.2 and count > 1 and not ended:
        return (), count - 1  # the last one has ended, and nobody takes its place
    places = {*ended, *(place for place in range(count) if random.random() < 0.1)}
    grown = random.randint(count, batch) if random.random() < 0.3 else count
    return (*sorted(places), *range(count, grown)), grown


@pytest.mark.parametrize("before, after", [(0, 0), (3, 0), (0, 3), (3, 3)])
def test_a_newcomer_writes_its_own_pages_and_its_neighbours_keep_their_tokens(file, before, after):
    """`before`, `after`: tokens of each sequence in the log before and after it comes."""
    form = cache_format(None, torch.float32, HEAD_DIM)
    layout = KVLayout(4, HEADS, (256,), HEAD_DIM, form, *FIXED)  # a sequence has two pages of K, and two of V
    mirrored = Mirrored(file, layout, 256)
    slots = [torch.full((4, HEADS), 7 + n) for n in range(before + after)]
    for n in range(before):
        mirrored.step(256, slots[n])
    written = mirrored.io.written_bytes
    mirrored.read(256, 4)
    mirrored.step(256, torch.full((4, HEADS), 9), {2: 256})
    assert mirrored.in_part == 1 and mirrored.io.written_bytes - written == (4 + 1) * PAGE
    for n in range(after):
        mirrored.read(256, 4)
        mirrored.step(256, slots[before + n])
    mirrored.read(256, 4)
    assert mirrored.compacted == 0
    mirrored.io.close()
