"""One model on two GPUs: the tokens of one, and no more bytes on each than planned."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams
from h2o_flexgen.errors import PlanError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

MIB = 1 << 20
TWO = "cuda:0,cuda:1"
POLICIES = {
    "resident": Policy(3, 2),
    "micro-batches": Policy(4, 2, prefill_tokens=10),
    "ram": Policy(3, 2, (0, 100, 0, 100, 0, 100)),
    "ram, attention on the CPU": Policy(3, 2, (0, 100, 0, 100, 0, 100), cpu_cache_compute=True),
    "disk": Policy(3, 2, (0, 0, 0, 0, 0, 0)),
    "thirds, one after the other": Policy(2, 3, (33, 33, 33, 33, 33, 33), overlap=False),
    "thirds": Policy(2, 3, (33, 33, 33, 33, 33, 33)),
}


@pytest.mark.parametrize("name", ["opt", "qwen3_moe"])
@pytest.mark.parametrize("budget", [None, KVBudget.from_size(4, 4)], ids=["full", "budget"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_two_gpus_give_the_tokens_of_one(models, name, budget, policy):
    model = models(name)
    prompts = model.clear_cut_prompts([5, 17, 9, 21, 1, 12, 3, 8], 12, [(None, None), (4, 4)])
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    found = []
    for device in ("cuda:1", TWO):
        with LLM(str(model.folder), policy, budget, device=device, dtype="float32", progress=False) as llm:
            runs = [llm.generate(prompts, params) for _ in range(2)]
        found.append([[output.outputs[0].token_ids for output in outputs] for outputs in runs])
    assert found[0] == found[1]


@pytest.mark.parametrize("percent", [(100, 0, 100, 0, 100, 0), (30, 70, 30, 70, 0, 100)])
def test_each_gpu_holds_what_is_planned_for_it(percent):
    policy = Policy(16, 2, percent)
    with LLM("facebook/opt-1.3b", policy, device=TWO, path="_DUMMY_", progress=False) as llm:
        llm.generate([[n + 4] * 64 for n in range(32)], SamplingParams(max_tokens=8, ignore_eos=True))
        first, second = llm.report["devices"]
        assert first["device"] == "cuda:0" and second["first_layer"] == first["layers"]
        for each in (first, second):
            assert each["peak_bytes"] <= 1.1 * each["planned_bytes"] + 16 * MIB
        assert llm.report["peak_memory_bytes"]["gpu"] == first["peak_bytes"] + second["peak_bytes"]
    for n in range(2):
        assert torch.cuda.memory_allocated(n) <= llm.devices[n].workspace_bytes + MIB


def test_the_cap_of_a_gpu_is_its_own():
    caps = [4 << 30, 600 * MIB]
    with LLM("facebook/opt-1.3b", device=TWO, path="_DUMMY_", gpu_mem=caps, progress=False) as llm:
        llm.generate([[5, 6, 7]] * 4, SamplingParams(max_tokens=4, ignore_eos=True))
        first, second = llm.report["devices"]
        assert first["layers"] > 3 * second["layers"]
        assert second["peak_bytes"] <= caps[1]
    options = dict(path="_DUMMY_", gpu_mem=[4 << 30, MIB], progress=False)
    with pytest.raises(PlanError, match="cuda:1 is too small"):
        with LLM("facebook/opt-1.3b", Policy(4), device=TWO, **options) as llm:
            llm.generate([[5, 6, 7]] * 4, SamplingParams(max_tokens=4))
