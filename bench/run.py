"""Throughput of h2o_flexgen beside Accelerate, ZeRO-Inference, transformers and FlexGen.

    python -m bench.run --list
    python -m bench.run --row "1.3b 32+32" --quick --system Accelerate --system "ours, H2O"

All systems run the same job (a random checkpoint, dtype, prompts, a fixed output length), each run in a process of its
own inside a memory cgroup, page cache included, after the page cache was dropped; loading is not counted. Systems take
turns. Peers run with the batch and options that docs/benchmarks/peer_settings.json says are best, with the figures that
showed it; --batch and --option try others, and only print. Medians go to docs/benchmarks/throughput_ROW.json after
every run. Needs root for the cgroup, and the packages of the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from datetime import date
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from bench import common
from bench.checkpoint import drop_page_cache, write_checkpoint
from bench.job import Job
from bench.memory_cap import MemoryCap
from bench.rows import ROWS, Row, file_name
from bench.systems import SYSTEMS

#: what a system tells of a run beside its times; medians, or of the first run where it is text
TOLD = (
    "policy",
    "predicted_over_measured",
    "read_gb_per_step",
    "bound_by",
    "share_of_bound",
    "peak_over_plan",
)
#: sequences of the blocks of `--frontier`
BLOCKS = (128, 64, 32, 16, 8)
#: seconds in which DeepSpeed's operators must be built
BUILD_LIMIT = 1800


class Runner:
    """Runs systems on one row, one process at a time."""

    def __init__(self, row: Row, folder: Path):
        self.row, self.folder = row, folder
        self.is_built = False

    @cached_property
    def checkpoint(self) -> Path:
        return write_checkpoint(self.row.model, self.folder / "checkpoint", self.row.dtype)

    @cached_property
    def hardware(self) -> Path:
        options = ["--offload-dir", str(self.folder), "--dtype", self.row.dtype, "--device", self.row.device]
        return common.measure_machine(self.folder / "profile.json", *options)

    def job(self, system: str, batch: int, options: dict) -> Job:
        row, what = self.row, SYSTEMS[system]
        return Job(
            what.module,
            str(self.checkpoint),
            str(self.folder / "run"),
            row.dtype,
            row.device,
            row.prompt_len,
            row.gen_len,
            batch,
            gpu_bytes=row.cap_bytes("cuda"),
            ram_bytes=row.cap_bytes("cpu"),
            options=options,
            kv_budget=row.kv_budget if what.h2o else None,
            hardware=str(self.hardware) if what.is_ours else None,
        )

    def run(self, system: str, batch: int, options: dict) -> dict:
        """Times of one run; "failed" says why it died."""
        job = self.job(system, batch, options)
        if system == "ZeRO-Inference":
            self.build_operators(job)
        made = {"batch": batch, "options": options, "date": date.today().isoformat(), "commit": common.commit()}
        result = run_job(job, self.row.limit) | made
        told = result.get("failed") or f"{speed(result, self.row.gen_len):.2f} tokens/s"
        print(f"{system}, batch {batch} {options or ''}: {told}", flush=True)
        return result

    def build_operators(self, job: Job) -> None:
        """DeepSpeed compiles its operators when they are first used: that is neither timed nor capped."""
        if self.is_built:
            return
        print("DeepSpeed builds its operators (minutes, once)", flush=True)
        small = write_checkpoint("facebook/opt-125m", self.folder / "small", job.dtype)
        tier = "cpu" if job.fits_in_ram else "nvme"
        tiny = replace(job, model=str(small), prompt_len=4, gen_len=2, batch=1, ram_bytes=None)
        result = run_job(replace(tiny, options={"offload": tier}), BUILD_LIMIT)
        if "failed" in result:
            sys.exit(f"error: DeepSpeed's operators (a C++ compiler, Python headers, libaio-dev): {result['failed']}")
        self.is_built = True


def run_job(job: Job, limit: float) -> dict:
    """What a job comes to in a process of its own, capped if the job is; its folder goes, whatever happens."""
    scratch = Path(job.scratch)
    scratch.mkdir()
    try:
        paths = [scratch / name for name in ("job.json", "result.json", "output.txt")]
        paths[0].write_text(json.dumps(asdict(job)))
        drop_page_cache(Path(job.model))
        argv = [sys.executable, "-m", "bench.job", *map(str, paths[:2])]
        with open(paths[2], "w") as output, MemoryCap(job.ram_bytes) as cap:
            try:
                done = cap.run(argv, limit, cwd=common.ROOT, stdout=output, stderr=subprocess.STDOUT)
            except subprocess.TimeoutExpired:
                return {"failed": f"no end after {limit:.0f} s"}
            killed = cap.killed()
        if done.returncode:
            told = paths[2].read_text(errors="replace").replace(str(scratch.parent), "SCRATCH")
            return {"failed": why(done.returncode, killed, told)}
        return json.loads(paths[1].read_text())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def why(code: int, killed: bool, output: str) -> str:
    """What ended a process, in words. `killed`: the kernel killed something at the cap."""
    if code in (-9, 137):
        return "killed (out of memory)" if killed else "killed"
    lines = [line for line in output.splitlines() if line.strip()]
    # behind the error may come warnings; torch marks what a rank printed
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b", line)]
    return f"exit code {code}: {(errors or lines or [''])[-1][:200]}"


def speed(run: dict, gen_len: int) -> float:
    """Generated tokens per second of the whole job."""
    return run["batch"] * gen_len / (run["prefill"] + run["decode"])


def summarise(runs: list[dict], gen_len: int) -> dict:
    """Medians and ranges of a system's runs, all with one batch and the same options; what died of them."""
    done = [run for run in runs if "failed" not in run]
    dead = Counter(f"batch {run['batch']}: {run['failed']}" for run in runs if "failed" in run)
    found = {"batch": runs[0]["batch"], "options": runs[0]["options"], "runs": len(done)}
    found |= {"dates": sorted({run["date"] for run in runs}), "commits": sorted({str(run["commit"]) for run in runs})}
    if done:
        rates = [speed(run, gen_len) for run in done]
        found |= {
            "lowest_tier": done[0]["lowest_tier"],
            "tokens_per_s": {"median": median(rates), "min": min(rates), "max": max(rates)},
            "prefill_seconds": median(run["prefill"] for run in done),
            "decode_seconds": median(run["decode"] for run in done),
        }
        for key in TOLD:
            told = [run[key] for run in done if key in run]
            if told:
                found[key] = told[0] if isinstance(told[0], str) else median(told)
    if dead:
        found["died"] = [f"{what}, {n} {'run' if n == 1 else 'runs'}" for what, n in dead.items()]
    return found


