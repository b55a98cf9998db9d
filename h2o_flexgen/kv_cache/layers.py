"""Slots by layer: the same number in all, more of them where they are missed most."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from h2o_flexgen.errors import UserError
from h2o_flexgen.files import read_json


def read_shares(path: str) -> list[float]:
    """What each layer gets, relative to the others, by a file of `h2o-flexgen calibrate`. Raises UserError."""
    data = read_json("`kv_rule`", path)
    shares = data.get("layers") if isinstance(data, dict) else None
    if not isinstance(shares, list) or not all(isinstance(x, (int, float)) and 0 < x < inf for x in shares) or not shares:
        raise UserError(f"`kv_rule`: {path} holds no shares of layers: h2o-flexgen calibrate --output FILE makes one")
    return shares


def slots_by_layer(heavy: int, recent: int, shares: Sequence[float], most: int) -> tuple[tuple[int, int], ...]:
    """(heavy, recent) of each layer, each in the proportion of the two that are given.

    Args:
        heavy, recent: slots of the average layer.
        shares: what each layer gets of the slots of all layers, relative to the others.
        most: slots of a layer that can be filled; what a layer would have beyond that goes to the others.
    """
    mean = min(heavy + recent, most)
    left, open_layers = mean * len(shares), list(range(len(shares)))
    slots = [float(most)] * len(shares)
    while True:
        each = left / sum(shares[n] for n in open_layers)
        full = [n for n in open_layers if each * shares[n] >= most]
        if not full or len(full) == len(open_layers):
            break
        left -= most * len(full)
        open_layers = [n for n in open_layers if n not in full]
    for n in open_layers:
        slots[n] = min(float(most), each * shares[n])
    whole = [max(1, int(x)) for x in slots]
    by_rest = sorted(open_layers, key=lambda n: whole[n] - slots[n])
    for n in by_rest[: max(0, mean * len(shares) - sum(whole))]:
        whole[n] += 1
    recents = [round(n * recent / (heavy + recent)) for n in whole]
    return tuple((n - r, r) for n, r in zip(whole, recents))
