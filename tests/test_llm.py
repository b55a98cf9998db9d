"""A prompt's output depends on nothing else: not its neighbours, not the batch, not the job before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zoo

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams, UserError
from h2o_flexgen.engine.observer import Observer
from h2o_flexgen.engine_args import EngineArgs
from h2o_flexgen.formats import Dense

ALL_GPU = (100, 0, 100, 0, 100, 0)
ALL_CPU = (0, 100, 0, 100, 0, 100)
ALL_DISK = (0, 0, 0, 0, 0, 0)
MIXED = (33, 33, 33, 33, 33, 33)
SAMPLED = dict(temperature=0.8, top_p=0.95, seed=11)
LENGTHS = [5, 17, 9, 21, 1, 12, 3, 8, 21, 2, 14]


def facts(output):
    return output.token_ids, output.finish_reason


def assert_alike(one, other, atol=1e-4):
    assert facts(one) == facts(other)
    assert one.logprobs == pytest.approx(other.logprobs, abs=atol)


def with_eos(tiny_model, tmp_path, eos):
    """The same model, in a folder whose config has these end-of-sequence tokens."""
    import shutil

    from transformers import GenerationConfig, OPTConfig

    folder = tmp_path / f"eos_{eos}".replace(" ", "")
    shutil.copytree(tiny_model.folder, folder)
    config = OPTConfig.from_pretrained(folder)
    config.eos_token_id = eos
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=eos).save_pretrained(folder)
    return zoo.Tiny(tiny_model.name, tiny_model.hf, folder)


# neighbours


@pytest.mark.parametrize(
    "budget, sampling",
    [(None, SAMPLED), ((4, 4), {}), (KVBudget.from_ratio(0.2), SAMPLED)],
    ids=["full", "budget", "ratio"],
)
def test_a_prompt_does_not_depend_on_the_others_of_the_job(tiny, run, budget, sampling):
    """Same tokens and log-probabilities alone and in jobs of other lengths, orders and batch sizes. It keeps its place,
    which decides the random numbers, and the longest prompt, which decides what a ratio means."""
    model = tiny()
    (prompt,) = model.clear_cut_prompts([9], 16, [(4, 4), (None, None)])
    longest, *others = model.prompts([24, 13, 2, 24, 7, 18, 1, 11, 5], seed=5)
    short = model.prompts([1, 1, 2, 3], seed=6)
    jobs = [
        ([prompt, longest], dict(gpu_batch_size=1)),
        ([prompt, *others, longest], dict(gpu_batch_size=10)),
        ([prompt, *short, longest], dict(gpu_batch_size=3, prefill_tokens=7)),
        ([prompt, longest, *reversed(others)], dict(gpu_batch_size=3, num_gpu_batches=2, percent=ALL_DISK)),
    ]
    first = run(model, *jobs[0][:1], 16, budget, sampling=sampling, **jobs[0][1])[0]
    for prompts, policy in jobs[1:]:
        assert_alike(run(model, prompts, 16, budget, sampling=sampling, **policy)[0], first)
    if not isinstance(budget, KVBudget):
        assert_alike(run(model, [prompt], 16, budget, sampling=sampling)[0], first)


def test_sampled_texts_differ_by_place_and_by_seed_only(tiny, run):
    model = tiny()
    (prompt,) = model.prompts([7])
    hot = dict(temperature=2.0)
    outputs = run(model, [prompt] * 4, 12, sampling=hot, gpu_batch_size=3)
    again = run(model, [prompt] * 4, 12, sampling=hot, gpu_batch_size=2, percent=ALL_DISK)
    other = run(model, [prompt] * 4, 12, sampling={**hot, "seed": 1}, gpu_batch_size=3)
    texts = [tuple(o.token_ids) for o in outputs]
    assert len(set(texts)) == 4
    assert [tuple(o.token_ids) for o in again] == texts
    assert not set(texts) & {tuple(o.token_ids) for o in other}


def test_the_budget_of_a_ratio_comes_from_the_longest_prompt_of_the_job(tiny, run):
    """Not of the batch: here every sequence is a batch."""
    model = tiny()
    prompts = model.clear_cut_prompts([21, 17, 9, 5], 16, [(4, 6)])
    outputs = run(model, prompts, 16, KVBudget.from_ratio(0.2, 0.3, zoo.RULE), gpu_batch_size=1)
    assert [o.token_ids for o in outputs] == [r.tokens for r in model.references(prompts, 16, 4, 6)]


# parameters of each prompt

#: sampling parameters in which the prompts of a job may differ
WAYS = [
    dict(max_tokens=12),
    dict(max_tokens=3),
    dict(max_tokens=20, temperature=0.9, seed=5),
    dict(max_tokens=1),
    dict(max_tokens=7, temperature=1.5, top_k=9, seed=5),
    dict(max_tokens=20, ignore_eos=False),
    dict(max_tokens=12, temperature=0.9, top_p=0.8),
]


@pytest.mark.parametrize("percent, budget", [(ALL_DISK, None), (MIXED, (4, 4))], ids=str)
def test_prompts_with_parameters_of_their_own_share_a_block(tiny, tmp_path, percent, budget):
    """Each gets what it gets alone."""
    model = tiny()
    prompts = model.clear_cut_prompts(LENGTHS[: len(WAYS)], 20, [budget or (None, None)])
    tokens = model.reference(prompts[5], 20, *(budget or ())).tokens
    model = with_eos(model, tmp_path, tokens[4])
    params = [SamplingParams(**{"ignore_eos": True, **way}) for way in WAYS]
    kv_budget = budget and zoo.sized(*budget)
    options = dict(device="cpu", dtype="float32", progress=False)
    with LLM(str(model.folder), Policy(3, 2, percent), kv_budget, **options) as llm:
        outputs = llm.generate(prompts, params)
        alone = [llm.generate([p], params[n], keys=[n])[0].outputs[0] for n, p in enumerate(prompts)]
    for output, expected in zip(outputs, alone):
        assert_alike(output.outputs[0], expected)
    assert [(len(o.token_ids), o.finish_reason) for o in alone] == [
        (tokens.index(tokens[4]) + 1, "stop") if n == 5 else (p.max_tokens, "length") for n, p in enumerate(params)
    ]


def test_a_prompt_with_its_old_key_gets_its_old_text(tiny):
    """In other places, with other neighbours, as when a job resumes."""
    model = tiny()
    prompts = model.prompts(LENGTHS)
    hot = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
    keys = [2**64 - 1, *range(1, len(prompts))]
    options = dict(device="cpu", dtype="float32", progress=False)
    with LLM(str(model.folder), Policy(3, 2), **options) as llm:
        whole = [o.outputs[0].token_ids for o in llm.generate(prompts, hot, keys=keys)]
        left = [6, 0, 9, 3]
        again = llm.generate([prompts[n] for n in left], hot, keys=[keys[n] for n in left])
        places = [o.outputs[0].token_ids for o in llm.generate(prompts, hot)]
    assert [o.outputs[0].token_ids for o in again] == [whole[n] for n in left]
    assert places[0] != whole[0] and places[1:] == whole[1:]


@pytest.mark.parametrize(
    "given, say",
    [
        (dict(sampling_params=[SamplingParams()]), "`sampling_params` has 1 for 2 prompts"),
        (dict(sampling_params=[]), "`sampling_params` has 0 for 2 prompts"),
        (dict(sampling_params=[SamplingParams(), None]), "one SamplingParams for all prompts, or a list"),
        (dict(sampling_params={"seed": 3}), "one SamplingParams for all prompts, or a list"),
        (dict(keys=[1, 2, 3]), "`keys` has 3 for 2 prompts"),
        (dict(keys=[1, -1]), "whole number"),
        (dict(keys=[1, 2**64]), "whole number"),
        (dict(keys=[1, "a"]), "whole number"),
        (dict(keys=[1, True]), "whole number"),
        (dict(keys=5), "`keys` must be a list"),
        (dict(keys={1, 2}), "`keys` must be a list"),
    ],
    ids=str,
)
def test_lists_that_do_not_fit_the_prompts_are_refused(tiny, given, say):
    with LLM(str(tiny().folder), Policy(), device="cpu", dtype="float32", progress=False) as llm:
        with pytest.raises(UserError, match=say):
            llm.generate([[5, 6], [7]], skip_errors=True, **given)
        assert llm.generate([], []) == []


@pytest.mark.parametrize("prompts", [None, 5, 5.0, b"ab", {"prompt": "a"}, {"a"}, LLM, [None], [5], [b"ab"]], ids=str)
def test_anything_but_a_list_of_prompts_is_refused(tiny, prompts):
    with LLM(str(tiny().folder), Policy(), device="cpu", dtype="float32", progress=False) as llm:
        with pytest.raises(UserError, match="`prompts` must be|prompt 0: a prompt is"):
            llm.generate(prompts)
        if not isinstance(prompts, list):
            with pytest.raises(UserError, match="`texts` must be"):
                llm.score(prompts)
            with pytest.raises(UserError, match="a conversation is a list of messages"):
                llm.chat(prompts)


def test_numpys_numbers_are_pythons(tiny):
    """As from arrays, data frames and configuration files."""
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(5),
        top_p=np.float64(0.5),
        max_tokens=np.int32(3),
        ignore_eos=np.bool_(True),
        seed=np.uint64(2**64 - 1),
        stop_token_ids=np.array([90]),
    )
    same = SamplingParams(0.5, 5, 0.5, 3, True, 2**64 - 1, stop_token_ids=[90])
    assert params == same and type(params.max_tokens) is int and type(params.ignore_eos) is bool
    with LLM(str(tiny().folder), Policy(), device="cpu", dtype="float32", progress=False) as llm:
        prompts = np.array([[5, 6, 7], [7, 6, 5]])
        found = llm.generate((list(row) for row in prompts), params, keys=np.array([3, 4]))
        again = llm.generate(prompts.tolist(), same, keys=[3, 4])
        assert [o.outputs for o in found] == [o.outputs for o in again]
        scores = llm.score(prompts.tolist(), prompt_len=np.array([1, 2]))
        assert [len(score.token_logprobs) for score in scores] == [2, 1]
        assert len(llm.score([[5, 6, 7]], prompt_len=np.int64(2))[0].token_logprobs) == 1


def test_every_prompt_is_admitted_with_its_own_output(tiny):
    model = tiny()
    most = model.hf.config.max_position_embeddings
    prompts = model.prompts([most - 3] * 2)
    params = [SamplingParams(max_tokens=n) for n in (3, 4)]
    with LLM(str(model.folder), Policy(), device="cpu", dtype="float32", progress=False) as llm:
        with pytest.raises(UserError, match="prompt 1: .*positions"):
            llm.generate(prompts, params)
        good, bad = llm.generate(prompts, params, skip_errors=True)
    assert good.outputs and "positions" in bad.error


def test_rows_with_the_longest_outputs_run_first(tiny):
    """So that few places are empty at the end; rows with equal outputs are sorted by the length of their prompts."""
    passes = []

    class Watch(Observer):
        def on_pass(self, rows):
            passes.append([s.index for s in rows])

    prompts = tiny().prompts([4, 9, 12, 2, 7, 7])
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 6, 3, 6, 6, 3)]
    options = dict(device="cpu", dtype="float32", progress=False, observer=Watch())
    with LLM(str(tiny().folder), Policy(3), **options) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.choice.workload.prompt_lens == (12, 9, 7, 7, 4, 2) and llm.choice.workload.gen_len == 6
    assert passes == [[1, 4, 3]] * 6 + [[2, 5, 0]] * 3
    assert [len(o.outputs[0].token_ids) for o in outputs] == [3, 6, 3, 6, 6, 3]


def cut(tokens, ends):
    for n, token in enumerate(tokens):
        if token in ends:
            return tokens[: n + 1], "stop"
    return tokens, "length"


# early stop


def test_one_eos_token_in_the_config_is_enough(tiny, run, tmp_path):
    model = tiny()
    prompts = model.clear_cut_prompts([9], 24)
    tokens = model.reference(prompts[0], 24).tokens
    outputs = run(with_eos(model, tmp_path, tokens[4]), prompts, 24, ignore_eos=False)
    assert facts(outputs[0]) == cut(tokens, {tokens[4]})


# one LLM, many jobs


@pytest.mark.parametrize("budget", [None, (4, 4)], ids=["full", "budget"])
def test_one_llm_runs_different_jobs_one_after_the_other(tiny, budget):
    """With other lengths, counts, outputs and placements, with and without overlap, and the first job again."""
    model = tiny()
    jobs = [
        (LENGTHS, 12, dict(gpu_batch_size=3, num_gpu_batches=2)),
        ([30, 25, 3], 20, dict(gpu_batch_size=3, num_gpu_batches=2, percent=ALL_DISK)),
        (LENGTHS, 5, dict(gpu_batch_size=3, num_gpu_batches=2, percent=ALL_DISK)),
        (LENGTHS[:5], 12, dict(gpu_batch_size=2, num_gpu_batches=1, percent=ALL_DISK, overlap=False)),
        ([1, 1, 1], 20, dict(gpu_batch_size=1, num_gpu_batches=2, percent=MIXED, overlap=True)),
        (LENGTHS, 12, dict(gpu_batch_size=4, percent=ALL_CPU, cpu_cache_compute=True)),
        (LENGTHS, 12, dict(gpu_batch_size=3, num_gpu_batches=2)),
    ]
    kv_budget = zoo.sized(*budget) if budget else None
    with LLM(str(model.folder), Policy(), kv_budget, device="cpu", dtype="float32", progress=False) as llm:
        for lengths, max_tokens, policy in jobs:
            prompts = model.clear_cut_prompts(lengths, 20, [budget or (None, None)])
            llm.policy = Policy(**policy)
            outputs = llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
            references = [r.tokens[:max_tokens] for r in model.references(prompts, 20, *(budget or ()))]
            assert [o.outputs[0].token_ids for o in outputs] == references
        llm.close()
        outputs = llm.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True))
        assert [o.outputs[0].token_ids for o in outputs] == [tokens[:3] for tokens in references]


def test_policy_auto_gives_the_same_tokens(tiny):
    model = tiny()
    prompts = model.clear_cut_prompts(LENGTHS, 12)
    with LLM(str(model.folder), device="cpu", dtype="float32", progress=False) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == [r.tokens for r in model.references(prompts, 12)]


def test_outputs_come_in_the_order_of_the_prompts_and_each_is_announced_once(tiny):
    model = tiny()
    prompts = model.clear_cut_prompts(LENGTHS, 5)
    prompts.insert(2, [])
    prompts.insert(5, [model.vocab_size])
    announced = []
    with LLM(str(model.folder), Policy(2, 2), device="cpu", dtype="float32", progress=False) as llm:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        outputs = llm.generate(prompts, params, skip_errors=True, on_output=announced.append)
        with pytest.raises(UserError, match="prompt 2"):
            llm.generate(prompts, params)
    assert [o.index for o in outputs] == list(range(len(prompts)))
    assert sorted(o.index for o in announced) == list(range(len(prompts)))
    assert [n for n, o in enumerate(outputs) if o.error] == [2, 5]
    for n, output in enumerate(outputs):
        assert output.prompt_token_ids == ([] if n in (2, 5) else prompts[n])
        if n not in (2, 5):
            assert output.outputs[0].token_ids == model.reference(prompts[n], 5).tokens


# arguments


@pytest.mark.parametrize("given", [dict(overlap=False), dict(overlap=True), dict(gpu_batch_size=2)])
def test_options_that_a_policy_sets_are_refused(tiny, given):
    with pytest.raises(UserError, match="a policy has its own"):
        LLM(str(tiny().folder), Policy(), device="cpu", **given)


def test_a_cap_of_the_cpu_tier_is_refused_where_a_search_would_not_use_it(tiny):
    folder = str(tiny().folder)
    for more in ({}, dict(gpu_mem=1 << 30)):
        with pytest.raises(UserError, match="use `mem`"):
            LLM(folder, device="cpu", cpu_mem=1 << 30, **more)
    LLM(folder, device="cpu", cpu_mem=1 << 30, policy=Policy()).close()


def test_without_progress_nothing_is_printed(tmp_path, capfd):
    policy = Policy(1, 1, (0, 0, 100, 0, 100, 0))
    options = dict(path="_DUMMY_", device="cpu", dtype="float32", progress=False, offload_dir=tmp_path)
    with LLM("facebook/opt-125m", policy, **options) as llm:
        llm.generate([[5, 6]], SamplingParams(max_tokens=2))
    assert capfd.readouterr() == ("", "")


def test_norms_of_another_type_do_not_count_as_a_conversion(tiny, tmp_path):
    """Vectors never stream: their type takes no memory and no time."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "mixed"
    shutil.copytree(tiny().folder, folder)
    weights = load_file(folder / "model.safetensors")
    mixed = {name: w.float() if w.dim() == 1 else w.half() for name, w in weights.items()}
    save_file(mixed, folder / "model.safetensors")
    with LLM(str(folder), Policy(), device="cpu", dtype="float16", progress=False) as llm:
        assert set(llm.model.formats.values()) == {Dense(torch.float16)}


def test_the_bar_counts_what_was_generated(tiny, tmp_path, capfd):
    model = tiny()
    (prompt,) = model.clear_cut_prompts([9], 24)
    tokens = model.reference(prompt, 24).tokens
    end = tokens.index(tokens[4]) + 1
    with LLM(str(with_eos(model, tmp_path, tokens[4]).folder), Policy(), device="cpu", dtype="float32") as llm:
        llm.generate([prompt], SamplingParams(max_tokens=24))
    assert f"generating: {end} of {end} tokens" in capfd.readouterr().err


def test_the_bar_knows_how_long_each_output_may_be(tiny, capfd):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 7, 4)]
    with LLM(str(tiny().folder), Policy(2), device="cpu", dtype="float32") as llm:
        llm.generate(tiny().prompts([3, 5, 4]), params)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("generating")]
    assert lines and all("of 13 tokens" in line for line in lines) and "generating: 13 of 13" in lines[-1]


@pytest.mark.parametrize("limit", [float("nan"), float("inf"), "4", -5])
def test_a_memory_limit_is_a_number_of_bytes(limit):
    with pytest.raises(UserError, match="`mem` must be a number of bytes"):
        EngineArgs(mem=limit)
