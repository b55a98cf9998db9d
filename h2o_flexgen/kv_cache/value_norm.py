"""Keep the tokens that contribute most to the output of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_flexgen.kv_cache.fixed_rule import FixedRule
from h2o_flexgen.kv_cache.rule import Tokens


@dataclass(frozen=True)
class ValueNormCache(FixedRule):
    """VATP, value-aware token pruning (arXiv 2406.12335), on the scores of H2O.

    Keeps the `first` and the last `recent` tokens and, of the others, those with the highest product of H2O's score and
    the L1 norm of the value.
    Why: a token's share of the output is its attention times its value. The first tokens (attention sinks) have large
    scores and tiny values, but a model breaks without them: `first` protects 20, as the paper's code does.
    """

    first: int = 20

    name = "vatp"
    metadata = (*FixedRule.metadata, ("value_norm", torch.float32))

    def remember(self, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        return {"value_norm": v.abs().float().sum(-1)}

    def rank(self, tokens: Tokens) -> Tensor:
        return tokens.score * tokens.metadata["value_norm"]
