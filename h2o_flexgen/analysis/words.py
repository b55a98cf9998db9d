"""Whether words with many neighbours receive more attention (section 3.2 and the appendix of the H2O paper)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: two tokens co-occur if they are at most this many places apart, as in GloVe (Pennington et al. 2014)
REACH = 10


@dataclass
class Words:
    """The words of some texts; a word is a token id.

    Attributes:
        co_occurrences: (W,) number of tokens at most REACH places from an occurrence of the word, over all occurrences.
        occurrences: (W,) how often the word occurs, not counting the first token of a text, which receives attention
            whatever it is.
        score: (W,) sum of the attention that these occurrences received.
    """

    co_occurrences: Tensor
    occurrences: Tensor
    score: Tensor

    @classmethod
    def of(cls, ids: Tensor, received: Tensor) -> Words:
        """From texts ids (B, N), and the attention (B, N) that their tokens `received`."""
        at = torch.arange(ids.shape[1])
        before = at.clamp(max=REACH)
        after = at.flip(0).clamp(max=REACH)
        words, index = ids[:, 1:].unique(return_inverse=True)
        neighbours = (before + after).double()[1:].expand(index.shape)

        def summed(values: Tensor) -> Tensor:
            return torch.zeros(len(words), dtype=torch.float64).index_add_(0, index.flatten(), values.flatten())

        values = received[:, 1:].double()
        return cls(summed(neighbours), summed(torch.ones_like(values)), summed(values))

    def correlations(self) -> dict[str, dict[str, float]]:
        """Correlations of co-occurrences with the score, and with the score per occurrence."""
        scores = {"summed": self.score, "per_occurrence": self.score / self.occurrences}
        return {
            name: {
                "spearman": pearson(ranks(self.co_occurrences), ranks(score)),
                "pearson_of_logs": pearson(self.co_occurrences.log(), score.log()),
            }
            for name, score in scores.items()
        }


def ranks(values: Tensor) -> Tensor:
    """(W,) fp64: rank of each value in ascending order; equal values share the mean of their ranks."""
    _, index, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0).double() - (counts - 1) / 2)[index]


def pearson(a: Tensor, b: Tensor) -> float:
    a = a - a.mean()
    b = b - b.mean()
    return float((a * b).sum() / (a.norm() * b.norm()))
