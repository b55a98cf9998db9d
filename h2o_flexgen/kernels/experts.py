"""A mixture of experts: which tokens go through which experts, and the sum of what these return.

Shapes: N tokens, E hidden width, K experts that each token goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor


class Routing:
    """The experts of N tokens.

    Args:
        ids: (N, K) int64, the experts of each token.
        weights: (N, K), what the output of each counts.
    """

    def __init__(self, ids: Tensor, weights: Tensor):
        order = ids.flatten().argsort(stable=True)
        self._tokens = order.div(ids.shape[1], rounding_mode="floor")
        self._weights = weights.flatten()[order]
        counts = ids.flatten().bincount().tolist()
        self._parts: dict[int, slice] = {}  # by expert, of both
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                self._parts[expert] = slice(begin, begin + count)
            begin += count

    @property
    def experts(self) -> Collection[int]:
        """Those that have a token."""
        return self._parts.keys()

    def add(self, expert: int, x: Tensor, total: Tensor, compute: Callable[[Tensor], Tensor]) -> None:
        """Add the weighted output of an expert to the rows of `total` (N, E) whose tokens go through it.

        Experts of a token are added up one by one, in ascending order if this is called so, as transformers does: the
        sum depends neither on other tokens nor on how experts are grouped.

        Args:
            x: (N, E), what experts read; compute: the expert, (n, E) -> (n, E).
        """
        if expert not in self._parts:
            return
        part = self._parts[expert]
        tokens = self._tokens[part]
        found = compute(x.index_select(0, tokens)).mul_(self._weights[part, None].to(x.dtype))
        total.index_add_(0, tokens, found)
