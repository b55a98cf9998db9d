"""On CUDA the tokens are those of the CPU, the oracle and transformers, wherever the bytes are."""

from __future__ import annotations

import math

import pytest
import torch
import zoo

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams
from h2o_flexgen.kv_cache import full as full_cache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

LENGTHS = [5, 17, 9, 21, 1, 12, 3]
BUDGET = (4, 4)
#: of the default rule, with options for short prompts
VOTED = (*BUDGET, "voted:window=4:pool=3")
GEN = 24


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr(full_cache, "SEGMENT", 8)


POLICIES = {
    "all_gpu": dict(percent=(100, 0, 100, 0, 100, 0), gpu_batch_size=7),
    "all_gpu_batches": dict(percent=(100, 0, 100, 0, 100, 0), gpu_batch_size=2, num_gpu_batches=4),
    "all_gpu_micro": dict(percent=(100, 0, 100, 0, 100, 0), gpu_batch_size=5, num_gpu_batches=2, prefill_tokens=10),
    "all_cpu": dict(percent=(0, 100, 0, 100, 0, 100), gpu_batch_size=3, num_gpu_batches=2),
    "all_cpu_one_batch": dict(percent=(0, 100, 0, 100, 0, 100), gpu_batch_size=7),
    "all_cpu_micro": dict(percent=(0, 100, 0, 100, 0, 100), gpu_batch_size=4, num_gpu_batches=2, prefill_tokens=25),
    "all_cpu_attention_on_cpu": dict(
        percent=(0, 100, 0, 100, 0, 100), gpu_batch_size=3, num_gpu_batches=2, cpu_cache_compute=True
    ),
    "all_disk": dict(percent=(0, 0, 0, 0, 0, 0), gpu_batch_size=3, num_gpu_batches=2),
    "all_disk_one_batch": dict(percent=(0, 0, 0, 0, 0, 0), gpu_batch_size=7),
    "all_disk_micro": dict(percent=(0, 0, 0, 0, 0, 0), gpu_batch_size=5, num_gpu_batches=2, prefill_tokens=10),
    "thirds": dict(percent=(33, 33, 33, 33, 33, 33), gpu_batch_size=2, num_gpu_batches=3),
    "thirds_micro": dict(percent=(33, 33, 33, 33, 33, 33), gpu_batch_size=4, num_gpu_batches=2, prefill_tokens=25),
    "thirds_attention_on_cpu": dict(
        percent=(33, 33, 33, 33, 33, 33), gpu_batch_size=2, num_gpu_batches=4, cpu_cache_compute=True
    ),
    "weights_cpu": dict(percent=(0, 100, 100, 0, 100, 0), gpu_batch_size=4, num_gpu_batches=2),
    "weights_disk": dict(percent=(0, 0, 100, 0, 100, 0), gpu_batch_size=2, num_gpu_batches=2),
    "weights_gpu_cpu": dict(percent=(50, 50, 100, 0, 100, 0), gpu_batch_size=4),
    "weights_cpu_disk": dict(percent=(0, 50, 100, 0, 100, 0), gpu_batch_size=4, num_gpu_batches=2),
    "cache_cpu": dict(percent=(100, 0, 0, 100, 100, 0), gpu_batch_size=1, num_gpu_batches=7),
    "cache_disk": dict(percent=(100, 0, 0, 0, 100, 0), gpu_batch_size=6, num_gpu_batches=2, prefill_tokens=1),
    "cache_gpu_cpu": dict(percent=(100, 0, 50, 50, 100, 0), gpu_batch_size=2, num_gpu_batches=4),
    "cache_cpu_disk": dict(percent=(100, 0, 0, 50, 100, 0), gpu_batch_size=3, num_gpu_batches=3),
    "cache_cpu_disk_attention_on_cpu": dict(
        percent=(100, 0, 0, 50, 100, 0), gpu_batch_size=3, num_gpu_batches=3, cpu_cache_compute=True
    ),
    "activations_cpu": dict(percent=(100, 0, 100, 0, 0, 100), gpu_batch_size=4, prefill_tokens=30),
    "activations_disk": dict(percent=(100, 0, 100, 0, 0, 0), gpu_batch_size=3, num_gpu_batches=2, prefill_tokens=21),
    "everything_mixed": dict(percent=(20, 70, 10, 60, 50, 10), gpu_batch_size=3, num_gpu_batches=3, prefill_tokens=40),
}


def generate(model, prompts, budget, device="cuda", dtype="float32", gen_len=GEN, times=1, **policy):
    kv_budget = None if budget is None else zoo.sized(*budget)
    params = SamplingParams(max_tokens=gen_len, ignore_eos=True)
    with LLM(str(model.folder), Policy(**policy), kv_budget, device=device, dtype=dtype, progress=False) as llm:
        for _ in range(times):
            outputs = llm.generate(prompts, params)
    return [o.outputs[0] for o in outputs]


