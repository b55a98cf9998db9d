"""What one prompt is continued with under KV budgets, and how much sampled texts differ."""

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
    """A row for the full cache, and then one for each setting.

    Returns:
        rows as `row_of`, with the greedy `text`, the `samples`, texts drawn at the temperature, and their `self_bleu`,
        None without samples.
    """
    params = [SamplingParams(max_tokens=gen_len)] + [SamplingParams(temperature, max_tokens=gen_len)] * samples

    def job() -> dict:
        outputs = llm.generate([prompt] * len(params), params)
        check_outputs(outputs, "text")
        text, *drawn = [output.outputs[0].text for output in outputs]
        return {"text": text, "samples": drawn, "self_bleu": self_bleu(drawn) if drawn else None}

    return measure_each(llm, settings, len(params) * gen_len, job)


def self_bleu(texts: list[str]) -> float:
    """The mean over texts of the BLEU, in [0, 1], of each against all others (Texygen, arXiv 1802.01886, section 2.2):
    1 if they are all the same. By `sacrebleu`, sentence by sentence, with its own smoothing. At least two texts."""
    sacrebleu = need("sacrebleu", "sacrebleu", "self-BLEU")
    others = [texts[:n] + texts[n + 1 :] for n in range(len(texts))]
    return fmean(sacrebleu.sentence_bleu(text, rest).score / 100 for text, rest in zip(texts, others))
