"""A prompt's output depends on nothing else: not its neighbours, not the batch, not the job before."""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate, chain

import numpy as np
import pytest
import torch
import zoo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machines import policies

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams, UserError
from h2o_flexgen.engine.observer import Observer
from h2o_flexgen.formats import Dense
from h2o_flexgen.kv_cache import full as full_cache

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
    [(None, SAMPLED), ((4, 4), {}), (KVBudget.from_ratio(0.2), SAMPLED), (KVBudget.from_ratio(0.0, 0.3), {})],
    ids=["full", "budget", "ratio", "window"],
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
        ([prompt, longest], dict(gpu_batch_size=2)),
        ([prompt, longest, *others], dict(gpu_batch_size=4, num_gpu_batches=2)),
        ([prompt, *others, longest], dict(gpu_batch_size=10)),
        ([prompt, *short, longest], dict(gpu_batch_size=3, prefill_tokens=7)),
        ([prompt, longest, *others, *short], dict(gpu_batch_size=5, num_gpu_batches=3, percent=MIXED)),
        ([prompt, longest, *reversed(others)], dict(gpu_batch_size=3, num_gpu_batches=2, percent=ALL_DISK)),
    ]
    first = run(model, *jobs[0][:1], 16, budget, sampling=sampling, **jobs[0][1])[0]
    for prompts, policy in jobs[1:]:
        assert_alike(run(model, prompts, 16, budget, sampling=sampling, **policy)[0], first)
    if not isinstance(budget, KVBudget):
        assert_alike(run(model, [prompt], 16, budget, sampling=sampling)[0], first)


@pytest.mark.parametrize("budget", [None, (3, 4)], ids=["full", "budget"])
def test_the_order_of_the_prompts_does_not_matter(tiny, run, budget):
    model = tiny("untied")
    prompts = model.clear_cut_prompts(LENGTHS, 12, [budget or (None, None)])
    references = [r.tokens for r in model.references(prompts, 12, *(budget or ()))]
    order = list(range(len(prompts)))
    for seed in range(3):
        random.Random(seed).shuffle(order)
        outputs = run(model, [prompts[n] for n in order], 12, budget, gpu_batch_size=3, num_gpu_batches=2)
        assert [o.token_ids for o in outputs] == [references[n] for n in order]


def test_numpy_token_ids(tiny, run):
    model = tiny()
    (prompt,) = model.clear_cut_prompts([7], 10)
    (output,) = run(model, [list(np.array(prompt))], 10)
    assert output.token_ids == model.reference(prompt, 10).tokens


def test_equal_prompts_get_equal_outputs(tiny, run):
    model = tiny()
    (prompt,) = model.clear_cut_prompts([7], 10)
    outputs = run(model, [prompt] * 5, 10, gpu_batch_size=2)
    assert {tuple(o.token_ids) for o in outputs} == {tuple(model.reference(prompt, 10).tokens)}


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
    outputs = run(model, prompts, 16, KVBudget.from_ratio(0.2, 0.3), gpu_batch_size=1)
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


@pytest.mark.parametrize("percent", [ALL_GPU, ALL_CPU, ALL_DISK, MIXED], ids=str)
@pytest.mark.parametrize("budget", [None, (4, 4)], ids=["full", "budget"])
def test_prompts_with_parameters_of_their_own_share_a_block(tiny, tmp_path, percent, budget):
    """Each gets what it gets alone."""
    model = tiny()
    prompts = model.clear_cut_prompts(LENGTHS[: len(WAYS)], 20, [budget or (None, None)])
    tokens = model.reference(prompts[5], 20, *(budget or ())).tokens
    model = with_eos(model, tmp_path, tokens[4])
    params = [SamplingParams(**{"ignore_eos": True, **way}) for way in WAYS]
    kv_budget = budget and KVBudget.from_size(*budget)
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
        found = llm.generate((row for row in prompts.tolist()), params, keys=np.array([3, 4]))
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


# any policy at all


