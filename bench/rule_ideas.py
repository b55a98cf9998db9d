"""Measure what ideas for cache rules cost in quality, all with the same number of slots.

python -m bench.rule_ideas TEXT TEXT --output docs/benchmarks/rule_ideas.json

Rules that lost are small classes here, outside the package. Ideas are measured as in `h2o-flexgen quality`: the tokens
after a prompt are fed one by one through the engine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice
from math import exp
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch

from h2o_flexgen import LLM
from h2o_flexgen.commands.main import execute
from h2o_flexgen.commands.options import Parser
from h2o_flexgen.evaluation.origin import origin
from h2o_flexgen.evaluation.passages import Passage, passages_of, read_source
from h2o_flexgen.evaluation.settings import make_settings, measure_each
from h2o_flexgen.formats import dtype_name
from h2o_flexgen.kv_cache import RULES
from h2o_flexgen.kv_cache.fixed_rule import FixedRule
from h2o_flexgen.kv_cache.mean import MeanAttentionCache
from h2o_flexgen.kv_cache.smoothed import SmoothedCache
from h2o_flexgen.kv_cache.value_norm import ValueNormCache
from h2o_flexgen.utils.files import read_json, rounded, to_json, write_text


@dataclass(frozen=True)
class Grace(MeanAttentionCache):
    """The mean with half as many recent tokens protected, so that new tokens must earn their slots sooner."""

    name = "mean_short_window"

    @property
    def recent_window(self):
        return self.recent // 2


@dataclass(frozen=True)
class MeanValue(ValueNormCache):
    """The mean times the value's norm."""

    first: int = 0
    name = "mean_value"

    def rank(self, tokens):
        return super().rank(tokens) / (tokens.newest + 1 - tokens.position)


@dataclass(frozen=True)
class Unweighted(SmoothedCache):
    """The smoothed mean without the value's norm."""

    name = "smoothed_unweighted"

    def rank(self, tokens):
        return super().rank(tokens) / tokens.metadata["value_norm"].clamp(min=1e-6)


@dataclass(frozen=True)
class RootAge(ValueNormCache):
    """Between sum and mean: the score over the square root of the age."""

    first: int = 0
    name = "root_age"

    def rank(self, tokens):
        return super().rank(tokens) / (tokens.newest + 1 - tokens.position).sqrt()


@dataclass(frozen=True)
class LastQuery(FixedRule):
    """TOVA (arXiv 2401.06104): the attention of the newest query alone."""

    name = "last_query"

    def query_weights(self, position, newest):
        return (position == newest).float()

    def step_scores(self, score, received):
        return received

    @property
    def recent_window(self):
        return 0


@dataclass(frozen=True)
class KeyNorm(SmoothedCache):
    """The smoothed mean divided by the key's norm, since keys with small norms matter most (arXiv 2406.11430)."""

    name = "key_norm"

    def remember(self, k, v):
        return {"value_norm": 1 / k.float().norm(dim=-1).clamp(min=1e-6)}


@dataclass(frozen=True)
class KeyRarity(SmoothedCache):
    """The smoothed mean times how far the key points from the prompt's mean (after KeyDiff, arXiv 2504.15364)."""

    name = "key_rarity"

    def remember(self, k, v):
        norm = super().remember(k, v)["value_norm"]
        if k.shape[2] == 1:  # a decode step, where no earlier key is known
            return {"value_norm": norm}
        keys = torch.nn.functional.normalize(k.float(), dim=-1)
        mean = torch.nn.functional.normalize(keys.mean(2, keepdim=True), dim=-1)
        return {"value_norm": norm * (1 - (keys * mean).sum(-1)).clamp(min=0.05)}


