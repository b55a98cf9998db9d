"""ROUGE of known texts and of the engine's summaries; self-BLEU."""

from __future__ import annotations

import pytest

from h2o_flexgen import LLM, SamplingParams, UserError
from h2o_flexgen.evaluation import compare
from h2o_flexgen.evaluation.passages import Source
from h2o_flexgen.evaluation.settings import make_settings
from h2o_flexgen.evaluation.summaries import articles_of, mean_rouge, measure, rouge

pytest_plugins = ["command_tools"]


@pytest.fixture
def packages():
    pytest.importorskip("rouge")
    pytest.importorskip("rouge_score")


def test_rouge_of_known_texts(packages):
    """6 and 6 words, of which 5 are common, with 3 common pairs of neighbours out of 5."""
    for found in rouge("the cat sat on the mat", "the cat lay on the mat").values():
        # the package `rouge` counts different words: "the" stands twice in both
        assert found["1"] in (pytest.approx(5 / 6), pytest.approx(4 / 5))
        assert found["2"] == pytest.approx(3 / 5)
        assert found["l"] in (pytest.approx(5 / 6), pytest.approx(4 / 5))


@pytest.mark.parametrize("text, reference, score", [("", "a cat", 0), ("...", "a cat", 0), ("a cat", "a cat", 1)])
def test_rouge_at_its_ends(packages, text, reference, score):
    for found in rouge(text, reference).values():
        assert [found["1"], found["l"]] == pytest.approx([score, score])


def test_only_texts_with_a_reference_count(packages):
    assert mean_rouge(["a cat", "x"], ["a cat", None])["rouge"]["1"] == pytest.approx(1)
    assert mean_rouge(["a cat"], [None]) is None


def test_summaries_are_what_generate_writes(packages, talker):
    rows = [
        (1, {"article": "A book about rivers. Summary:", "summary_gt": "Rivers are long.", "max_tokens": 12}),
        (2, {"article": "Water is wet. " * 12, "temperature": 0.7, "seed": 3}),
        (3, {"text": "no article"}),
        (4, {"article": "word " * 2000}),
    ]
    with LLM(str(talker), device="cpu", dtype="float32", progress=False) as llm:
        articles, errors = articles_of(Source("rows.jsonl", rows=rows), llm, 20)
        assert [e.split(": ")[0] for e in errors] == ["rows.jsonl line 3", "rows.jsonl line 4"]
        assert articles[0].params == SamplingParams(max_tokens=12, stop="###")
        assert articles[1].params == SamplingParams(0.7, max_tokens=20, seed=3, stop="###")
        full, row = measure(llm, articles, make_settings(["h2o"], [], [8]))
        prompts = [article.prompt for article in articles]
        params = [article.params for article in articles]
        for found in (row, full):
            llm.kv_budget = None if found is full else make_settings(["h2o"], [], [8])[0].budget
            outputs = llm.generate(prompts, params)
            assert found["texts"] == [output.outputs[0].text.strip() for output in outputs]
    assert full["rouge"]["full_cache"]["rouge-score"]["1"] == pytest.approx(1)
    assert row["rouge"]["reference"] == rouge(row["texts"][0], "Rivers are long.")
    assert row["texts"] != full["texts"]
    with pytest.raises(UserError, match="must hold JSON lines"):
        articles_of(Source("a.txt", text="a"), llm, 20)


def test_texts_of_one_prompt_side_by_side(talker):
    pytest.importorskip("sacrebleu")
    settings = make_settings(["h2o"], [], [8])
    with LLM(str(talker), device="cpu", dtype="float32", progress=False) as llm:
        prompt = llm.admit("Water is wet. " * 12, 16)
        full, row = compare.measure(llm, prompt, settings, 16, 3, 0.8)
        llm.kv_budget = None
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=16))
    assert full["text"] == output.outputs[0].text
    assert full["text"] != row["text"]
    assert len(set(row["samples"])) == 3
    assert 0 <= row["self_bleu"] < 1


def test_self_bleu_is_one_where_all_texts_are_the_same():
    pytest.importorskip("sacrebleu")
    assert compare.self_bleu(["a cat sat on the mat"] * 3) == pytest.approx(1)
    assert compare.self_bleu(["a cat sat on the mat", "no word is like those of it", "x y z u v w"]) < 0.1
