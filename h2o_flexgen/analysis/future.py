"""The tokens that a rule would keep if it knew the future, and the heavy hitters of a prompt (H2O paper, section 3.2).

Shapes: KV heads, N tokens, the first P are the prompt, M = N - P follow.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kept_with_future(received: Tensor, prompt_len: int, heavy: int, recent: int) -> Tensor:
    """(..., M, N) bool, as `Run.kept`: the tokens kept by a rule that sees the whole text. These are the last `recent`
    tokens, and of the others the `heavy` ones with the most attention `received` (..., N) from all queries, later ones
    included."""
    N = received.shape[-1]
    newest = torch.arange(prompt_len - 1, N - 1)[:, None]  # just before each of the M tokens
    position = torch.arange(N)
    window = (position > newest - recent) & (position <= newest)
    old = position <= newest - recent
    ranked = torch.where(old, received[..., None, :], -torch.inf)
    best = ranked.topk(min(heavy, N), -1).indices
    return torch.zeros_like(ranked, dtype=torch.bool).scatter_(-1, best, True) & old | window


def overlaps(kept: Tensor, future: Tensor, recent: list[int]) -> tuple[Tensor, Tensor, float]:
    """Of the tokens that a rule with the `future` known keeps (L, ..., M, N), the fraction that is `kept` (L, ..., M,
    N) too. Returns it by layer (L,) for all slots; by layer for the slots before the recent window, where the two may
    differ; and the value that chance would give the latter. `recent`: tokens of that window, by layer."""
    M, N = kept.shape[-2:]
    newest = torch.arange(N - M - 1, N - 1)[:, None]
    old = torch.arange(N) <= newest - torch.tensor(recent).view(-1, *[1] * (kept.dim() - 1))

    def share(places: Tensor) -> Tensor:
        slots = (future & places).sum(-1)
        return ((kept & future & places).sum(-1) / slots.clamp(min=1)).flatten(1).mean(1)

    chance = (future & old).sum(-1) / old.sum(-1).clamp(min=1)
    return share(torch.ones_like(old)), share(old), float(chance.mean())


def heaviest(received: Tensor, count: int) -> Tensor:
    """(..., N) bool: the `count` tokens with the largest `received` (..., N)."""
    return torch.zeros_like(received, dtype=torch.bool).scatter_(-1, received.topk(count, -1).indices, True)


def random_others(chosen: Tensor, prompt_len: int, rng: torch.Generator) -> Tensor:
    """Prompt tokens drawn at random, as many as are `chosen` (..., N), but none of them."""
    draw = torch.rand(chosen.shape, generator=rng).masked_fill_(chosen, -1.0)
    draw[..., prompt_len:] = -1.0
    return heaviest(draw, int(chosen[(0,) * (chosen.dim() - 1)].sum()))
