"""The policy search against published figures and against this machine.

    papers    the published policies and throughputs of FlexGen and H2O on a T4, against predictions
    machine   policies over two models and three memory caps, run for real: predicted over measured
    top       the policy that the search picks against a hand grid, both run for real

`machine` and `top` run in memory cgroups, page cache included, and measure the hardware anew before every group (and
`machine` after it: the mean of both predictions counts), since a shared machine is not equally fast all day. Results go
to docs/benchmarks/.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from statistics import median

import bench_common as common
from bench_common import ROOT, MemoryCap

from h2o_flexgen import policy_search
from h2o_flexgen.errors import PlanError
from h2o_flexgen.models.config import OPTConfig
from h2o_flexgen.planning.profile import Profile
from h2o_flexgen.policy import GIB, MARGIN, KVBudget, Policy
from h2o_flexgen.sizes import Workload

T4 = ROOT / "policies" / "hardware" / "t4-16gb.json"

# papers

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


def bench_papers(args) -> None:
    profile = Profile.from_file(T4)
    limits = policy_search.profile_limits(profile, dict.fromkeys(("gpu", "cpu", "disk")))
    rows = []
    for source, model, prompt, gen, ratio, size, batches, percent, on_cpu, published in PAPERS:
        workload = Workload((prompt,) * size * batches, gen)
        planner = policy_search.Planner(OPTConfig.named(model), workload, profile, limits, one_block=True)
        budget = None if ratio is None else KVBudget.from_ratio(ratio)
        found = planner.search(budget).candidate(Policy(size, batches, percent, True, on_cpu))
        predicted = found.prediction.block_tokens_per_s
        rows.append(
            {
                "source": source,
                "model": model,
                "prompt_len": prompt,
                "gen_len": gen,
                "hh_ratio": ratio,
                "policy": f"{size} x {batches}, {' '.join(map(str, percent))}",
                "published_tokens_per_s": published,
                "predicted_tokens_per_s": predicted,
                "ratio": predicted / published,
                "bound_by": found.prediction.bound_by,
            }
        )
        print(f"{source:<26}{model:<10}{prompt}+{gen:<6}{published:>7} {predicted:7.2f} {predicted / published:6.2f}")
    common.save("search_papers", {"profile": "policies/hardware/t4-16gb.json", "rows": rows})


# machine

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


def measure(path) -> None:
    subprocess.run([sys.executable, "-m", "h2o_flexgen.hardware", "-o", str(path)], cwd=ROOT, check=True)


def run_child(work: dict, cap: float, timeout: int = 3600) -> list:
    """Run `work` in a process of its own in a memory cgroup; the rows it wrote."""
    with common.scratch() as folder, MemoryCap(int(cap * GIB)) as memory_cap:
        (folder / "work.json").write_text(json.dumps(work | {"folder": str(folder)}))
        done = memory_cap.run([sys.executable, __file__, "child", "--work", str(folder / "work.json")], timeout)
        if done.returncode:
            sys.exit(f"a run under {cap} GiB ended with {done.returncode}")
        return json.loads((folder / "rows.json").read_text())


def child(args) -> None:
    """Run policies one after the other, or what "auto" picks; their reports go to rows.json. What the plan refuses is
    left out."""
    import random
    from pathlib import Path

    from h2o_flexgen import LLM, SamplingParams

    work = json.loads(Path(args.work).read_text())
    rows = []
    with LLM(
        work["model"],
        path="_DUMMY_",
        hardware=work["profile"],
        offload_dir=work["folder"],
        progress=False,
    ) as llm:
        for n, job in enumerate([{**work["jobs"][0], "gen_len": 2}, *work["jobs"]]):  # the first only warms up
            llm.policy = "auto" if job["policy"] is None else Policy.from_dict(job["policy"])
            llm.kv_budget = None if job["hh_ratio"] is None else KVBudget.from_ratio(job["hh_ratio"])
            rng = random.Random(0)
            prompts = [[rng.randrange(4, 50000) for _ in range(job["prompt_len"])] for _ in range(job["num_prompts"])]
            try:
                llm.generate(prompts, SamplingParams(max_tokens=job["gen_len"]))
            except PlanError as e:
                print(f"{job['policy']}: {e}", flush=True)
                continue
            report = llm.report
            rows += [job | {"report": report}] if n else []
            p = report["predicted"]
            print(
                f"{report['policy']['gpu_batch_size']} x {report['policy']['num_gpu_batches']} "
                f"{report['policy']['percent']} hh {job['hh_ratio']} {job['prompt_len']}+{job['gen_len']}: "
                f"prefill {report['prefill']['seconds']:.2f} / {p['prefill_seconds']:.2f} "
                f"decode {report['decode']['seconds']:.2f} / {p['decode_seconds']:.2f} "
                f"{report['total']['tokens_per_s']:.2f} tokens/s",
                flush=True,
            )
    (Path(work["folder"]) / "rows.json").write_text(json.dumps(rows))


def bench_machine(args) -> None:
    runs: dict[tuple, list] = {}
    with common.scratch() as folder:
        after = folder / "after.json"
        measure(after)
        for _ in range(args.rounds):
            for (model, cap), policies in MACHINE.items():
                before = after.rename(folder / "before.json")
                jobs = [
                    {
                        "policy": asdict(Policy(size, batches, percent)),
                        "hh_ratio": ratio,
                        "prompt_len": prompt,
                        "gen_len": gen,
                        "num_prompts": size * batches,
                    }
                    for size, batches, percent, prompt, gen, ratio in policies
                ]
                rows = run_child({"model": model, "profile": str(before), "jobs": jobs}, cap)
                measure(after)
                for n, row in enumerate(rows):
                    row["after"] = _predicted(model, row, after).of_job()
                    runs.setdefault((model, cap, n), []).append(row)
            _save_machine(runs)


def _save_machine(runs: dict) -> None:
    table = []
    for (model, cap, _), reports in runs.items():
        row = {"model": model, "cap_gib": cap, **{k: v for k, v in reports[0].items() if k not in ("report", "after")}}
        for phase in ("prefill", "decode"):
            measured = [r["report"][phase]["seconds"] for r in reports]
            before = [r["report"]["predicted"][f"{phase}_seconds"] for r in reports]
            after = [r["after"][f"{phase}_seconds"] for r in reports]
            row[phase] = {
                "measured": measured,
                "predicted_before": before,
                "predicted_after": after,
                "ratio": median([(b + a) / 2 / m for b, a, m in zip(before, after, measured)]),
            }
        row["bound_by"] = reports[0]["report"]["predicted"]["bound_by"]
        table.append(row)
    ratios = {phase: [row[phase]["ratio"] for row in table] for phase in ("prefill", "decode")}
    summary = {phase: {"median": median(r), "lowest": min(r), "highest": max(r)} for phase, r in ratios.items()}
    print(json.dumps(summary, indent=1), flush=True)
    common.save("search_machine", {"summary": summary, "rows": table})


# top

#: (model, cap in GiB, prompts, prompt, output, hh-ratio)
TOP = [
    ("facebook/opt-125m", 0.8, 64, 32, 16, 0.2),
    ("facebook/opt-125m", 1.0, 64, 64, 8, None),
    ("facebook/opt-350m", 1.25, 64, 16, 24, 0.2),
    ("facebook/opt-125m", 0.9, 64, 64, 16, 0.2),
]
#: the blocks picked with and without H2O are compared for so many prompts
H2O_RATIO, MANY = 0.2, 4096
#: the best of the grid that run again, alternating with the pick
FINALISTS, FINALS = 3, 3
GRID = [
    (size, batches, (weights, 0, cache, 0, activations, 0))
    for size, batches in ((16, 2), (32, 1), (32, 2), (48, 1), (64, 1))
    for weights, cache, activations in (
        (100, 100, 100),
        (60, 100, 100),
        (30, 100, 100),
        (30, 50, 100),
        (0, 100, 100),
        (0, 0, 0),
    )
]


def bench_top(args) -> None:
    """The grid runs once; then its best and the pick take turns, and medians count: the best of many single runs on a
    noisy machine is the luckiest. What does not fit into the cap is refused by the plan and is not run."""
    cases = dict(enumerate(common.kept("search_top").get("cases", []) if args.case else []))
    with common.scratch() as folder:
        for number in args.case or range(len(TOP)):
            model, cap, num, prompt, gen, ratio = TOP[number]
            measure(folder / "profile.json")
            common_job = {"prompt_len": prompt, "gen_len": gen, "num_prompts": num}
            pick = {"policy": None, "hh_ratio": ratio, **common_job}
            many = {**pick, "num_prompts": MANY}
            full, h2o = (
                _search(model, {**many, "hh_ratio": r}, folder / "profile.json", _limits(cap)).best()
                for r in (None, H2O_RATIO)
            )
            grid = [{**pick, "policy": asdict(p)} for p in _grid(num)]
            work = {"model": model, "profile": str(folder / "profile.json")}
            others = [r["report"] for r in run_child({**work, "jobs": grid}, cap)]
            others.sort(key=_speed, reverse=True)
            finals = [pick, *({**pick, "policy": r["policy"]} for r in others[:FINALISTS])]
            rows = [r["report"] for r in run_child({**work, "jobs": finals * FINALS}, cap)]
            picks, *rivals = (rows[n :: len(finals)] for n in range(len(finals)))
            mine, *theirs = (median([_speed(r) for r in runs]) for runs in (picks, *rivals))
            best = theirs.index(max(theirs))
            cases[number] = {
                "model": model,
                "cap_gib": cap,
                **common_job,
                "hh_ratio": ratio,
                "picked_block": {"full": full.policy.block_size, "h2o": h2o.policy.block_size},
                "picked": picks[0]["policy"],
                "picked_tokens_per_s": mine,
                "best_of_grid": rivals[best][0]["policy"],
                "best_of_grid_tokens_per_s": theirs[best],
                "ratio": mine / theirs[best],
                "grid": [{"policy": r["policy"], "tokens_per_s": _speed(r)} for r in others],
                "finals": [[_speed(r) for r in runs] for runs in (picks, *rivals)],
            }
            print(json.dumps({k: v for k, v in cases[number].items() if k != "grid"}), flush=True)
            common.save("search_top", {"cases": [cases[n] for n in sorted(cases)]})


def _speed(report: dict) -> float:
    return report["total"]["tokens_per_s"]


def _grid(num: int) -> list[Policy]:
    return [Policy(size, batches, percent) for size, batches, percent in GRID if size * batches <= num]


def _search(model: str, job: dict, profile_path, limits: dict):
    """The search for a job as `child` runs it, on hardware as profiled."""
    profile = Profile.from_file(profile_path)
    limits = policy_search.profile_limits(profile, dict.fromkeys(("gpu", "cpu", "disk"))) | limits
    workload = Workload((job["prompt_len"],) * job["num_prompts"], job["gen_len"])
    stored = "bfloat16" if profile.dtype == "bfloat16" else "float16"  # of random weights
    planner = policy_search.Planner(OPTConfig.named(model), workload, profile, limits, dummy=True, stored=stored)
    return planner.search(None if job["hh_ratio"] is None else KVBudget.from_ratio(job["hh_ratio"]))


def _predicted(model: str, job: dict, profile_path):
    return _search(model, job, profile_path, {}).candidate(Policy.from_dict(job["policy"])).prediction


def _limits(cap: float) -> dict[str, int]:
    return dict.fromkeys(("gpu", "cpu", "ram"), int(MARGIN * cap * GIB))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=["papers", "machine", "top", "child"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", type=int, action="append", help="top: only this one, from 0 on; the others are kept")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    common.commit()  # of what runs: the working copy may change meanwhile
    {"papers": bench_papers, "machine": bench_machine, "top": bench_top, "child": child}[args.section](args)


if __name__ == "__main__":
    main()
