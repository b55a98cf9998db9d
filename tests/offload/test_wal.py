"""A KV block on disk reads back as it was, whatever is in its log and whenever it is compacted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen.compression import cache_format
from h2o_flexgen.kv_cache import HeavyHitterCache, KVLayout
from h2o_flexgen.offload.device import host_memory
from h2o_flexgen.offload.disk import DiskIO, File
from h2o_flexgen.offload.wal import LoggedBlock, file_bytes
from h2o_flexgen.sizes import PAGE

HEADS, HEAD_DIM = 2, 4
OFFSET = 3 * PAGE
FORMS = st.sampled_from([cache_format(kind, torch.float32, HEAD_DIM) for kind in (None, "int8", "int4")])

#: metadata and growth of a cache with a fixed number of slots
FIXED = HeavyHitterCache.metadata, HeavyHitterCache.growth


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return File(tmp_path_factory.mktemp("wal") / "kv_cache", writable=True)


def replay(file: File, layout: KVLayout, steps: list[tuple[int, torch.Tensor]]) -> int:
    """Take a block through steps as the store does: read it, put a token into `slots` (B, H), and append or compact.
    At each, what was read must be what a cache in RAM holds. `steps`: (slots held before, slots). Returns how many
    times the block was compacted."""
    io = DiskIO(threads=1)
    block, buffer, wanted = LoggedBlock(io, file, OFFSET), host_memory(file_bytes(layout)), host_memory(layout.kv_bytes)
    block.begin(layout)
    held = steps[0][0]
    wanted[: layout.used_bytes(held)] = 1  # as prefill leaves it
    buffer[: layout.kv_bytes] = wanted
    block.compact(buffer.numpy(), block.dirty(held))
    compacted = 0
    for n, (held, slots) in enumerate(steps):
        used = layout.used_bytes(held)
        buffer[:] = 255
        block.read(buffer.numpy(), used)
        assert torch.equal(buffer[:used], wanted[:used])
        k = torch.full((layout.batch, HEADS, HEAD_DIM), 2.0 + n) + torch.arange(HEAD_DIM)
        for cache in (buffer, wanted):
            layout.view(cache, host_memory(layout.meta_bytes)).write(slots, k, -k)
        if block.is_due(held + 1):
            block.compact(buffer.numpy(), block.dirty(held + 1, slots))
            compacted += 1
        else:
            row = host_memory(layout.row_bytes)
            token = layout.view(wanted, host_memory(layout.meta_bytes)).token(slots)
            row[:] = torch.cat([x.view(torch.uint8).view(-1) for x in token])
            whole_pages = torch.nn.functional.pad(row, (0, -len(row) % PAGE)).numpy()
            block.append(whole_pages, slots.numpy())
    io.close()
    return compacted


@settings(max_examples=30)
@given(form=FORMS, batch=st.integers(1, 3), slots=st.integers(1, 40), seed=st.integers(0, 100))
def test_a_cache_of_fixed_size(file, form, batch, slots, seed):
    layout = KVLayout(batch, HEADS, (slots,), HEAD_DIM, form, *FIXED)
    generator = torch.Generator().manual_seed(seed)
    victims = [torch.randint(0, slots, (batch, HEADS), generator=generator) for _ in range(30)]
    assert replay(file, layout, [(slots, victim) for victim in victims]) > 0  # a slot may be logged twice


@settings(max_examples=30)
@given(
    form=FORMS,
    segments=st.tuples(st.integers(3, 9), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
    lags=st.lists(st.integers(0, 6), min_size=1, max_size=3),
)
def test_a_cache_that_grows_by_segments(file, form, segments, lags):
    """`lags`: by so many tokens each sequence is shorter than the longest; those go into an earlier segment."""
    layout = KVLayout(len(lags), HEADS, segments, HEAD_DIM, form)
    steps = []
    for held in range(segments[0], sum(segments)):
        slots = torch.tensor([max(0, held - lag + min(lags)) for lag in lags])
        steps.append((held, slots[:, None].expand(len(lags), HEADS)))
    assert replay(file, layout, steps) == 2  # when the second and the third segment are full
