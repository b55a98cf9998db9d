"""Compare predictions of the policy search with the throughputs that FlexGen and H2O published for a T4.

The result goes to docs/benchmarks/search_papers.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import common  # noqa: E402
from h2o_flexgen.kv_cache import rule_for  # noqa: E402
from h2o_flexgen.machine.profile import Profile  # noqa: E402
from h2o_flexgen.models.registry import named_spec  # noqa: E402
from h2o_flexgen.planning.memory import Resources  # noqa: E402
from h2o_flexgen.planning.search import Constraints, Search  # noqa: E402
from h2o_flexgen.planning.shapes import ModelData  # noqa: E402
from h2o_flexgen.planning.workload import Workload  # noqa: E402
from h2o_flexgen.policy import KVBudget, Policy  # noqa: E402

T4 = ROOT / "policies" / "hardware" / "t4-16gb.json"
TIERS = ("gpu", "cpu", "disk")

#: source, model, prompt length, output length, hh-ratio, GPU batch size, batches, percent, attention on the CPU,
#: published tokens/s
PAPERS = [
    ("FlexGen", "opt-30b", 512, 32, None, 48, 3, (20, 80, 0, 100, 0, 100), True, 7.32),
    ("FlexGen", "opt-175b", 512, 32, None, 32, 8, (0, 50, 0, 0, 0, 100), False, 0.69),
    ("FlexGen", "opt-30b", 1024, 32, None, 20, 4, (4, 96, 0, 100, 0, 100), True, 3.50),
    ("FlexGen", "opt-175b", 1024, 32, None, 12, 12, (0, 50, 0, 0, 0, 100), False, 0.35),
    ("FlexGen, by the H2O paper", "opt-30b", 512, 512, None, 40, 2, (20, 80, 0, 100, 0, 100), True, 8.5),
    ("FlexGen, by the H2O paper", "opt-30b", 512, 1024, None, 48, 1, (20, 80, 0, 100, 0, 100), True, 7.1),
    ("H2O", "opt-30b", 512, 32, 0.1, 52, 14, (0, 100, 0, 100, 0, 100), True, 12.7),
    ("H2O", "opt-30b", 512, 512, 0.2, 52, 8, (0, 100, 0, 100, 0, 100), True, 18.83),
    ("H2O", "opt-30b", 512, 1024, 0.3, 44, 6, (0, 100, 0, 100, 0, 100), True, 13.82),
]


def search(model: str, count: int, prompt_len: int, gen_len: int, ratio: float | None, profile: Profile) -> Search:
    """The search for one block of `count` prompts."""
    spec = named_spec(model)
    resources = Resources.of(profile, dict.fromkeys(TIERS))
    data = ModelData.of(spec, profile.dtype, "float16", cuda=profile.device == "cuda")
    workload = Workload((prompt_len,) * count, gen_len)
    budget = None if ratio is None else KVBudget.from_ratio(ratio)
    rule = rule_for(budget, workload.longest, workload.gen_len, spec)
    return Search(profile, data.shapes(rule, workload), workload, resources, Constraints(one_block=True))


def main() -> None:
    profile = Profile.from_file(T4)
    rows = []
    for source, model, prompt, gen, ratio, size, batches, percent, on_cpu, published in PAPERS:
        found = search(model, size * batches, prompt, gen, ratio, profile)
        guess = found.candidate(Policy(size, batches, percent, True, on_cpu)).prediction
        row = {"source": source, "model": model, "prompt_len": prompt, "gen_len": gen, "hh_ratio": ratio}
        row |= {"policy": f"{size} x {batches}, {' '.join(map(str, percent))}", "published_tokens_per_s": published}
        predicted = guess.block_tokens_per_s
        row |= {"predicted_tokens_per_s": predicted, "ratio": predicted / published, "bound_by": guess.bound_by}
        rows.append(row)
        print(f"{source:<26}{model:<10}{prompt}+{gen:<6}{published:>7} {predicted:7.2f} {predicted / published:6.2f}")
    common.save("search_papers", {"profile": str(T4.relative_to(ROOT)), "rows": rows})


if __name__ == "__main__":
    main()
