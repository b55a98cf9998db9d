"""Perplexity behind a prompt, and how often the most likely token is that of the full cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean

from h2o_flexgen.evaluation.passages import Passage
from h2o_flexgen.evaluation.settings import Setting, check_outputs, measure_each
from h2o_flexgen.llm import LLM


def measure(llm: LLM, passages: list[Passage], settings: list[Setting]) -> Iterator[dict]:
    """A row for the full cache, and then one for each setting, as soon as it is measured.

    The tokens behind each prompt are fed one by one (teacher-forced), so that eviction acts as in generation.

    Returns:
        rows as `row_of`, with the `perplexity` over all scored tokens, its `rise` over the full cache's as a fraction,
        and the `agreement`: at how many of the tokens, as a fraction, the most likely one is the full cache's.

    Raises:
        UserError: a passage cannot be scored.
    """
    texts = [p.token_ids for p in passages]
    prompt_lens = [p.prompt_len for p in passages]
    tokens = sum(map(len, texts)) - sum(prompt_lens)
    full = []  # perplexity and most likely tokens of the full cache, which comes first

    def job() -> dict:
        scores = llm.score(texts, prompt_lens)
        check_outputs(scores, "passage")
        perplexity = math.exp(-fmean(logprob for score in scores for logprob in score.token_logprobs))
        greedy = [token for score in scores for token in score.greedy_token_ids]
        if not full:
            full.extend((perplexity, greedy))
        agreement = fmean(a == b for a, b in zip(greedy, full[1]))
        return {"perplexity": perplexity, "rise": perplexity / full[0] - 1, "agreement": agreement}

    return measure_each(llm, settings, tokens, job)
