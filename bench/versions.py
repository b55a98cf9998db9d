"""Compare this version of the engine with an older one, which take turns on the same jobs.

    git worktree add ../older 833ff06
    python -m bench.versions geometric uniform equal --checkout ../older --pairs 5
    python -m bench.versions shared --checkout ../older --where ram disk --pairs 3

`geometric` and `uniform`: rows end at random lengths (bench/lot.py) that the engine cannot know. `equal` and `opt`: all
rows end together and share nothing, so neither version should lose. `shared`: prompts with a common prefix. `answers`:
scores of several answers to each question. Jobs run in RAM, and partly from disk under a memory cap that counts page
cache. Every run is a separate process; both versions use the same policy, and the data type that this version chooses.
Results go to docs/benchmarks/versions.json after every pair. Needs root for the cgroup.
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
from bench.lot import output_length
from bench.memory_cap import MemoryCap
from bench.real_jobs import WORK, find_value
from bench.rows import DEMO, DEMO_KIND
from bench.systems.ours import policy_text
from h2o_flexgen import Policy

FILE = "versions"
SIDES = ("old", "new")
IN_RAM = (100, 0, 100, 0, 100, 0)
#: figures of a run whose medians are stored
FIGURES = "seconds wall_seconds prefill_seconds decode_seconds tokens tokens_per_s row_steps running_share moved_gb"
FIGURES += " peak_over_plan cores_of_others"


@dataclass(frozen=True)
class Workload:
    """A job of random prompts.

    Attributes:
        shared: length of the prompts' common prefix in tokens.
        most, draw: lengths of outputs, as in `lot.output_length`.
        batch, batches: size and number of a block's batches.
        on_disk: the six numbers of `--percent` for runs from disk, whose memory is capped at `cap` GiB.
        measure: the seconds that versions are compared by.
        answers: answers of `most` tokens to score for each prompt; 0 generates outputs instead.
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


LLAMA = Workload("", "meta-llama/Llama-3.2-1B", "Q4_0", 384, 16, 48)
SMOLLM2 = Workload("", DEMO, DEMO_KIND, 512, 512, 2, batch=64, on_disk=(0,) * 6)
WORKLOADS = {
    "geometric": replace(LLAMA, about="outputs of 12 tokens on average, geometric, at most 48", draw="geometric"),
    "uniform": replace(LLAMA, about="outputs of 1 to 24 tokens, uniform", draw="uniform", most=24),
    "equal": replace(LLAMA, about="outputs of 12 tokens, all alike", most=12),
    "opt": Workload(
        "OPT-1.3B, outputs of 16 tokens, all alike", "facebook/opt-1.3b", "safetensors", 32, 64, 16, batch=32, cap=2
    ),
    "shared": replace(
        SMOLLM2, about="prompts of 512 tokens, 448 in common", shared=448, batches=2, measure="prefill_seconds"
    ),
    "answers": replace(
        SMOLLM2,
        about="log-probabilities of 4 answers of 8 tokens to each of 64 questions of 400, as lm-eval wants them",
        rows=64,
        prompt_len=400,
        most=8,
        answers=4,
    ),
}


