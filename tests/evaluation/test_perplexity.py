"""Perplexity and agreement match the oracle; passages are cut as documented."""

from __future__ import annotations

import json
import math
from statistics import fmean

import pytest
import zoo

from h2o_flexgen import LLM, KVBudget, Policy, UserError
from h2o_flexgen.evaluation.passages import Passage, Source, passages_of, read_source
from h2o_flexgen.evaluation.perplexity import measure
from h2o_flexgen.evaluation.settings import Setting, make_settings

pytest_plugins = ["command_tools"]

PROMPTS = [8, 12, 8]
LENGTHS = [24, 30, 17]
BUDGETS = [(3, 4), (2, 6)]


@pytest.fixture
def llm(tiny):
    with LLM(str(tiny("llama").folder), Policy(2, 2), device="cpu", dtype="float32", progress=False) as llm:
        yield llm


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rows_are_those_of_the_oracle(tiny, llm):
    model = tiny("llama")
    passages = [clear_cut(model, n, length) for n, length in zip(PROMPTS, LENGTHS)]
    settings = [Setting("smoothed", zoo.sized(*budget)) for budget in BUDGETS]
    full, *rows = measure(llm, passages, settings)
    perplexity, greedy = by_oracle(model, passages)
    assert full["perplexity"] == pytest.approx(perplexity, rel=1e-4)
    assert (full["rise"], full["agreement"], full["slots"]) == (0, 1, None)
    agreements = set()
    for row, budget in zip(rows, BUDGETS, strict=True):
        its_perplexity, its_greedy = by_oracle(model, passages, *budget)
        assert row["perplexity"] == pytest.approx(its_perplexity, rel=1e-4)
        assert row["rise"] == pytest.approx(its_perplexity / perplexity - 1, abs=1e-4)
        assert row["agreement"] == pytest.approx(fmean(a == b for a, b in zip(its_greedy, greedy)))
        assert (row["heavy"], row["recent"], row["slots"]) == (*budget, sum(budget))
        agreements.add(row["agreement"])
    assert len(agreements) == 2 and max(agreements) < 1


def test_bytes_are_those_of_a_sequence_in_all_layers(tiny, llm):
    """K and V, 2 layers, 2 heads, 6 elements of 4 bytes; the last token is never attended to."""
    (text,) = tiny("llama").prompts([24])
    full, row = measure(llm, [Passage(text, 8)], [Setting("h2o", KVBudget.from_size(3, 4, "h2o"))])
    slot = 2 * 2 * 2 * 6 * 4
    assert full["kv_bytes"] == 23 * slot
    score_and_position = 2 * 2 * 8
    assert row["kv_bytes"] == 8 * (slot + score_and_position)


def clear_cut(model, prompt_len: int, length: int) -> Passage:
    """A text for which no decision of the oracle is a close call under any budget."""
    for seed in range(200):
        (text,) = model.prompts([length], seed=20_000 * length + seed)
        traces = [trace_of(model, Passage(text, prompt_len), *budget) for budget in [(None, None), *BUDGETS]]
        if all(t.slack > zoo.SLACK and min(map(abs, t.margins)) > zoo.MARGIN for t in traces):
            return Passage(text, prompt_len)
    raise AssertionError("no clear-cut text")


def trace_of(model, passage: Passage, heavy=None, recent=None):
    text = passage.token_ids
    n = passage.prompt_len
    return model.oracle.generate(text[:n], len(text) - n, heavy, recent, forced=text[n:])


def by_oracle(model, passages, *budget) -> tuple[float, list[int]]:
    traces = [trace_of(model, passage, *budget) for passage in passages]
    perplexity = math.exp(-fmean(logprob for trace in traces for logprob in trace.logprobs))
    return perplexity, [token for trace in traces for token in trace.greedy]


# settings


def test_every_rule_has_every_budget():
    settings = make_settings(["h2o", "mean:first=4"], [0.4, 0.2], [9])
    found = [(s.rule, s.budget.slots(100)) for s in settings]
    slots = [(20, 20), (10, 10), (4, 5)]
    assert found == [(rule, each) for rule in ("h2o", "mean:first=4") for each in slots]
    assert make_settings(["h2o"], [0.4], [], 0.25)[0].budget.slots(100) == (10, 30)
    assert len(make_settings(["h2o", "h2o"], [0.4, 0.4], [])) == 1


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(ratios=[0.0], sizes=[]), "`ratios` must lie in"),
        (dict(ratios=[1.5], sizes=[]), "`ratios` must lie in"),
        (dict(ratios=[], sizes=[0]), "`sizes` must be 1 or more"),
        (dict(ratios=[], sizes=[4], hh_share=1.5), "`hh_share` must lie in"),
    ],
)
def test_budgets_out_of_range(given, message):
    with pytest.raises(UserError, match=message):
        make_settings(["h2o"], **given)


# passages


@pytest.fixture
def model(talker):
    with LLM(str(talker), device="cpu", dtype="float32", progress=False) as llm:
        yield llm.model


def test_windows_are_evenly_spaced_without_overlap(model):
    text = "".join(map(chr, range(97, 123))) * 40
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    passages, errors = passages_of(Source("a", text=text), model, 20, 10, 5)
    assert errors == [] and len(passages) == 5
    begins = [n * (len(ids) - 29) // 4 for n in range(5)]
    assert [p.token_ids for p in passages] == [[2, *ids[begin : begin + 29]] for begin in begins]  # 2: </s>
    assert begins[-1] + 29 == len(ids)
    many, _ = passages_of(Source("a", text=text), model, 20, 10, 10_000)
    assert len(many) == len(ids) // 29


def test_rows_are_cut_at_the_end_of_their_prompt(model, tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "a b", "completion": " c d e f g h"}, {"text": "x y z " * 30}, {"text": "x"}, {"prompt": "x"}]
    path.write_text("\n".join([*map(json.dumps, rows), "{", '{"prompt": "a", "completion": ""}']))
    passages, errors = passages_of(read_source(str(path)), model, 10, 5, 8)
    prompt = model.encode("a b")
    completion = model.tokenizer(" c d e f g h", add_special_tokens=False)["input_ids"][:5]
    assert passages == [Passage(prompt + completion, len(prompt)), Passage(model.encode(rows[1]["text"])[:15], 10)]
    says = ["line 3: the text has 2 tokens", "line 4: no texts", "line 5: not JSON", "line 6: the completion is empty"]
    assert all(expected in error for expected, error in zip(says, errors, strict=True))
