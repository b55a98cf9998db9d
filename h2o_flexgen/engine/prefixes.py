"""Shared prefixes of prompts, as a tree: each is computed once (as in RadixAttention, arXiv 2312.07104, section 3, but
exactly, with scores, and kept only as long as rows wait for it).

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

#: fewest tokens that a node must save over all rows, since each node costs one more call of attention in every layer
LEAST_SAVED = 64
#: fewest tokens of a node, since each row after it costs one more call
LEAST_TOKENS = 8


@dataclass(eq=False)
class Node:
    """A prefix that several prompts share.

    Attributes:
        parent: the node of its own prefix.
        prompt: token ids, beginning with the parent's.
        ahead: tokens after it that are never shared (`CacheRule.voters`).
        waiting: rows that begin with it and have not been computed.
        texts: by layer, K, V and the rule's state for the tokens after the parent's, with the scores of all tokens.
    """

    parent: Node | None
    prompt: list[int]
    ahead: int = 0
    waiting: int = 0
    texts: dict[int, Text] = field(default_factory=dict)

    length = 0  # cached tokens, as in a `Sequence`

    @property
    def end(self) -> int:
        return len(self.prompt)

    @property
    def wanted(self) -> int:
        """The first token whose logits are wanted: none."""
        return self.end

    def path(self) -> list[Node]:
        """All nodes from the root to this one."""
        return [self] if self.parent is None else [*self.parent.path(), self]

    def text(self, layer: int) -> Text:
        """K, V and scores of all tokens in a layer."""
        own = self.texts[layer]
        return own if self.parent is None else own.appended_to(self.parent.text(layer))


def nodes_of(row) -> list[Node]:
    """The nodes of the prefix of a row, or of a piece of rows, from the root on."""
    return row.path.path() if row.path else []


def order(rows: list, limit: Callable[[object], int], ahead: int, nodes: dict[tuple[int, ...], Node]) -> list:
    """Set the `path` of each row, and sort rows in the order in which they should wait: depth first, then the longest
    outputs and prompts, otherwise in the order given. `limit`: how many tokens of a row's prompt it may share; `ahead`:
    as in `Node`; `nodes`: existing ones by their token ids, to which new ones are added."""
    given = rows
    # by the part that they may share: otherwise a row that may share little could separate two that may share more
    rows = sorted(rows, key=lambda s: s.prompt[: limit(s)])
    common = [0, *(_common(a, b, limit) for a, b in zip(rows, rows[1:])), 0]  # tokens shared by rows n - 1 and n
    groups = [(0, len(rows), 0, None)]  # (first row, end, shared tokens, node of the prefix)
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
    """The most tokens that two rows share, and the number of tokens that need not be computed again."""
    rows = sorted(rows, key=lambda s: s.prompt)
    common = [_common(a, b, lambda s: min(s.wanted, len(s.prompt) - 1)) for a, b in zip(rows, rows[1:])]
    common = [tokens for tokens in common if tokens >= LEAST_TOKENS]
    return max(common, default=0), sum(common)


def _common(a, b, limit: Callable[[object], int]) -> int:
    """The length of the prefix that two rows share."""
    most = min(limit(a), limit(b))
    if a.prompt[:most] == b.prompt[:most]:
        return most
    return next(n for n, pair in enumerate(zip(a.prompt, b.prompt)) if pair[0] != pair[1])


def _runs(common: list[int], begin: int, end: int, depth: int) -> list[tuple[int, int]]:
    """(begin, end) of runs of rows that share more than `depth` tokens with their neighbours."""
    cuts = [n for n in range(begin + 1, end) if common[n] <= depth]
    return list(zip([begin, *cuts], [*cuts, end]))


def _depth_first(rows: list) -> list:
    """Rows sorted so that those of a node stay together: nodes that have been computed first, then the longest."""
    longest: dict[Node, tuple[int, int]] = {}  # of the rows that begin with each node
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
