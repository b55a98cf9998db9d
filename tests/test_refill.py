"""Rows enter and leave, and share prefixes: each gets the same as alone, wherever its data is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import zoo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machines import policies
from oracle import IN_SHORT

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams
from h2o_flexgen.engine import prefixes
from h2o_flexgen.engine.observer import Observer
from h2o_flexgen.kv_cache import RULES
from h2o_flexgen.kv_cache import full as full_cache

#: fewer places than the twelve rows of a job
PLACEMENTS = {
    "ram": dict(percent=(100, 0, 100, 0, 100, 0), gpu_batch_size=5),
    "ram, one by one": dict(percent=(100, 0, 100, 0, 100, 0), gpu_batch_size=1, num_gpu_batches=2),
    "cpu tier": dict(percent=(0, 100, 0, 100, 0, 100), gpu_batch_size=4, num_gpu_batches=2),
    "attention on the CPU": dict(
        percent=(0, 100, 0, 100, 0, 100), gpu_batch_size=3, num_gpu_batches=2, cpu_cache_compute=True
    ),
    "disk": dict(percent=(0, 0, 0, 0, 0, 0), gpu_batch_size=4, num_gpu_batches=2),
    "disk, one batch": dict(percent=(0, 0, 0, 0, 0, 0), gpu_batch_size=6, prefill_tokens=40),
    "thirds": dict(percent=(33, 33, 33, 33, 33, 33), gpu_batch_size=3, num_gpu_batches=3, prefill_tokens=60),
    "thirds, attention on the CPU": dict(
        percent=(33, 33, 33, 33, 33, 33), gpu_batch_size=4, num_gpu_batches=2, cpu_cache_compute=True
    ),
}
#: (prompt tokens after the shared beginning, which beginning, output tokens)
ROWS = [
    (9, "", 14),
    (4, "a", 3),
    (7, "a", 14),
    (3, "ab", 9),
    (5, "ab", 2),
    (6, "ab", 12),
    (2, "abc", 1),
    (8, "abc", 14),
    (21, "", 5),
    (1, "", 8),
    (4, "b", 14),
    (5, "b", 4),
]
BEGINNINGS = {"": 0, "a": 11, "ab": 17, "abc": 22, "b": 13}  # "ab" begins with "a", "abc" with "ab"
MOST = max(output for _, _, output in ROWS)
BUDGET = (4, 4)
OPTIONS = dict(device="cpu", dtype="float32", progress=False)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Makes growing caches grow often, and a few shared tokens worth a node."""
    monkeypatch.setattr(full_cache, "SEGMENT", 4)
    monkeypatch.setattr(prefixes, "LEAST_SAVED", 4)
    monkeypatch.setattr(prefixes, "LEAST_TOKENS", 1)


@dataclass
class Job:
    """Prompts, several with shared prefixes, and the most tokens of each output."""

    prompts: list[list[int]]
    outputs: list[int]

    @classmethod
    def of(cls, model: zoo.Tiny, *budgets: tuple) -> Job:
        """Prompts for which no decision of the reference is a close call."""
        (a,) = model.prompts([22], seed=77)
        (b,) = model.prompts([13], seed=78)
        found = {}
        for name, length in BEGINNINGS.items():
            begin = tuple((b if name == "b" else a)[:length])
            lengths = [own for own, each, _ in ROWS if each == name]
            found[name] = iter(model.clear_cut_prompts(lengths, MOST, budgets or [(None, None)], begin))
        return cls([next(found[name]) for _, name, _ in ROWS], [output for _, _, output in ROWS])

    @property
    def params(self) -> list[SamplingParams]:
        return [SamplingParams(max_tokens=most, ignore_eos=True) for most in self.outputs]

    def expected(self, model: zoo.Tiny, *budget) -> list[list[int]]:
        references = model.references(self.prompts, MOST, *budget)
        return [trace.tokens[:most] for trace, most in zip(references, self.outputs)]


def opened(model: zoo.Tiny, placement: str, budget=None, *, overlap: bool = True, **options) -> LLM:
    budget = zoo.sized(*budget) if isinstance(budget, tuple) else budget
    return LLM(str(model.folder), Policy(overlap=overlap, **PLACEMENTS[placement]), budget, **OPTIONS, **options)


