"""Perplexity behind a prompt, and how often the argmax matches the full cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from statistics import fmean

from h2o_flexgen.evaluation.passages import Passage
from h2o_flexgen.evaluation.settings import Setting, check_outputs, measure_each
from h2o_flexgen.llm import LLM


def measure(llm: LLM, passages: list[Passage], settings: list[Setting]) -> Iterator[dict]:
    """Yields a row for the full cache, then one for each setting, as soon as it is measured: `row_of`, with the
    `perplexity` over all scored tokens, its `rise` over the full cache's as a fraction, and the `agreement`: the
    fraction of tokens whose argmax matches the full cache. The tokens behind each prompt are fed one by one
    (teacher-forced), so that eviction acts as in generation. Raises UserError if a passage cannot be scored."""
    texts = [p.token_ids for p in passages]
    prompt_lens = [p.prompt_len for p in passages]
    tokens = sum(map(len, texts)) - sum(prompt_lens)
    full = []  # perplexity and argmax tokens of the full cache, which is measured first

    def job() -> dict:
        scores = llm.score(texts, prompt_lens)
        check_outputs(scores, "passage")
        perplexity = math.exp(-fmean(chain.from_iterable(score.token_logprobs for score in scores)))
        greedy = list(chain.from_iterable(score.greedy_token_ids for score in scores))
        if not full:
            full.extend((perplexity, greedy))
        agreement = fmean(a == b for a, b in zip(greedy, full[1]))
        return {"perplexity": perplexity, "rise": perplexity / full[0] - 1, "agreement": agreement}

    return measure_each(llm, settings, tokens, job)
