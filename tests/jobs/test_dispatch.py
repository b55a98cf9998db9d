"""Rows go to whoever asks, are run again when a worker dies, and only those that kill their workers fail."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.jobs.dispatch import FATAL, MOST_ALONE, MOST_DEATHS, Dispatch


def rows(count: int) -> list[Sequence]:
    return [Sequence(n, [1]) for n in range(count)]


def work(dispatch: Dispatch, rng: random.Random, fatal: set[int], dies: float = 0.0, most: int = 7) -> list[Sequence]:
    """Workers take, end and die in any order, those that hold a fatal row always, until nothing is left. Returns the
    rows in the order in which they ended."""
    ended = []
    for _ in range(100_000):
        if dispatch.is_done:
            return ended
        worker = rng.randrange(len(dispatch.held))
        held = dispatch.held[worker]
        what = rng.random()
        if not held or what < 0.3:
            dispatch.take(worker, rng.randint(1, most))
        elif fatal & held.keys() or what < 0.3 + dies:
            ended += dispatch.died(worker)
        elif what < 0.3 + dies * 1.5:
            dispatch.give_back(worker)
        else:
            ended.append(dispatch.ended(worker, rng.choice(list(held))))
    raise AssertionError("it never ends")


@given(st.integers(0, 60), st.integers(1, 5), st.sets(st.integers(0, 59), max_size=4), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_every_row_ends_once_and_only_fatal_ones_fail(count, workers, fatal, seed):
    dispatch = Dispatch(iter(rows(count)), count, workers)
    ended = work(dispatch, random.Random(seed), fatal)
    assert sorted(s.index for s in ended) == list(range(count))
    assert {s.index for s in ended if s.finish_reason == "error"} == {n for n in fatal if n < count}
    assert all(s.error == FATAL for s in ended if s.finish_reason == "error")
    assert dispatch.left == 0


@given(st.integers(1, 60), st.integers(1, 5), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_workers_that_die_at_random_lose_no_row(count, workers, seed):
    dispatch = Dispatch(iter(rows(count)), count, workers)
    ended = work(dispatch, random.Random(seed), set(), dies=0.05)
    assert sorted(s.index for s in ended) == list(range(count))


def test_a_fatal_row_is_found_by_halves():
    assert deaths_by_a_fatal_row(Dispatch(iter(rows(64)), 64, 1)) == MOST_DEATHS + 6 + MOST_DEATHS
    disturbed = Dispatch(iter(rows(64)), 64, 1)
    disturbed.died(0)  # not by the row
    assert deaths_by_a_fatal_row(disturbed) == MOST_DEATHS + 6 + MOST_ALONE


def deaths_by_a_fatal_row(dispatch: Dispatch) -> int:
    """Run 64 rows of which one is fatal: together, by themselves (64, 32, ... 2), alone."""
    deaths = 0
    failed = []
    while not dispatch.is_done:
        held = dispatch.take(0, 64) or dispatch.held[0]
        if 37 in held:
            deaths += 1
            failed += dispatch.died(0)
        else:
            for number in list(held):
                dispatch.ended(0, number)
    assert [s.index for s in failed] == [37]
    return deaths


def test_a_row_is_not_blamed_while_others_die_too():
    dispatch = Dispatch(iter(rows(2)), 2, 2)
    for _ in range(MOST_DEATHS):
        assert dispatch.take(0, 1)
        dispatch.died(0)
    dispatch.take(1, 1)  # the suspect, or the other one
    for _ in range(MOST_ALONE - 1):
        dispatch.take(0, 1)
        assert dispatch.died(0) == []
    dispatch.give_back(1)  # a worker that was lost
    for _ in range(MOST_ALONE - 1):
        assert dispatch.take(0, 1)
        assert dispatch.died(0) == []


def test_rows_of_a_worker_that_never_began_are_not_suspected():
    dispatch = Dispatch(iter(rows(4)), 4, 1)
    for _ in range(3 * MOST_DEATHS):
        assert len(dispatch.take(0, 4)) == 4
        dispatch.give_back(0)
    for _ in range(MOST_DEATHS - 1):
        dispatch.take(0, 4)
        dispatch.died(0)
    assert len(dispatch.take(0, 4)) == 4


def test_nobody_holds_more_than_a_share_of_what_is_left():
    dispatch = Dispatch(iter(rows(100)), 100, 4)
    for _ in range(10):
        dispatch.take(0, 10)
    assert len(dispatch.held[0]) == 25
    assert dispatch.take(0, 10) == {}
    assert len(dispatch.take(1, 10)) == 10


def test_rows_are_read_as_they_are_taken():
    read = []
    dispatch = Dispatch((read.append(s.index) or s for s in rows(100)), 100, 2)
    dispatch.take(0, 10)
    assert read == list(range(11))


def test_more_rows_than_were_announced_run_too():
    dispatch = Dispatch(iter(rows(50)), 10, 2)
    assert len(work(dispatch, random.Random(0), set())) == 50


def kill_at_random(seed: int) -> int:
    """Seconds of a job of two workers, one of which is killed every few seconds; a row takes about as long. Returns how
    many rows fail."""
    rng = random.Random(seed)
    dispatch = Dispatch(iter(rows(200)), 200, 2)
    loaded = [5.0, 5.0]  # when they have
    ends: list[dict[int, float]] = [{}, {}]
    failed = 0
    for now in range(100_000):
        for worker in (0, 1):
            if now < loaded[worker]:
                continue
            for number in [number for number, end in ends[worker].items() if now >= end]:
                dispatch.ended(worker, number)
                del ends[worker][number]
            for number in dispatch.take(worker, 8 - len(dispatch.held[worker])):
                ends[worker][number] = now + rng.uniform(3, 5) * (1 + number % 2)
        if rng.random() < 0.2 and now < 300:
            worker = rng.randrange(2)
            failed += len(dispatch.died(worker)) if now >= loaded[worker] else dispatch.give_back(worker) or 0
            ends[worker] = {}
            loaded[worker] = now + rng.uniform(5, 10)
        if dispatch.is_done:
            return failed
    raise AssertionError("it never ends")


def test_random_kills_blame_no_row():
    assert sum(map(kill_at_random, range(20))) == 0


def test_of_more_rows_than_were_announced_nobody_needs_to_leave_a_share():
    dispatch = Dispatch(iter(rows(1000)), 10, 2)
    while not dispatch.left < -100:
        for worker in (0, 1):
            dispatch.take(worker, 8)
            for number in list(dispatch.held[worker]):
                dispatch.ended(worker, number)
    assert len(dispatch.take(0, 8)) == 8
    assert len(dispatch.take(0, 8)) == 8