def tokens(llm: LLM, job: Job, params: list[SamplingParams] | None = None) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(job.prompts, params or job.params)]


def alone(llm: LLM, job: Job, params: list[SamplingParams] | None = None) -> list[list[int]]:
    """Each row in a job of its own."""
    each = enumerate(zip(job.prompts, params or job.params))
    return [llm.generate([prompt], p, keys=[n])[0].outputs[0].token_ids for n, (prompt, p) in each]


# placements


@pytest.mark.parametrize("n, placement", [*enumerate(PLACEMENTS)], ids=PLACEMENTS)
def test_rows_that_enter_and_leave_get_the_tokens_of_the_oracle(tiny, n, placement):
    """Twice, since the second job begins with data that the first one left in the buffers. Each of two models, with and
    without a KV budget and overlap."""
    model = tiny(("opt", "llama_groups_of_3_wide_heads_linear")[n % 2])
    budget = (None, BUDGET)[n // 2 % 2]
    job = Job.of(model, (None, None), BUDGET)
    with opened(model, placement, budget, overlap=n < 4) as llm:
        for _ in range(2):
            assert tokens(llm, job) == job.expected(model, *(budget or ()))
        assert llm.report["row_steps"] == sum(most - 1 for most in job.outputs), "a row was taken on behind its end"
        read = llm.report["computed_tokens"], llm.report["shared_tokens"]
        assert sum(read) > sum(map(len, job.prompts)) > read[0] + 90, "what is shared is computed again"


@pytest.mark.parametrize("name", zoo.FIRST.values())
def test_every_family_gives_the_tokens_of_transformers(tiny, name):
    model = tiny(name)
    job = Job.of(model)
    with opened(model, "thirds") as llm:
        found = tokens(llm, job)
    assert found == [model.transformers(p, MOST)[0][:most] for p, most in zip(job.prompts, job.outputs)]


@pytest.mark.parametrize("n, placement", [*enumerate(PLACEMENTS)], ids=PLACEMENTS)
def test_windows_slide_over_shared_prefixes_and_rows_that_enter(tiny, n, placement):
    """Full caches give the tokens of transformers; budgets are smaller and larger than the window."""
    model = tiny(zoo.WINDOWS[n % 2])
    budgets = [(None, None), (2, 3), (4, 20, "h2o")]
    job = Job.of(model, *budgets)
    expected = [model.transformers(p, MOST)[0][:most] for p, most in zip(job.prompts, job.outputs)]
    assert expected == job.expected(model)
    for budget in (None, *budgets[1:]):
        with opened(model, placement, budget) as llm:
            for _ in range(2):
                assert tokens(llm, job) == job.expected(model, *(budget or ()))
            assert llm.report["shared_tokens"] > 90


@pytest.mark.parametrize("name", zoo.BY_LENGTH)
def test_rope_by_length_shares_only_prefixes_that_are_rotated_alike(tiny, name):
    model = tiny(name)
    job = Job.of(model)
    with opened(model, "disk") as llm:
        assert tokens(llm, job) == job.expected(model)


#: options of each rule; `snapkv` shares the tokens before its window
OWN = {"snapkv": ":window=4:pool=3", "vatp": ":first=1", "sinks": ":first=1", **IN_SHORT}


@pytest.mark.parametrize("n, rule", [*enumerate(RULES)], ids=RULES)
def test_every_rule_keeps_what_the_oracle_keeps(tiny, n, rule):
    """Each rule with another placement."""
    model = tiny("llama")
    budget = (*BUDGET, rule + OWN.get(rule, ":first=0"))
    job = Job.of(model, budget)
    with opened(model, [*PLACEMENTS][n % len(PLACEMENTS)], budget, overlap=n % 3 > 0) as llm:
        assert tokens(llm, job) == job.expected(model, *budget)
        assert llm.report["shared_tokens"] > 0


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("budget", [None, (3, 2)], ids=["full", "budget"])
def test_quantised_caches(tiny, budget, kind):
    """A prompt attends to its tokens unquantised, shared ones included, its output to stored ones. The job is small,
    since with more tokens one would always be close to being rounded the other way."""
    model = tiny("one_layer")
    its_budget = (*(budget or (None, None)), "smoothed", kind)
    outputs = [4, 2, 4, 3, 4]
    (begin,) = model.clear_cut_prompts([5], 4, [its_budget])
    prompts = model.clear_cut_prompts([1, 2, 2], 4, [its_budget], tuple(begin))
    job = Job(prompts + model.clear_cut_prompts([4, 6], 4, [its_budget]), outputs)
    for placement in ("attention on the CPU", "disk"):
        with opened(model, placement, budget, compress_cache=kind) as llm:
            llm.policy = replace(llm.policy, gpu_batch_size=2, num_gpu_batches=1)
            references = model.references(job.prompts, 4, *its_budget)
            assert tokens(llm, job) == [trace.tokens[:most] for trace, most in zip(references, outputs)], placement
            assert llm.report["shared_tokens"] >= 3 * 5


@pytest.mark.parametrize("placement", ["ram", "thirds, attention on the CPU"])
def test_positions_that_roll(tiny, placement):
    model = tiny("llama")
    job = Job.of(model)
    with opened(model, placement, KVBudget(hh_size=5, recent_size=5, position_rolling=True)) as llm:
        assert tokens(llm, job) == alone(llm, job)


@pytest.mark.parametrize("placement, rule", [("ram", "snapkv:window=2"), ("cpu tier", None), ("disk", "h2o")])
def test_a_long_prompt_with_a_short_output_waits_for_short_ones(tiny, placement, rule):
    """Batches are laid out for the rows that enter first, and not every row fits into each."""
    model = tiny()
    lengths = [40, 5, 5, 60, 3, 30, 6]
    outputs = [2, 9, 12, 3, 20, 1, 12]
    budget = (None, None) if rule is None else (*BUDGET, rule)
    prompts = [model.clear_cut_prompts([n], most, [budget])[0] for n, most in zip(lengths, outputs)]
    job = Job(prompts, outputs)
    with opened(model, placement, None if rule is None else budget) as llm:
        llm.policy = replace(llm.policy, gpu_batch_size=2)
        expected = [model.reference(p, most, *budget).tokens for p, most in zip(prompts, outputs)]
        assert tokens(llm, job) == expected


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(
    policy=policies([0, 33, 50, 100], [0, 50, 67, 100], (6, 3), [1, 20, 45, 2048]),
    budget=st.sampled_from([None, BUDGET, (*BUDGET, "snapkv:window=2")]),
    rows=st.lists(st.tuples(st.integers(0, len(ROWS) - 1), st.integers(1, MOST)), min_size=1, max_size=20),
    ending=st.integers(0, 95),
    group_rows=st.sampled_from([1, 4, 128]),
)
def test_any_rows_under_any_policy(tiny, policy, budget, rows, ending, group_rows):
    """Some rows twice, and each up to its length or an end-of-sequence token."""
    model = tiny()
    pool = Job.of(model, (None, None), BUDGET, (*BUDGET, "snapkv:window=2"))
    prompts = []
    expected = []
    for n, most in rows:
        reference = model.reference(pool.prompts[n], MOST, *(budget or ())).tokens[:most]
        prompts.append(pool.prompts[n])
        expected.append(reference[: reference.index(ending) + 1] if ending in reference else reference)
    params = [SamplingParams(max_tokens=most) for _, most in rows]
    kv_budget = budget and zoo.sized(*budget)
    with pytest.MonkeyPatch.context() as patch, LLM(str(model.folder), Policy(**policy), kv_budget, **OPTIONS) as llm:
        patch.setattr("h2o_flexgen.planning.workload.GROUP_ROWS", group_rows)
        llm.eos_ids = frozenset([ending])
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected


# ends


@pytest.mark.parametrize("placement", ["ram", "attention on the CPU", "disk"])
def test_rows_end_where_their_texts_end(tiny, placement):
    """At the model's end-of-sequence token, at one of a row's own, or by length."""
    model = tiny()
    job = Job.of(model)
    references = job.expected(model)
    end = max({t for tokens in references for t in tokens}, key=lambda t: sum(t in r[:-1] for r in references))
    own = [r[len(r) // 2] for r in references]
    params = [
        replace(p, ignore_eos=n % 3 == 0, stop_token_ids=(own[n],) if n % 2 else ()) for n, p in enumerate(job.params)
    ]
    wanted = []
    for n, reference in enumerate(references):
        ends = ({end} if n % 3 else set()) | ({own[n]} if n % 2 else set())
        at = next((place for place, token in enumerate(reference) if token in ends), None)
        wanted.append((reference, "length") if at is None else (reference[: at + 1], "stop"))
    with opened(model, placement) as llm:
        llm.eos_ids = frozenset([end])
        found = [output.outputs[0] for output in llm.generate(job.prompts, params)]
        assert llm.report["row_steps"] == sum(len(tokens) - 1 for tokens, _ in wanted)
    assert [(o.token_ids, o.finish_reason) for o in found] == wanted
    assert len({reason for _, reason in wanted}) == 2


@pytest.mark.parametrize("placement", ["ram", "thirds"])
def test_a_row_draws_the_same_numbers_whenever_it_enters(tiny, placement):
    model = tiny()
    job = Job.of(model)
    params = [replace(p, temperature=1.3, top_p=0.95, seed=n % 2) for n, p in enumerate(job.params)]
    with opened(model, placement) as llm:
        together = tokens(llm, job, params)
        by_itself = alone(llm, job, params)
        order = [7, 2, 11, 0, 9, 4, 1, 10, 3, 8, 6, 5]
        mixed = llm.generate([job.prompts[n] for n in order], [params[n] for n in order], keys=order)
    assert together == by_itself
    assert [o.outputs[0].token_ids for o in mixed] == [together[n] for n in order]


# scores


@pytest.mark.parametrize("placement, budget", [("ram", BUDGET), ("disk", None), ("thirds", BUDGET)], ids=str)
def test_texts_with_the_same_context_score_as_each_alone(tiny, placement, budget):
    """In one pass, and token by token after a prompt, with the first scored token anywhere in it."""
    model = tiny("llama")
    texts = Job.of(model).prompts
    texts = [text + [5, 9, 3][: 1 + n % 3] for n, text in enumerate(texts)]
    ways = [
        dict(first_scored=[max(1, len(text) - 1 - n % 4) for n, text in enumerate(texts)]),
        dict(prompt_len=[max(1, len(text) - 3) for text in texts]),
        dict(
            prompt_len=[max(1, len(text) - 2) for text in texts],
            first_scored=[max(1, len(text) - 2 - n % 3) for n, text in enumerate(texts)],
        ),
    ]
    with opened(model, placement, budget) as llm:
        for way in ways:
            together = llm.score(texts, **way)
            assert llm.report["shared_tokens"] > 0
            for n, (text, output) in enumerate(zip(texts, together)):
                (single,) = llm.score([text], **{name: values[n] for name, values in way.items()})
                whole = output.error is None and single.error is None
                assert whole == (output.error == single.error)
                assert output.token_logprobs == pytest.approx(single.token_logprobs, abs=1e-4)
                assert output.greedy_token_ids == single.greedy_token_ids
                begin = list(way.values())[-1][n]
                assert not whole or len(output.token_logprobs) == len(text) - begin


# errors


class Fails(Observer):
    """Ends the job once `after` rows have ended."""

    def __init__(self, after: int):
        self.after = after
        self.ended = []

    def on_finished(self, rows):
        self.ended += [s.index for s in rows]
        if len(self.ended) >= self.after:
            raise RuntimeError("by this test")


@pytest.mark.parametrize("placement", ["cpu tier", "disk"])
def test_outputs_before_an_error_are_right_and_so_is_the_next_job(tiny, placement):
    """An error while some rows prefill and others decode leaves nothing behind."""
    model = tiny()
    seen = []
    job = Job.of(model)
    watch = Fails(5)
    expected = job.expected(model)
    with opened(model, placement, observer=watch) as llm:
        with pytest.raises(RuntimeError, match="by this test"):
            llm.generate(job.prompts, job.params, on_output=seen.append)
        assert 5 <= len(seen) < len(job.prompts) and [o.index for o in seen] == watch.ended
        assert all(o.outputs[0].token_ids == expected[o.index] for o in seen)
        watch.after = len(job.prompts) + 1
        watch.ended.clear()
        assert tokens(llm, job) == expected