def settings(name: str, system: str) -> tuple[int, dict]:
    """The batch and the options of a system in a row."""
    if SYSTEMS[system].is_ours:
        return ROWS[name].prompts, {}
    found = common.stored("peer_settings")["rows"].get(name, {}).get(system)
    if found is None:
        sys.exit(f"error: peer_settings.json has no batch for {system} in {name}: name one with --batch")
    return found["batch"], found["options"]


def parse_option(text: str) -> tuple[str, object]:
    """A system's option: a number, or a word."""
    name, value = text.split("=", 1)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def run_row(runner: Runner, name: str, systems: dict[str, tuple[int, dict]], runs: int, file: str | None) -> dict:
    """Runs of all systems, in turns; their medians, which go to `file` after every run."""
    row, known = ROWS[name], {}
    if file and (old := common.stored(file)) and set(systems) < set(old["systems"]):
        here = common.origin()
        if differ := [key for key in ("machine", "versions") if old[key] != here[key]]:
            sys.exit(f"error: {file}.json is of another {' and '.join(differ)}: run all systems, or --quick")
        known = old["systems"]
    made: dict[str, list[dict]] = {system: [] for system in systems}
    data: dict = {}
    for _ in range(runs):
        for system, (batch, options) in systems.items():
            made[system].append(runner.run(system, batch, options))
            found = known | {s: summarise(of_it, row.gen_len) for s, of_it in made.items() if of_it}
            data = common.origin() | {"row": name, "job": row.job(), "systems": found}
            if file:
                common.save(file, data)
    return data


