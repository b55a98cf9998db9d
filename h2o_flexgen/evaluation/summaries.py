"""Summaries under KV budgets, and their ROUGE."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from h2o_flexgen.engine.params import SamplingParams
from h2o_flexgen.errors import UserError
from h2o_flexgen.evaluation.extras import need
from h2o_flexgen.evaluation.passages import Source
from h2o_flexgen.evaluation.settings import Setting, check_outputs, measure_each
from h2o_flexgen.jobs.keys import sampling
from h2o_flexgen.llm import LLM

#: ends a summary in the rows of the H2O repository
STOP = "###"


@dataclass(frozen=True)
class Article:
    """A prompt that ends where the summary begins, and the reference summary, if there is one."""

    prompt: list[int]
    params: SamplingParams
    reference: str | None


def articles_of(source: Source, llm: LLM, gen_len: int) -> tuple[list[Article], list[str]]:
    """The articles of a source, and an error for each row that gives none. Rows are those of the H2O repository
    (h2o_hf, data/summarization): {"article", "summary_gt"}, where the article is the whole prompt. A row may name its
    sampling parameters, as a job's rows do; the default is greedy, up to `gen_len` tokens, with the stop string ###."""
    if source.rows is None:
        raise UserError(f'{source.name} must hold JSON lines {{"article", "summary_gt"}}, and end in .jsonl')
    return source.each(lambda row: _article(row, llm, gen_len))


def _article(row: dict, llm: LLM, gen_len: int) -> Article:
    article = row.get("article")
    reference = row.get("summary_gt")
    if not isinstance(article, str):
        raise UserError('no text "article"')
    if not isinstance(reference, str | None):
        raise UserError("summary_gt must be a text")
    params = SamplingParams(**({"max_tokens": gen_len, "stop": STOP} | sampling(row)))
    return Article(llm.admit(article, params.max_tokens), params, reference or None)


def measure(llm: LLM, articles: list[Article], settings: list[Setting]) -> Iterator[dict]:
    """Yields a row for the full cache, then one for each setting, as soon as its summaries are written: `row_of`, with
    the mean ROUGE (`rouge`) of the summaries against the references ("reference"; None if there are none) and against
    the full cache's ("full_cache"), and the summaries (`texts`)."""
    prompts = [article.prompt for article in articles]
    params = [article.params for article in articles]
    references = [a.reference for a in articles]
    full = []  # the summaries of the full cache, which is measured first

    def job() -> dict:
        outputs = llm.generate(prompts, params, skip_errors=True)
        check_outputs(outputs, "article")
        texts = [output.outputs[0].text.strip() for output in outputs]
        full.extend(texts if not full else [])
        found = {"reference": mean_rouge(texts, references), "full_cache": mean_rouge(texts, full)}
        return {"rouge": found, "texts": texts}

    return measure_each(llm, settings, sum(p.max_tokens for p in params), job)


def mean_rouge(texts: list[str], references: list[str | None]) -> dict[str, dict[str, float]] | None:
    """The mean of `rouge` over the texts that have a reference; None if none has."""
    each = [rouge(text, reference) for text, reference in zip(texts, references) if reference]
    if not each:
        return None
    means = {}
    for package, kinds in each[0].items():
        means[package] = {}
        for kind in kinds:
            means[package][kind] = fmean(one[package][kind] for one in each)
    return means


def rouge(text: str, reference: str) -> dict[str, dict[str, float]]:
    """ROUGE-1, 2 and L, F measures in [0, 1], by the package `rouge`, which the H2O repository uses, and by
    `rouge-score` with stemming, as HELM uses it. The two split texts into words and sentences differently."""
    theirs = need("rouge", "rouge", "ROUGE")
    scorer = need("rouge_score.rouge_scorer", "rouge-score", "ROUGE")
    by_rouge = dict.fromkeys("12l", 0.0)
    if text.strip(" .\n") and reference.strip(" .\n"):  # it refuses texts without words
        (found,) = theirs.Rouge().get_scores(text, reference)
        by_rouge = {n: found[f"rouge-{n}"]["f"] for n in "12l"}
    names = ("rouge1", "rouge2", "rougeL")
    found = scorer.RougeScorer(names, use_stemmer=True).score(reference, text)
    by_score = {n: found[name].fmeasure for n, name in zip("12l", names)}
    return {"rouge": by_rouge, "rouge-score": by_score}
