"""The policy search against published figures and against this machine.

    papers    the published policies and throughputs of FlexGen and H2O on a T4, against predictions
    machine   policies over two models and three memory caps, run for real: predicted over measured
    top       the policy that the search picks against a hand grid, both run for real

`machine` and `top` run in memory cgroups, page cache included, and measure the hardware anew before every group, since
a shared machine is not equally fast all day. Results go to docs/benchmarks/.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import common  # noqa: E402
from bench.systems.ours import policy_text  # noqa: E402
from h2o_flexgen.kv_cache import rule_for  # noqa: E402
from h2o_flexgen.machine.profile import Profile  # noqa: E402
from h2o_flexgen.models.registry import named_spec  # noqa: E402
from h2o_flexgen.planning.memory import Resources  # noqa: E402
from h2o_flexgen.planning.planner import Planner  # noqa: E402
from h2o_flexgen.planning.search import Constraints, Search  # noqa: E402
from h2o_flexgen.planning.shapes import ModelData  # noqa: E402
from h2o_flexgen.planning.workload import Workload  # noqa: E402
from h2o_flexgen.policy import MARGIN, KVBudget, Policy  # noqa: E402

T4 = ROOT / "policies" / "hardware" / "t4-16gb.json"
TIERS = ("gpu", "cpu", "disk")

#: source, model, prompt, output, hh-ratio, gpu batch size, batches, percent, attention on the CPU, tokens/s
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

#: (model, cap in GiB): [(gpu batch size, batches, percent, prompt, output, hh-ratio)]
MACHINE = {
    ("facebook/opt-125m", 0.9): [
        (32, 1, (0, 0, 100, 0, 100, 0), 32, 12, None),
        (16, 2, (0, 0, 50, 0, 100, 0), 64, 12, 0.2),
        (16, 4, (0, 0, 50, 0, 100, 0), 32, 12, None),
        (32, 4, (0, 0, 0, 0, 100, 0), 32, 12, 0.2),
    ],
    ("facebook/opt-350m", 1.2): [
        (8, 1, (0, 0, 100, 0, 100, 0), 32, 12, None),
        (16, 2, (20, 0, 100, 0, 100, 0), 64, 12, 0.2),
        (32, 2, (0, 0, 100, 0, 100, 0), 32, 12, 0.1),
        (16, 2, (0, 0, 0, 0, 100, 0), 64, 12, None),
    ],
    ("facebook/opt-350m", 1.5): [
        (16, 1, (40, 0, 100, 0, 100, 0), 64, 16, None),
        (64, 1, (30, 0, 100, 0, 100, 0), 32, 12, 0.2),
        (16, 4, (40, 0, 50, 0, 100, 0), 32, 12, None),
        (32, 2, (0, 0, 100, 0, 0, 0), 64, 12, 0.2),
    ],
}

#: (model, cap in GiB, prompts, prompt, output, hh-ratio)
TOP = [
    ("facebook/opt-125m", 0.8, 64, 32, 16, 0.2),
    ("facebook/opt-125m", 1.0, 64, 64, 8, None),
    ("facebook/opt-350m", 1.25, 64, 16, 24, 0.2),
    ("facebook/opt-125m", 0.9, 64, 64, 16, 0.2),
]
#: the blocks picked with and without H2O are compared for so many prompts
H2O_RATIO, MANY = 0.2, 4096
#: the best of the grid that run again, alternating with the pick, and how often
FINALISTS, FINALS = 3, 3
BLOCKS = ((16, 2), (32, 1), (32, 2), (48, 1), (64, 1))
SHARES = ((100, 100, 100), (60, 100, 100), (30, 100, 100), (30, 50, 100), (0, 100, 100), (0, 0, 0))


def search(
    model: str,
    prompts: tuple[int, int],
    gen_len: int,
    ratio: float | None,
    profile: Profile,
    limits: dict[str, int] | None = None,
    stored: str = "float16",
    dummy: bool = False,
    one_block: bool = False,
) -> Search:
    """The search for so many prompts of a length."""
    count, length = prompts
    spec, resources = named_spec(model), Resources.of(profile, dict.fromkeys(TIERS))
    resources = replace(resources, limits=resources.limits | (limits or {}))
    data = ModelData.of(spec, profile.dtype, stored, cuda=profile.device == "cuda", dummy=dummy)
    workload = Workload((length,) * count, gen_len)
    rule = rule_for(None if ratio is None else KVBudget.from_ratio(ratio), workload.longest, workload.gen_len, spec)
    return Planner({None: data}, Constraints(one_block=one_block), profile).search(rule, workload, resources)


def bench_papers(rounds: int) -> None:
    profile, rows = Profile.from_file(T4), []
    for source, model, prompt, gen, ratio, size, batches, percent, on_cpu, published in PAPERS:
        found = search(model, (size * batches, prompt), gen, ratio, profile, one_block=True)
        guess = found.candidate(Policy(size, batches, percent, True, on_cpu)).prediction
        row = {"source": source, "model": model, "prompt_len": prompt, "gen_len": gen, "hh_ratio": ratio}
        row |= {"policy": f"{size} x {batches}, {' '.join(map(str, percent))}", "published_tokens_per_s": published}
        predicted = guess.block_tokens_per_s
        row |= {"predicted_tokens_per_s": predicted, "ratio": predicted / published, "bound_by": guess.bound_by}
        rows.append(row)
        print(f"{source:<26}{model:<10}{prompt}+{gen:<6}{published:>7} {predicted:7.2f} {predicted / published:6.2f}")
    common.save("search_papers", {"profile": str(T4.relative_to(ROOT)), "rows": rows})


def run(model: str, cap: float, job: tuple, policy: dict | None, profile: Path, folder: Path) -> dict | None:
    """The report of a run of the command line with a policy, or with what the search picks; None if the plan does not
    fit under the cap."""
    num, prompt, gen, ratio = job
    kept = json.loads(profile.read_text())
    options = ["--model", model, "--path", "_DUMMY_", "--dtype", kept["dtype"], "--hardware", str(profile)]
    options += ["--num-prompts", str(num), "--prompt-len", str(prompt), "--gen-len", str(gen), "--ignore-eos"]
    options += [] if ratio is None else ["--hh-ratio", str(ratio)]
    if policy is not None:
        (folder / "policy.json").write_text(json.dumps(policy))
        options += ["--policy", str(folder / "policy.json")]
    report = common.run_flex_opt(options, folder, int(cap * common.GIB))
    print(f"{model} {job} {policy or 'auto'}: {report.get('failed') or report['total']}", flush=True)
    return None if "failed" in report else report


def policy(size: int, batches: int, percent) -> dict:
    return {"gpu_batch_size": size, "num_gpu_batches": batches, "percent": list(percent)}


def bench_machine(rounds: int) -> None:
    rows: dict[tuple, dict] = {}
    with common.scratch() as folder:
        for _ in range(rounds):
            for (model, cap), policies in MACHINE.items():
                profile = common.measure_machine(folder / "profile.json")
                for n, (size, batches, percent, prompt, gen, ratio) in enumerate(policies):
                    job = (size * batches, prompt, gen, ratio)
                    report = run(model, cap, job, policy(size, batches, percent), profile, folder)
                    if report is None:
                        sys.exit("error: a run that should fit did not come to its end")
                    facts = {"model": model, "cap_gib": cap, "policy": policy_text(report["policy"])}
                    facts |= {"prompt_len": prompt, "gen_len": gen, "hh_ratio": ratio, "reports": []}
                    rows.setdefault((model, cap, n), facts)["reports"].append(report)
    for row in rows.values():
        reports = row.pop("reports")
        row["rounds"] = len(reports)
        for phase in ("prefill", "decode"):
            ratios = [r["predicted"][f"{phase}_seconds"] / r[phase]["seconds"] for r in reports]
            measured = median(r[phase]["seconds"] for r in reports)
            row[phase] = {"measured": measured, "predicted_over_measured": median(ratios)}
        row["bound_by"] = reports[0]["predicted"]["bound_by"]
    summary = {}
    for phase in ("prefill", "decode"):
        ratios = [row[phase]["predicted_over_measured"] for row in rows.values()]
        summary[phase] = {"median": median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    common.save("search_machine", {"summary": summary, "rows": list(rows.values())})


def bench_top(rounds: int) -> None:
    """The grid runs once; then its best and the pick take turns, and medians count: the best of many single runs on a
    noisy machine is the luckiest. What does not fit into the cap is refused by the plan and is not run."""
    cases = []
    grid = [policy(size, n, (w, 0, c, 0, a, 0)) for size, n in BLOCKS for w, c, a in SHARES]
    speed = lambda report: report["total"]["tokens_per_s"]
    with common.scratch() as folder:
        for model, cap, num, prompt, gen, ratio in TOP:
            path = common.measure_machine(folder / "profile.json")
            profile, limit = Profile.from_file(path), int(MARGIN * cap * common.GIB)
            how = {"limits": dict.fromkeys(("gpu", "cpu", "ram"), limit), "dummy": True}
            how["stored"] = "bfloat16" if profile.dtype == "bfloat16" else "float16"
            blocks = {}
            for name, of in (("full", None), ("h2o", H2O_RATIO)):
                best = search(model, (MANY, prompt), gen, of, profile, **how).best()
                blocks[name] = best.policy.block_size
            job = (num, prompt, gen, ratio)
            fitting = [p for p in grid if p["gpu_batch_size"] * p["num_gpu_batches"] <= num]
            ran = [r for p in fitting if (r := run(model, cap, job, p, path, folder))]
            ran.sort(key=speed, reverse=True)
            finals = [None, *(r["policy"] for r in ran[:FINALISTS])]
            turns = [[run(model, cap, job, p, path, folder) for p in finals] for _ in range(FINALS)]
            picked, *rivals = ((reports[0]["policy"], median(map(speed, reports))) for reports in zip(*turns))
            best = max(rivals, key=lambda rival: rival[1])
            case = {"model": model, "cap_gib": cap, "num_prompts": num, "prompt_len": prompt, "gen_len": gen}
            case |= {"hh_ratio": ratio, "policies_of_grid": len(ran), "runs": FINALS}
            for name, (what, rate) in (("picked", picked), ("best_of_grid", best)):
                case[name] = {"policy": policy_text(what), "tokens_per_s": rate}
            cases.append(case | {"ratio": picked[1] / best[1], "picked_block": blocks})
            common.save("search_top", {"cases": cases})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = {"papers": bench_papers, "machine": bench_machine, "top": bench_top}
    parser.add_argument("section", choices=list(sections))
    parser.add_argument("--rounds", type=int, default=3, help="of machine")
    args = parser.parse_args()
    sections[args.section](args.rounds)


if __name__ == "__main__":
    main()