def tokens(outputs):
    return [o.token_ids for o in outputs]


@pytest.fixture(scope="module")
def prompts(models):
    return models().clear_cut_prompts(LENGTHS, GEN, [(None, None), BUDGET, VOTED])


@pytest.fixture(scope="module")
def on_cpu(models, prompts):
    """By budget, the outputs on the CPU; with a full cache these are the tokens of transformers."""
    model = models()
    policy = dict(percent=(100, 0, 100, 0, 100, 0), gpu_batch_size=7)
    found = {budget: generate(model, prompts, budget, device="cpu", **policy) for budget in (None, BUDGET, VOTED)}
    for prompt, output in zip(prompts, found[None]):
        assert output.token_ids == model.transformers(prompt, GEN)[0]
    return found


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
@pytest.mark.parametrize("budget", [None, BUDGET, VOTED], ids=["full", "budget", "voted"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_tokens_in_fp32_are_those_of_the_cpu_under_every_policy(models, prompts, on_cpu, policy, budget, overlap):
    outputs = generate(models(), prompts, budget, overlap=overlap, **policy)
    assert tokens(outputs) == tokens(on_cpu[budget])
    for output, wanted in zip(outputs, on_cpu[budget]):
        assert output.logprobs == pytest.approx(wanted.logprobs, abs=1e-3)


@pytest.mark.parametrize("name", ["post_norm", "350m_style", "galactica", "untied", "odd_sizes", "one_layer", "deep"])
@pytest.mark.parametrize("budget", [None, BUDGET], ids=["full", "budget"])
@pytest.mark.parametrize("percent", [(100, 0, 100, 0, 100, 0), (33, 33, 33, 33, 33, 33)], ids=["gpu", "thirds"])
def test_every_kind_of_opt_gives_the_tokens_of_the_oracle(models, name, budget, percent):
    model = models(name)
    prompts = model.clear_cut_prompts(LENGTHS, 12, [budget or (None, None)])
    outputs = generate(model, prompts, budget, gen_len=12, percent=percent, gpu_batch_size=3, num_gpu_batches=2)
    assert tokens(outputs) == [t.tokens for t in model.references(prompts, 12, *(budget or ()))]


@pytest.mark.parametrize("name", zoo.WINDOWS)
@pytest.mark.parametrize("budget", [None, BUDGET], ids=["full", "budget"])
@pytest.mark.parametrize("place", ["all_gpu", "all_cpu", "all_cpu_attention_on_cpu", "all_disk_micro", "thirds"])
def test_windows_slide_on_every_tier(models, name, budget, place):
    model = models(name)
    prompts = model.clear_cut_prompts(LENGTHS, GEN, [budget or (None, None)])
    references = model.references(prompts, GEN, *(budget or ()))
    assert tokens(generate(model, prompts, budget, **POLICIES[place])) == [t.tokens for t in references]


@pytest.mark.parametrize("place", ["all_gpu", "all_cpu", "all_cpu_attention_on_cpu", "all_disk_micro", "thirds"])
def test_heads_have_slots_of_their_own_on_every_tier(models, place):
    model = models("llama")
    heads = model.oracle.kv_heads_of
    recents = tuple(tuple(2 + (layer + head) % 3 for head in range(KV)) for layer, KV in enumerate(heads))
    budget = (recents, recents, "h2o")
    prompts = model.clear_cut_prompts(LENGTHS, GEN, [budget])
    by_head = tuple(tuple(2 * n for n in layer) for layer in recents)
    kv_budget = KVBudget(hh_size=4, recent_size=4, rule="h2o", by_head=by_head)
    arguments = dict(device="cuda", dtype="float32", progress=False)
    with LLM(str(model.folder), Policy(**POLICIES[place]), kv_budget, **arguments) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=GEN, ignore_eos=True))
    expected = [trace.tokens for trace in model.references(prompts, GEN, *budget)]
    assert [o.outputs[0].token_ids for o in outputs] == expected


@pytest.mark.parametrize("budget", [None, BUDGET], ids=["full", "budget"])
def test_a_second_job_and_several_blocks_give_the_same(models, prompts, on_cpu, budget):
    policy = dict(percent=(33, 33, 33, 33, 33, 33), gpu_batch_size=1, num_gpu_batches=2)
    assert tokens(generate(models(), prompts, budget, times=2, **policy)) == tokens(on_cpu[budget])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("budget", [None, BUDGET], ids=["full", "budget"])
