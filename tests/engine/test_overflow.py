"""A sequence whose hidden states overflow fails alone; a broken checkpoint is reported."""

from __future__ import annotations

import pytest
import torch
import zoo

from h2o_flexgen import LLM, Policy, SamplingParams, UserError
from h2o_flexgen.engine import prefixes, sampling
from h2o_flexgen.kv_cache import full as full_cache

ALL_GPU = (100, 0, 100, 0, 100, 0)
ALL_CPU = (0, 100, 0, 100, 0, 100)
ALL_DISK = (0, 0, 0, 0, 0, 0)
MIXED = (33, 33, 33, 33, 33, 33)


LENGTHS = [5, 17, 9, 21, 1, 12, 3, 8, 21, 2, 14]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """poisoned(token) -> a model whose hidden states overflow to NaN where the token is in the text."""
    made = {}

    def get(token: int) -> zoo.Tiny:
        if token not in made:
            folder = tmp_path_factory.mktemp("poisoned")
            model = zoo.build("untied_projected", folder, do_layer_norm_before=True, num_hidden_layers=3)
            with torch.no_grad():
                model.hf.model.decoder.embed_tokens.weight[token] = 3e38
                model.hf.lm_head.weight[token] = 0  # never generated
            model.hf.save_pretrained(folder)
            made[token] = zoo.Tiny("poisoned", model.hf, folder)
        return made[token]

    return get


def healthy_prompts(model, token, lengths, max_tokens, budget, behind=()):
    prompts = []
    for place, n in enumerate(lengths):
        for seed in range(200):
            (prompt,) = model.prompts([n], seed=1000 * place + seed)
            prompt = [*behind, *prompt]
            if token in prompt:
                continue
            trace = model.reference(prompt, max_tokens, *(budget or ()))
            if token not in trace.tokens and trace.margin > zoo.MARGIN and trace.slack > zoo.SLACK:
                prompts.append(prompt)
                break
    assert len(prompts) == len(lengths)
    return prompts


POLICIES = {
    "cpu_attention": dict(percent=ALL_CPU, gpu_batch_size=3, num_gpu_batches=2, cpu_cache_compute=True),
    "disk_micro": dict(percent=ALL_DISK, gpu_batch_size=12, prefill_tokens=24),
    "mixed_one_by_one": dict(percent=MIXED, gpu_batch_size=1, num_gpu_batches=3),
}


@pytest.mark.parametrize("n, policy", [*enumerate(POLICIES)], ids=POLICIES)
def test_a_sequence_that_overflows_fails_alone(poisoned, monkeypatch, n, policy):
    """Alternating between H2O and a full cache."""
    policy = POLICIES[policy]
    (token, overlap, budget) = [(7, True, (4, 4)), (0, False, None)][n % 2]
    monkeypatch.setattr(full_cache, "SEGMENT", 4)
    model = poisoned(token)
    prompts = healthy_prompts(model, token, LENGTHS, 18, budget)
    bad = {1: 16, 4: 3, 7: 0, 8: 9}  # {prompt: position of the token}
    for n, at in bad.items():
        prompts.insert(n, prompts[n][:at] + [token] + prompts[n][at:])
    kv_budget = zoo.sized(*budget) if budget else None
    params = SamplingParams(max_tokens=18, ignore_eos=True)
    with LLM(
        str(model.folder), Policy(overlap=overlap, **policy), kv_budget, device="cpu", dtype="float32", progress=False
    ) as llm:
        for _ in range(2):  # data left in buffers must not affect the next job either
            outputs = llm.generate(prompts, params)
            for n, output in enumerate(outputs):
                if n in bad:
                    assert output.error and not output.outputs, n
                else:
                    assert output.error is None, n
                    trace = model.reference(prompts[n], 18, *(budget or ()))
                    assert output.outputs[0].token_ids == trace.tokens, n
                    assert output.outputs[0].logprobs == pytest.approx(trace.logprobs, abs=1e-4), n


