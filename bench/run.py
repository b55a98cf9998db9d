"""Throughput of h2o_flexgen beside transformers, Accelerate, ZeRO-Inference, FlexGen and llama.cpp.

    python -m bench.run --list
    python -m bench.run "opt-1.3b 64+256" --quick --system Accelerate --system "ours, H2O"

All systems run the same job (a random checkpoint, lengths), each run in a process of its own inside a memory cgroup,
page cache included, after the page cache was dropped; loading is not counted. Systems take turns. Peers run with the
settings that docs/benchmarks/peer_settings.json says are best, with the figures that showed it; a trial (--batch,
--option) adds a figure of 8 tokens, and is taken if it is the fastest. Medians go to
docs/benchmarks/throughput_ROW.json after every run. Checkpoints, the peers' environment and llama.cpp are made once and
stay in the folder `bench` of H2O_FLEXGEN_HOME (default: of the user's cache folder). Needs root for the cgroup.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from statistics import median

from bench import common, systems
from bench.checkpoint import checkpoint, drop_page_cache
from bench.job import Job
from bench.memory_cap import MemoryCap
from bench.rows import ROWS, Row, System, file_name, setting_text

#: what a system tells of a run beside its times; medians, or of the first run where it is text
TOLD = "version policy computes_in bound_by predicted_over_measured read_gb_per_step share_of_bound peak_over_plan"
#: what runs without arguments of scripts/bench.sh
HEADLINE = ["opt-1.3b 64+256", "--quick", "--prompts", "16"]
HEADLINE += ["--system", "Accelerate", "--system", "ours, H2O + int4, int8 matmuls"]
#: output tokens of a trial
TRIAL = 8
#: seconds in which DeepSpeed's operators must be built
BUILD_LIMIT = 1800


class Runner:
    """Runs systems on one row, one process at a time; `data` has what stays, `scratch` goes."""

    def __init__(self, row: Row, data: Path, scratch: Path):
        self.row, self.data, self.scratch = row, data, scratch
        self.ready: set[tuple] = set()

    @cached_property
    def home(self) -> Path:
        """Where ours keeps what it measures, which is measured anew, and compressed checkpoints."""
        home = self.data / "home"
        shutil.rmtree(home / "hardware", ignore_errors=True)
        return home

    def job(self, system: System, setting: dict) -> Job:
        row = self.row
        return Job(
            system.module,
            str(checkpoint(row.model, system.kind, row.dtype, self.data)),
            str(self.scratch / "run"),
            row.dtype,
            row.device,
            row.prompt_len,
            setting.get("gen_len", row.gen_len),
            setting["batch"],
            gpu_bytes=row.cap_bytes("cuda"),
            ram_bytes=row.cap_bytes("cpu"),
            options=setting.get("options", {}),
            flags=system.flags.format(hh_ratio=row.hh_ratio),
        )

    def run(self, name: str, setting: dict) -> dict:
        """Times of one run, decode for all tokens of the row; "failed" says why it died."""
        system, row = self.row.systems[name], self.row
        job = self.job(system, setting)
        if (system.module, system.kind) not in self.ready:
            self.prepare(job)
            self.ready.add((system.module, system.kind))
        made = {"date": date.today().isoformat(), "commit": common.commit()}
        found = run_job(job, row.limit, self.home) | setting | made
        if "decode" in found and job.gen_len < row.gen_len:
            found["decode"] *= (row.gen_len - 1) / (job.gen_len - 1)
        told = found.get("failed") or f"{speed(found, row.gen_len):.2f} tokens/s"
        print(f"{name}, {setting_text(setting)}: {told}", flush=True)
        return found

    def prepare(self, job: Job) -> None:
        """What is neither timed nor capped: ours measures the machine, DeepSpeed compiles its operators."""
        if job.system == "ours":
            argv = [sys.executable, "-m", "h2o_flexgen.commands.plan", "--model", job.model, "--device", job.device]
            env = os.environ | {"H2O_FLEXGEN_HOME": str(self.home)}
            print("measuring this machine", flush=True)
            argv += ["--offload-dir", str(self.scratch)]
            subprocess.run(argv, cwd=common.ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
        elif job.system == "zero_inference":
            print("DeepSpeed builds its operators (minutes, once)", flush=True)
            for lock in self.home.rglob("torch_extensions/**/lock"):  # of a build that was killed, it would wait for it
                lock.unlink()
            small = checkpoint("facebook/opt-125m", "safetensors", job.dtype, self.data)
            tier = {"offload": job.options.get("offload", "cpu" if job.fits_in_ram else "nvme")}
            tiny = replace(job, model=str(small), prompt_len=4, gen_len=2, batch=1, ram_bytes=None, options=tier)
            if "failed" in (found := run_job(tiny, BUILD_LIMIT, self.home)):
                sys.exit(
                    f"error: DeepSpeed's operators (a C++ compiler, Python headers, libaio-dev): {found['failed']}"
                )


def run_job(job: Job, limit: float, home: Path) -> dict:
    """What a job comes to in a process of its own, capped if the job is; its folder goes, whatever happens."""
    scratch = Path(job.scratch)
    scratch.mkdir()
    try:
        (scratch / "job.json").write_text(json.dumps(asdict(job)))
        argv, printed = systems.command(job), scratch / "printed.txt"
        env = os.environ | {"H2O_FLEXGEN_HOME": str(home), "TORCH_EXTENSIONS_DIR": str(home / "torch_extensions")}
        if job.system != "ours":  # GNU's default, which importing our package changes
            env["GOMP_SPINCOUNT"] = "300000"
        drop_page_cache(Path(job.model))
        with open(printed, "w") as output, MemoryCap(job.ram_bytes) as cap:
            try:
                done = cap.run(argv, limit, cwd=common.ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
            except subprocess.TimeoutExpired:
                return {"failed": f"no end after {limit:.0f} s"}
            killed = cap.killed()
        text = printed.read_text(errors="replace")
        if done.returncode:
            text = text.replace(str(scratch.parent), "SCRATCH").replace(str(Path(job.model).parent), "DATA")
            return {"failed": why(done.returncode, killed, text)}
        return systems.result(job, text)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def why(code: int, killed: bool, output: str) -> str:
    """What ended a process, in words. `killed`: the kernel killed something at the cap."""
    if code in (-9, 137):
        return "killed (out of memory)" if killed else "killed"
    lines = [line for line in output.splitlines() if line.strip()]
    # behind the error may come warnings; torch marks what a rank printed
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b|error: ", line)]
    return f"exit code {code}: {(errors or lines or [''])[-1][:200]}"


def speed(run: dict, gen_len: int) -> float:
    """Generated tokens per second of the whole job."""
    return run["batch"] * gen_len / (run["prefill"] + run["decode"])


def summarise(runs: list[dict], gen_len: int) -> dict:
    """Medians and ranges of a system's runs, all with the same setting; what died of them."""
    done = [run for run in runs if "failed" not in run]
    dead = Counter(f"{setting_text(run)}: {run['failed']}" for run in runs if "failed" in run)
    found = {key: runs[0][key] for key in ("batch", "options", "gen_len") if key in runs[0]} | {"runs": len(done)}
    found |= {"dates": sorted({run["date"] for run in runs}), "commits": sorted({str(run["commit"]) for run in runs})}
    if done:
        rates = [speed(run, gen_len) for run in done]
        found |= {
            "lowest_tier": done[0]["lowest_tier"],
            "tokens_per_s": {"median": median(rates), "min": min(rates), "max": max(rates)},
            "prefill_seconds": median(run["prefill"] for run in done),
            "decode_seconds": median(run["decode"] for run in done),
        }
        for key in TOLD.split():
            told = [run[key] for run in done if key in run]
            if told:
                found[key] = told[0] if isinstance(told[0], str) else median(told)
    if dead:
        found["died"] = [f"{what}, {n} {'run' if n == 1 else 'runs'}" for what, n in dead.items()]
    return found


