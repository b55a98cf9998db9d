"""The places of a token's K and V in the bytes of a cache."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.formats import KVFormat
from h2o_flexgen.formats.forms import cache_format
from h2o_flexgen.kv_cache import HeavyHitterCache, KVLayout

FORMS = [KVFormat.dense(torch.float32), KVFormat.dense(torch.bfloat16)]
FORMS += [cache_format(kind, torch.float32, 4) for kind in ("int8", "int4")]
NAMES = ["fp32", "bf16", "int8", "int4"]

#: metadata and growth of a cache with a fixed number of slots
FIXED = HeavyHitterCache.metadata, HeavyHitterCache.growth


def floats(form: KVFormat) -> torch.dtype:
    """The type of the floats that it stores."""
    return form.k.dtype if form.is_dense else torch.float32


def as_row(token):
    return torch.cat([x.contiguous().view(torch.uint8).reshape(-1) for x in token])


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
@pytest.mark.parametrize("segments", [(7,), (3, 4), (2, 1, 5)])
def test_put_and_write_store_a_token_in_the_same_place(segments, form):
    B, H, D = 3, 2, 4
    layout = KVLayout(B, H, segments, D, form)
    for slot in range(layout.slots):
        slots = ((torch.arange(B) + slot) % layout.slots)[:, None].expand(B, H)
        if len(segments) == 1:
            slots = (slots + torch.arange(H)) % layout.slots  # heads need not agree
        k, v = torch.randn(2, B, H, D).to(floats(form))
        expected, found = (torch.zeros(layout.kv_bytes, dtype=torch.uint8) for _ in range(2))
        cache = layout.view(expected)
        cache.write(slots, k, v)
        token = cache.token(slots)
        assert all(torch.equal(a, b) for a, b in zip(token, form.stored(k, v)))
        layout.put(found.numpy(), as_row(token).numpy()[None], slots.numpy()[None])
        assert torch.equal(found, expected)


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_the_later_of_two_tokens_in_one_slot_stays(form):
    """Replaying a write-ahead log relies on this."""
    layout = KVLayout(2, 3, (5,), 4, form, *FIXED)
    slots = torch.tensor([1, 3, 1])[:, None, None].expand(3, 2, 3)
    tokens = [form.stored(*torch.full((2, 2, 3, 4), float(n)).to(floats(form))) for n in range(3)]
    kv, meta = (torch.zeros(n, dtype=torch.uint8) for n in (layout.kv_bytes, layout.meta_bytes))
    layout.put(kv.numpy(), torch.stack([as_row(token) for token in tokens]).numpy(), slots.numpy())
    cache = layout.view(kv, meta)
    for slot, n in ((1, 2), (3, 1)):
        assert all(torch.equal(x[0][:, :, slot], y) for x, y in zip((cache.k, cache.v), tokens[n]))
