"""This version of the engine beside an older one, on the same jobs in turns.

    git worktree add ../older 833ff06
    python -m bench.versions geometric uniform equal --checkout ../older --pairs 5
    python -m bench.versions shared --checkout ../older --where ram disk --pairs 3

`geometric` and `uniform`: rows end at random lengths (bench/lot.py) that the engine cannot know. `equal` and `opt`: all
rows end together and share nothing, so no version should lose. `shared`: prompts with a common prefix. `answers`:
scores of several answers to each question. In RAM, and with a part on disk under a memory cap that counts page cache.
Every run is a separate process; both versions have the same policy and data type, the one that this version picks
first. Results go to docs/benchmarks/versions.json after every pair. Needs root for the cgroup.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median

from bench import common
from bench.checkpoint import checkpoint, drop_page_cache
from bench.lot import drawn
from bench.memory_cap import MemoryCap
from bench.real_jobs import WORK, find
from bench.rows import DEMO, DEMO_KIND
from bench.systems.ours import policy_text
from h2o_flexgen import Policy

FILE = "versions"
SIDES = ("old", "new")
IN_RAM = (100, 0, 100, 0, 100, 0)
#: what is kept of a run; medians
FIGURES = "seconds wall_seconds prefill_seconds decode_seconds tokens tokens_per_s row_steps running_share moved_gb"
FIGURES += " peak_over_plan cores_of_others"


@dataclass(frozen=True)
class Workload:
    """A job of random prompts.

    Attributes:
        shared: tokens with which all prompts begin.
        most: tokens of an output; draw: as in `lot.drawn`.
        batch, batches: of a block.
        on_disk: the six numbers of `--percent` of the run with `where` "disk", whose memory is capped at `cap` GiB.
        measure: the seconds whose ratio counts.
        answers: to each prompt, of `most` tokens each, which are scored; 0: outputs are generated.
    """

    about: str
    model: str
    kind: str
    rows: int
    prompt_len: int
    most: int
    draw: str | None = None
    shared: int = 0
    batch: int = 48
    batches: int = 1
    on_disk: tuple[int, ...] = (0, 0, 100, 0, 100, 0)
    cap: float = 1.25
    measure: str = "seconds"
    answers: int = 0


BY_LOT = Workload("", "meta-llama/Llama-3.2-1B", "Q4_0", 384, 16, 48)
WORKLOADS = {
    "geometric": replace(BY_LOT, about="outputs of 12 tokens on average, geometric, at most 48", draw="geometric"),
    "uniform": replace(BY_LOT, about="outputs of 1 to 24 tokens, uniform", draw="uniform", most=24),
    "equal": replace(BY_LOT, about="outputs of 12 tokens, all alike", most=12),
    "opt": Workload(
        "OPT-1.3B, outputs of 16 tokens, all alike", "facebook/opt-1.3b", "safetensors", 32, 64, 16, batch=32, cap=1.5
    ),
    "shared": Workload(
        "prompts of 512 tokens, 448 in common",
        DEMO,
        DEMO_KIND,
        512,
        512,
        2,
        shared=448,
        batch=64,
        batches=2,
        on_disk=(0,) * 6,
        measure="prefill_seconds",
    ),
    "answers": Workload(
        "log-probabilities of 4 answers of 8 tokens to each of 64 questions of 400, as lm-eval wants them",
        DEMO,
        DEMO_KIND,
        64,
        400,
        8,
        answers=4,
        batch=64,
        on_disk=(0,) * 6,
    ),
}


class Runner:
    """Runs one workload with either version. `folders`: of each side, the checkout; `file`: gets the results."""

    def __init__(self, folders: dict[str, Path], scratch: Path, compute: str, limit: float, file: str = FILE):
        self.folders = folders
        self.scratch = scratch
        self.compute = compute
        self.limit = limit
        self.file = file
        self.dtype = "auto"

    def run(self, side: str, workload: Workload, where: str, seed: int = 0) -> dict:
        """Figures of one run; SystemExit with what it printed if it dies."""
        folder = self.scratch / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        model = checkpoint(workload.model, workload.kind, "bfloat16", common.data_folder())
        job = asdict(workload) | {"model": str(model), "policy": asdict(policy(workload, where)), "seed": seed}
        job |= {"dtype": self.dtype, "compute": self.compute, "scratch": str(folder)}
        (folder / "job.json").write_text(json.dumps(job))
        drop_page_cache(model)
        argv = [sys.executable, "-P", str(common.ROOT / "bench" / "lot.py"), str(folder / "job.json")]
        home = common.data_folder() / f"home-{side}"
        env = os.environ | {"PYTHONPATH": str(self.folders[side]), "H2O_FLEXGEN_HOME": str(home)}
        how = dict(cwd=folder, env=env, capture_output=True, text=True)
        with MemoryCap(cap_bytes(workload, where)) as cap, common.machine_use() as use:
            try:
                done = cap.run(argv, self.limit, **how)
            except subprocess.TimeoutExpired:
                sys.exit(f"error: {side}: no end after {self.limit:g} s (--limit)")
        if done.returncode:
            sys.exit(f"error: {side}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        found = json.loads((folder / "result.json").read_text())
        check(found, workload, seed, self.folders[side])
        return found | use


def policy(workload: Workload, where: str) -> Policy:
    percent = IN_RAM if where == "ram" else workload.on_disk
    return Policy(gpu_batch_size=workload.batch, num_gpu_batches=workload.batches, percent=percent)


def cap_bytes(workload: Workload, where: str) -> int | None:
    return None if where == "ram" else int(workload.cap * common.GIB)


def check(found: dict, workload: Workload, seed: int, folder: Path) -> None:
    """The version that was meant ran, and every row ended where its lot fell."""
    assert Path(found["package"]).parent == folder.resolve(), f"{found['package']} ran"
    rows = workload.rows * max(1, workload.answers)
    lengths = [drawn(workload.draw, seed, row, workload.most) for row in range(rows)]
    assert found["lengths"] == lengths, "rows did not end where they should"


def compare(runner: Runner, name: str, workload: Workload, where: str, pairs: int) -> dict:
    """Runs of both versions in turns, which begins changing from pair to pair; results are stored after each pair."""
    sides = [side for side in SIDES if side in runner.folders]
    few = replace(workload, rows=workload.batch * workload.batches, most=2, draw=None)
    runner.dtype = "auto"
    for side in reversed(sides):  # measures the machine and compiles loops; this version chooses the float type
        found = runner.run(side, few, where)
        runner.dtype = found["dtype"] if side == "new" else runner.dtype
    made: dict[str, list[dict]] = {side: [] for side in sides}
    for pair in range(pairs):
        for side in sides if pair % 2 == 0 else reversed(sides):
            made[side].append(runner.run(side, workload, where, seed=pair))
            seconds = made[side][-1][workload.measure]
            print(f"{name}, {where}, pair {pair + 1}, {side}: {seconds:.1f} s", flush=True)
        if len(sides) == len(SIDES):
            store(result(runner, name, workload, where, made), runner.file)
    return result(runner, name, workload, where, made)


def result(runner: Runner, name: str, workload: Workload, where: str, made: dict[str, list[dict]]) -> dict:
    """Medians of each side, and of the ratios of the pairs: above 1, this version is faster."""
    found = {"workload": name, "where": "RAM" if where == "ram" else f"disk, {workload.cap:g} GiB cap"}
    found |= {key: value for key, value in asdict(workload).items() if key not in ("on_disk", "cap")}
    found["about"] = f"{workload.rows} x {workload.prompt_len} tokens: {workload.about}"
    found |= {"policy": policy_text(asdict(policy(workload, where))), "computes_in": runner.dtype}
    found |= {"compute": runner.compute, "date": date.today().isoformat(), "pairs": min(map(len, made.values()))}
    for side, runs in made.items():
        found[side] = summary(runs) | {"commit": common.commit(runner.folders[side])}
    if len(made) == len(SIDES):
        pairs = list(zip(made["old"], made["new"]))
        found["ratios"] = [old[workload.measure] / new[workload.measure] for old, new in pairs]
        found["ratio"] = median(found["ratios"])
        found["same_tokens"] = all(old["digest"] == new["digest"] for old, new in pairs)
    return found


def summary(runs: list[dict]) -> dict:
    """Medians of the figures, and of what the reports say of the work."""
    found = {name: median(run[name] for run in runs) for name in FIGURES.split()}
    reported = {}
    for name in WORK:
        told = [find(run["report"], name) for run in runs]
        if None not in told:
            reported[name] = median(told)
    return found | {"reported": reported}


def store(row: dict, file: str) -> None:
    """Add a comparison to the results, instead of one of the same workload and place. SystemExit as `common.add`."""
    order = lambda each: (list(WORKLOADS).index(each["workload"]), each["where"] != "RAM")
    common.add(file, "rows", row, ("workload", "where"), order)


def sized(workload: Workload, args: argparse.Namespace) -> Workload:
    """A workload with what the command line says of its size."""
    batch, _, batches = (args.block or f"{workload.batch}x{workload.batches}").partition("x")
    changes = {"rows": args.num_rows or workload.rows, "batch": int(batch), "batches": int(batches or 1)}
    return replace(workload, **changes, cap=args.cap or workload.cap)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="+", choices=list(WORKLOADS), metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--checkout", type=Path, help="of the older version; without it this one runs alone")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--where", nargs="+", choices=["ram", "disk"], default=["ram", "disk"])
    parser.add_argument("--compute", choices=["exact", "int8"], default="exact", help="matmuls")
    parser.add_argument("--num-rows", type=int, help="fewer than the workload's, to try it")
    parser.add_argument("--block", metavar="BATCHxNUMBER", help="another block than the workload's")
    parser.add_argument("--cap", type=float, help="GiB of the runs from disk")
    parser.add_argument("--limit", type=float, default=1800, help="seconds after which a run counts as dead")
    parser.add_argument("--file", default=FILE, help="the result, in docs/benchmarks, that gets the rows")
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error("--pairs takes a number from 1")
    folders = {"new": common.ROOT}
    if args.checkout:
        if not (args.checkout / "h2o_flexgen").is_dir():
            parser.error(f"{args.checkout} is no checkout of h2o_flexgen")
        folders = {"old": args.checkout.resolve(), **folders}
    with common.scratch() as scratch:
        runner = Runner(folders, scratch, args.compute, args.limit, args.file)
        for name in args.workload:
            for where in args.where:
                found = compare(runner, name, sized(WORKLOADS[name], args), where, args.pairs)
                print(json.dumps(found, indent=1), flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped; the pairs that ran are kept")