def setting(name: str, row: Row, system: str, most: int | None = None) -> dict:
    """The batch of a system in a row (`most`: what a peer's is held to), its options, and its output tokens where they
    are fewer than the row's."""
    if row.systems[system].is_ours:
        return {"batch": row.prompts}
    found = common.stored("peer_settings").get("rows", {}).get(name, {}).get(system)
    if found is None:
        sys.exit(f"error: peer_settings.json has no batch for {system} in {name}: try one with --batch")
    kept = {key: found[key] for key in ("batch", "options", "gen_len") if key in found}
    return kept | {"batch": min(found["batch"], most or found["batch"])}


def parse_option(text: str) -> tuple[str, object]:
    """A system's option: a number, or a word."""
    name, value = text.split("=", 1)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def record_trial(row: str, system: str, trial: dict, found: dict) -> None:
    """Add a figure to the settings of a peer, which become those of the trial if none was faster."""
    data = common.stored("peer_settings")
    known = data.setdefault("rows", {}).setdefault(row, {}).setdefault(system, {})
    tried = known.setdefault("tried", {})
    text = setting_text({key: trial[key] for key in ("batch", "options")}).removeprefix("batch ")
    tried[text] = "died" if "failed" in found else round(speed(found, ROWS[row].gen_len), 2)
    if tried[text] == max((rate for rate in tried.values() if rate != "died"), default=None):
        known.update(batch=trial["batch"], options=trial["options"])
    (common.RESULTS / "peer_settings.json").write_text(common.to_json(data) + "\n")


