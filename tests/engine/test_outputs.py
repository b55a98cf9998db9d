"""Outputs are handed on as soon as they are complete."""

from __future__ import annotations

import pytest

from h2o_flexgen import LLM, Policy, SamplingParams
from h2o_flexgen.engine.observer import Observer

pytest_plugins = ["command_tools"]


@pytest.mark.parametrize("policy", [Policy(1, 2), Policy(2, 1)], ids=["in batches", "in a batch"])
def test_an_output_arrives_before_other_rows_have_ended(model, policy):
    """One of two ends at its stop token, the other continues for several steps."""
    seen = []
    steps = iter(range(10**6))

    class Progress(Observer):
        def on_layer(self, j):
            if seen:
                next(steps)

    options = dict(device="cpu", dtype="float32", progress=False, observer=Progress())
    prompts = [[5, 6, 7], [8, 9]]
    params = SamplingParams(temperature=1.0, max_tokens=8)
    with LLM(str(model), policy, **options) as llm:
        first, second = (output.outputs[0].token_ids for output in llm.generate(prompts, params))
        llm.eos_ids = frozenset([next(token for token in first[:4] if token not in second)])
        llm.generate(prompts, params, on_output=lambda o: seen.append((o.index, next(steps))))
    assert [index for index, _ in seen] == [0, 1]
    assert seen[1][1] > seen[0][1] + 1
