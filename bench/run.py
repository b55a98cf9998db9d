"""Compare the throughput of h2o_flexgen with transformers, Accelerate, ZeRO-Inference, FlexGen and llama.cpp.

    python -m bench.run --list
    python -m bench.run "opt-1.3b 64+256" --quick --system Accelerate --system "ours, H2O"

All systems run the same job (a random checkpoint, prompt and output lengths) and take turns. Every run is a separate
process in a memory cgroup that counts page cache, which is dropped first; loading is not timed. Peers use their best
known settings, from docs/benchmarks/peer_settings.json; a trial (--batch, --option) times 8 tokens with other settings
and stores them there if they are faster. Medians go to docs/benchmarks/throughput_ROW.json after every run.
Checkpoints, the peers' environment and llama.cpp are made once and kept in the folder `bench` of H2O_FLEXGEN_HOME
(default: the user's cache folder). Needs root for the cgroup.
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

import torch

from bench import common, systems
from bench.checkpoint import checkpoint, drop_page_cache
from bench.job import Job
from bench.memory_cap import MemoryCap
from bench.rows import ROWS, Row, System, file_name, setting_text

#: what a system reports of a run beside its times; results have medians, or the first run's text
REPORTED = "version policy computes_in bound_by predicted_over_measured read_gb_per_step share_of_bound peak_over_plan"
#: arguments if none are given
HEADLINE = ["opt-1.3b 64+256", "--quick", "--prompts", "16"]
HEADLINE += ["--system", "Accelerate", "--system", "ours, H2O + int4, int8 matmuls"]
#: output tokens of a trial
TRIAL_TOKENS = 8
#: most seconds that building DeepSpeed's operators may take
BUILD_LIMIT = 1800


class Runner:
    """Runs systems on one row, one process at a time; `data` is kept, `scratch` is temporary."""

    def __init__(self, row: Row, data: Path, scratch: Path):
        self.row = row
        self.data = data
        self.scratch = scratch
        self.ready: set[tuple] = set()

    @cached_property
    def home(self) -> Path:
        """Folder for our compressed checkpoints and measurements of this machine; the latter start fresh."""
        home = self.data / "home"
        for measured in home.rglob("hardware"):
            shutil.rmtree(measured)
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
            avx2=system.avx2,
        )

    def run(self, name: str, setting: dict) -> dict:
        """The times of one run, with decode scaled up to all tokens of the row, or why it "failed"."""
        row = self.row
        system = row.systems[name]
        job = self.job(system, setting)
        home = self.home / "avx2" if job.avx2 else self.home
        if (needs := (system.module, system.kind, home)) not in self.ready:
            self.prepare(job, home)
            self.ready.add(needs)
        stamp = {"date": date.today().isoformat(), "commit": common.commit()}
        found = run_job(job, row.limit, home) | setting | stamp
        if "decode" in found and job.gen_len < row.gen_len:
            found["decode"] *= (row.gen_len - 1) / (job.gen_len - 1)
        outcome = found.get("failed") or f"{speed(found, row.gen_len):.2f} tokens/s"
        print(f"{name}, {setting_text(setting)}: {outcome}", flush=True)
        return found

    def prepare(self, job: Job, home: Path) -> None:
        """Steps that are neither timed nor capped: ours measures the machine, DeepSpeed compiles its operators."""
        if job.system == "ours":
            print("measuring this machine", flush=True)
            argv = [*job.python, "h2o_flexgen.commands.plan", "--model", job.model, "--device", job.device]
            argv += ["--offload-dir", str(self.scratch)]
            env = os.environ | {"H2O_FLEXGEN_HOME": str(home)}
            subprocess.run(argv, cwd=common.ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
        elif job.system == "zero_inference":
            print("building DeepSpeed's operators (minutes, once)", flush=True)
            for lock in home.rglob("torch_extensions/**/lock"):  # a killed build's, which it would wait for
                lock.unlink()
            small = checkpoint("facebook/opt-125m", "safetensors", job.dtype, self.data)
            tier = {"offload": job.options.get("offload", "cpu" if job.fits_in_ram else "nvme")}
            tiny = replace(job, model=str(small), prompt_len=4, gen_len=2, batch=1, ram_bytes=None, options=tier)
            if "failed" in (found := run_job(tiny, BUILD_LIMIT, home)):
                needs = "a C++ compiler, Python's headers and libaio-dev"
                sys.exit(f"error: DeepSpeed's operators, which need {needs}, were not built: {found['failed']}")


def run_job(job: Job, limit: float, home: Path) -> dict:
    """The result of a job in its own process, capped if the job is; its folder is always deleted."""
    scratch = Path(job.scratch)
    scratch.mkdir()
    try:
        (scratch / "job.json").write_text(json.dumps(asdict(job)))
        argv = systems.command(job)
        printed = scratch / "printed.txt"
        env = os.environ | {"H2O_FLEXGEN_HOME": str(home), "TORCH_EXTENSIONS_DIR": str(home / "torch_extensions")}
        if job.system != "ours":  # the default, which importing our package changes
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
            return {"failed": failure_text(done.returncode, killed, text)}
        return systems.result(job, text)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def failure_text(code: int, killed: bool, output: str) -> str:
    """Why a process failed; `killed`: the kernel killed one for lack of memory."""
    if code in (-9, 137):
        return "killed (out of memory)" if killed else "killed"
    lines = [line for line in output.splitlines() if line.strip()]
    # warnings may follow the error, and torch prefixes lines with their rank
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b|error: ", line)]
    return f"exit code {code}: {(errors or lines or [''])[-1][:200]}"


def speed(run: dict, gen_len: int) -> float:
    """Generated tokens per second of the whole job."""
    return run["batch"] * gen_len / (run["prefill"] + run["decode"])


def summarise(runs: list[dict], gen_len: int) -> dict:
    """Medians and ranges of a system's runs with one setting, and how some died."""
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
        for key in REPORTED.split():
            values = [run[key] for run in done if key in run]
            if values:
                found[key] = values[0] if isinstance(values[0], str) else median(values)
    if dead:
        found["died"] = [f"{what}, {n} {'run' if n == 1 else 'runs'}" for what, n in dead.items()]
    return found


