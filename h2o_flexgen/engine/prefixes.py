"""Prompts that begin alike, as a tree: what they have in common is computed once (as RadixAttention does, arXiv
2312.07104, section 3, but exactly, with scores, and for as long as rows wait for it).

    instructions (400 tokens)           node
        example text 1 (300 tokens)         node
            question 1, question 2              rows
        question 3                          row

Rows wait depth first, so that one path through the tree is alive at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from h2o_flexgen.kv_cache.rule import Text

#: tokens that a node saves at least, over all rows: fewer cost more than they save, since each node is one more call of
#: attention in every layer
LEAST_SAVED = 64
#: and tokens that it has at least: else every row behind it would make a call more than it is worth
LEAST_TOKENS = 8


@dataclass(eq=False)
class Node:
    """The beginning of several prompts.

    Attributes:
        parent: the node of its own beginning.
        prompt: token ids, those of the parent first.
        ahead: tokens of the prompts behind it whose queries alone give scores (`CacheRule.voters`).
        waiting: rows that begin with it and have not been computed.
        texts: by layer, K, V and what the rule remembers of the tokens behind the parent's, with the scores of all.
    """

    parent: Node | None
    prompt: list[int]
    ahead: int = 0
    waiting: int = 0
    texts: dict[int, Text] = field(default_factory=dict)

    length = 0  # tokens that came before, as a `Sequence` has

    @property
    def end(self) -> int:
        return len(self.prompt)

    @property
    def wanted(self) -> int:
        """No logits are."""
        return self.end

    def path(self) -> list[Node]:
        """All nodes from the first one to this."""
        return [self] if self.parent is None else [*self.parent.path(), self]

    def text(self, layer: int) -> Text:
        """All tokens."""
        own = self.texts[layer]
        return own if self.parent is None else own.behind(self.parent.text(layer))


def nodes_of(row) -> list[Node]:
    """The nodes that a row, or a piece of rows, is behind, from the first one on."""
    return row.path.path() if row.path else []


def order(rows: list, limit: Callable[[object], int], ahead: int, nodes: dict[tuple[int, ...], Node]) -> list:
    """Rows in the order in which they should wait, the longest outputs and prompts first among their kind and equal
    ones as they are, each with its `path`.

    Args:
        limit: how many tokens of a row's prompt it may share.
        ahead: as `Node` has it.
        nodes: that have been made before, by their token ids; new ones are added.
    """
    given = rows
    # by what they may share: a row that may share little would stand between two that may share more
    rows = sorted(rows, key=lambda s: s.prompt[: limit(s)])
    common = [0, *(_common(a, b, limit) for a, b in zip(rows, rows[1:])), 0]  # of row n and the one before
    groups = [(0, len(rows), 0, None)]  # rows from, to; tokens that they have in common; the node that they are behind
    for node in nodes.values():
        node.waiting = 0
    while groups:
        begin, end, depth, parent = groups.pop()
        for first, last in _runs(common, begin, end, depth):
            if last - first == 1:
                rows[first].path = parent
                continue
            deeper = min(common[first + 1 : last])
            node = parent
            tokens = deeper - (parent.end if parent else 0)
            if tokens >= LEAST_TOKENS and (last - first - 1) * tokens >= LEAST_SAVED:
                prompt = rows[first].prompt[:deeper]
                node = nodes.setdefault(tuple(prompt), Node(parent, prompt, ahead))
            groups.append((first, last, deeper, node))
    for row in rows:
        for node in nodes_of(row):
            node.waiting += 1
    return _depth_first(given)


def shared_tokens(rows: list) -> tuple[int, int]:
    """What there is to share: the most tokens that two rows have in common, and the tokens of all that need not be
    computed again."""
    rows = sorted(rows, key=lambda s: s.prompt)
    common = [_common(a, b, lambda s: min(s.wanted, len(s.prompt) - 1)) for a, b in zip(rows, rows[1:])]
    common = [tokens for tokens in common if tokens >= LEAST_TOKENS]
    return max(common, default=0), sum(common)


def _common(a, b, limit: Callable[[object], int]) -> int:
    """Tokens with which two rows begin."""
    most = min(limit(a), limit(b))
    if a.prompt[:most] == b.prompt[:most]:
        return most
    return next(n for n, pair in enumerate(zip(a.prompt, b.prompt)) if pair[0] != pair[1])


def _runs(common: list[int], begin: int, end: int, depth: int) -> list[tuple[int, int]]:
    """(from, to) of rows that have more than `depth` tokens in common with their neighbours."""
    cuts = [n for n in range(begin + 1, end) if common[n] <= depth]
    return list(zip([begin, *cuts], [*cuts, end]))


def _depth_first(rows: list) -> list:
    """Rows, and nodes with all rows behind them: those that are alive first, then the longest."""
    longest: dict[Node, tuple[int, int]] = {}  # of the rows behind each node
    for s in rows:
        for node in nodes_of(s):
            longest[node] = max(longest.get(node, (0, 0)), _size(s))
    place = {node: -n for n, node in enumerate(longest)}

    def key(s) -> list[tuple]:
        sizes = [(bool(node.texts), *longest[node], place[node]) for node in nodes_of(s)]
        return [*sizes, (False, *_size(s), 0)]

    return sorted(rows, key=key, reverse=True)


def _size(s) -> tuple[int, int]:
    return s.params.max_tokens, len(s.prompt)
