"""Time a decode step with each cache rule, relative to H2O's.

python -m bench.rule_steps --output docs/benchmarks/rule_steps.json
python -m bench.rule_steps --kv-rule h2o:layers=none --kv-rule h2o --prompt-len 960 --output steps_by_head.json

All rules have the same number of slots and take turns in one process, so that noise affects them equally.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from statistics import median

import torch

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams
from h2o_flexgen.commands.main import execute
from h2o_flexgen.commands.options import Parser
from h2o_flexgen.evaluation.origin import origin
from h2o_flexgen.formats import dtype_name
from h2o_flexgen.kv_cache import RULES
from h2o_flexgen.utils.files import rounded, to_json, write_text

#: sequences, timed decode steps
SEQUENCES = 8
STEPS = 32


def run(args: argparse.Namespace) -> None:
    seconds = defaultdict(list)
    prompts = (1 + torch.arange(args.prompt_len) + 7 * torch.arange(SEQUENCES)[:, None]).tolist()
    params = SamplingParams(max_tokens=STEPS + 1, ignore_eos=True)
    heavy = args.slots // 2
    rules = args.kv_rule or [*RULES]
    with LLM(policy=Policy(gpu_batch_size=SEQUENCES), progress=False) as llm:
        for rule in rules + rules * args.rounds:  # the first round warms up
            llm.kv_budget = KVBudget.from_size(heavy, args.slots - heavy, rule)
            llm.generate(prompts, params)
            seconds[rule].append(llm.report["decode"]["seconds"] / STEPS)
        found = {rule: median(each[1:]) for rule, each in seconds.items()}
        model = {"model": llm.model.name, "dtype": dtype_name(llm.dtype)}
    rows = [{"rule": rule, "ms": 1000 * step, "over_h2o": step / found[rules[0]]} for rule, step in found.items()]
    workload = {"sequences": SEQUENCES, "prompt_len": args.prompt_len, "steps": STEPS, "slots": args.slots}
    result = origin(args) | model | {"workload": workload, "rounds": args.rounds, "rows": rows}
    write_text("--output", args.output, to_json(rounded(result, 4)) + "\n")


if __name__ == "__main__":
    parser = Parser("python -m bench.rule_steps", "Time a decode step with each cache rule.")
    parser.add_argument("--kv-rule", action="append", help="H2O first (default: all rules)")
    parser.add_argument("--prompt-len", type=int, default=224)
    parser.add_argument("--slots", type=int, default=204)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", required=True)
    sys.exit(execute(parser, run))