@pytest.mark.parametrize("percent", [ALL_GPU, ALL_CPU, ALL_DISK], ids=["gpu", "cpu", "disk"])
def test_a_sequence_that_overflows_after_its_end_is_unaffected(poisoned, monkeypatch, percent):
    """Data left in its place must reach neither the next row there nor its neighbours."""
    monkeypatch.setattr(full_cache, "SEGMENT", 4)
    model = poisoned(7)
    prompts = healthy_prompts(model, 7, [20, 19, 9, 8], 18, None)
    real = sampling.sample

    def sample(logits, params, draws, *rest):
        choice = real(logits, params, draws, *rest)
        first = sampling.Draw(key=1, step=0)
        if first in draws:
            choice.tokens[draws.index(first)] = 7  # ends this sequence
        return choice

    monkeypatch.setattr(sampling, "sample", sample)
    with LLM(str(model.folder), Policy(2, 1, percent), device="cpu", dtype="float32", progress=False) as llm:
        llm.eos_ids = frozenset([7])
        outputs = llm.generate(prompts, SamplingParams(max_tokens=18))
    assert (outputs[1].outputs[0].token_ids, outputs[1].outputs[0].finish_reason) == ([7], "stop")
    for n in (0, 2, 3):
        assert outputs[n].error is None
        assert outputs[n].outputs[0].token_ids == model.reference(prompts[n], 18).tokens


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_shared_prefix_that_overflows_fails_only_its_rows(poisoned, monkeypatch, policy):
    """Rows that share a sound prefix fail only if they overflow themselves."""
    monkeypatch.setattr(full_cache, "SEGMENT", 4)
    monkeypatch.setattr(prefixes, "LEAST_SAVED", 4)
    monkeypatch.setattr(prefixes, "LEAST_TOKENS", 1)
    model = poisoned(7)
    outputs = [3, 12, 7, 12, 2, 9]
    (begin,) = healthy_prompts(model, 7, [12], 12, None)
    good = [*healthy_prompts(model, 7, [4, 9, 3], 12, None, begin), *healthy_prompts(model, 7, [5, 16, 8], 12, None)]
    bad = [[*begin, 3, 7, 5], [*begin, 7], *([9, 7, *begin[:8], n] for n in (3, 4, 5))]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in [*outputs, 12, 3, 12, 9, 1]]
    with LLM(str(model.folder), Policy(**policy), device="cpu", dtype="float32", progress=False) as llm:
        for _ in range(2):
            found = llm.generate([*good, *bad], params)
            assert llm.report["shared_tokens"] > 0
            assert all(output.error for output in found[len(good) :])
            for prompt, most, output in zip(good, outputs, found):
                assert output.outputs[0].token_ids == model.reference(prompt, most).tokens


def test_a_block_in_which_everything_overflows_does_not_stop_the_others(poisoned):
    """The longest prompts come first, and if all of them fail the others may still run."""
    model = poisoned(7)
    good = healthy_prompts(model, 7, [5, 3], 6, None)
    prompts = [[7] * 20, good[0], [7] * 19, good[1]]
    with LLM(str(model.folder), Policy(2), device="cpu", dtype="float32", progress=False) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
    assert outputs[0].error and outputs[2].error
    assert [outputs[n].outputs[0].token_ids for n in (1, 3)] == [r.tokens for r in model.references(good, 6)]


@pytest.mark.parametrize("batch", [4, 1])
def test_a_job_in_which_everything_overflows_says_so(poisoned, batch):
    model = poisoned(7)
    with LLM(str(model.folder), Policy(batch), device="cpu", dtype="float32", progress=False) as llm:
        with pytest.raises(UserError, match="NaN for every prompt"):
            llm.generate([[7], [7, 7], [1, 7, 3]], SamplingParams(max_tokens=4))


def test_weights_too_large_for_fp16_get_advice(tmp_path):
    model = zoo.build("untied", tmp_path / "large")
    with torch.no_grad():
        model.hf.model.decoder.layers[1].fc1.weight[3, 3] = 1e5
    model.hf.save_pretrained(model.folder)
    with LLM(str(model.folder), Policy(1), device="cpu", dtype="float16", progress=False) as llm:
        with pytest.raises(UserError, match="layers.1.fc1.weight.*bfloat16 or float32"):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))


@pytest.mark.parametrize("percent", [ALL_GPU, ALL_DISK], ids=str)
def test_a_checkpoint_with_nan_is_named(tiny, tmp_path, percent):
    model = zoo.build("untied", tmp_path / "broken")
    with torch.no_grad():
        model.hf.model.decoder.layers[1].fc1.weight[3, 3] = float("nan")
    model.hf.save_pretrained(model.folder)
    with LLM(str(model.folder), Policy(1, 1, percent), device="cpu", dtype="float32", progress=False) as llm:
        with pytest.raises(
            UserError, match="NaN.*the checkpoint is broken" if percent == ALL_DISK else "layers.1.fc1.weight.*NaN"
        ):
            llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=4))
