"""The zig-zag schedule: every step once, in order, and what comes next."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen.engine.schedule import Step, ZigZag

sizes = dict(tokens=st.integers(1, 5), layers=st.integers(1, 5), batches=st.integers(1, 5))


def walk(schedule, finishes=None):
    """The steps as the engine goes through them. finishes: {batch: the token step at whose end it leaves}."""
    for i, j, active in schedule.layers():
        for k in active:
            yield Step(i, j, k)
            if j == schedule.num_layers - 1 and finishes is not None and finishes.get(k, -1) == i:
                schedule.finish(k)


@given(**sizes)
def test_every_step_comes_once_and_in_order(tokens, layers, batches):
    steps = list(walk(ZigZag(tokens, layers, range(batches))))
    assert steps == [Step(i, j, k) for i in range(tokens) for j in range(layers) for k in range(batches)]


@given(**sizes, data=st.data())
def test_a_finished_batch_takes_no_later_token_step_and_the_block_ends_with_the_last(tokens, layers, batches, data):
    ends = {k: data.draw(st.integers(0, tokens + 1), f"end of batch {k}") for k in range(batches)}
    steps = list(walk(ZigZag(tokens, layers, range(batches)), ends))
    assert steps == [
        Step(i, j, k) for i in range(tokens) for j in range(layers) for k in range(batches) if i <= ends[k]
    ]


@given(**sizes, data=st.data())
def test_cache_steps_are_those_at_one_of_the_kv_blocks(tokens, layers, batches, data):
    """Once a batch has finished, its later steps are left out."""
    schedule = ZigZag(tokens, layers, range(batches))
    pairs = [(j, k) for j in range(layers) for k in range(batches)]
    blocks = sorted(data.draw(st.sets(st.sampled_from(pairs)), "blocks"))
    finished, since = data.draw(st.integers(0, batches - 1)), data.draw(st.integers(0, tokens * len(blocks)))
    expected = [Step(i, j, k) for i in range(1, tokens) for j, k in blocks]
    steps = schedule.cache_steps(blocks)
    found = list(islice(steps, since))
    schedule.finish(finished)
    found += steps
    assert found == [s for n, s in enumerate(expected) if n < since or s.k != finished]


@given(**sizes)
def test_nothing_follows_once_all_batches_have_finished(tokens, layers, batches):
    schedule = ZigZag(tokens, layers, range(batches))
    for k in range(batches):
        schedule.finish(k)
    assert list(schedule.layers()) == []
    assert list(schedule.cache_steps([(1, k) for k in range(batches)])) == []
