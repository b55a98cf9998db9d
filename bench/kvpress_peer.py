"""Compare the perplexity under KV budgets with that of NVIDIA's kvpress, at the same number of slots.

    python -m bench.kvpress_peer handbook.txt --slots 102 204 --name kvpress_handbook

Both have the same model in fp32 and the same passages, whose tokens behind the prompt are fed one by one. kvpress
compresses the prompt to the budget and goes on with its DecodingPress; a scorer that needs several queries compresses
every few steps, to so many slots that it holds the budget on average. AdaKV only masks what it would evict, and its
cache holds all tokens. Results go to docs/benchmarks/NAME.json. kvpress has an environment of its own in that of the
peers (bench/peers.sh), which is made once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from math import exp
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from bench import common
from bench.systems import ensure_built
from h2o_flexgen import LLM
from h2o_flexgen.commands.main import execute
from h2o_flexgen.commands.options import Parser
from h2o_flexgen.evaluation.passages import Passage, builtin_source, passages_of, read_source
from h2o_flexgen.evaluation.settings import make_settings, measure_each
from h2o_flexgen.evaluation.trials import standard_error
from h2o_flexgen.models.source import find_model


def ours(llm: LLM, passages: list[Passage], args: argparse.Namespace) -> Iterator[dict]:
    """A row for the full cache, then one for each rule and budget."""
    texts = [passage.token_ids for passage in passages]

    def job() -> dict:
        return {"logprobs": [score.token_logprobs for score in llm.score(texts, args.prompt_len)]}

    settings = make_settings(args.kv_rule, [], args.slots)
    for row in measure_each(llm, settings, len(texts) * args.gen_len, job):
        slots = row["slots"]
        yield {"method": row["rule"], "budget": slots, "slots": slots, "held": slots, "logprobs": row["logprobs"]}


def theirs(passages: list[Passage], args: argparse.Namespace) -> list[dict]:
    """The same of kvpress."""
    python = ensure_built("peers", "kvpress/ready") / "kvpress" / "bin" / "python"
    job = {
        "model": str(find_model(args.model)[0]),
        "token_ids": [passage.token_ids for passage in passages],
        "prompt_len": args.prompt_len,
        "slots": args.slots,
        "presses": args.press,
    }
    with TemporaryDirectory() as folder:
        job_file = Path(folder, "job.json")
        result = Path(folder, "result.json")
        job_file.write_text(json.dumps(job))
        subprocess.run([python, "-m", "bench.kvpress_scores", job_file, result], cwd=common.ROOT, check=True)
        return json.loads(result.read_text())


def losses(system: str, rows: list[dict]) -> list[dict]:
    """The perplexity of each row and its rise over the first, the full cache's, with its standard error over the
    passages."""
    found = []
    full = [fmean(each) for each in rows[0]["logprobs"]]
    for row in rows:
        lost = [before - fmean(each) for before, each in zip(full, row["logprobs"], strict=True)]
        factor = exp(fmean(lost))
        figures = {
            "perplexity": exp(-fmean(chain.from_iterable(row["logprobs"]))),
            "rise": factor - 1,
            "error": factor * standard_error(lost),
        }
        kept = {name: row[name] for name in ("method", "budget", "slots", "held")}
        found.append({"system": system} | kept | figures)
    return found


def run(args: argparse.Namespace) -> None:
    source = read_source(args.text) if args.text else builtin_source()
    with LLM(args.model, device="cpu", dtype="float32", progress=False) as llm:
        passages, _ = passages_of(source, llm.model, args.prompt_len, args.gen_len, args.windows)
        rows = losses("ours", list(ours(llm, passages, args)))
        name = llm.model.name
    rows += losses("kvpress", theirs(passages, args))
    workload = {"model": name, "text": Path(source.name).name, "passages": len(passages)}
    workload |= {"prompt_len": args.prompt_len, "gen_len": args.gen_len}
    common.save(args.name, {"workload": workload, "kvpress": "0.5.5", "rows": rows})


if __name__ == "__main__":
    parser = Parser("python -m bench.kvpress_peer", "Compare the perplexity under KV budgets with kvpress's.")
    parser.add_argument("text", nargs="?", help="(default: Python's language reference)")
    parser.add_argument("--model", help="a GGUF file (default: the demo model)")
    parser.add_argument("--slots", type=int, nargs="+", default=[102, 204])
    parser.add_argument("--kv-rule", action="append", help="ours, repeated for each")
    parser.add_argument("--press", action="append", help="one of kvpress_scores.TRIED, repeated (default: all)")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--gen-len", type=int, default=512)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--name", required=True)
    sys.exit(execute(parser, run))