def run_row(runner: Runner, name: str, settings: dict[str, dict], runs: int, file: str) -> dict:
    """Runs of all systems, in turns; their medians, which go to `file` after every run."""
    row, known = runner.row, {}
    if (old := common.stored(file)) and set(settings) < set(row.systems):
        here = common.origin()
        if differ := [key for key in ("machine", "versions") if old[key] != here[key]]:
            sys.exit(f"error: {file}.json is of another {' and '.join(differ)}: run all systems, or --quick")
        known = old["systems"]
    made: dict[str, list[dict]] = {system: [] for system in settings}
    for _ in range(runs):
        for system, what in settings.items():
            made[system].append(runner.run(system, what))
            found = known | {s: summarise(of_it, row.gen_len) for s, of_it in made.items() if of_it}
            common.save(file, {"row": name, "job": row.job(), "systems": found})
    return common.stored(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", nargs="?", choices=list(ROWS), metavar="ROW")
    parser.add_argument("--system", action="append", help="only this one (may be given again)")
    parser.add_argument("--runs", type=int, help="of every system (default: the row's)")
    parser.add_argument("--quick", action="store_true", help="one run of every system; results in quick_throughput_ROW")
    prompts = "of our job (default: the row's); with --quick also the most of a peer's batch"
    parser.add_argument("--prompts", type=int, help=prompts)
    parser.add_argument("--batch", type=int, help="try a batch with one peer")
    parser.add_argument("--option", action="append", default=[], help="likewise, as share=0.15 or attention=eager")
    parser.add_argument("--list", action="store_true", help="print the rows")
    args = parser.parse_args(sys.argv[1:] or HEADLINE)
    if args.list:
        for name, row in ROWS.items():
            print(f"{name:<27}{row.model}, {row.cap or 'no'} GiB cap: {', '.join(row.systems)}")
        return
    if args.row is None:
        parser.error("name a ROW (--list)")
    if any(count is not None and count < 1 for count in (args.runs, args.prompts)):
        parser.error("--runs and --prompts take a number from 1")
    row = replace(ROWS[args.row], prompts=args.prompts or ROWS[args.row].prompts)
    names = [s for s in row.systems if args.system is None or s in args.system]
    is_trial = args.batch is not None or bool(args.option)
    if len(names) < len(args.system or [0]):
        parser.error(f"--system names systems of the row: {', '.join(row.systems)}")
    if is_trial and (len(names) != 1 or row.systems[names[0]].is_ours):
        parser.error("--batch and --option try one peer, named by --system")
    if row.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            sys.exit(f"error: the row {args.row!r} needs CUDA")
    with MemoryCap(row.cap_bytes("cpu")):
        pass  # can one be made? Before minutes are spent
    with common.scratch() as scratch:
        runner = Runner(row, common.data_folder(), scratch)
        if is_trial:
            trial = {"batch": args.batch, "options": dict(map(parse_option, args.option))}
            trial["batch"] = args.batch or setting(args.row, row, names[0])["batch"]
            found = runner.run(names[0], trial | {"gen_len": min(TRIAL, row.gen_len)})
            record_trial(args.row, names[0], trial, found)
            return
        file = f"{'quick_' * args.quick}{file_name(args.row)}"
        if args.quick:
            (common.RESULTS / f"{file}.json").unlink(missing_ok=True)
        settings = {name: setting(args.row, row, name, most=args.prompts if args.quick else None) for name in names}
        data = run_row(runner, args.row, settings, 1 if args.quick else args.runs or row.runs, file)
    from bench.tables import throughput_details, where

    print(f"\n{throughput_details([data])}\n\n{where(data)}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped; the medians of what ran are kept")
