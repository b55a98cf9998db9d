"""Continuations of one prompt under several KV budgets, and how much sampled texts differ."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from h2o_flexgen.engine.params import SamplingParams
from h2o_flexgen.evaluation.extras import need
from h2o_flexgen.evaluation.settings import Setting, check_outputs, measure_each
from h2o_flexgen.llm import LLM


def measure(
    llm: LLM, prompt: list[int], settings: list[Setting], gen_len: int, samples: int, temperature: float
) -> Iterator[dict]:
    """Yields a row for the full cache, then one for each setting: `row_of`, with the greedy `text`, the `samples`
    drawn at the temperature, and their `self_bleu`, which is None without samples."""
    params = [SamplingParams(max_tokens=gen_len)] + [SamplingParams(temperature, max_tokens=gen_len)] * samples

    def job() -> dict:
        outputs = llm.generate([prompt] * len(params), params)
        check_outputs(outputs, "text")
        text, *drawn = [output.outputs[0].text for output in outputs]
        return {"text": text, "samples": drawn, "self_bleu": self_bleu(drawn) if drawn else None}

    return measure_each(llm, settings, len(params) * gen_len, job)


def self_bleu(texts: list[str]) -> float:
    """The mean BLEU, in [0, 1], of each text against all others (Texygen, arXiv 1802.01886, section 2.2): 1 if all are
    the same. By `sacrebleu`, sentence by sentence, with its default smoothing. Takes two texts or more."""
    sacrebleu = need("sacrebleu", "sacrebleu", "self-BLEU")
    others = [texts[:n] + texts[n + 1 :] for n in range(len(texts))]
    return fmean(sacrebleu.sentence_bleu(text, rest).score / 100 for text, rest in zip(texts, others))