class Runner:
    """Runs workloads with either version; `folders` are the checkouts by side, `file` is the name of the result."""

    def __init__(self, folders: dict[str, Path], scratch: Path, compute: str, limit: float, file: str = FILE):
        self.folders = folders
        self.scratch = scratch
        self.compute = compute
        self.limit = limit
        self.file = file
        self.dtype = "auto"

    def run(self, side: str, workload: Workload, tier: str, seed: int = 0) -> dict:
        """The figures of one run. Raises SystemExit with its output if it dies."""
        folder = self.scratch / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        model = checkpoint(workload.model, workload.kind, "bfloat16", common.data_folder())
        job = asdict(workload) | {"model": str(model), "policy": asdict(policy(workload, tier)), "seed": seed}
        job |= {"dtype": self.dtype, "compute": self.compute, "scratch": str(folder)}
        (folder / "job.json").write_text(json.dumps(job))
        drop_page_cache(model)
        argv = [sys.executable, "-P", str(common.ROOT / "bench" / "lot.py"), str(folder / "job.json")]
        home = common.data_folder() / f"home-{side}"
        env = os.environ | {"PYTHONPATH": str(self.folders[side]), "H2O_FLEXGEN_HOME": str(home)}
        with MemoryCap(cap_bytes(workload, tier)) as cap, common.machine_use() as use:
            try:
                done = cap.run(argv, self.limit, cwd=folder, env=env, capture_output=True, text=True)
            except subprocess.TimeoutExpired:
                sys.exit(f"error: {side}: no end after {self.limit:g} s (--limit)")
        if done.returncode:
            sys.exit(f"error: {side}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        found = json.loads((folder / "result.json").read_text())
        check(found, workload, seed, self.folders[side])
        return found | use


def policy(workload: Workload, tier: str) -> Policy:
    percent = IN_RAM if tier == "ram" else workload.on_disk
    return Policy(gpu_batch_size=workload.batch, num_gpu_batches=workload.batches, percent=percent)


def cap_bytes(workload: Workload, tier: str) -> int | None:
    return None if tier == "ram" else int(workload.cap * common.GIB)


def check(found: dict, workload: Workload, seed: int, folder: Path) -> None:
    """Asserts that the intended version ran, and that every row ended at its drawn length."""
    assert Path(found["package"]).parent == folder.resolve(), f"{found['package']} ran"
    rows = workload.rows * max(1, workload.answers)
    lengths = [output_length(workload.draw, seed, row, workload.most) for row in range(rows)]
    assert found["lengths"] == lengths, "rows did not end at their lengths"


def compare(runner: Runner, name: str, workload: Workload, tier: str, pairs: int) -> dict:
    """Run pairs of both versions, in alternating order; results are stored after each pair."""
    sides = [side for side in SIDES if side in runner.folders]
    warm_up = replace(workload, rows=workload.batch * workload.batches, most=2, draw=None)
    runner.dtype = "auto"
    for side in reversed(sides):  # measures the machine and compiles loops; this version chooses the data type
        found = runner.run(side, warm_up, tier)
        runner.dtype = found["dtype"] if side == "new" else runner.dtype
    runs: dict[str, list[dict]] = {side: [] for side in sides}
    for pair in range(pairs):
        for side in sides if pair % 2 == 0 else reversed(sides):
            runs[side].append(runner.run(side, workload, tier, seed=pair))
            seconds = runs[side][-1][workload.measure]
            print(f"{name}, {tier}, pair {pair + 1}, {side}: {seconds:.1f} s", flush=True)
        if len(sides) == len(SIDES):
            store(result(runner, name, workload, tier, runs), runner.file)
    return result(runner, name, workload, tier, runs)


def result(runner: Runner, name: str, workload: Workload, tier: str, runs: dict[str, list[dict]]) -> dict:
    """Medians of each side and of the pairs' ratios; above 1 this version is faster."""
    found = {"workload": name, "where": "RAM" if tier == "ram" else f"disk, {workload.cap:g} GiB cap"}
    found |= {key: value for key, value in asdict(workload).items() if key not in ("on_disk", "cap")}
    found["about"] = f"{workload.rows} x {workload.prompt_len} tokens: {workload.about}"
    found |= {"policy": policy_text(asdict(policy(workload, tier))), "computes_in": runner.dtype}
    found |= {"compute": runner.compute, "date": date.today().isoformat(), "pairs": min(map(len, runs.values()))}
    for side, of_side in runs.items():
        found[side] = summary(of_side) | {"commit": common.commit(runner.folders[side])}
    if len(runs) == len(SIDES):
        pairs = list(zip(runs["old"], runs["new"]))
        found["ratios"] = [old[workload.measure] / new[workload.measure] for old, new in pairs]
        found["ratio"] = median(found["ratios"])
        found["same_tokens"] = all(old["digest"] == new["digest"] for old, new in pairs)
    return found


def summary(runs: list[dict]) -> dict:
    """Medians of the figures and of the reported counts of work."""
    found = {}
    for name in FIGURES.split():
        found[name] = median(run[name] for run in runs)
    reported = {}
    for name in WORK:
        counts = [find_value(run["report"], name) for run in runs]
        if None not in counts:
            reported[name] = median(counts)
    return found | {"reported": reported}


def store(row: dict, file: str) -> None:
    """Store a comparison; it replaces one of the same workload and place. SystemExit as in `common.add_entry`."""
    order = lambda each: (list(WORKLOADS).index(each["workload"]), each["where"] != "RAM")
    common.add_entry(file, "rows", row, ("workload", "where"), order, {})


def resize(workload: Workload, args: argparse.Namespace) -> Workload:
    """The workload with the sizes of the command line."""
    batch, _, batches = (args.block or f"{workload.batch}x{workload.batches}").partition("x")
    changes = {"rows": args.num_rows or workload.rows, "batch": int(batch), "batches": int(batches or 1)}
    return replace(workload, **changes, cap=args.cap or workload.cap)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="+", choices=list(WORKLOADS), metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--checkout", type=Path, help="folder of the older version; without it this version runs alone")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--where", nargs="+", choices=["ram", "disk"], default=["ram", "disk"])
    parser.add_argument("--compute", choices=["exact", "int8"], default="exact", help="matmuls")
    parser.add_argument("--num-rows", type=int, help="another number of rows than the workload's")
    parser.add_argument("--block", metavar="BATCHxNUMBER", help="another block than the workload's")
    parser.add_argument("--cap", type=float, help="memory cap in GiB of runs from disk")
    parser.add_argument("--limit", type=float, default=1800, help="seconds after which a run counts as dead")
    parser.add_argument("--file", default=FILE, help="name of the result in docs/benchmarks")
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error("--pairs must be at least 1")
    folders = {"new": common.ROOT}
    if args.checkout:
        if not (args.checkout / "h2o_flexgen").is_dir():
            parser.error(f"{args.checkout} is not a checkout of h2o_flexgen")
        folders = {"old": args.checkout.resolve(), **folders}
    with common.scratch() as scratch:
        runner = Runner(folders, scratch, args.compute, args.limit, args.file)
        for name in args.workload:
            for tier in args.where:
                found = compare(runner, name, resize(WORKLOADS[name], args), tier, args.pairs)
                print(json.dumps(found, indent=1), flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped; completed pairs are kept")