@settings(max_examples=7, suppress_health_check=list(HealthCheck))
@given(
    policy=policies([0, 20, 33, 50, 80, 100], [0, 33, 50, 67, 100], (5, 4), [1, 12, 30, 2048]),
    name=st.sampled_from(["opt", "one_layer", "untied"]),
    budget=st.sampled_from([None, (4, 4), (0, 3), (3, 0)]),
    size=st.tuples(st.integers(1, len(LENGTHS)), st.integers(1, 18)),
    stop=st.booleans(),
)
def test_any_policy_and_any_early_stop(tiny, run, tmp_path_factory, policy, name, budget, size, stop):
    """With early stops, batches leave the schedule while their caches are being fetched."""
    count, max_tokens = size
    model = tiny(name)
    prompts = model.clear_cut_prompts(LENGTHS, 20, [(None, None), (4, 4), (0, 3), (3, 0)])[:count]
    references = [r.tokens[:max_tokens] for r in model.references(prompts, 20, *(budget or ()))]
    expected = [(tokens, "length") for tokens in references]
    if stop:
        every = sorted(token for tokens in references for token in tokens)
        ends = every[len(every) // 3]  # a token that many outputs contain
        model = with_eos(model, tmp_path_factory.mktemp("eos"), ends)
        expected = [cut(tokens, {ends}) for tokens in references]
    outputs = run(model, prompts, max_tokens, budget, ignore_eos=not stop, **policy)
    assert [facts(o) for o in outputs] == expected


def choose_ends(references, wanted):
    """Two end-of-sequence tokens, such that the outputs that they cut are as `wanted`."""
    every = sorted({token for tokens in references for token in tokens})
    for a in every:
        for b in every:
            if a < b and wanted([cut(tokens, {a, b}) for tokens in references]):
                return {a, b}
    raise AssertionError("no such tokens")


def cut(tokens, ends):
    for n, token in enumerate(tokens):
        if token in ends:
            return tokens[: n + 1], "stop"
    return tokens, "length"


@pytest.mark.parametrize(
    "percent, cpu_cache_compute", [(ALL_GPU, False), (ALL_CPU, True), (ALL_DISK, False), (MIXED, True)], ids=str
)
@pytest.mark.parametrize("segment", [1, 5])
def test_a_full_cache_of_many_segments(tiny, run, monkeypatch, percent, cpu_cache_compute, segment):
    monkeypatch.setattr(full_cache, "SEGMENT", segment)
    model = tiny()
    prompts = model.clear_cut_prompts(LENGTHS, 20)
    outputs = run(
        model, prompts, 20, percent=percent, cpu_cache_compute=cpu_cache_compute, gpu_batch_size=3, num_gpu_batches=2
    )
    assert [o.token_ids for o in outputs] == [r.tokens for r in model.references(prompts, 20)]


# early stop


@pytest.mark.parametrize("percent", [ALL_GPU, ALL_CPU, ALL_DISK, MIXED], ids=str)
@pytest.mark.parametrize("budget, overlap", [(None, True), ((4, 4), False)], ids=["full", "h2o-no_overlap"])
def test_a_sequence_ends_at_eos(tiny, run, tmp_path, percent, budget, overlap):
    model = tiny()
    prompts = model.clear_cut_prompts(LENGTHS, 20, [budget or (None, None)])
    references = [r.tokens for r in model.references(prompts, 20, *(budget or ()))]
    ends = choose_ends(
        references,
        lambda outputs: (
            {1, 20} < {len(tokens) for tokens, _ in outputs}
            and sum(reason == "stop" for _, reason in outputs) > len(outputs) // 2
        ),
    )
    expected = [cut(tokens, ends) for tokens in references]
    stopping = with_eos(model, tmp_path, sorted(ends))
    policy = dict(gpu_batch_size=2, num_gpu_batches=3, percent=percent, overlap=overlap)
    outputs = run(stopping, prompts, 20, budget, ignore_eos=False, **policy)
    assert [facts(o) for o in outputs] == expected
    assert [len(o.logprobs) for o in outputs] == [len(tokens) for tokens, _ in expected]
    ignoring = run(stopping, prompts, 20, budget, ignore_eos=True, **policy)
    assert [facts(o) for o in ignoring] == [(tokens, "length") for tokens in references]


def test_one_eos_token_in_the_config_is_enough(tiny, run, tmp_path):
    model = tiny()
    prompts = model.clear_cut_prompts([9], 24)
    tokens = model.reference(prompts[0], 24).tokens
    outputs = run(with_eos(model, tmp_path, tokens[4]), prompts, 24, ignore_eos=False)
    assert facts(outputs[0]) == cut(tokens, {tokens[4]})


@pytest.mark.parametrize("percent", [ALL_GPU, ALL_DISK], ids=str)
def test_rows_that_have_ended_are_not_computed_any_more(tiny, tmp_path, percent):
    """With room for all rows from the beginning, and for half of them."""
    model = tiny()
    prompts = model.clear_cut_prompts([20, 19, 12, 11, 4, 3], 20)
    references = [r.tokens for r in model.references(prompts, 20)]
    ends = choose_ends(references, lambda outputs: len({len(tokens) for tokens, _ in outputs} | {20}) > 4)
    lengths = [len(cut(tokens, ends)[0]) for tokens in references]
    seen = []

    class Passes(Observer):
        def on_pass(self, rows):
            seen.append({s.index for s in rows})

    stopping = with_eos(model, tmp_path, sorted(ends))
    options = dict(dtype="float32", device="cpu", progress=False, observer=Passes())
    with LLM(str(stopping.folder), Policy(2, 3, percent), **options) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=20))
        assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
        longer = lambda i: {n for n, length in enumerate(lengths) if i < length}
        assert seen == [longer(i) for i in range(max(lengths))]
        assert llm.report["row_steps"] == sum(length - 1 for length in lengths)
        seen.clear()
        llm.policy = Policy(3, 1, percent)
        llm.generate(prompts, SamplingParams(max_tokens=20))
    assert Counter(chain(*seen)) == dict(enumerate(lengths))
    entered = accumulate(seen, set.union)
    assert all(len(rows) == 3 or len(before) == 6 for rows, before in zip(seen, entered)), "a place was free"


