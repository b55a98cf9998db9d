"""A mixture of experts: which tokens go through which experts, and the sum of what these return.

Shapes: N tokens, E hidden width, K experts that each token goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial

import torch
from torch import Tensor

from h2o_flexgen.compiled.threads import together

#: an expert: (n, E) -> (n, E)
Expert = Callable[[Tensor], Tensor]


def each_of(group: range, matrices: dict[str, list], compute: Callable[[dict, Tensor], Tensor]) -> dict[int, Expert]:
    """The experts of a group by their numbers. `matrices`: by short name, of each of them; `compute`: (the tensors of
    one, rows)."""
    found = {}
    for place, expert in enumerate(group):
        found[expert] = partial(compute, {short: each[place] for short, each in matrices.items()})
    return found


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

    def add(self, experts: dict[int, Expert], x: Tensor, total: Tensor) -> None:
        """Add the weighted outputs of some experts to `total` (N, E), from x (N, E).

        Experts of a token are added up one by one, in ascending order if they are given so, as transformers does: the
        sum depends neither on other tokens nor on how experts are grouped.
        """
        for few in self._batches([expert for expert in experts if expert in self._parts], x):
            outputs = together([partial(self._output, expert, experts[expert], x) for expert in few])
            for expert, output in zip(few, outputs):
                total.index_add_(0, self._tokens[self._parts[expert]], output)

    def _batches(self, experts: list[int], x: Tensor) -> Iterator[list[int]]:
        """Experts that are computed at the same time, on a core each: with few rows that is faster than one after the
        other on all cores. They have at most N rows together, for which there is room."""
        most = 1 if x.is_cuda else torch.get_num_threads()
        few: list[int] = []
        rows = 0
        for expert in experts:
            part = self._parts[expert]
            rows += part.stop - part.start
            if few and (len(few) == most or rows > len(x)):
                yield few
                few = []
                rows = part.stop - part.start
            few.append(expert)
        if few:
            yield few

    def _output(self, expert: int, compute: Expert, x: Tensor) -> Tensor:
        part = self._parts[expert]
        found = compute(x.index_select(0, self._tokens[part]))
        return found.mul_(self._weights[part, None].to(x.dtype))