def setting(name: str, row: Row, system: str, most: int | None = None) -> dict:
    """A system's batch in a row (a peer's: at most `most`), options, and output tokens if fewer than the row's."""
    if row.systems[system].is_ours:
        return {"batch": row.prompts}
    found = common.load_result("peer_settings").get("rows", {}).get(name, {}).get(system)
    if found is None:
        sys.exit(f"error: peer_settings.json has no batch for {system} in {name}: try one with --batch")
    kept = {key: found[key] for key in ("batch", "options", "gen_len") if key in found}
    return kept | {"batch": min(found["batch"], most or found["batch"])}


def parse_option(text: str) -> tuple[str, object]:
    """The name and value of an option; the value is a JSON literal or a word."""
    name, value = text.split("=", 1)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def record_trial(row: str, system: str, trial: dict, found: dict) -> None:
    """Store the figure of a trial, and its settings as the peer's if none was faster."""
    data = common.load_result("peer_settings")
    known = data.setdefault("rows", {}).setdefault(row, {}).setdefault(system, {})
    tried = known.setdefault("tried", {})
    text = setting_text({key: trial[key] for key in ("batch", "options")}).removeprefix("batch ")
    tried[text] = "died" if "failed" in found else round(speed(found, ROWS[row].gen_len), 2)
    if tried[text] == max((rate for rate in tried.values() if rate != "died"), default=None):
        known.update(batch=trial["batch"], options=trial["options"])
    (common.RESULTS / "peer_settings.json").write_text(common.to_json(data) + "\n")


def run_row(runner: Runner, name: str, settings: dict[str, dict], runs: int, file: str) -> dict:
    """Run the systems in turns and store their medians in `file` after every run; other systems' results are kept."""
    row = runner.row
    known = {}
    if (old := common.load_result(file)) and set(settings) < set(row.systems):
        common.check_origin(file, old, common.origin(), "run all systems, or use --quick")
        known = old["systems"]
    found: dict[str, list[dict]] = {system: [] for system in settings}
    for _ in range(runs):
        for system, chosen in settings.items():
            found[system].append(runner.run(system, chosen))
            medians = {each: summarise(done, row.gen_len) for each, done in found.items() if done}
            common.save(file, {"row": name, "job": row.job(), "systems": known | medians})
    return common.load_result(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", nargs="?", choices=list(ROWS), metavar="ROW")
    parser.add_argument("--system", action="append", help="run only this system (repeatable)")
    parser.add_argument("--runs", type=int, help="runs of each system (default: the row's)")
    parser.add_argument("--quick", action="store_true", help="run each system once; results go to quick_throughput_ROW")
    parser.add_argument("--prompts", type=int, help="prompts of our job; with --quick also the largest batch of a peer")
    parser.add_argument("--batch", type=int, help="try a batch size with one peer")
    parser.add_argument("--option", action="append", default=[], help="likewise: share=0.15, attention=eager")
    parser.add_argument("--list", action="store_true", help="print the rows")
    args = parser.parse_args(sys.argv[1:] or HEADLINE)
    if args.list:
        for name, row in ROWS.items():
            print(f"{name:<27}{row.model}, {row.cap or 'no'} GiB cap: {', '.join(row.systems)}")
        return
    if args.row is None:
        parser.error("name a ROW (--list)")
    if any(count is not None and count < 1 for count in (args.runs, args.prompts)):
        parser.error("--runs and --prompts must be at least 1")
    row = replace(ROWS[args.row], prompts=args.prompts or ROWS[args.row].prompts)
    names = [s for s in row.systems if args.system is None or s in args.system]
    is_trial = args.batch is not None or bool(args.option)
    if len(names) < len(args.system or [0]):
        parser.error(f"unknown --system; this row has {', '.join(row.systems)}")
    if is_trial and (len(names) != 1 or row.systems[names[0]].is_ours):
        parser.error("--batch and --option need one peer, named by --system")
    if row.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"error: the row {args.row!r} needs CUDA")
    with MemoryCap(row.cap_bytes("cpu")):
        pass  # fails early if no cgroup can be made
    with common.scratch() as scratch:
        runner = Runner(row, common.data_folder(), scratch)
        if is_trial:
            batch = args.batch or setting(args.row, row, names[0])["batch"]
            trial = {"batch": batch, "options": dict(map(parse_option, args.option))}
            found = runner.run(names[0], trial | {"gen_len": min(TRIAL_TOKENS, row.gen_len)})
            return record_trial(args.row, names[0], trial, found)
        file = f"{'quick_' * args.quick}{file_name(args.row)}"
        if args.quick:
            (common.RESULTS / f"{file}.json").unlink(missing_ok=True)
        settings = {name: setting(args.row, row, name, most=args.prompts if args.quick else None) for name in names}
        data = run_row(runner, args.row, settings, 1 if args.quick else args.runs or row.runs, file)
    from bench.tables import row_provenance, throughput_details

    print(f"\n{throughput_details([data])}\n\n{row_provenance(data)}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped; medians of completed runs are kept")