def run_frontier(runner: Runner, name: str, runs: int) -> None:
    """Latency and throughput of our blocks: sweeps down and up, because a disk that tires would slow one end."""
    made: dict[tuple[str, int], list[dict]] = {(s, b): [] for s in ("ours, full cache", "ours, H2O") for b in BLOCKS}
    for n in range(runs):
        for system, block in sorted(made, key=lambda key: key[1], reverse=n % 2 == 0):
            made[system, block].append(runner.run(system, block, {"block": block}))
        points = []
        for (system, block), of_it in made.items():
            seconds = [run["prefill"] + run["decode"] for run in of_it if "failed" not in run]
            if seconds:
                times = {"median": median(seconds), "min": min(seconds), "max": max(seconds)}
                point = {"system": system, "sequences": block, "runs": len(seconds), "seconds": times}
                points.append(point | {"tokens_per_s": block * ROWS[name].gen_len / times["median"]})
        common.save("frontier", {"row": name, "job": ROWS[name].job(), "points": points})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=list(ROWS))
    parser.add_argument("--system", action="append", choices=list(SYSTEMS), help="only this one (may be given again)")
    parser.add_argument("--runs", type=int, help="of every system (default: 3, of OPT-30B 1)")
    parser.add_argument("--quick", action="store_true", help="one run of every system; results in quick_throughput_ROW")
    parser.add_argument("--frontier", action="store_true", help="our latency and throughput over the size of a block")
    parser.add_argument("--batch", type=int, help="try a batch with one --system; nothing is written")
    parser.add_argument("--option", action="append", default=[], help="likewise, as share=0.15 or attention=eager")
    parser.add_argument("--list", action="store_true", help="print the rows")
    args = parser.parse_args()
    if args.list:
        for name, row in ROWS.items():
            print(f"{name:<18}{row.model}, {row.cap or 'no'} GiB cap: {', '.join(row.systems)}")
        return
    if args.row is None:
        parser.error("--row names the job (--list)")
    if args.runs is not None and args.runs < 1:
        parser.error("--runs takes a number from 1")
    row = ROWS[args.row]
    names = [s for s in row.systems if args.system is None or s in args.system]
    is_trial = args.batch is not None or bool(args.option)
    if not names or (is_trial and len(args.system or []) != 1):
        parser.error(f"--system names systems of the row ({', '.join(row.systems)}), one for --batch and --option")
    if absent := [s for s in names if find_spec(SYSTEMS[s].package) is None]:
        sys.exit(f"error: {', '.join(absent)}: not installed (pip install -e '.[bench]')")
    if row.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            sys.exit(f"error: the row {args.row!r} needs CUDA")
    with MemoryCap(row.cap_bytes("cpu")):
        pass  # can one be made? Before minutes are spent
    systems = {s: settings(args.row, s) for s in names if not is_trial}
    if is_trial:
        options = dict(map(parse_option, args.option))
        systems = {names[0]: (args.batch or settings(args.row, names[0])[0], options)}
    file = None if is_trial else f"{'quick_' * args.quick}{file_name(args.row)}"
    if args.quick:
        (common.RESULTS / f"{file}.json").unlink(missing_ok=True)
    runs = 1 if args.quick or is_trial else args.runs or row.runs
    with common.scratch() as folder:
        runner = Runner(row, folder)
        if args.frontier:
            run_frontier(runner, args.row, args.runs or row.runs)
            return
        data = run_row(runner, args.row, systems, runs, file)
    from bench.tables import throughput_details, where

    print(f"\n{throughput_details([data])}\n\n{where(data)}")
    if args.quick and (known := common.stored(file_name(args.row))):
        print(f"\nFor comparison:\n\n{throughput_details([known])}\n\n{where(known)}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped; the medians of what ran are kept")