IDEAS = (Grace, MeanValue, Unweighted, RootAge, LastQuery, KeyNorm, KeyRarity)
#: human-readable name -> rule; {} is replaced by the folder of `write_layers`
TRIED = {
    "H2O: sum of attention (the paper's)": "h2o",
    "mean per query": "mean",
    "sum that decays by 0.95 a step": "decayed",
    "queries' recent mean: decays by 0.99": "decayed:decay=0.99",
    "sum times the value's norm, 20 first tokens (VATP)": "vatp",
    "4 sinks + recent tokens": "sinks",
    "newest query alone (TOVA)": "last_query",
    "mean, half the window": "mean_short_window",
    "mean times the value's norm": "mean_value",
    "sum over the root of the age, times the norm": "root_age",
    "smoothed mean, no norm": "smoothed_unweighted",
    "smoothed mean times the norm, fading slowly (`smoothed`)": "smoothed",
    "the same, without fading": "smoothed:decay=1",
    "the same, fading faster: by 0.998": "smoothed:decay=0.998",
    "the same, 64 more observations": "smoothed:queries=64",
    "the same, 4 first tokens protected": "smoothed:first=4",
    "the same, last 51 tokens of the prompt protected": "smoothed:last=51",
    "smoothed mean over the key's norm": "key_norm",
    "smoothed mean times the key's rarity": "key_rarity",
    "smoothed, slots by layer: pyramid": "smoothed:layers={}/pyramid.json",
    "smoothed, slots by layer: calibrated": "smoothed:layers={}/calibrated.json",
    "mean, slots by layer: calibrated": "mean:layers={}/calibrated.json",
    "H2O, slots by layer: calibrated": "h2o:layers={}/calibrated.json",
}


def write_layers(folder: str, calibrated: dict) -> None:
    """Write the files of layers' losses that TRIED names; the pyramid's losses give lower layers more slots."""
    Path(folder, "calibrated.json").write_text(json.dumps(calibrated))
    layers = len(calibrated["losses"])
    budgets = calibrated["budgets"]
    losses = []
    for n in range(layers):
        half_life = 0.1 * (1 + layers - n) / layers
        losses.append([2.0 ** (-x / half_life) for x in budgets])
    Path(folder, "pyramid.json").write_text(json.dumps({"budgets": budgets, "losses": losses}))


def run(args: argparse.Namespace) -> None:
    RULES.update({rule.name: rule for rule in IDEAS})
    sources = [read_source(path) for path in args.texts]
    with TemporaryDirectory() as folder, LLM() as llm:
        write_layers(folder, read_json("--layers", args.layers))
        rules = {rule.format(folder): name for name, rule in TRIED.items()}
        result = origin(args) | {"model": llm.model.name, "dtype": dtype_name(llm.dtype), "slots": args.slots}
        texts = [Path(source.name).stem for source in sources]
        passages = [passages_of(source, llm.model, 512, 512, args.windows)[0] for source in sources]
        measured = measure_each(llm, make_settings(list(rules), [], [args.slots]), *perplexities(llm, passages))
        full = result["full_cache"] = dict(zip(texts, next(measured)["perplexities"]))
        rows = result["rows"] = []
        for row in measured:
            rises = {text: each / full[text] - 1 for text, each in zip(texts, row["perplexities"])}
            rows.append({"idea": rules[row["rule"]], **rises})
            write_text("--output", args.output, to_json(rounded(result, 4)) + "\n")


def perplexities(llm: LLM, passages: list[list[Passage]]) -> tuple[int, Callable[[], dict]]:
    """The number of scored tokens, and a job that scores all passages at once and returns each text's perplexity."""
    together = [*chain(*passages)]
    texts = [p.token_ids for p in together]
    prompt_lens = [p.prompt_len for p in together]

    def job() -> dict:
        scores = iter(llm.score(texts, prompt_lens))
        found = []
        for each in passages:
            logprobs = chain.from_iterable(score.token_logprobs for score in islice(scores, len(each)))
            found.append(exp(-fmean(logprobs)))
        return {"perplexities": found}

    return sum(map(len, texts)) - sum(prompt_lens), job


if __name__ == "__main__":
    parser = Parser("python -m bench.rule_ideas", "Measure ideas for cache rules.")
    parser.add_argument("texts", nargs="+", metavar="TEXT")
    parser.add_argument("--slots", type=int, default=204)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--layers", required=True, help="output of h2o-flexgen calibrate")
    parser.add_argument("--output", required=True)
    sys.exit(execute(parser, run))
