"""The segments of a full cache, and the bytes of a layout."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen.formats import KVFormat
from h2o_flexgen.kv_cache import FullCache, HeavyHitterCache, KVLayout
from h2o_flexgen.kv_cache import full as full_cache
from h2o_flexgen.machine.pages import PAGE
from h2o_flexgen.storage.wal import file_bytes

#: metadata and growth of a cache with a fixed number of slots
FIXED = HeavyHitterCache.metadata, HeavyHitterCache.growth


@given(prompt=st.integers(1, 600), gen=st.integers(1, 600))
def test_the_full_cache_has_a_slot_for_each_token_but_the_last(prompt, gen):
    segments = FullCache().segments(prompt, gen)
    assert sum(segments) == prompt + gen - 1
    assert segments[0] == prompt
    assert all(0 < s <= full_cache.LARGEST_SEGMENT for s in segments[1:])
    for n, size in enumerate(segments[1:], 1):
        assert size <= max(full_cache.SEGMENT, sum(segments[:n]) / 8)
    assert len(segments) < 32


@given(prompt=st.integers(1, 1500), more=st.integers(0, 500), gen=st.integers(1, 1500))
def test_a_shorter_block_finds_room_on_disk(prompt, more, gen):
    form = KVFormat.dense(torch.float32)
    short, long = (KVLayout(1, 1, FullCache().segments(n, gen), 512, form) for n in (prompt, prompt + more))
    assert short.row_bytes == PAGE and file_bytes(short) <= file_bytes(long)


@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    segments=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    head_dim=st.integers(1, 5),
    cached=st.integers(1, 40),
    scored=st.booleans(),
)
def test_a_layout_covers_its_bytes_once(batch, heads, segments, head_dim, cached, scored):
    segments = tuple(segments[:1] if scored else segments)
    layout = KVLayout(batch, heads, segments, head_dim, KVFormat.dense(torch.float32), *(FIXED if scored else ()))
    kv = torch.zeros(layout.kv_bytes, dtype=torch.uint8)
    meta = torch.zeros(layout.meta_bytes, dtype=torch.uint8)
    cache = layout.view(kv, meta)
    for tensor in (*cache.k, *cache.v):
        assert not tensor.any(), "two tensors share bytes"
        tensor.fill_(1.5)
    assert (kv.view(torch.float32) == 1.5).all()
    used = layout.used_bytes(cached)
    assert used % layout.row_bytes == 0 and used >= min(cached, layout.slots) * layout.row_bytes
    assert used // layout.row_bytes in [sum(segments[: n + 1]) for n in range(len(segments))]
    if scored:
        cache.score.fill_(2.5)
        cache.position.fill_(7)
        assert (meta.view(torch.int32) == 7).sum() == cache.position.numel() == cache.score.numel()