@pytest.mark.parametrize("rows", [1, 4, 5])
@pytest.mark.parametrize(
    "percent, budget", [(ALL_GPU, None), (ALL_CPU, (4, 4)), (ALL_DISK, (4, 4)), (MIXED, None)], ids=str
)
def test_tokens_do_not_depend_on_which_batches_share_matmuls(tiny, run, monkeypatch, percent, budget, rows):
    """Of five batches of two and one rows, none share them, two do, or the last one joins the two before it."""
    monkeypatch.setattr("h2o_flexgen.planning.workload.GROUP_ROWS", rows)
    model = tiny()
    prompts = model.clear_cut_prompts([20, 19, 12, 11, 9, 8, 6, 4, 3], 20, [budget or (None, None)])
    outputs = run(model, prompts, 20, budget, percent=percent, gpu_batch_size=2, num_gpu_batches=5)
    assert [o.token_ids for o in outputs] == [r.tokens for r in model.references(prompts, 20, *(budget or ()))]


@pytest.mark.parametrize("percent", [ALL_GPU, ALL_CPU, ALL_DISK, MIXED], ids=str)
@pytest.mark.parametrize("budget", [None, (4, 4), (40, 40)], ids=["full", "budget", "budget_for_all"])
def test_one_token(tiny, run, percent, budget):
    model = tiny()
    prompts = model.clear_cut_prompts(LENGTHS, 1)
    outputs = run(model, prompts, 1, budget, percent=percent, gpu_batch_size=2, num_gpu_batches=2)
    assert [facts(o) for o in outputs] == [(r.tokens, "length") for r in model.references(prompts, 1)]


def test_the_longest_output_that_the_positions_allow(tiny, run):
    model = tiny("one_layer")
    most = model.hf.config.max_position_embeddings
    prompts = model.prompts([most - 3, most - 4])
    for budget in (None, (9, 9)):
        outputs = run(model, prompts, 3, budget, gpu_batch_size=2)
        assert [o.token_ids for o in outputs] == [r.tokens for r in model.references(prompts, 3, *(budget or ()))]
    with pytest.raises(UserError, match="positions"):
        run(model, prompts, 4)


# one LLM, many jobs


@pytest.mark.parametrize("budget", [None, (4, 4)], ids=["full", "budget"])
def test_one_llm_runs_different_jobs_one_after_the_other(tiny, budget):
    """With other lengths, counts, outputs and placements, with and without overlap, and the same jobs again."""
    model = tiny()
    jobs = [
        (LENGTHS, 12, dict(gpu_batch_size=3, num_gpu_batches=2)),
        ([2], 1, dict(gpu_batch_size=3, num_gpu_batches=2)),
        ([30, 25, 3], 20, dict(gpu_batch_size=3, num_gpu_batches=2, percent=ALL_DISK)),
        (LENGTHS, 5, dict(gpu_batch_size=3, num_gpu_batches=2, percent=ALL_DISK)),
        (LENGTHS[:5], 12, dict(gpu_batch_size=2, num_gpu_batches=1, percent=ALL_DISK, overlap=False)),
        ([1, 1, 1], 20, dict(gpu_batch_size=1, num_gpu_batches=2, percent=MIXED, overlap=True)),
        (LENGTHS, 12, dict(gpu_batch_size=4, percent=ALL_CPU, cpu_cache_compute=True)),
        (LENGTHS, 12, dict(gpu_batch_size=3, num_gpu_batches=2)),
    ]
    kv_budget = KVBudget.from_size(*budget) if budget else None
    with LLM(str(model.folder), Policy(), kv_budget, device="cpu", dtype="float32", progress=False) as llm:
        for lengths, max_tokens, policy in jobs * 2:
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
