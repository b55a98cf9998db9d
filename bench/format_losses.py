"""Measure what fewer bits cost in quality: in weights, matmuls and cache, alone and together, and with a KV budget.

python -m bench.format_losses TEXT --output docs/benchmarks/format_losses.json

Like `h2o-flexgen quality`, but over several models: the tokens after a prompt are fed one by one through the engine.
"""

from __future__ import annotations

import argparse
import sys

from h2o_flexgen import LLM, KVBudget
from h2o_flexgen.commands.main import execute
from h2o_flexgen.commands.options import Parser
from h2o_flexgen.evaluation import perplexity
from h2o_flexgen.evaluation.origin import origin
from h2o_flexgen.evaluation.passages import passages_of, read_source
from h2o_flexgen.evaluation.settings import Setting
from h2o_flexgen.policy import DEFAULT_RULE
from h2o_flexgen.utils.files import rounded, to_json, write_text

#: (weights, matmuls) -> caches, each a format (None: floats) and slots (None: all). Every entry also runs with a full
#: cache of floats; the first one's is the exact model. 204 slots in 16 bits take as many bytes as 378 in int8 or 478 in
#: int4.
TRIED = {
    (None, "exact"): [("int8", None), ("int4", None), (None, 204), ("int8", 378), ("int4", 478)],
    ("int8", "exact"): [],
    ("int4", "exact"): [],
    (None, "int8"): [],
    ("int8", "int8"): [("int8", None), ("int4", None), (None, 204), ("int8", 378), ("int4", 478)],
}


def run(args: argparse.Namespace) -> None:
    source = read_source(args.text)
    exact = None
    rows = []
    for (weights, compute), caches in TRIED.items():
        settings = [setting_of(*cache) for cache in caches]
        with LLM(dtype="float32", compress_weight=weights, compute=compute) as llm:
            passages, _ = passages_of(source, llm.model, 512, 512, args.windows)
            for row in perplexity.measure(llm, passages, settings):
                exact = exact or row["perplexity"]
                names = ("slots", "compress_cache", "kv_bytes", "perplexity")
                kept = {name: row[name] for name in names} | {"rise": row["perplexity"] / exact - 1}
                rows.append({"compress_weight": weights, "compute": compute, **kept})
                result = origin(args) | {"model": llm.model.name, "rule": DEFAULT_RULE, "rows": rows}
                write_text("--output", args.output, to_json(rounded(result, 4)) + "\n")


def setting_of(compress_cache: str | None, slots: int | None) -> Setting:
    budget = None if slots is None else KVBudget.from_size(slots // 2)
    return Setting("full" if budget is None else budget.rule, budget, compress_cache)


if __name__ == "__main__":
    parser = Parser("python -m bench.format_losses", "Measure what fewer bits cost in quality.")
    parser.add_argument("text", metavar="TEXT")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--output", required=True)
    sys.exit(execute(parser, run))
