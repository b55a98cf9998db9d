"""Keep random tokens: the control."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_flexgen.kv_cache.fixed_rule import FixedRule
from h2o_flexgen.kv_cache.rule import Tokens


@dataclass(frozen=True)
class RandomCache(FixedRule):
    """Random choice: our control.

    Keeps the last `recent` tokens and, of the others, `heavy` random ones.
    Why: a rule that claims to know which tokens matter must beat it.

    A token's random number is a hash of its position and its KV head alone, so that the same tokens stay on every tier
    and in every batch. In 32-bit integers, which wrap around, with arithmetic shifts:
    x = position * 0x2545F491 + (head + 1) * 0x1B873593; x = (x ^ x >> 15) * 0x2C1B3C6D; number = (x ^ x >> 13) >> 8.
    """

    name = "random"
    needs_equal_heads = True

    def rank(self, tokens: Tokens) -> Tensor:
        position = tokens.position
        head = torch.arange(1, position.shape[1] + 1, dtype=torch.int32, device=position.device)[:, None]
        x = torch.add(head * 0x1B873593, position, alpha=0x2545F491)
        x = (x ^ (x >> 15)).mul_(0x2C1B3C6D)
        return (x ^ (x >> 13)).bitwise_right_shift_(8).float()  # 24 bits: exact as a float
