"""How long a decode step takes with each cache rule, beside H2O's.

python -m bench.rule_steps --output docs/benchmarks/rule_steps.json

All rules have as many slots, and run in turn in one process, so that noise meets them alike.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from statistics import median

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams
from h2o_flexgen.commands.main import execute
from h2o_flexgen.commands.options import Parser
from h2o_flexgen.evaluation.origin import origin
from h2o_flexgen.formats import dtype_name
from h2o_flexgen.kv_cache import RULES
from h2o_flexgen.utils.files import rounded, to_json, write_text

#: sequences, tokens of their prompts, and decode steps that are timed
SEQUENCES, PROMPT, STEPS = 8, 224, 32


def run(args: argparse.Namespace) -> None:
    seconds = defaultdict(list)
    prompts = [[1 + (7 * n + m) % 1000 for m in range(PROMPT)] for n in range(SEQUENCES)]
    params = SamplingParams(max_tokens=STEPS + 1, ignore_eos=True)
    heavy = args.slots // 2
    with LLM(policy=Policy(gpu_batch_size=SEQUENCES), progress=False) as llm:
        for rule in [*RULES] + [*RULES] * args.rounds:  # the first round warms up
            llm.kv_budget = KVBudget.from_size(heavy, args.slots - heavy, rule)
            llm.generate(prompts, params)
            seconds[rule].append(llm.report["decode"]["seconds"] / STEPS)
        found = {rule: median(each[1:]) for rule, each in seconds.items()}
        model = {"model": llm.model.name, "dtype": dtype_name(llm.dtype)}
    rows = [{"rule": rule, "ms": 1000 * step, "over_h2o": step / found["h2o"]} for rule, step in found.items()]
    workload = {"sequences": SEQUENCES, "prompt_len": PROMPT, "steps": STEPS, "slots": args.slots}
    result = origin(args) | model | {"workload": workload, "rounds": args.rounds, "rows": rows}
    write_text("--output", args.output, to_json(rounded(result, 4)) + "\n")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser("python -m bench.rule_steps", "Time a decode step with each cache rule.")
    parser.add_argument("--slots", type=int, default=204)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", required=True)
    return parser


if __name__ == "__main__":
    sys.exit(execute(make_parser(), run))
