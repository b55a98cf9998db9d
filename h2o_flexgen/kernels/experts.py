"""A mixture of experts: which tokens go through which experts, and the sum of what these return.

Shapes: N tokens, E hidden width, K experts that each token goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from operator import itemgetter

from torch import Tensor

from h2o_flexgen.kernels.int8 import INT8_ROWS
from h2o_flexgen.kernels.operands import Grouped

#: (tensors by short name, x (n, E)) -> (n, E); a tensor may be a group, of the same tensor of several experts
Expert = Callable[[dict, Tensor], Tensor]


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

    def add(self, group: range, matrices: dict[str, list], compute: Expert, x: Tensor, total: Tensor) -> None:
        """Add the weighted outputs of a group of experts to `total` (N, E), from x (N, E). `matrices`: by short name,
        of each expert of the group.

        Experts of a token are added up one by one, in ascending order if groups are given so, as transformers does: the
        sum depends neither on other tokens nor on how experts are grouped.
        """
        for experts in self._batches(group, len(x)):
            parts = [self._parts[expert] for expert in experts]
            all_rows = slice(parts[0].start, parts[-1].stop)
            w = self._weights_of([group.index(expert) for expert in experts], parts, matrices)
            outputs = compute(w, x.index_select(0, self._tokens[all_rows]))
            outputs.mul_(self._weights[all_rows, None].to(x.dtype))
            for part, output in zip(parts, outputs.split([part.stop - part.start for part in parts])):
                total.index_add_(0, self._tokens[part], output)

    def _batches(self, group: range, tokens: int) -> Iterator[list[int]]:
        """The experts of a group that have tokens, in lists of those that are computed together: with N rows at most,
        for which there is room, and no more than an int8 matmul takes at once, or one alone."""
        batch = []
        room = most = min(tokens, INT8_ROWS)
        for expert in filter(self._parts.__contains__, group):
            part = self._parts[expert]
            size = part.stop - part.start
            if batch and size > room:
                yield batch
                batch = []
                room = most
            batch.append(expert)
            room -= size
        if batch:
            yield batch

    def _weights_of(self, places: list[int], parts: list[slice], matrices: dict[str, list]) -> dict:
        """The tensors of the experts at some places of a group."""
        if len(places) == 1:
            return {short: each[places[0]] for short, each in matrices.items()}
        counts = [part.stop - part.start for part in parts]
        members = itemgetter(*places)
        return {short: Grouped(list(members(each)), counts) for short, each in matrices.items()}
