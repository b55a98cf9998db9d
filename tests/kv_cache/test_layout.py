"""Where a token's k and v lie in the bytes of a cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from h2o_flexgen.kv_cache import HeavyHitterCache, KVLayout

DTYPES = [torch.float32, torch.bfloat16]

#: metadata and growth of a cache with a fixed number of slots
FIXED = HeavyHitterCache.metadata, HeavyHitterCache.growth


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("segments", [(7,), (3, 4), (2, 1, 5)])
def test_places_are_where_write_puts_a_token(segments, dtype):
    B, H, D = 3, 2, 4
    layout = KVLayout(B, H, segments, D, dtype)
    for slot in range(layout.slots):
        slots = ((torch.arange(B) + slot) % layout.slots)[:, None].expand(B, H)
        if len(segments) == 1:
            slots = (slots + torch.arange(H)) % layout.slots  # heads need not agree
        row = torch.randn(2, B, H, D).to(dtype)
        expected, found = (torch.zeros(layout.kv_bytes, dtype=torch.uint8) for _ in range(2))
        layout.view(expected).write(slots, row[0], row[1])
        layout.vectors(found.numpy())[layout.places(slots.numpy())] = layout.vectors(
            row.view(torch.uint8).numpy().reshape(-1)
        )
        assert torch.equal(found, expected)


def test_of_two_tokens_in_one_slot_the_later_stays():
    """What replaying a write-ahead log relies on."""
    layout = KVLayout(2, 3, (5,), 4, torch.float32, *FIXED)
    slots = [np.full((2, 3), slot) for slot in (1, 3, 1)]
    rows = torch.arange(3.0).view(3, 1).expand(3, 2 * 2 * 3 * 4).contiguous()
    kv = np.zeros(layout.kv_bytes, np.uint8)
    places = np.concatenate([layout.places(s) for s in slots])
    layout.vectors(kv)[places] = layout.vectors(rows.view(torch.uint8).numpy().reshape(-1))
    k = layout.view(torch.from_numpy(kv), torch.zeros(layout.meta_bytes, dtype=torch.uint8)).k[0]
    assert (k[:, :, 1] == 2).all() and (k[:, :, 3] == 1).all()
