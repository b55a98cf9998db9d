"""Perplexity behind a prompt, and how often the argmax matches the full cache."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from statistics import fmean

from h2o_flexgen.engine.outputs import ScoreOutput
from h2o_flexgen.evaluation.passages import Passage
from h2o_flexgen.evaluation.settings import Setting, check_outputs, measure_each
from h2o_flexgen.evaluation.trials import standard_error
from h2o_flexgen.llm import LLM


def measure(llm: LLM, passages: list[Passage], settings: list[Setting]) -> Iterator[dict]:
    """Yields a row for the full cache, then one for each setting, as soon as it is measured: `row_of`, with the
    `perplexity` over all scored tokens, its `rise` over the full cache's as a fraction, the standard error of the rise
    over passages (`error`), the rise of each text (`texts`), and the `agreement`: the fraction of tokens whose argmax
    matches the full cache. The tokens behind each prompt are fed one by one (teacher-forced), so that eviction acts as
    in generation. Raises UserError if a passage cannot be scored."""
    texts = [p.token_ids for p in passages]
    prompt_lens = [p.prompt_len for p in passages]
    tokens = sum(map(len, texts)) - sum(prompt_lens)
    full: list[ScoreOutput] = []  # of the full cache, which is measured first

    def job() -> dict:
        scores = llm.score(texts, prompt_lens)
        check_outputs(scores, "passage")
        full.extend([] if full else scores)
        perplexity = math.exp(-logprob(scores))
        rise = math.exp(logprob(full) - logprob(scores)) - 1
        differences = [logprob([before]) - logprob([score]) for before, score in zip(full, scores)]
        pairs = zip(greedy(scores), greedy(full))
        return {
            "perplexity": perplexity,
            "rise": rise,
            "error": (1 + rise) * standard_error(differences),
            "texts": {name: math.exp(fmean(each)) - 1 for name, each in _by_text(passages, differences).items()},
            "agreement": fmean(a == b for a, b in pairs),
        }

    return measure_each(llm, settings, tokens, job)


def greedy(scores: list[ScoreOutput]) -> Iterator[int]:
    """The most likely token in the place of each scored one."""
    return chain.from_iterable(score.greedy_token_ids for score in scores)


def logprob(scores: list[ScoreOutput]) -> float:
    """The mean over all scored tokens."""
    return fmean(chain.from_iterable(score.token_logprobs for score in scores))


def _by_text(passages: list[Passage], values: list[float]) -> dict[str, list[float]]:
    """The values of the passages of each text."""
    found = defaultdict(list)
    for passage, value in zip(passages, values):
        found[os.path.basename(passage.source)].append(value)
    return found
