"""The full cache, segment by segment, against attention over the whole text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import quantised

from h2o_flexgen.formats import KVFormat
from h2o_flexgen.formats.forms import cache_format
from h2o_flexgen.kv_cache import FullCache, HeavyHitterCache, KVLayout
from h2o_flexgen.kv_cache import full as full_cache
from h2o_flexgen.kv_cache.rule import Rows
from h2o_flexgen.machine.pages import PAGE
from h2o_flexgen.storage.wal import file_bytes

#: metadata and growth of a cache with a fixed number of slots
FIXED = HeavyHitterCache.metadata, HeavyHitterCache.growth


@given(
    kind=st.sampled_from([None, "int8", "int4"]),
    B=st.integers(1, 3),
    KV=st.integers(1, 3),
    group=st.sampled_from([1, 3, 8]),
    D=st.integers(1, 5),
    segment=st.integers(1, 6),
    steps=st.integers(0, 15),
    data=st.data(),
)
def test_every_token_is_attended_to_and_nothing_else(kind, B, KV, group, D, segment, steps, data):
    """As it is stored, in a step."""
    D = {None: D, "int8": 2 * D, "int4": 4 * D}[kind]
    T = data.draw(st.integers(1, 9), "T")
    lengths = [T] + [data.draw(st.integers(1, T), "length") for _ in range(B - 1)]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32), "seed"))
    heads = (KV * group, KV, KV)
    q, k, v = (torch.randn(B, H, T + steps, D, generator=generator) for H in heads)
    rule = FullCache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full_cache, "SEGMENT", segment)
        layout = KVLayout(B, KV, rule.segments(T, steps + 1), D, cache_format(kind, torch.float32, D))
        assert layout.slots == T + steps
        cache = layout.view(torch.zeros(layout.kv_bytes, dtype=torch.uint8))
        for tensor in (*cache.k, *cache.v):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 255)  # what another job left behind
        ragged = [torch.zeros(B, H, T, D).uniform_(-9, 9, generator=generator) for H in heads]
        for b, n in enumerate(lengths):
            for padded, x in zip(ragged, (q, k, v)):
                padded[b, :, :n] = x[b, :, :n]
        rule.prefill(cache, *ragged, Rows.prompts(torch.tensor(lengths)))
        stored = quantised(kind, k, v)
        for step in range(1, steps + 1):
            now = [n + step - 1 for n in lengths]
            new = (torch.stack([x[b, :, t] for b, t in enumerate(now)])[:, :, None] for x in (q, k, v))
            context, slots = rule.decode(
                cache, *new, Rows.steps(torch.tensor(lengths) + step - 1, torch.tensor(lengths))
            )
            assert slots.tolist() == [[t] * KV for t in now]
            for b, t in enumerate(now):
                seen_k, seen_v = (x[b, :, : t + 1].double().repeat_interleave(group, 0) for x in stored)
                logits = torch.einsum("hd,hsd->hs", q[b, :, t].double(), seen_k) / D**0.5
                expected = torch.einsum("hs,hsd->hd", torch.softmax(logits, -1), seen_v)
                torch.testing.assert_close(context[b, :, 0].double(), expected, atol=1e-5, rtol=1e-4)


@given(prompt=st.integers(1, 600), gen=st.integers(1, 600))
def test_slots_are_those_of_the_text_without_its_last_token(prompt, gen):
    segments = FullCache().segments(prompt, gen)
    assert sum(segments) == prompt + gen - 1
    assert segments[0] == prompt
    assert all(0 < s <= full_cache.LARGEST_SEGMENT for s in segments[1:])
    for n, size in enumerate(segments[1:], 1):
        assert size <= max(full_cache.SEGMENT, sum(segments[:n]) / 8), "too much of it is empty at first"
    assert len(segments) < 32


@given(prompt=st.integers(1, 1500), more=st.integers(0, 500), gen=st.integers(1, 1500))
def test_a_shorter_block_finds_room_on_disk(prompt, more, gen):
    segments = (FullCache().segments(n, gen) for n in (prompt, prompt + more))
    short, long = (KVLayout(1, 1, each, 512, KVFormat.dense(torch.float32)) for each in segments)
    assert short.row_bytes == PAGE and file_bytes(short) <= file_bytes(long)


@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    segments=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    head_dim=st.integers(1, 5),
    held=st.integers(1, 40),
    scored=st.booleans(),
)
def test_a_layout_covers_its_bytes_once(batch, heads, segments, head_dim, held, scored):
    segments = tuple(segments[:1] if scored else segments)
    layout = KVLayout(batch, heads, segments, head_dim, KVFormat.dense(torch.float32), *(FIXED if scored else ()))
    kv, meta = torch.zeros(layout.kv_bytes, dtype=torch.uint8), torch.zeros(layout.meta_bytes, dtype=torch.uint8)
    cache = layout.view(kv, meta)
    for tensor in (*cache.k, *cache.v):
        assert not tensor.any(), "two tensors share bytes"
        tensor.fill_(1.5)
    assert (kv.view(torch.float32) == 1.5).all()
    used = layout.used_bytes(held)
    assert used % layout.row_bytes == 0 and used >= min(held, layout.slots) * layout.row_bytes
    assert used // layout.row_bytes in [sum(segments[: n + 1]) for n in range(len(segments))]
    if scored:
        cache.score.fill_(2.5)
        cache.position.fill_(7)
        assert (meta.view(torch.int32) == 7).sum() == cache.position.numel() == cache.score.numel()