@pytest.mark.parametrize(
    "name", ["all_gpu", "all_cpu", "all_cpu_attention_on_cpu", "all_disk_micro", "thirds", "everything_mixed"]
)
def test_half_precision_runs_to_the_end_with_finite_logprobs(models, prompts, name, budget, dtype):
    outputs = generate(models(), prompts, budget, dtype=dtype, **POLICIES[name])
    for output in outputs:
        assert len(output.token_ids) == GEN and output.finish_reason == "length"
        assert all(math.isfinite(x) and x <= 1e-3 for x in output.logprobs)


@pytest.mark.parametrize("budget", [None, BUDGET], ids=["full", "budget"])
def test_half_precision_agrees_with_fp32_on_the_first_token(models, prompts, on_cpu, budget):
    outputs = generate(models(), prompts, budget, dtype="float16", gpu_batch_size=4, num_gpu_batches=2)
    traces = models().references(prompts, 1, *(budget or ()))
    clear = [n for n, trace in enumerate(traces) if trace.margins[0] > 0.3]  # more than the error of fp16
    assert clear
    assert all(outputs[n].token_ids[0] == on_cpu[budget][n].token_ids[0] for n in clear)


@pytest.mark.parametrize("sampling", [dict(temperature=0.8), dict(temperature=1.2, top_k=8, top_p=0.9)])
def test_sampled_text_depends_on_the_seed_and_not_on_the_policy(models, prompts, sampling):
    found = []
    for name in ("all_gpu", "thirds", "all_cpu_micro"):
        params = SamplingParams(max_tokens=8, ignore_eos=True, seed=3, **sampling)
        policy = Policy(**POLICIES[name])
        with LLM(str(models().folder), policy, device="cuda", dtype="float32", progress=False) as llm:
            found.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
    assert found[0] == found[1] == found[2]


def test_cuda_and_cuda_0_are_the_same_device(models, prompts, on_cpu):
    outputs = generate(models(), prompts, None, device="cuda:0", gpu_batch_size=7)
    assert tokens(outputs) == tokens(on_cpu[None])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_second_device_gives_the_same(models, prompts, on_cpu):
    for name in ("all_gpu", "thirds", "all_cpu_micro"):
        outputs = generate(models(), prompts, BUDGET, device="cuda:1", **POLICIES[name])
        assert tokens(outputs) == tokens(on_cpu[BUDGET])


@pytest.mark.parametrize("of", ["llama", *zoo.WINDOWS])
@pytest.mark.parametrize("name", ["all_gpu", "all_cpu", "all_disk_micro", "thirds", "thirds_attention_on_cpu"])
def test_streams_give_the_tokens_of_the_cpu(models, name, of):
    """Past the model's positions, with a stream that is idle in a turn."""
    model = models(of)
    first, second = model.prompts([90, 50])
    (third,) = model.prompts([60], seed=1)

    def turns(device, policy):
        where = dict(device=device, dtype="float32", progress=False)
        with LLM(str(model.folder), Policy(**policy), zoo.sized(*BUDGET), **where) as llm:
            session = llm.session(count=3, chunk=16)
            params = SamplingParams(max_tokens=GEN, ignore_eos=True)
            outputs = session.generate([first, None, second], params) + session.generate([third, third, None], params)
            return [output and output.token_ids for output in outputs]

    assert turns("cuda", POLICIES[name]) == turns("cpu", POLICIES["all_gpu"])


FORMATS = {
    "int8": dict(compress_weight="int8", compress_cache="int8"),
    "int4": dict(compress_weight="int4", compress_cache="int4"),
    "int8_matmuls": dict(compress_weight="int8", compute="int8"),
    "int8_matmuls_of_int4": dict(compress_weight="int4", compute="int8"),
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose sizes are multiples of 32, for groups of 32."""
    sizes = dict(hidden_size=64, num_attention_heads=4, intermediate_size=96)
    return zoo.build("llama", tmp_path_factory.mktemp("wide") / "model", **sizes)


def scores(model, device: str, formats: dict, **policy) -> list[float]:
    options = dict(device=device, dtype="float32", progress=False, **formats)
    with LLM(str(model.folder), Policy(**policy), KVBudget.from_size(6), **options) as llm:
        return [x for score in llm.score(model.prompts([30, 24, 27]), 8) for x in score.token_logprobs]


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("place", ["all_gpu", "all_cpu", "all_disk", "thirds"])
def test_quantised_it_gives_the_scores_of_the_cpu(wide, place, formats):
    """Up to elements on the edge between two codes, which may be rounded either way."""
    expected = scores(wide, "cpu", FORMATS[formats], **POLICIES["all_gpu"])
    assert scores(wide, "cuda", FORMATS[formats], **POLICIES[place]) == pytest.approx(expected, abs=0.02)
