"""An observer sees a job as it runs, in order, and can end it."""

from __future__ import annotations

import pytest

from h2o_flexgen import LLM, Policy, SamplingParams
from h2o_flexgen.engine.observer import Observer

pytest_plugins = ["cli_tools"]

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


class Watch(Observer):
    """Keeps what it is told. `stop`: the event at which it ends the job."""

    def __init__(self, stop: str = ""):
        self.seen, self.stop = [], stop

    def see(self, name, *what):
        self.seen.append((name, *what))
        if name == self.stop:
            raise RuntimeError(name)

    def on_plan(self, choice):
        self.see("plan", choice.policy)

    def on_begin(self):
        self.see("begin")

    def on_block(self, block, blocks, sequences):
        self.see("block", block, blocks, [s.index for s in sequences])

    def on_progress(self, i, j, batches):
        self.see("progress", i, j, batches)

    def on_finished(self, sequences):
        self.see("finished", [s.index for s in sequences])

    def on_block_end(self, sequences):
        self.see("block end", [s.index for s in sequences])


def watched(model, watch: Watch, max_tokens: int = 2):
    policy = Policy(1, 2)
    with LLM(str(model), policy, device="cpu", dtype="float32", progress=False, observer=watch) as llm:
        return llm.generate(PROMPTS, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def test_every_event_comes_in_its_place(model):
    watch = Watch()
    watched(model, watch)
    steps = [(i, j) for i in range(2) for j in range(5)]
    first = [("progress", i, j, [0, 1]) for i, j in steps[:-1]]
    assert watch.seen[:3] == [("plan", Policy(1, 2)), ("begin",), ("block", 0, 2, [2, 0])]  # the longest first
    assert watch.seen[3 : 3 + len(first)] == first
    rest = watch.seen[3 + len(first) :]
    assert rest[:4] == [
        ("finished", [2]),
        ("finished", [0]),
        ("progress", 1, 4, [0, 1]),
        ("block end", [2, 0]),
    ]
    assert rest[4] == ("block", 1, 2, [1]) and rest[-1] == ("block end", [1])


@pytest.mark.parametrize("event", ["plan", "begin", "block", "progress", "finished", "block end"])
def test_what_an_observer_raises_ends_the_job(model, event):
    watch = Watch(event)
    with pytest.raises(RuntimeError, match=event):
        watched(model, watch)
    assert watch.seen[-1][0] == event
