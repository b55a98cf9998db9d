"""An observer sees a job as it runs, in order, and can end it."""

from __future__ import annotations

import pytest

from h2o_flexgen import LLM, Policy, SamplingParams
from h2o_flexgen.engine.observer import Observer

pytest_plugins = ["command_tools"]

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


class Watch(Observer):
    """Records events. `stop`: the event at which it ends the job."""

    def __init__(self, stop: str = ""):
        self.seen = []
        self.stop = stop

    def see(self, name, *what):
        self.seen.append((name, *what))
        if name == self.stop:
            raise RuntimeError(name)

    def on_plan(self, choice):
        self.see("plan", choice.policy)

    def on_begin(self):
        self.see("begin")

    def on_pass(self, rows):
        self.see("pass", [s.index for s in rows])

    def on_layer(self, j):
        self.see("layer", j)

    def on_finished(self, rows):
        self.see("finished", [s.index for s in rows])


def watched(model, watch: Watch):
    policy = Policy(1, 2)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 2, 3)]
    with LLM(str(model), policy, device="cpu", dtype="float32", progress=False, observer=watch) as llm:
        return llm.generate(PROMPTS, params)


def test_every_event_comes_in_its_place(model):
    """The longest prompt comes first, and the last row enters when a place is free."""
    watch = Watch()
    watched(model, watch)
    layers = [("layer", j) for j in range(5)]
    assert watch.seen == [
        ("plan", Policy(1, 2)),
        ("begin",),
        *[("pass", [2, 0]), *layers],
        *[("pass", [2, 0]), *layers],
        *[("pass", [2, 0]), *layers, ("finished", [2, 0])],
        *[("pass", [1]), *layers],
        *[("pass", [1]), *layers, ("finished", [1])],
    ]


def test_new_rows_join_a_pass_with_running_ones(model):
    watch = Watch()
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 1, 4)]
    with LLM(str(model), Policy(2), device="cpu", dtype="float32", progress=False, observer=watch) as llm:
        llm.generate(PROMPTS, params)
    told = [event for event in watch.seen if event[0] in ("pass", "finished")]
    assert told == [
        ("pass", [2, 0]),
        ("pass", [2, 0]),
        ("finished", [0]),
        ("pass", [2, 1]),
        ("finished", [1]),
        ("pass", [2]),
        ("finished", [2]),
    ]


@pytest.mark.parametrize("event", ["plan", "layer", "finished"])
def test_what_an_observer_raises_ends_the_job(model, event):
    watch = Watch(event)
    with pytest.raises(RuntimeError, match=event):
        watched(model, watch)
    assert watch.seen[-1][0] == event
