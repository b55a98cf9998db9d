"""Shared prefixes are found, whatever the order of the prompts, and kept as long as rows wait for them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen.engine import prefixes
from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.params import SamplingParams
from h2o_flexgen.engine.prefixes import LEAST_SAVED, Node, order


@pytest.fixture(autouse=True, scope="module")
def small_savings():
    """Makes nodes pay from three tokens on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "LEAST_SAVED", 3)
        patch.setattr(prefixes, "LEAST_TOKENS", 1)
        yield


def row(index: int, prompt: list[int], max_tokens: int = 1, wanted: int | None = None) -> Sequence:
    return Sequence(index, prompt, SamplingParams(max_tokens=max_tokens), wanted=wanted)


def but_one(s: Sequence) -> int:
    """A row may share all of its prompt but the last token."""
    return len(s.prompt) - 1


def path(s: Sequence) -> list[list[int]]:
    """The prompts of a row's nodes, from the root on."""
    return [node.prompt for node in s.path.path()] if s.path else []


@st.composite
def jobs(draw, most: int = 10) -> list[Sequence]:
    """Rows, some cut from others, so that they share prefixes of several depths."""
    prompts: list[list[int]] = []
    for _ in range(draw(st.integers(1, most))):
        begin = draw(st.sampled_from(prompts)) if prompts and draw(st.booleans()) else []
        begin = begin[: draw(st.integers(0, len(begin)))]
        prompts.append(begin + draw(st.lists(st.integers(0, 1), min_size=0 if begin else 1, max_size=6)))
    return [row(n, prompt, draw(st.integers(1, 3))) for n, prompt in enumerate(prompts)]


# a slow oracle


@dataclass
class Group:
    """Rows, and the nodes that all of them share."""

    rows: list[Sequence]
    depth: int
    path: list[list[int]]


def in_common(a: Sequence, b: Sequence, limits: dict[int, int]) -> int:
    """Tokens that two rows may share, one by one."""
    count = 0
    while count < min(limits[a.index], limits[b.index]) and a.prompt[count] == b.prompt[count]:
        count += 1
    return count


def paths_of(rows: list[Sequence], limits: dict[int, int]) -> dict[int, list[list[int]]]:
    """Compares all pairs: rows that share more than their group does become a group of their own, with a node
    if it saves enough."""
    found = {s.index: [] for s in rows}
    groups = [Group(rows, 0, [])]
    while groups:
        group = groups.pop()
        left = list(group.rows)
        while left:
            first = left[0]
            alike = [s for s in left if s is first or in_common(first, s, limits) > group.depth]
            left = [s for s in left if s not in alike]
            if len(alike) == 1:
                found[first.index] = group.path
                continue
            depth = min(in_common(a, b, limits) for a in alike for b in alike if a is not b)
            before = len(group.path[-1]) if group.path else 0
            saves = (len(alike) - 1) * (depth - before) >= prefixes.LEAST_SAVED
            groups.append(Group(alike, depth, [*group.path, first.prompt[:depth]] if saves else group.path))
    return found


@given(rows=jobs(), data=st.data())
def test_nodes_are_those_that_comparing_all_pairs_finds(rows, data):
    """However much of its prompt each row may share: none separates two others."""
    limits = {s.index: data.draw(st.integers(0, len(s.prompt)), f"limit of {s.prompt}") for s in rows}
    found = order(rows, lambda s: limits[s.index], 0, {})
    assert sorted(s.index for s in found) == [s.index for s in rows]
    assert {s.index: path(s) for s in rows} == paths_of(rows, limits)


@given(rows=jobs())
def test_a_node_knows_its_parent_and_how_many_rows_wait_for_it(rows):
    nodes: dict = {}
    order(rows, but_one, 5, nodes)
    alive = {node for s in rows if s.path for node in s.path.path()}
    assert alive == set(nodes.values())
    for key, node in nodes.items():
        behind = [s for s in rows if s.path and node in s.path.path()]
        assert node.waiting == len(behind) > 1 and node.ahead == 5 and list(key) == node.prompt
        assert all(s.prompt[: node.end] == node.prompt and node.end <= but_one(s) for s in behind)
        assert node.parent is None or node.prompt[: node.parent.end] == node.parent.prompt != node.prompt


@given(rows=jobs())
def test_rows_of_a_node_wait_next_to_each_other(rows):
    """So that one path through the tree is alive at a time."""
    found = order(rows, but_one, 0, {})
    for node in {node for s in rows if s.path for node in s.path.path()}:
        places = [n for n, s in enumerate(found) if s.path and node in s.path.path()]
        assert places == list(range(places[0], places[-1] + 1))


@given(rows=jobs())
def test_rows_that_share_nothing_are_sorted_by_length_then_by_place(rows):
    found = order(rows, lambda s: 0, 0, {})
    assert all(s.path is None for s in rows)
    assert found == sorted(rows, key=lambda s: (-s.params.max_tokens, -len(s.prompt), s.index))


@given(rows=jobs())
def test_the_same_rows_wait_in_the_same_order_in_every_process(rows):
    """The order does not depend on the addresses of their nodes."""
    again = [row(s.index, s.prompt, s.params.max_tokens) for s in rows]
    first = order(rows, but_one, 0, {})
    litter = [Node(None, []) for _ in range(50)]
    del litter[::2]
    assert [s.index for s in order(again, but_one, 0, {})] == [s.index for s in first]


@given(rows=jobs(), more=jobs(4))
def test_rows_of_computed_nodes_come_first(rows, more):
    """Even if others have arrived in the meantime."""
    nodes: dict = {}
    first = order(rows, but_one, 0, nodes)[0]
    for node in first.path.path() if first.path else ():
        node.texts[1] = "computed"
    for n, s in enumerate(more):
        s.index = len(rows) + n
    found = order([*rows, *more], but_one, 0, nodes)
    computed = lambda s: s.path is not None and any(node.texts for node in s.path.path())
    alive = list(map(computed, found))
    assert alive == sorted(alive, reverse=True)


# by example


@pytest.mark.parametrize("count, tokens, saves", [(2, 63, False), (2, 64, True), (33, 2, True), (64, 1, False)])
def test_a_node_saves_enough_over_all_of_its_rows(monkeypatch, count, tokens, saves):
    monkeypatch.setattr(prefixes, "LEAST_SAVED", LEAST_SAVED)
    rows = [row(n, [1] * tokens + [2 + n]) for n in range(count)]
    order(rows, but_one, 0, {})
    assert all((s.path is not None) == saves for s in rows)


def test_an_existing_node_is_reused():
    nodes: dict = {}
    rows = [row(n, [1] * 5 + [2 + n]) for n in range(3)]
    order(rows, but_one, 0, nodes)
    node = rows[0].path
    more = [row(3 + n, [1] * 5 + [9 + n]) for n in range(2)]
    order([*rows[1:], *more], but_one, 0, nodes)
    assert {s.path for s in [*rows[1:], *more]} == {node} and node.waiting == 4


def test_the_text_of_a_node_begins_with_its_parents_text():
    first = Node(None, [1, 2])
    second = Node(first, [1, 2, 3])
    third = Node(second, [1, 2, 3, 4, 5])
    assert third.path() == [first, second, third]
    assert [node.end for node in third.path()] == [2, 3, 5]
